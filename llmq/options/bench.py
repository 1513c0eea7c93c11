"""What `llmq-bench` is asked to measure, beside the options that it shares with `llmq-train`."""

# No `from __future__ import annotations`: pydantic would compile every annotation from text, a tenth of --help's time.

from typing import Annotated

from pydantic import BeforeValidator, Field

from llmq.options.field import Count, Path, Positive, Section, option, with_commas

Names = Annotated[tuple[Path, ...], BeforeValidator(with_commas), Field(min_length=1)]
Sizes = Annotated[tuple[Positive, ...], BeforeValidator(with_commas), Field(min_length=1)]
Levels = Annotated[tuple[Annotated[int, Field(ge=0, le=3)], ...], BeforeValidator(with_commas), Field(min_length=1)]
OF_RUNS = ("tokens_per_step", "steps", "warmup", "gpus", "zero_levels", "save", "single_ops")  # not of single ops


class BenchOptions(Section):
    title = "What is measured"
    tokens_per_step: Positive | None = option(None, "Tokens in an optimizer step.", shown="524288; on the CPU 1024")
    steps: Positive = option(10, "Optimizer steps to time.")
    warmup: Count = option(3, "Optimizer steps before those; two capture the graphs.")
    gpus: Count = option(1, "Measure one GPU, then this many together, with a process for each; 0 takes all.")
    zero_levels: Levels = option(
        (),
        "With --gpus: what they share out, --zero-level of llmq-train, one after the other.",
        metavar="N,N,...",
        shown="1",
    )
    save: Path | None = option(None, "Write the results as JSON.", metavar="FILE")
    single_ops: bool = option(True, "Time each op of a micro-step on its own, too, for the time by family.")
    models: Names = option(
        (), "Presets or folders, separated by commas.", metavar="TEXT", shown="models that fit this device"
    )
    dtypes: Names = option(
        (),
        "Matmul dtypes, separated by commas: fp32, bf16, e4m3.",
        metavar="TEXT",
        shown="bf16; without --models also e4m3",
    )
    batch_size: Sizes = option(
        (),
        "Sequences in a micro-batch; of several sizes, separated by commas, each is measured.",
        metavar="N,N,...",
        shown="as many as fit, up to 32",
    )
    seq_len: Positive | None = option(None, "Tokens in a sequence.", shown="1024; on the CPU 128")
    recompute: Names = option(
        (), "Recompute flags without their prefix, separated by commas: ffn,att.", metavar="TEXT", shown="none"
    )
