"""Hooks of a run: when they are called, what they see, and what they ask for and keep in checkpoints."""

from pathlib import Path

import pytest

from llmq.options.parse import Options
from llmq.training.hooks import Ask, Hook
from llmq.training.train import run

SAVED = Path("runs/run/checkpoints")


@pytest.fixture
def trained(given):
    """Trains with hooks, and returns the result."""

    def train(*hooks, **more):
        options = {key: value for key, value in {**given, **more}.items() if key != "console"}
        return run(Options.parse(options), hooks=hooks, console=given["console"])

    return train


def saved():
    return sorted(int(path.name[5:]) for path in SAVED.glob("step-*"))


class Notes(Hook):
    """Notes the moments at which it is called, with the step of the run and what it is given."""

    key = "notes"

    def __init__(self):
        self.seen = []

    def state(self):
        return {"count": len(self.seen)}

    def resume(self, state):
        self.seen.append(("resume", state["count"]))

    def on_save(self, run, path, step):
        self.seen.append(("on_save", path.name, step))

    def on_end(self, run, result):
        self.seen.append(("on_end", result.steps, result.exit_code))


def noting(moment):
    def note(self, run, *about):
        self.seen.append((moment, run.progress.step, *(one.step for one in about if hasattr(one, "step"))))

    return note


for moment in ("on_begin", "before_step", "during_step", "after_update", "after_step", "on_evaluate"):
    setattr(Notes, moment, noting(moment))


def test_every_moment_comes_in_its_order(trained):
    notes = Notes()
    trained(notes, steps=2, eval_every_n_steps=2, grad_accumulation=2)
    of_step = [[("before_step", n), ("during_step", n), ("after_update", n)] for n in range(2)]
    one, two = ([*moments, ("after_step", n, n)] for n, moments in enumerate(of_step, 1))
    last = [("on_evaluate", 2, 2), ("on_end", 2, 0)]
    assert [each for each in notes.seen if each[0] != "on_save"] == [("on_begin", 0), *one, *two, *last]
    assert [each for each in notes.seen if each[0] == "on_save"] == [("on_save", "step-00000002", 2)]  # meanwhile


def test_a_hook_resumes_with_its_state(trained):
    notes = Notes()
    trained(notes, steps=2, ckpt_interval=1, ckpt_keep_n=0, eval_every_n_steps=0)
    again = Notes()
    trained(again, steps=3, eval_every_n_steps=0, overwrite=True, **{"continue": 1})
    assert again.seen[:2] == [("resume", 5), ("on_begin", 1)]  # begin, and what is called in a step


class Asks(Hook):
    """Asks for something after a step."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def after_step(self, run, record):
        return self.what if record.step == self.step else Ask.NOTHING


def test_it_may_stop_the_run_which_ends_as_one_of_that_many_steps(trained, given):
    """With an evaluation of all held-out data, a checkpoint and a model: those of a run without a schedule's end."""
    more = {"lr_schedule": "constant", "warmup": 0, "cooldown": 0}
    early = trained(Asks(3, Ask.STOP), name="early", steps=9, **more)
    short = trained(name="short", steps=3, **more)
    assert (early.exit_code, early.steps) == (0, 3) and early.model_path.is_dir()
    assert early.checkpoint_path.name == short.checkpoint_path.name == "step-00000003"
    assert early.eval_loss == short.eval_loss and early.train_loss == short.train_loss


def test_an_evaluation_may_stop_it_too(trained):
    class Patience(Hook):
        def on_evaluate(self, run, record):
            return Ask.STOP if record.step == 4 else None

    assert trained(Patience(), eval_every_n_steps=2).steps == 4 and saved() == [4]


def test_it_may_ask_for_a_checkpoint_and_an_evaluation(trained):
    notes = Notes()
    trained(notes, Asks(2, Ask.SAVE), Asks(4, Ask.EVALUATE), eval_every_n_steps=100, ckpt_interval=0, ckpt_keep_n=0)
    assert saved() == [2, 12]
    assert [one[1] for one in notes.seen if one[0] == "on_evaluate"] == [4, 12]
    assert [one[2] for one in notes.seen if one[0] == "on_save"] == [2, 12]
