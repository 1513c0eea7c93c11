"""Callbacks: what users add to a run, beside the order that the loop keeps for itself.

A callback is an object with some methods of `Callback`, or a function, which is called after each step and each
evaluation with the run and the record. Callbacks run on the first rank; what they ask for is agreed by all ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from llmq.errors import UsageError, WorldError, nearest
from llmq.files.writers import gain
from llmq.model.parameters import parameter_rows
from llmq.plugins import Table, table
from llmq.training.hooks import Ask, Hook, RunView
from llmq.training.records import OWN_METRICS, EvalRecord, History, TrainRecord, TrainResult
from llmq.training.requests import ask, batches_of, end, prompts_of, serve

if TYPE_CHECKING:
    from pathlib import Path

    from llmq.generation.prompts import Answer
    from llmq.options.run import StoppingOptions
    from llmq.training.ready import Ready

MOMENTS = ("on_begin", "on_step", "on_evaluate", "on_checkpoint", "on_end")


class Callback:
    """Something to do at the moments of a run. Subclasses define what they need; all of it does nothing here."""

    def on_begin(self, run: Run) -> None:
        """The weights are loaded, and the first step is next."""

    def on_step(self, run: Run, record: TrainRecord) -> None:
        """A step is done."""

    def on_evaluate(self, run: Run, record: EvalRecord) -> None:
        """An evaluation is done."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """A checkpoint is complete on the disk."""

    def on_end(self, run: Run, result: TrainResult) -> None:
        """The run has ended without an error."""

    def state(self) -> Mapping[str, Any]:
        """What a resumed run needs of it, as JSON has it; kept in checkpoints."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes the state of the checkpoint that the run resumes from; called before `on_begin`."""


IDLE = tuple(vars(Callback)[moment] for moment in MOMENTS)


class RunFunction(Protocol):
    """A callback as a function."""

    def __call__(self, run: Run, record: TrainRecord | EvalRecord, /) -> Any:
        """A step or an evaluation is done."""


