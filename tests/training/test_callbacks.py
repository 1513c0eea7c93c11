"""Callbacks: what they see of a run, what they may ask for, and what survives a resume."""

import json
import math
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from in_process import train_on_ranks
from tiny_runs import weights_of

import llmq
from llmq import Callback, EarlyStopping
from llmq.errors import UsageError
from llmq.files.checkpoint import load
from llmq.training.callbacks import Callbacks
from llmq.training.hooks import RunView
from llmq.training.progress import Progress
from llmq.training.ranks import Ranks
from llmq.training.records import History, TrainRecord


def saved(name="run"):
    return sorted(int(path.name[5:]) for path in Path("runs", name, "checkpoints").glob("step-*"))


class Notes(Callback):
    """Notes what it is called with."""

    def __init__(self):
        self.seen, self.runs = [], set()

    def on_begin(self, run):
        self.seen.append(("begin", run.step, run.num_steps, run.options["seq_len"]))

    def on_step(self, run, record):
        self.runs.add(run)
        self.seen.append(("step", run.step, record.step))

    def on_evaluate(self, run, record):
        self.seen.append(("evaluate", run.step, run.history["eval_loss"][-1] == record.loss))

    def on_checkpoint(self, run, path):
        self.seen.append(("checkpoint", path.name))

    def on_end(self, run, result):
        self.seen.append(("end", result.steps, run.model_path == result.model_path))


def test_every_moment_comes_in_its_order(given):
    notes = Notes()
    llmq.train(**{**given, "steps": 2, "eval_every_n_steps": 2, "ckpt_interval": 1, "callbacks": [notes]})
    moments = [("begin", 0, 2, 16), ("step", 1, 1), ("step", 2, 2), ("evaluate", 2, True), ("end", 2, True)]
    assert [one for one in notes.seen if one[0] != "checkpoint"] == moments and len(notes.runs) == 1
    assert [one[1] for one in notes.seen if one[0] == "checkpoint"] == ["step-00000001", "step-00000002"]


class Idle(Callback):
    """Does nothing in what it defines."""

    def on_step(self, run, record):
        """Is called."""


def test_idle_callbacks_change_no_bit(given):
    alone = llmq.train(**given)
    beside = llmq.train(**{**given, "name": "beside"}, callbacks=[Idle(), Notes(), lambda run, record: None])
    assert weights_of(alone.checkpoint_path) == weights_of(beside.checkpoint_path)
    assert alone.eval_loss == beside.eval_loss


def test_idle_callbacks_cost_less_than_a_hundredth_of_a_short_step(given):
    hook = Callbacks({"Idle": Idle(), "other": Idle()}, type("Ready", (), {"ranks": Ranks(), "log": None}))
    view, record = RunView(Progress(), 5, None, History()), TrainRecord(1, 0.1, 2.0, 1.0, 1e-3, 10.0, 64, 64)

    def seconds():
        began = time.perf_counter()
        for _ in range(100):
            hook.after_step(view, record)
        return (time.perf_counter() - began) / 100

    assert min(seconds() for _ in range(20)) < 0.01 * 10e-3


def test_a_stop_leaves_what_an_interrupted_run_does(given):
    def interrupts(run, record):
        if record.step == 5 and isinstance(record, TrainRecord):
            signal.raise_signal(signal.SIGTERM)

    broken = llmq.train(**{**given, "name": "broken"}, callbacks=[interrupts])
    stopped = llmq.train(**given, callbacks=[lambda run, record: record.step == 5 and run.stop("that will do")])
    assert (broken.exit_code, broken.stopped_by) == (75, "terminated") and broken.model_path is None
    assert (stopped.exit_code, stopped.steps, stopped.stopped_by) == (0, 5, "that will do")
    assert weights_of(stopped.checkpoint_path) == weights_of(broken.checkpoint_path)
    assert stopped.model_path.is_dir() and stopped.history.steps("eval_loss").tolist() == [4, 5]
    assert "Stopping after step 5: that will do" in given["console"].getvalue()
    notices = [json.loads(line) for line in Path("runs/run/log.jsonl").read_text().splitlines()]
    assert any(one["type"] == "notice" and "that will do" in one["text"] for one in notices)


def test_it_may_ask_for_a_checkpoint(given):
    asks = [lambda run, record: run.save() if run.step == 3 else None]
    llmq.train(**{**given, "ckpt_interval": 0, "ckpt_keep_n": 0, "callbacks": asks})
    assert saved() == [3, 12]


