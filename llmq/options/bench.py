"""What `llmq-bench` is asked to measure, beside the options that it shares with `llmq-train`."""

# No `from __future__ import annotations`: pydantic would compile every annotation from text, a tenth of --help's time.

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field

from llmq.options.field import Count, NonNegative, Path, Positive, Section, option, with_commas

Names = Annotated[tuple[Path, ...], BeforeValidator(with_commas), Field(min_length=1)]
Sizes = Annotated[tuple[Positive, ...], BeforeValidator(with_commas), Field(min_length=1)]
Levels = Annotated[tuple[Annotated[int, Field(ge=0, le=3)], ...], BeforeValidator(with_commas), Field(min_length=1)]
OF_RUNS = (  # not of single ops
    *("tokens_per_step", "steps", "warmup", "batch_sizes", "gpus", "zero_levels", "save", "compare", "tolerance"),
    *("single_ops", "markdown"),
)


class BenchOptions(Section):
    title = "What is measured"
    tokens_per_step: Positive | None = option(None, "Tokens in an optimizer step.", shown="524288; on the CPU 1024")
    steps: Positive = option(10, "Optimizer steps to time.")
    warmup: Count = option(3, "Optimizer steps before those; two capture the graphs.")
    batch_sizes: Sizes = option(
        (), "Measure each of these sizes of a micro-batch, and print one table.", metavar="N,N,...", shown="none"
    )
    gpus: Count = option(1, "Measure one GPU, then this many together, with a process for each; 0 takes all.")
    zero_levels: Levels = option(
        (),
        "With --gpus: what they share out, --zero-level of llmq-train, one after the other.",
        metavar="N,N,...",
        shown="1",
    )
    save: Path | None = option(None, "Write the results as JSON.", metavar="FILE")
    compare: Path | None = option(
        None, "Print the changes since the results that --save wrote to FILE.", metavar="FILE"
    )
    tolerance: NonNegative | None = option(
        None, "With --compare: exit with 1 if a model is slower by more than this.", metavar="PERCENT"
    )
    single_ops: bool = option(True, "Time each op of a micro-step on its own, too, for the time by family.")
    markdown: bool = option(False, "Print the results as Markdown, and everything else to stderr.")
    models: Names = option(
        (), "Presets or folders, separated by commas.", metavar="TEXT", shown="models that fit this device"
    )
    dtypes: Names = option(
        (),
        "Matmul dtypes, separated by commas: fp32, bf16, e4m3.",
        metavar="TEXT",
        shown="bf16; without --models also e4m3",
    )
    batch_size: Positive | None = option(None, "Sequences in a micro-batch.", shown="as many as fit, up to 32")
    seq_len: Positive | None = option(None, "Tokens in a sequence.", shown="1024; on the CPU 128")
    recompute: Names = option(
        (), "Recompute flags without their prefix, separated by commas: ffn,att.", metavar="TEXT", shown="none"
    )
    adapters_at_once: Sizes = option(
        (),
        "With --lora-rank: train N equal adapters at once, which share the rows of a micro-batch; 1,8 measures "
        "one alone, then eight.",
        metavar="N,N,...",
        shown="1",
    )

    def contradictions(self) -> Iterator[str]:
        if self.tolerance is not None and self.compare is None:
            yield f"--tolerance {self.tolerance:g} is for --compare: add it, or leave --tolerance out"
        if self.batch_size and self.batch_sizes:
            yield "--batch-size and --batch-sizes are both given: give one of them"
