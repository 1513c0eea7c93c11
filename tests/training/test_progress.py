"""What a checkpoint stores of a run's progress: all of it, under names that earlier releases wrote."""

import json
import math
from dataclasses import fields, replace

import pytest

from llmq.training.health import Course
from llmq.training.progress import Progress

FAR = Progress(
    step=7,
    position=28,
    stream={"begun": 28, "epoch": 1},
    rejected=2,
    course=Course().after(2.5, 1.0).after(math.inf, 0.0),
    evaluated=5,
    losses=(4.75, 2),
    train_loss=math.inf,
    eval_loss=2.25,
    moments_from=3,
    rate_from=4,
)


def stored(progress):
    """The state of a checkpoint, as its file has it."""
    return json.loads(json.dumps({"step": progress.step, **progress.stored}, allow_nan=False))


def test_all_of_it_is_stored():
    assert all(getattr(FAR, f.name) != getattr(Progress(), f.name) for f in fields(Progress)), "a default hides a loss"
    assert Progress.read(stored(FAR)) == FAR
    begun = Progress.read(stored(Progress()))
    assert math.isnan(begun.train_loss) and math.isnan(begun.eval_loss)
    assert replace(begun, train_loss=0, eval_loss=0) == replace(Progress(), train_loss=0, eval_loss=0)


def test_the_names_are_those_of_earlier_releases():
    names = {"position", "stream", "rejected", "course", "evaluated", "losses", "train_loss", "eval_loss"}
    assert Progress().stored.keys() == names | {"moments_from", "rate_from"}


@pytest.mark.parametrize("name", ["stream", "rejected", "course", "moments_from", "rate_from"])
def test_what_earlier_releases_did_not_store_is_as_at_the_start(name):
    state = stored(FAR)
    del state[name]
    assert Progress.read(state) == replace(FAR, **{name: getattr(Progress(), name)})