def test_its_own_numbers_are_logged(given):
    result = llmq.train(**{**given, "steps": 3}, callbacks=[lambda run, record: run.log(double=2 * record.loss)])
    steps = [1, 2, 3, 3]  # the last one at the evaluation
    assert result.history.steps("double").tolist() == steps
    assert result.history["double"][:3].tolist() == (2 * result.history["loss"]).tolist()
    records = [json.loads(line) for line in Path("runs/run/log.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records if one["type"] == "metrics"] == steps
    with pytest.raises(UsageError, match=r"run.log\(loss=...\): llmq logs these itself"):
        llmq.train(**{**given, "name": "a"}, callbacks=[lambda run, record: run.log(loss=1)])
    with pytest.raises(UsageError, match=r"run.log\(mine='x'\): give a number"):
        llmq.train(**{**given, "name": "b"}, callbacks=[lambda run, record: run.log(mine="x")])


def test_it_sees_weights_and_evaluates(given):
    found = []

    def looks(run, record):
        if isinstance(record, TrainRecord):
            return
        norm, up = run.parameter("model.norm.weight"), run.parameter("model.layers.0.mlp.up_proj.weight")
        found.append((run.evaluate() - record.loss, norm.shape, up.shape, norm.dtype.name))
        with pytest.raises(KeyError, match=r"model.norm is no parameter"):
            run.parameter("model.norm")

    llmq.train(**given, callbacks=[looks])
    config = json.loads((Path(given["model"]) / "config.json").read_text())
    c, f = config["hidden_size"], config["intermediate_size"]
    assert found == [(0.0, (c,), (f, c), "float32")] * 3


def test_an_error_in_one_ends_the_run_and_names_it(given):
    class Broken(Callback):
        def on_step(self, run, record):
            if run.step == 3:
                raise ZeroDivisionError("by nothing")

    with pytest.raises(ZeroDivisionError, match="by nothing"):
        llmq.train(**given, callbacks=[Notes(), Broken()])
    assert (
        saved() == [3] and "The callback Broken failed in on_step at step 3: by nothing" in given["console"].getvalue()
    )


class Misspelt(Idle):
    """One that has a method too many."""

    def on_steps(self, run, record):
        """Never called."""


class OfAnotherTrainer:
    """One whose moments have other names."""

    def on_train_begin(self, args, state, control):
        """Never called."""


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        *(
            (one, r"is no callback: give a function f\(run, record\), or an")
            for one in (5, "on_step", Idle, Callback())
        ),
        (Misspelt(), r"Misspelt has on_steps, which is never called: did you mean on_step\?"),
        (OfAnotherTrainer(), "OfAnotherTrainer has on_train_begin, which is never called"),
        (None, r"callbacks is .*: give a list of them"),
    ],
)
def test_what_is_no_callback_is_refused_before_an_earlier_run_goes(given, wrong, match):
    log = Path("runs/run/log.jsonl")
    log.parent.mkdir(parents=True)
    log.touch()
    with pytest.raises(UsageError, match=match):
        llmq.train(**given, overwrite=True, callbacks=Idle() if wrong is None else [wrong])
    assert log.is_file()


class Counts(Callback):
    """Counts the steps of all processes."""

    count = 0

    def on_step(self, run, record):
        self.count += 1

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]


def test_its_state_survives_a_resume(given):
    given |= {"ckpt_interval": 2, "ckpt_keep_n": 0, "steps": 4}
    llmq.train(**given, callbacks=[Counts(), Counts()])
    assert load(Path("runs/run/checkpoints/step-00000002"))[0]["callbacks"] == {
        "Counts": {"count": 2},
        "Counts 2": {"count": 2},
    }
    again = Counts()
    llmq.train(**{**given, "overwrite": True, "continue": 2}, callbacks=[again])
    assert again.count == 4


@pytest.mark.parametrize("state", [{"rate": np.float32(1)}, {"rate": math.nan}, {"seen": {1}}, None])
def test_a_state_that_cannot_be_saved_ends_the_run_with_its_steps(given, state):
    wrong = Counts()
    wrong.state = lambda: {"count": 1} if wrong.count < 5 else state
    with pytest.raises((UsageError, TypeError), match=r"return a dict of what JSON has|not iterable"):
        llmq.train(**{**given, "ckpt_interval": 5}, callbacks=[wrong])
    assert saved() == [5] and "The callback Counts failed in state: " in given["console"].getvalue()


