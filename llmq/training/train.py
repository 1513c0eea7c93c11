"""Training from options to results: ranks, locks and signals around a run that is prepared and then looped.

`run` is what the command and `llmq.Trainer` call. It has its signal handlers and threads for the time of the run only.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from llmq.engine.bound_plan import make_ready
from llmq.errors import StorageError
from llmq.files.checkpoint import Checkpoints
from llmq.files.huggingface import finish_model
from llmq.files.run_lock import held, kept_folder, replaced_whole
from llmq.options.parse import Options
from llmq.plugins import naming_plugins
from llmq.training.callbacks import Callback, Callbacks, EarlyStopping, RunFunction, named
from llmq.training.hooks import REASONS, Hook
from llmq.training.interrupt import Interrupt
from llmq.training.log import RunLog
from llmq.training.loop import Loop
from llmq.training.prepare import is_dry, prepare
from llmq.training.ranks import Ranks, joined
from llmq.training.ready import Ready
from llmq.training.records import TrainResult
from llmq.training.saving import saver_of


def run(
    options: Options,
    *,
    callbacks: Sequence[Callback | RunFunction] = (),
    hooks: Sequence[Hook] = (),
    console: TextIO | None = None,
    ranks: Ranks | None = None,
    handle_signals: bool = True,
) -> TrainResult:
    """Trains by parsed options, on `ranks` or on those that this process was started as one of; returns metrics and
    paths. `callbacks` and `hooks` are called at its moments; `console` takes the lines that the command prints (None:
    stdout).

    Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end the step, save a checkpoint and return with exit code 130, the others 75.
    Without `handle_signals` they do what they did before the call. Raises LlmqError for what the caller can fix.
    """
    began = time.perf_counter()
    with ExitStack() as stack:
        ranks = ranks or stack.enter_context(joined(options))
        log = stack.enter_context(RunLog(options.log, console, is_silent=not ranks.is_first, again=ranks.again))
        ranks.on_lost = lambda lost: log.end("failed", error=lost)
        stack.enter_context(_hold(options, log, ranks))
        stack.enter_context(naming_plugins())
        metrics = _answer_metrics(log)
        called = named(callbacks, options.stopping, metrics) if ranks.is_first else {}
        stops_early = any(isinstance(one, EarlyStopping) for one in called.values())
        prepared = partial(prepare, options, log, ranks, stops_early=stops_early)
        ready = ranks.in_turn(prepared, partial(_choices, has_callbacks=bool(called)))
        if ready.is_dry:
            return TrainResult(plan=ready.plan)
        for one in metrics:
            one.asks = ready.samples.exercises if ready.samples else ()
        calls = [Callbacks(called, ready)] if called or ranks.shared.get("callbacks") else []
        if log.wants_panel:
            _show_panel(log, ready)
        _share_algorithms(ready)
        interrupt, saver = Interrupt(), saver_of(ready)
        with interrupt if handle_signals else nullcontext(), saver:
            try:
                with naming_plugins():
                    result = Loop(ready, interrupt, saver, [*calls, *hooks], began).run()
            except Exception as error:
                with suppress(StorageError):  # a log that cannot be written must not hide what ended the run
                    log.end("failed", error=str(error) or type(error).__name__)
                raise
        stopped_by = REASONS.get(result.exit_code) or next((hook.stopped_by for hook in calls), None)
        return replace(result, stopped_by=stopped_by)


def _answer_metrics(log: RunLog) -> list[Any]:
    """The callback of --eval-metrics, if it is given."""
    return [import_module("llmq.training.answers").AnswerMetrics(log)] if log.eval_metrics else []


def _show_panel(log: RunLog, run: Ready) -> None:
    """The numbers of the run above its bars."""
    gpu, panel = run.device.gpu, import_module("llmq.training.panel")
    log.show(panel.Panel(gpu and gpu.uuid, gpu and gpu.total_bytes, has_unicode=log.has_unicode))


def _choices(run: Ready, *, has_callbacks: bool) -> dict[str, Any]:
    """What the other ranks take over from the first one's run."""
    dtypes, resume = run.plan.spec.precision, run.earlier.path
    sites = {"matmul": dtypes.matmul, "wide": list(dtypes.wide)}
    fit = {"fit": dict(run.fitted)} if run.fitted else {}
    return {"resume": resume and str(resume), "sites": sites, "callbacks": has_callbacks, **fit}


def _share_algorithms(run: Ready) -> None:
    """Times the matrix products of the plan on the first rank; the others compute as it does, and so with its bits."""
    ranks, backend = run.ranks, run.backend
    with ranks.long("timing matrix products"), run.log.task("Timing matrix products") as report:
        if ranks.is_first:
            make_ready(run.plan, backend, report)
        chosen = ranks.agreed(dict(backend.algorithms))
        if not ranks.is_first:
            backend.take(chosen)


@contextmanager
def _hold(options: Options, log: RunLog, ranks: Ranks) -> Iterator[None]:
    """Holds the lock on all that the run writes; a dry run writes nothing, and of many ranks the first holds it.

    StorageError if another run has it.
    """
    dry = log.console_is_all = is_dry(options.run)
    with ExitStack() as stack:
        if ranks.is_first and not dry:
            model = Path(options.to_flat()["out_dir"])
            stack.enter_context(held(replaced_whole("--out-dir", model), log.say))
            finish_model(model)  # may bring back the checkpoints, which can be below the model
            saved = Checkpoints(options.checkpoint).folder
            stack.enter_context(held(kept_folder("--checkpoint-dir", saved), log.say))
            stack.enter_context(held(replaced_whole("--log-file", log.path), log.say))
        yield
