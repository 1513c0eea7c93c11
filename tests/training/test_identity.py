"""How a run that resumes differs from the one that was saved, and the flags that it names to keep ranks and rows."""

from dataclasses import dataclass

import pytest

from llmq.cli.train import options_of
from llmq.data.batches.batch import step_of
from llmq.training.saving import changes

RUN = ("--model=m", "--train-file=t.bin")


@dataclass(frozen=True)
class Step:
    """As much of a run's data as says how large a step is."""

    batch_size: int
    grad_accumulation: int
    world: int

    @property
    def samples_per_step(self):
        return self.batch_size * self.grad_accumulation * self.world


def resumed(before, now, *, start=("llmq-train",)):
    """What is said of a run with the flags `now` on a number of ranks, after one with those `before`."""
    (options, data), (others, other) = (opened(*each) for each in (before, now))
    ran_as = {"ranks": data.world, "start": list(start), "rows": data.samples_per_step}
    return changes({"options": options, "ran_as": ran_as}, others, other)


def opened(flags, world):
    options = options_of((*RUN, *flags.split()))
    size, _, accumulation = step_of(options.data, world)
    return options.to_flat(), Step(size, accumulation, world)


@pytest.mark.parametrize("by_global", [False, True])
@pytest.mark.parametrize(("size", "world"), [(4, 3), (2, 3), (4, 2), (1, 4), (3, 4), (6, 1), (5, 2)])
def test_the_flags_that_are_named_keep_the_rows(by_global, size, world):
    """Of 24 on one rank, whatever the micro-batch: one is named that divides them."""
    before = ("--batch-size=4 --grad-accumulation=6", 1)
    step = f"--global-batch-size={size * world}" if by_global else "--grad-accumulation=7"
    (text,) = (
        one for one in resumed(before, (f"--batch-size={size} {step}", world)) if one.startswith("rows per step")
    )
    flags = text.partition("(")[2].partition(" keep 24)")[0]
    assert flags.split()[1].startswith("--global-batch-size=" if by_global else "--grad-accumulation=")
    assert opened(flags, world)[1].samples_per_step == 24
    assert not any(one.startswith("rows") for one in resumed(before, (flags, world)))


def test_what_no_flags_keep_is_said():
    said = resumed(("--batch-size=2 --grad-accumulation=4", 2), ("--batch-size=2 --grad-accumulation=4", 3))
    assert said == ["ranks 2 to 3 (--gpus=2 keeps 2)", "rows per step 16 to 24 (no flags keep 16 on 3 ranks)"]


@pytest.mark.parametrize(
    ("start", "ranks", "keeps"),
    [
        ("llmq-launch --procs=2 --", 2, "llmq-launch --procs=2"),
        ("torchrun --nproc-per-node=2 -m llmq", 2, "torchrun --nproc-per-node=2 -m llmq"),
        ("llmq-train", 2, "--gpus=2"),
        ("llmq-train", 1, "llmq-train"),
    ],
)
def test_other_ranks_are_named_with_what_started_them(start, ranks, keeps):
    """Their steps have as many rows, as the global batch is given."""
    flags = "--batch-size=1 --global-batch-size=12"
    said = resumed((flags, ranks), (flags, 3), start=start.split())
    assert said == [f"ranks {ranks} to 3 ({keeps} keeps {ranks})"]


def test_a_checkpoint_of_an_earlier_release_says_nothing_of_ranks():
    options, data = opened("", 2)
    assert changes({"options": options}, options, data) == []
