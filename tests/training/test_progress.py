"""What a checkpoint stores of a run's progress, and signs of a ruined run in losses of a known end and in weights."""

import json
import math
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest

from llmq.training.finish import all_finite
from llmq.training.progress import KEPT, Course, Progress
from llmq.training.schedule import Schedule


def course(losses, norms=None):
    made = Course()
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        made = made.after(float(loss), float(norm))
    return made


def noise(count, seed):
    return 0.1 * np.random.default_rng(seed).standard_normal(count)


@pytest.mark.parametrize("count", [8, 20, 60, 100, 400])
@pytest.mark.parametrize("after", [1, 3])
def test_a_model_that_is_ruined_by_its_first_steps(count, after):
    """2.5 nats, then a jump to 80 and down to the 11.9 of a uniform guess among 152 thousand tokens."""
    losses = np.full(count, 11.93) + noise(count, 1) / 100
    losses[:after] = 2.5
    losses[after : after + 2] = 80, 30
    (warning,) = course(losses).warnings(152_000)
    assert warning.startswith("The loss ended at 11.93, above the 2.5 where it began")


def test_a_slow_rise_beyond_the_noise():
    """By 3 of a step's deviations, which a look at single steps would miss."""
    losses = 2.5 + np.linspace(0, 0.3, 1000) + noise(1000, 2)
    (warning,) = course(losses).warnings(152_000)
    assert "above the 2.5" in warning


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 12, 50, 60, 120, 500])
def test_noise_and_learning_are_no_warning(count):
    for seed in range(20):
        assert course(2.5 + noise(count, seed)).warnings(152_000) == [], seed
    assert course(2 + 3 * np.exp(-np.arange(count) / 20) + noise(count, 3)).warnings(152_000) == []


@pytest.mark.parametrize(
    "losses",
    [
        *([2.5, 9.0, 9.0], [2.5, 90.0, 90.0]),  # too few to be judged
        *([2.5] * 20, [2.5] * 10 + [2.5 + 1e-6] * 10, [2.5, np.nan, np.inf] * 10),
    ],
)
def test_losses_that_are_no_rise(losses):
    assert course(losses).warnings(152_000) == []


def test_a_model_that_is_worse_than_a_guess():
    """Its noise is that of its loss, so that no rise beyond the noise can be seen."""
    losses = [2.5, 124, 621, 224, 231, 108, 252, 182, 166, 73, 85, 116, 128, 83, 54]
    for count in (4, 8, 15):
        (warning,) = course(losses[:count]).warnings(97)
        assert "above the 2.5 where it began and the 4.575 of a guess" in warning
    assert course([5.6, 5.1, 5.5, 5.2]).warnings(97) == []  # as large initial weights have it


@pytest.mark.parametrize("count", [1, 3, 60])
def test_a_last_update_that_makes_it_worse_than_a_guess(count):
    """Losses of steps are those before their updates: only a look after the last one shows what that did."""
    losses = 2.5 + noise(count, 5)
    (warning,) = course(losses).warnings(97, 5.1)
    assert warning.startswith("The loss ended at 5.1, above the ") and "the 4.575 of a guess" in warning
    for after in (2.6, 4.9, np.nan, None):
        assert course(losses).warnings(97, after) == []
    assert Course().warnings(97, 9.0) == []  # without a finite loss there is nothing to compare with


def test_a_rate_that_trains_nothing_or_ruins_anything():
    assert not any(list(Schedule(9, rate).warnings()) for rate in (1e-6, 0.3, 1.0))
    assert list(Schedule(9, 0.0).warnings()) == ["--learning-rate 0 trains nothing: the weights do not change"]
    (warning,) = Schedule(9, 1e30).warnings()
    assert warning.startswith("--learning-rate 1e+30 moves weights by up to that much in every step")


def test_a_gradient_of_exactly_nothing_at_the_end():
    (warning,) = course([4.0] * 5, [1, 1, 0, 0, 0]).warnings(152_000)
    assert "exactly 0 in the last 3 steps" in warning
    assert course([4.0] * 5, [1, 1, 1, 0, 0]).warnings(152_000) == []
    assert course([4.0] * 5, [0, 0, 0, 0, 1]).warnings(152_000) == []


@pytest.mark.parametrize("count", [5, KEPT, KEPT + 30, 4 * KEPT])
def test_a_course_goes_on_from_a_checkpoint(count):
    losses = 2.5 + noise(count, 4)
    whole, begun = course(losses), course(losses[: count // 2])
    going_on = Progress.read(stored(Progress(course=begun))).course
    for loss in losses[count // 2 :]:
        going_on = going_on.after(float(loss), 1.0)
    assert going_on == whole
    assert len(whole.first) == len(whole.last) == min(count, KEPT)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64, np.float16])
@pytest.mark.parametrize("size", [1, (1 << 20) + 5])
def test_one_value_that_is_not_finite_is_found_anywhere(dtype, size):
    values = np.random.default_rng(0).standard_normal(size).astype(dtype)
    values[0] = ml_dtypes.finfo(dtype).max
    assert all_finite(values) and all_finite(-values)
    for place in {0, size // 2, size - 1}:
        for bad in (np.nan, np.inf, -np.inf):
            spoiled = values.copy()
            spoiled[place] = bad
            assert not all_finite(spoiled.reshape(-1, 1))


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
    eval_accuracy=0.25,
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


def test_the_names_are_those_of_earlier_releases_and_what_they_did_not_store_is_as_at_the_start():
    newer = {"stream", "rejected", "course", "moments_from", "rate_from", "eval_accuracy"}
    assert Progress().stored.keys() == newer | {"position", "evaluated", "losses", "train_loss", "eval_loss"}
    state = stored(FAR)
    for name in newer:
        state.pop(name)
    assert Progress.read(state) == replace(FAR, **{name: getattr(Progress(), name) for name in newer})
