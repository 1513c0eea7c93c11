"""The learning rate at every joint of every schedule, and the number of steps of a run."""

import math
from itertools import pairwise

import pytest

from llmq.errors import UsageError
from llmq.options.maths import ScheduleOptions
from llmq.training.schedule import Schedule, make_schedule

SHAPES = ["cosine", "linear", "constant", "wsd"]


def rates(schedule):
    return [schedule.learning_rate(step) for step in range(1, schedule.steps + 1)]


HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # W = 2, S = 6, f = 0.5: p = 0, 1/4, 1/2, 3/4 after the warmup.
        (Schedule(6, 1.0, warmup=2, final=0.5, shape="linear"), [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]),
        # S = 4, f = 0: (1 + cos(pi p)) / 2 at p = 0, 1/4, 1/2, 3/4.
        (Schedule(4, 2.0, final=0.0, shape="cosine"), [2, 1 + HALF, 1, 1 - HALF]),
        (Schedule(8, 1.0, warmup=2, cooldown=4, final=0.1, shape="wsd"), [0.5, 1.0, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325]),
        # Linear from 1 to 0 over 8 steps, from 1/2 at x = 4 straight to 0: the same line. The cosine is at 1/2, too.
        (Schedule(8, 1.0, cooldown=4, final=0.0, shape="linear"), [1 - n / 8 for n in range(8)]),
        (Schedule(8, 1.0, cooldown=4, final=0.0, shape="cosine"), [None] * 4 + [0.5, 0.375, 0.25, 0.125]),
    ],
)
def test_rates_by_hand(schedule, expected):
    found = [rate if by_hand is not None else None for rate, by_hand in zip(rates(schedule), expected, strict=True)]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_joints_are_continuous(shape):
    """No jump: neighbours differ by no more than the steepest piece allows."""
    steps, warmup, cooldown = 4000, 500, 700
    schedule = Schedule(steps, 3.0, warmup=warmup, cooldown=cooldown, final=0.1, shape=shape)
    found = rates(schedule)
    steepest = 3.0 * max(1 / warmup, 0.9 / cooldown, 0.9 * math.pi / 2 / (steps - warmup))
    assert max(abs(a - b) for a, b in pairwise(found)) <= steepest * 1.001
    assert found[0] == 3.0 / warmup
    assert found[warmup - 1] == found[warmup] == 3.0
    assert max(found) == 3.0
    last = found[-1] - 0.3
    assert 0 < last <= steepest * 1.001  # one step of the way before the end
    assert schedule.learning_rate(steps + 1) == pytest.approx(0.3)
    assert schedule.learning_rate(steps + 99) == pytest.approx(0.3)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rate_only_falls_after_the_warmup(shape):
    found = rates(Schedule(60, 1.0, warmup=7, cooldown=9, final=0.0, shape=shape))
    assert found[:7] == pytest.approx([k / 7 for k in range(1, 8)])
    assert all(a >= b > 0 for a, b in pairwise(found[7:]))


@pytest.mark.parametrize("shape", SHAPES)
def test_short_runs_and_those_without_a_fall(shape):
    assert set(rates(Schedule(9, 0.5, final=1.0, shape=shape))) == {0.5}
    assert rates(Schedule(1, 1.0, final=0.0, shape=shape)) == [1.0]
    assert rates(Schedule(3, 1.0, warmup=3, final=0.0, shape=shape)) == pytest.approx([1 / 3, 2 / 3, 1])
    assert rates(Schedule(4, 1.0, warmup=2, cooldown=2, final=0.0, shape=shape)) == pytest.approx([0.5, 1, 1, 0.5])


@pytest.mark.parametrize(
    ("given", "windows", "per_step", "steps"),
    [
        ({}, 100, 16, 7),
        ({}, 96, 16, 6),
        ({"epochs": 0.1}, 1000, 10, 10),
        ({"epochs": 2.5}, 100, 16, 16),
        ({"epochs": 0.001}, 10, 16, 1),
        ({"epochs": 1e-05}, 10**7, 10, 10),
        ({"steps": 30}, 100, 16, 30),
    ],
)
def test_number_of_steps(given, windows, per_step, steps):
    options = ScheduleOptions(**given)
    assert make_schedule(options, windows, per_step).steps == steps


def test_options_arrive():
    own = {"steps": 50, "learning_rate": 2.0, "warmup": 5, "cooldown": 6, "final_lr_fraction": 0.25}
    assert make_schedule(ScheduleOptions(**own, lr_schedule="wsd"), 1, 1) == Schedule(50, 2.0, 5, 6, 0.25, "wsd")


@pytest.mark.parametrize(("ratio", "windows", "warmup"), [(0.07, 100, 7), (0.071, 100, 8), (0, 100, 0), (1, 9, 9)])
def test_warmup_as_a_part_of_the_steps(ratio, windows, warmup):
    assert make_schedule(ScheduleOptions(warmup_ratio=ratio), windows, 1).warmup == warmup
    with pytest.raises(UsageError, match=rf"--warmup 5 and --warmup-ratio {ratio:g} disagree"):
        make_schedule(ScheduleOptions(warmup_ratio=ratio, warmup=5), windows, 1)


def test_a_cosine_ends_at_the_least_rate():
    schedule = make_schedule(ScheduleOptions(lr_schedule="cosine", learning_rate=3e-4, min_lr=1e-5), 100, 1)
    assert schedule.learning_rate(101) == pytest.approx(1e-5)
    falls = make_schedule(ScheduleOptions(lr_schedule="cosine", learning_rate=3e-4), 100, 1)
    assert falls.learning_rate(100) < 1e-6 and falls.learning_rate(101) == 0
    assert set(rates(make_schedule(ScheduleOptions(learning_rate=3e-4), 100, 1))) == {3e-4}


def test_steps_that_are_too_few_or_too_many_are_refused():
    options = ScheduleOptions(warmup=5, cooldown=3, final_lr_fraction=0)
    assert make_schedule(options, 80, 10).steps == 8
    with pytest.raises(UsageError, match=r"--warmup 5 and --cooldown 3 need 8 steps, but the run has 7"):
        make_schedule(options, 70, 10)
    with pytest.raises(UsageError, match="the most are 2147483647: use fewer"):
        make_schedule(ScheduleOptions(epochs=1e9), 1000, 4)