class EarlyStopping(Callback):
    """Stops the run when `metric` has not improved by more than `min_delta` in `patience` evaluations in a row.

    A metric whose name ends in `loss` improves downwards, others upwards. What was counted survives a resume.
    """

    def __init__(self, patience: int, metric: str = "eval_loss", min_delta: float = 0.0) -> None:
        """UsageError for a patience below 1, or a difference that is negative or not finite."""
        if patience < 1:
            raise UsageError(f"early stopping with a patience of {patience}: use 1 evaluation or more")
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise UsageError(f"early stopping with a least difference of {min_delta}: use 0 or more")
        self.patience, self.metric, self.min_delta = patience, metric, min_delta
        self.best, self.waited = math.nan, 0  # NaN before the first evaluation with a finite metric

    def on_evaluate(self, run: Run, record: EvalRecord) -> None:
        """Counts the evaluation. UsageError if nothing has given the metric so far."""
        if self.metric not in run.history or getattr(record, self.metric.removeprefix("eval_"), self) is None:
            raise UsageError(
                f"early stopping watches {self.metric}, which nothing has logged: known are {', '.join(run.history)}; "
                f"log others with run.log(NAME=value) in a callback's on_evaluate{nearest(self.metric, run.history)}"
            )
        value = float(run.history[self.metric][-1])
        if math.isnan(value) and self.metric != "eval_loss":
            return  # what could not be measured says nothing
        is_better = gain(self.metric, value, self.best) > self.min_delta or math.isnan(self.best)
        if math.isfinite(value) and is_better:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            run.stop(
                f"{self.metric} has not improved in {self.patience} evaluations: {value:.6g}, best {self.best:.6g}"
            )

    def state(self) -> Mapping[str, Any]:
        """The best value, and the evaluations since."""
        return {"waited": self.waited} if math.isnan(self.best) else {"best": self.best, "waited": self.waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on counting."""
        self.best, self.waited = state.get("best", math.nan), state.get("waited", 0)


def _wandb(**own: Any) -> Callback:
    from llmq.training.trackers.wandb import Wandb

    return Wandb(**own)


def _tensorboard(**own: Any) -> Callback:
    from llmq.training.trackers.tensorboard import TensorBoard

    return TensorBoard(**own)


def _mlflow(**own: Any) -> Callback:
    from llmq.training.trackers.mlflow import MLflow

    return MLflow(**own)


# Trackers are callbacks, which are imported when they are asked for.
TRACKERS = {"wandb": _wandb, "tensorboard": _tensorboard, "mlflow": _mlflow}
CALLBACKS: Table[Callable[..., Any]] = table("callback", {"early_stopping": EarlyStopping, **TRACKERS})


def named(
    callbacks: Sequence[Callback | RunFunction], options: StoppingOptions, own: Sequence[Callback] = ()
) -> dict[str, Any]:
    """A run's own callbacks, those that are given and those that the options ask for, by the names of their classes,
    with a number from the second of one class on; in the order of calls: early stopping goes by what others log, and
    trackers end after all of them.
    UsageError for what is none; PluginError."""
    if not isinstance(callbacks, Iterable):
        raise UsageError(f"callbacks is {callbacks!r}: give a list of them")
    given = [*own, *callbacks, *(CALLBACKS.call(text) for text in options.callback or ())]
    if (patience := options.early_stopping_patience) is not None:
        given.append(EarlyStopping(patience, options.early_stopping_metric, options.early_stopping_min_delta))
    found, counts = dict[str, Any](), dict[str, int]()
    trackers = [CALLBACKS.call(text) for text in options.report_to or ()]
    for one in (*sorted(given, key=lambda one: isinstance(one, EarlyStopping)), *trackers):
        kind, callback = _checked(one)
        counts[kind] = counts.get(kind, 0) + 1
        found[kind if counts[kind] == 1 else f"{kind} {counts[kind]}"] = callback
    return found


def _checked(one: Any) -> tuple[str, Any]:
    """The name of its kind, and an object with its methods. UsageError for what is no callback, or has a method that is
    never called."""
    if unknown := next((name for name in dir(one) if name.startswith("on_") and name not in MOMENTS), None):
        fix = nearest(unknown, MOMENTS, f": known are {', '.join(MOMENTS)}")
        raise UsageError(f"the callback {type(one).__name__} has {unknown}, which is never called{fix}")
    own = [getattr(one, moment, None) for moment in MOMENTS]
    if not isinstance(one, type):
        if any(callable(method) and getattr(method, "__func__", None) not in IDLE for method in own):
            return type(one).__name__, one
        if callable(one):
            return getattr(one, "__qualname__", type(one).__name__), SimpleNamespace(on_step=one, on_evaluate=one)
    raise UsageError(
        f"{one!r} is no callback: give a function f(run, record), or an object with one of {', '.join(MOMENTS)}"
    )


class Run:
    """What callbacks get of a run: how far it is, and what they may ask for.

    `history` has the metrics of this process so far: the fields of TrainRecord by their names (`loss`, `lr`, ...),
    those of EvalRecord with `eval_` before them (`eval_loss`), and what `log` was given.
    """

    def __init__(self, ready: Ready) -> None:
        self._ready = ready
        self._view: RunView | None = None
        self._is_served = False  # whether all ranks do what is asked
        self.asked = Ask.NOTHING
        self.stopped_by: str | None = None

    @property
    def _now(self) -> RunView:
        assert self._view is not None
        return self._view

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self._now.progress.step

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._now.num_steps

    @property
    def history(self) -> History:
        """The metrics so far, by name."""
        return self._now.history

    @property
    def options(self) -> Mapping[str, Any]:
        """All options by name."""
        return self._ready.options

    @property
    def model_path(self) -> Path:
        """Where the finished model will be."""
        return self._ready.exports[0].folder

    def stop(self, reason: str = "a callback") -> None:
        """Makes this step the last: the run saves a checkpoint, exports the model and ends with exit code 0."""
        self.asked |= Ask.STOP
        if self.stopped_by is None:
            self.stopped_by = reason
            self._ready.log.notice(f"Stopping after step {self.step}: {reason}")

    def save(self) -> None:
        """Saves a checkpoint after this step."""
        self.asked |= Ask.SAVE

    def log(self, **values: float) -> None:
        """Logs numbers under names of your own, at this step. UsageError for a name that every run has."""
        if taken := [name for name in values if name in OWN_METRICS]:
            raise UsageError(f"run.log({', '.join(f'{name}=...' for name in taken)}): llmq logs these itself: rename")
        found = {name: _number(name, value) for name, value in values.items()}
        self.history.add(self.step, found)
        self._ready.log.record("metrics", step=self.step, values=found)

    def warn(self, text: str) -> None:
        """Warns of something, now and at the end of the run."""
        self._ready.log.warn(text)

    def follow(self, listener: Callable[[Mapping[str, Any] | None], None]) -> None:
        """Calls a function with each record of the log as its file has it, from the first one of this process on, and
        with None when the log is closed. The function must not log numbers itself."""
        self._ready.log.follow(listener)

    def evaluate(self, data: Any = None) -> float:
        """The loss now on all of `data`, in nats per trained token, NaN without any: rows, a table or tokens, as for
        training, or a name that --data takes; without data on what is held out, as at an evaluation."""
        if data is not None:
            count, batches = batches_of(self._ready, data)
            return float(self._ask("loss", count, own=batches))
        return math.nan if self._ready.data.eval is None else float(self._ask("loss", None))

    def generate(
        self, prompts: object, *, max_tokens: int | None = None, stop: str | Sequence[str] = (), samples: int = 1
    ) -> list[Answer]:
        """Answers of the model as it is now, of at most `max_tokens` (None: --sample-tokens): its most likely tokens,
        or `samples` answers to each prompt, drawn at --sample-temperature.

        `prompts` are a text, a chat, token ids, or a list of these; the texts `stop` end an answer. UsageError in a run
        without --sample-length, for prompts that are too long for it, and for text without a tokenizer.
        """
        most = self._ready.options["sample_tokens"] if max_tokens is None else max_tokens
        stops = [stop] if isinstance(stop, str) else list(stop)
        found = prompts_of(self._ready, prompts, most, stops, samples)
        answers: list[Answer] = self._ask("texts", found, most, self.step, stops, samples)
        return answers

    def parameter(self, name: str) -> np.ndarray:
        """A copy of a parameter, by its name in a Hugging Face model, in f32. KeyError for one that is not there."""
        for row in (*self._now.engine.plan.rows, *parameter_rows(self._now.engine.plan.spec.config)):
            for part in row.parts:
                if part.name == name:
                    whole = self._ask("parameter", row.name).reshape(row.part_axes)
                    return part.take(whole).astype(np.float32)
        raise KeyError(f"{name} is no parameter of the model")

    def _ask(self, what: str, *about: Any, own: Any = None) -> Any:
        """What all ranks find together. UsageError where they do not wait for it."""
        if not self._is_served:
            raise UsageError(
                f"run.{ASKED_BY[what]}() is for a callback's on_begin, on_step, on_evaluate and on_end, and on one GPU "
                "on_checkpoint: call it there"
            )
        self._is_served = self._ready.ranks.size == 1  # others do not wait any more where this fails
        found = ask(self._ready, self._now.engine, what, *about, own=own)
        self._is_served = True
        return found


ASKED_BY = {"loss": "evaluate", "parameter": "parameter", "texts": "generate"}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"run.log({name}={value!r}): give a number") from None


class Callbacks(Hook):
    """Calls the callbacks of a run, on the first rank; the other ranks have this hook without any."""

    key = "callbacks"

    def __init__(self, callbacks: Mapping[str, Any], ready: Ready) -> None:
        self._ready, self._run, self._ranks, self._log = ready, Run(ready), ready.ranks, ready.log
        self._callbacks = callbacks
        self._failed = set[str]()  # names of those whose state cannot be saved

    @property
    def stopped_by(self) -> str | None:
        """Why a callback stopped the run, if one did."""
        return self._run.stopped_by

    def state(self) -> dict[str, Any]:
        """Those of the callbacks that have one, by their names. UsageError for one that JSON has not, without which the
        finished steps then are saved."""
        states = {}
        for name, one in self._callbacks.items():
            if hasattr(one, "state") and name not in self._failed:
                self._failed.add(name)
                with self._naming(name, "state"):
                    states[name] = dict(one.state())
                    try:
                        json.dumps(states[name], allow_nan=False)
                    except (TypeError, ValueError) as error:
                        raise UsageError(f"return a dict of what JSON has ({error})") from error
                self._failed.remove(name)
        return {name: state for name, state in states.items() if state}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Gives each callback its own."""
        for name, one in self._callbacks.items():
            if name in state and hasattr(one, "restore"):
                one.restore(state[name])

    def on_begin(self, run: RunView) -> None:
        """Calls on_begin; what callbacks ask of the loop then is due after the first step."""
        self._together("on_begin", run)

    def after_step(self, run: RunView, record: TrainRecord) -> Ask:
        """Calls on_step; what callbacks have asked for since the step before."""
        self._together("on_step", run, record)
        return self._taken()

    def on_evaluate(self, run: RunView, record: EvalRecord | None) -> Ask:
        """Calls on_evaluate; what callbacks ask for then."""
        if record is None:
            return Ask.NOTHING
        self._together("on_evaluate", run, record)
        return self._taken()

    def on_save(self, run: RunView, path: Path, step: int) -> None:
        """Calls on_checkpoint, which of many ranks each knows of at a time of its own."""
        self._call("on_checkpoint", run, path, is_served=self._ranks.size == 1)
        self._run._is_served = False

    def on_end(self, run: RunView, result: TrainResult) -> None:
        """Calls on_end."""
        self._together("on_end", run, result)

    def _call(self, moment: str, run: RunView, *about: object, is_served: bool = True) -> None:
        """Calls a method of every callback that has it."""
        self._run._view, self._run._is_served = run, is_served
        for name, one in self._callbacks.items():
            if (method := getattr(one, moment, None)) is not None:
                with self._naming(name, f"{moment} at step {run.progress.step}"):
                    method(self._run, *about)

    @contextmanager
    def _naming(self, name: str, where: str) -> Iterator[None]:
        """Within, what a callback raises ends the run; the log names the callback."""
        try:
            yield
        except Exception as error:
            self._log.notice(f"The callback {name} failed in {where}: {error}")
            raise

    def _together(self, moment: str, run: RunView, *about: object) -> None:
        """As `_call`, while the other ranks do what callbacks ask of all; what one raises ends them, too."""
        if self._ranks.size == 1:
            self._call(moment, run, *about)
            self._run._is_served = False
        elif self._ranks.is_first:
            failed = None
            try:
                with nullcontext() if moment == "on_step" else self._ranks.long(f"callbacks: {moment}"):
                    self._call(moment, run, *about)
                if not self._run._is_served:
                    raise WorldError("a callback went on after what it asked of all ranks had failed: let it fail, too")
            except BaseException as error:
                failed = f"{type(error).__name__}: {error}"
                raise
            finally:
                if self._run._is_served:
                    end(self._ready, [self._run.asked.value, self._run.stopped_by, failed])
                self._run._is_served = False
        else:
            asked, self._run.stopped_by, failed = serve(self._ready, lambda: run.engine)
            self._run.asked = Ask(asked)
            if failed:
                raise RuntimeError(f"a callback failed on the first rank: {failed}")

    def _taken(self) -> Ask:
        asked, self._run.asked = self._run.asked, Ask.NOTHING
        return asked
