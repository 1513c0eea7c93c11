"""What is trained in place of the whole model: low-rank adapters, or a part of it."""

# No `from __future__ import annotations`: see llmq/options/maths.py.

from collections.abc import Iterator
from typing import Any, Literal

from llmq.options.field import LARGEST_STEP, Float, Int, Path, Section, Text, flag, option

SHAPE = ("lora_alpha", "lora_targets", "lora_bias", "rslora", "lora_init")  # with --adapter, the folder says it
RATE = 2e-4  # of adapters, which take a larger one than the whole model


def _with_rank(value: Any) -> Any:
    return lambda data: value if data.get("lora_rank") is not None else None


class AdapterOptions(Section):
    title = "Adapters"
    lora_rank: Int | None = option(
        None, "Train low-rank adapters of this rank, and keep the model frozen.", "lora_r", ge=1, le=LARGEST_STEP
    )
    lora_alpha: Float | None = option(
        lambda data: None if data.get("lora_rank") is None else 2.0 * data["lora_rank"],
        "Multiply what adapters add by this over the rank.",
        shown="twice the rank",
        gt=0,
    )
    lora_dropout: Float | None = option(
        None,
        "Share of the adapters' inputs to leave out in training; 0 for none.",
        shown="0, or that of --adapter",
        ge=0,
        lt=1,
    )
    lora_targets: Text | None = option(
        _with_rank("all"),
        "Linear maps that get adapters: all of the layers, attention, mlp, or with commas names of Hugging Face's "
        "modules and patterns, such as q_proj,v_proj or layers.[0-3].*.",
        "target_modules",
        shown="all",
        metavar="all|attention|mlp|NAMES",
    )
    lora_bias: Literal["none", "all", "lora_only"] | None = option(
        _with_rank("none"),
        "Biases to train beside adapters: none, all, or those of adapted maps (lora_only).",
        shown="none",
    )
    rslora: bool = option(
        False, "Multiply what adapters add by alpha over the root of the rank (rsLoRA).", "use_rslora"
    )
    lora_init: Literal["kaiming", "gaussian"] | None = option(
        _with_rank("kaiming"),
        "How A is drawn: kaiming is uniform up to 1 / sqrt(inputs), gaussian has the deviation 1 / rank. B is zero.",
        shown="kaiming",
    )
    base_dtype: Literal["bf16", "e4m3", "int8", "nf4", "mxfp4"] | None = option(
        None,
        "Dtype in which the frozen weights of the layers' linear maps are held. e4m3 and int8 take half the memory of "
        "bf16, nf4 and mxfp4 about a quarter.",
        shown="the model dtype",
    )
    adapter: Path | None = option(
        None, "Continue to train the adapter in this folder, in PEFT's format.", metavar="DIR"
    )

    train_only: Text | None = option(
        None,
        "Train only the parameters of these names or patterns, with commas, such as *.bias or layers.2[0-9].*, and "
        "keep all others frozen.",
        shown="all",
        metavar="NAMES",
    )

    def contradictions(self) -> Iterator[str]:
        if self.train_only is not None and (self.lora_rank is not None or self.adapter is not None):
            yield "--train-only trains a part of the model, and adapters leave it as it is: leave one of them out"
        given = [key for key in SHAPE if getattr(self, key) not in (None, False)]
        if self.adapter is not None and self.lora_rank is not None:
            yield f"--lora-rank {self.lora_rank} is of a new adapter, and --adapter continues one: give one of them"
        elif self.adapter is not None and given:
            yield f"{flag(given[0])} {getattr(self, given[0])} is said by --adapter {self.adapter}: leave it out"
        elif self.adapter is None and self.lora_rank is None:
            given += [key for key in ("lora_dropout", "base_dtype") if getattr(self, key)]
            yield from (f"{flag(key)} {getattr(self, key)} is for adapters: add --lora-rank" for key in given)
