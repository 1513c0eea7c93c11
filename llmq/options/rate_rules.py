"""What the options of the learning rate's course mean, and which of them cannot go together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

FALLING = ("cosine", "linear", "wsd")
HUGGING_FACE = {  # names of transformers' schedulers
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}


def our_name(schedule: Any) -> Any:
    """Our name of a schedule of transformers; anything else as it is."""
    return HUGGING_FACE.get(schedule, schedule) if isinstance(schedule, str) else schedule


def final_fraction(options: Mapping[str, Any]) -> float:
    """What --final-lr-fraction is where it is not given, from the other options of the schedule."""
    if options["min_lr"] is not None and options["learning_rate"] > 0:
        return min(options["min_lr"] / options["learning_rate"], 1.0)
    return 0.0 if options["lr_schedule"] in FALLING or options["cooldown"] else 1.0


def warmup_steps(warmup: int, ratio: float | None, steps: int) -> int:
    """Steps of warmup in a run of `steps`: `warmup`, or the part `ratio` of them, rounded up."""
    if ratio is None:
        return warmup
    return math.ceil(Fraction(repr(ratio)) * steps)  # as written, not as binary: 0.07 of 100 steps are 7


def contradictions(*, schedule: str, rate: float, final: float, min_lr: float | None, cooldown: int) -> Iterator[str]:
    """A message if the rate does not get to where it should end."""
    said = f"--final-lr-fraction {final:g}" if min_lr is None else f"--min-lr {min_lr:g}"
    if schedule == "wsd" and not cooldown:
        yield "--lr-schedule wsd falls over the --cooldown steps, which are 0: set --cooldown, or use constant"
    elif min_lr is not None and min_lr > rate:
        yield f"--min-lr {min_lr:g} is above the --learning-rate {rate:g}: use that or less"
    elif min_lr is not None and not math.isclose(final * rate, min_lr, rel_tol=1e-9):
        yield (
            f"{said} and --final-lr-fraction {final:g} disagree: with --learning-rate {rate:g} the second asks for "
            f"{final * rate:g}; give one of the two"
        )
    elif cooldown and final == 1:
        yield f"--cooldown {cooldown} falls to {said}, which is the peak: use less (0 by default), or --cooldown 0"
    elif schedule not in FALLING and not cooldown and final != 1:
        yield f"{said} is never reached by --lr-schedule {schedule}: set --cooldown, or use linear or cosine"


def not_fitting(*, warmup: int, ratio: float | None, cooldown: int, steps: int) -> Iterator[str]:
    """A message if warmup and cooldown do not fit into a run of `steps`, or two options disagree about the warmup."""
    num_steps = warmup_steps(warmup, ratio, steps)
    said = f"--warmup {warmup}" if ratio is None else f"--warmup-ratio {ratio:g} ({num_steps} steps)"
    if ratio is not None and warmup not in (0, num_steps):
        yield (
            f"--warmup {warmup} and --warmup-ratio {ratio:g} disagree: the second asks for {num_steps} of the {steps} "
            "steps; give one of the two"
        )
    elif num_steps + cooldown > steps:
        yield (
            f"{said} and --cooldown {cooldown} need {num_steps + cooldown} steps, but the run has {steps}: shorten "
            "them, or train for longer"
        )