class Metric(Callback):
    """Logs a number that rises to 5 and stays."""

    def on_evaluate(self, run, record):
        run.log(score=min(run.step, 5))


@pytest.mark.parametrize("how", ["options", "object"])
def test_early_stopping_waits_for_its_patience(given, how):
    given |= {"eval_every_n_steps": 1, "ckpt_interval": 0}
    options = {"early_stopping_patience": 3, "early_stopping_metric": "score"}
    if how == "options":
        result = llmq.train(**given, **options, callbacks=[Metric()])
    else:
        result = llmq.train(**given, callbacks=[EarlyStopping(3, "score"), Metric()])  # which it is called after
    assert result.steps == 8 and result.stopped_by == "score has not improved in 3 evaluations: 5, best 5"
    assert saved() == [8] and result.model_path.is_dir()


def test_early_stopping_continues_over_a_resume(given):
    given |= {"eval_every_n_steps": 1, "ckpt_interval": 1, "ckpt_keep_n": 0, "early_stopping_patience": 3}
    given |= {"early_stopping_metric": "score", "callbacks": [Metric()]}
    whole = llmq.train(**given)
    weights = weights_of(whole.checkpoint_path)
    assert whole.steps == 8
    for step in (4, 6, 7):
        again = llmq.train(**{**given, "overwrite": True, "continue": step})
        assert weights_of(again.checkpoint_path) == weights
        assert (again.steps, again.history.steps("loss").tolist()) == (8, [*range(step + 1, 9)])


def test_a_loss_improves_downwards_by_a_least_difference():
    class Run:
        history, step, stopped = History(), 0, None

        def stop(self, reason):
            self.stopped = self.stopped or (self.step, reason)

    for losses, least, at in (
        ([3, 2, 2, 2], 0, 4),
        ([3, 2.9, 2.8, 2.7], 0.5, 3),
        ([3, 2, 1, 0.5], 0, None),
        ([math.nan, 2, 1], 0, None),
        ([math.inf, 2, math.inf, 3], 0, 4),  # JSON has no infinity, so that a state must not
        ([math.nan, math.nan, 1], 0, 2),
    ):
        run, stopping = Run(), EarlyStopping(2, min_delta=least)
        run.history = History()
        for run.step, loss in enumerate(losses, 1):
            run.history.add(run.step, {"eval_loss": loss})
            stopping.on_evaluate(run, None)
            again = EarlyStopping(2, min_delta=least)
            again.restore(json.loads(json.dumps(stopping.state(), allow_nan=False)))
            stopping = again
        assert (run.stopped and run.stopped[0]) == at


def test_early_stopping_that_cannot_be_is_refused(given):
    with pytest.raises(UsageError, match=r"early stopping watches los, .*: known are step, .*: did you mean loss"):
        llmq.train(**given, early_stopping_patience=1, early_stopping_metric="los")
    for about in ({"early_stopping_patience": 1}, {"callbacks": [EarlyStopping(1)]}):
        with pytest.raises(UsageError, match="early stopping goes by evaluations, and this run makes none"):
            llmq.train(**{**given, "name": "a", "eval_every_n_steps": 0}, **about)
    with pytest.raises(UsageError, match="--early-stopping-metric score is for early stopping: add"):
        llmq.train(**given, early_stopping_metric="score")
    for patience, least in ((0, 0), (1, -1), (1, np.inf)):
        with pytest.raises(UsageError, match="early stopping with a"):
            EarlyStopping(patience, min_delta=least)


def test_a_stop_is_that_of_all_ranks(given):
    """The callback of the first rank: the others have none."""
    given |= {"batch_size": 1, "global_batch_size": 4, "grad_accumulation": None}
    stop = lambda run, record: record.step == 3 and run.stop("enough")  # noqa: E731
    results, _ = train_on_ranks(2, given, callbacks=[stop])
    assert [(result.steps, result.exit_code) for result in results] == [(3, 0)] * 2 and saved() == [3]


def test_an_error_on_the_first_rank_ends_the_others(given):
    given |= {"batch_size": 1, "global_batch_size": 4, "grad_accumulation": None}
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero"):
        train_on_ranks(2, given, callbacks=[lambda run, record: 1 / 0])
