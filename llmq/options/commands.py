"""What `llmq-bench` measures, beside options of `llmq-train`; how `llmq-generate` and `llmq.generate` write."""

# No `from __future__ import annotations`: pydantic would compile every annotation from text, a tenth of --help's time.

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from llmq.options.adapters import BaseDtype
from llmq.options.data import Template
from llmq.options.field import (
    Count,
    DeviceName,
    Float,
    Int,
    NonNegative,
    Path,
    Positive,
    Section,
    Text,
    one_or_more,
    option,
    with_commas,
)

Names = Annotated[tuple[Path, ...], BeforeValidator(with_commas), Field(min_length=1)]
Sizes = Annotated[tuple[Positive, ...], BeforeValidator(with_commas), Field(min_length=1)]
Levels = Annotated[tuple[Annotated[int, Field(ge=0, le=3)], ...], BeforeValidator(with_commas), Field(min_length=1)]
OF_RUNS = ("tokens_per_step", "steps", "warmup", "gpus", "zero_levels", "save", "single_ops")  # not of single ops


class BenchOptions(Section):
    title = "What is measured"
    tokens_per_step: Positive | None = option(
        None, "Tokens in an optimizer step.", shown="524288, without --models 65536; on the CPU 1024"
    )
    steps: Positive = option(10, "Optimizer steps to time.")
    warmup: Count = option(3, "Optimizer steps before those; two capture the graphs.")
    gpus: Count = option(1, "Measure one GPU, then this many together, with a process for each; 0 takes all.")
    zero_levels: Levels = option(
        (), "With --gpus: each --zero-level of llmq-train to measure.", metavar="N,N,...", shown="1"
    )
    save: Path | None = option(None, "Write the results as JSON.")
    single_ops: bool = option(True, "Time each op of a micro-step on its own, too, for the time by family.")
    models: Names = option((), "Presets or folders, separated by commas.", shown="models that fit this device")
    dtypes: Names = option(
        (), "Matmul dtypes, separated by commas: fp32, bf16, e4m3.", shown="bf16; without --models also e4m3"
    )
    batch_size: Sizes = option(
        (), "Sequences in a micro-batch; of several, each is measured.", metavar="N,N,...", shown="as many as fit"
    )
    seq_len: Positive | None = option(None, "Tokens in a sequence.", shown="1024; on the CPU 128")
    recompute: Names = option((), "Recompute flags without their prefix, separated by commas: ffn,att.", shown="none")


STREAMS = 2**20  # from the number of one sample of a prompt, which addresses what is drawn, to that of the next
MOST_SAMPLES = 2**32 // STREAMS  # numbers have 32 bits


def _some_text(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise ValueError("use a text that is not empty")
    return value


Stops = Annotated[tuple[Annotated[str, BeforeValidator(_some_text)], ...], one_or_more(str, int, float)]


class GenerateOptions(Section):
    title = "Generation"
    model: Path = option(
        ..., "Model to write with: a folder, a hub name, or with --from-scratch a preset such as Qwen2.5-0.5B."
    )
    adapter: Path | None = option(None, "Adapter of the model, in PEFT's format, to write with.")
    base_dtype: BaseDtype | None = option(
        None, "Dtype in which to hold the layers' weights, as in training.", shown="that of the adapter's base"
    )
    revision: Text | None = option(None, "Branch, tag or commit of a hub model.")
    from_scratch: bool = option(False, "Use random weights, drawn from --seed.")
    tokenizer: Path | None = option(None, "Whose tokenizer.", shown="the model's")
    chat_template: Template | None = option(None, "Chat template in Jinja.", shown="the tokenizer's own")
    max_tokens: Positive = option(256, "Most new tokens of an answer.")
    max_length: Annotated[Int, Field(ge=2)] = option(4096, "Most tokens of a chat, all its turns.")
    stop: Stops = option(
        (), "End an answer before this text, which may begin or end within a token. Repeatable.", shown="none"
    )
    samples: Annotated[Int, Field(ge=1, le=MOST_SAMPLES)] = option(
        1, "Answers to each prompt, drawn independently at a --temperature above 0."
    )
    batch_size: Positive = option(8, "Prompts to answer at a time.")
    temperature: NonNegative = option(0.0, "Divide logits by this before drawing; 0 takes the most likely token.")
    top_k: Count = option(0, "Draw from the N most likely; 0: all.")
    top_p: Annotated[Float, Field(gt=0, le=1)] = option(
        1.0, "Draw from the fewest most likely tokens whose probabilities reach this; 1: all."
    )
    min_p: Annotated[Float, Field(ge=0, le=1)] = option(
        0.0, "Draw from tokens at least this times as likely as the most likely one; 0: all."
    )
    repetition_penalty: Annotated[Float, Field(gt=0)] = option(
        1.0, "Divide the positive logits of tokens that are there already by this, and multiply the others; 1: off."
    )
    seed: Annotated[Int, Field(ge=0)] = option(0, "Seed of what is drawn.")
    ignore_end: bool = option(False, "Go on after the model's end tokens, to --max-tokens.")
    device: DeviceName = option(
        "auto", "Device to compute on; auto uses a GPU if it can; or the backend of a plug-in.", metavar="auto|cuda|cpu"
    )
    dtype: Literal["bf16", "fp32"] | None = option(
        None, "Dtype of weights, cache and activations.", shown="bf16 on a GPU, fp32 on the CPU"
    )

    def contradictions(self) -> Iterator[str]:
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.min_p):
            yield "--top-k, --top-p and --min-p cut what is drawn from: give a --temperature above 0 with them"
        if self.temperature == 0 and self.samples > 1:
            yield f"--samples {self.samples} would be the same answer each time: give a --temperature above 0"
