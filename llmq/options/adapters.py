"""What is trained in place of the whole model: low-rank adapters, or a part of it."""

# No `from __future__ import annotations`: see llmq/options/maths.py.

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from llmq.options.field import Float, Int, Named, NonNegative, Path, Positive, Section, Share, Text, flag, option

OF_BUDGET = tuple(
    f"adalora_{key}" for key in ("target_rank", "warmup", "final", "interval", "beta1", "beta2", "orth_reg")
)
NOT_OF_ADALORA = ("dora", "rslora", "lora_init", "lora_rank_pattern", "lora_alpha_pattern")
SHAPE = (  # with --adapter, the folder says it
    *("lora_alpha", "lora_targets", "lora_bias", "rslora", "lora_init"),
    *("lora_rank_pattern", "lora_alpha_pattern", "train_also", "dora", "adalora"),
    *OF_BUDGET,
)
OF_LORA = (*(key for key in SHAPE if key != "train_also"), "lora_dropout", "lora_plus_ratio")
ADAPTERS = ("lora_rank", "adapter")
OF_TOKENS = "{own} trains virtual tokens alone, and {other} is of another method: leave one of them out"
RIVALS = (  # a method, what cannot be given beside it, and the message
    (
        "train_only",
        ADAPTERS,
        "--train-only trains a part of the model, and adapters do not change it: leave one of them out",
    ),
    ("prompt_tuning", ("prefix_tuning", *ADAPTERS, "ia3", "train_only", "train_also", *OF_LORA), OF_TOKENS),
    ("prefix_tuning", (*ADAPTERS, "ia3", "train_only", "train_also", *OF_LORA), OF_TOKENS),
    ("ia3", (*ADAPTERS, "train_only", *OF_LORA), "{own} trains gains, and {other} is of another method"),
    (
        "adapter_method",
        ("prompt_tuning", "prefix_tuning", *ADAPTERS, "ia3", "train_only", *OF_LORA),
        "{own} is a plug-in, whose options follow its name, and {other} is of another method: leave one of them out",
    ),
)
RATE_OF_GAINS = 3e-3  # of IA3, as in its paper
RATE = 2e-4  # of adapters, which take a larger one than the whole model

BaseDtype = Literal["fp32", "bf16", "e4m3", "int8", "nf4", "mxfp4"]


def _with_rank(value: Any) -> Any:
    return lambda data: value if data.get("lora_rank") is not None else None


def _of_adalora(value: Any, description: str, *aliases: str, shown: str = "", **limits: Any) -> Any:
    """An option of --adalora, whose default may be a function of the rank."""

    def default(data: dict[str, Any]) -> Any:
        if not data.get("adalora") or (rank := data.get("lora_rank")) is None:
            return None
        return value(rank) if callable(value) else value

    return option(default, description, *aliases, shown=shown or f"{value:g}", **limits)


class AdapterOptions(Section):
    title = "Adapters"
    lora_rank: Positive | None = option(None, "Train adapters of this rank, and keep the model frozen.", "lora_r")
    lora_alpha: Float | None = option(
        lambda data: None if data.get("lora_rank") is None else 2.0 * data["lora_rank"],
        "Multiply what adapters add by this over the rank.",
        shown="twice the rank",
        gt=0,
    )
    lora_dropout: Share | None = option(
        None, "Share of the adapters' inputs to leave out in training; 0 for none.", shown="0, or that of --adapter"
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
        _with_rank("none"), "Biases to train: none, all, or those of adapted maps (lora_only).", shown="none"
    )
    adalora: bool = option(
        False, "Begin with --lora-rank triplets for each map, and keep those that matter most over all maps (AdaLoRA)."
    )
    rslora: bool = option(False, "Multiply what adapters add by alpha / sqrt(rank) (rsLoRA).", "use_rslora")
    lora_init: Literal["kaiming", "gaussian", "pissa", "olora"] | None = option(
        lambda data: None if data.get("adalora") else _with_rank("kaiming")(data),
        "What A and B begin as: kaiming draws A uniform up to 1 / sqrt(inputs), gaussian with the deviation 1 / rank, "
        "and B is zero; pissa and olora take the principal part of the weight out of it, or of its QR decomposition.",
        shown="kaiming; --adalora has one of its own",
    )
    lora_rank_pattern: Text | None = option(
        None,
        "Ranks of the maps of these names or patterns, with commas, such as mlp=32,layers.[0-3].*=8; the first that "
        "matches counts.",
        "rank_pattern",
        shown="--lora-rank",
        metavar="NAME=RANK",
    )
    lora_alpha_pattern: Text | None = option(
        None, "Alphas of maps, in the same way.", "alpha_pattern", shown="--lora-alpha", metavar="NAME=ALPHA"
    )
    dora: bool = option(False, "Learn an adapted map's magnitude beside its direction (DoRA).", "use_dora")
    adalora_target_rank: Int | None = _of_adalora(
        lambda rank: max(1, 2 * rank // 3), "Mean rank at the end.", "target_r", shown="two thirds of --lora-rank", ge=1
    )
    adalora_warmup: Int | None = _of_adalora(0, "First steps in which all ranks are kept.", "tinit", ge=0)
    adalora_final: Int | None = _of_adalora(0, "Last steps in which ranks do not change.", "tfinal", ge=0)
    adalora_interval: Int | None = _of_adalora(10, "Steps from one choice of ranks to the next.", "deltaT", ge=1)
    adalora_beta1: Float | None = _of_adalora(0.85, "Share of past sensitivity kept in a step.", gt=0, lt=1)
    adalora_beta2: Float | None = _of_adalora(0.85, "Share of its past uncertainty kept in a step.", gt=0, lt=1)
    adalora_orth_reg: NonNegative | None = _of_adalora(
        0.5, "Weight in the loss of how far singular vectors are from orthonormal; 0 for none.", "orth_reg_weight"
    )
    lora_plus_ratio: Float | None = option(
        None, "Multiply the rate of B, and of trained vectors, by this (LoRA+).", "loraplus_lr_ratio", shown="1", gt=0
    )
    train_also: Text | None = option(
        None, "Modules to train in full, too: names or patterns, such as lm_head,embed_tokens.", "modules_to_save"
    )
    base_dtype: BaseDtype | None = option(
        None,
        "Dtype in which the frozen weights of the layers' linear maps are held. e4m3 and int8 take half the memory of "
        "bf16, nf4 and mxfp4 about a quarter.",
        shown="that of --adapter's base, else the model dtype",
    )
    adapter: Path | None = option(None, "Continue to train the adapter in this folder, in PEFT's format.")
    merge: bool = option(
        False, "Export the model with the adapter merged, too, as merged in --out-dir.", "merge_adapter"
    )
    ia3: Text | None = option(
        None,
        "Train a gain for each output of these linear maps (IA3), and for each input of mlp.down_proj, and keep the "
        "model frozen: names or patterns as in --lora-targets, such as k_proj,v_proj,down_proj.",
        metavar="NAMES",
    )
    prompt_tuning: Positive | None = option(
        None, "Train embeddings of N virtual tokens before documents (prompt tuning); they count in --seq-len."
    )
    prefix_tuning: Positive | None = option(
        None, "Train keys and values of virtual tokens in every layer (prefix tuning, P-tuning v2)."
    )
    adapter_method: Annotated[Text, AfterValidator(Named("method"))] | None = option(
        None, "Plug-in that says what is trained beside a frozen model, or of it.", metavar="NAME"
    )
    train_only: Text | None = option(
        None, "Train only parameters of these names or patterns, such as *.bias or layers.2[0-9].*.", shown="all"
    )

    def contradictions(self) -> Iterator[str]:
        for own, others, words in RIVALS:
            if getattr(self, own) is not None and (given := self.given(others)):
                yield words.format(own=self.written(own), other=flag(given[0]))
        if not self.given(("prompt_tuning", "prefix_tuning", "ia3", "adapter_method")):
            yield from self._of_low_rank()

    def _of_low_rank(self) -> Iterator[str]:
        """What contradicts the kind of adapter, or is for adapters where there are none."""
        given, fix = self.given(SHAPE), "is for adapters: add --lora-rank"
        if self.adapter is not None and self.lora_rank is not None:
            yield f"--lora-rank {self.lora_rank} is of a new adapter, and --adapter continues one: give one of them"
        elif self.adapter is not None:
            yield from (f"{self.written(key)} is said by --adapter {self.adapter}: leave it out" for key in given[:1])
        elif self.lora_rank is None:
            given += self.given(("lora_dropout", "lora_plus_ratio", "base_dtype", "merge"))
            yield from (f"{self.written(key)} {fix}" for key in given)
        elif self.adalora:
            given = self.given(NOT_OF_ADALORA)
            yield from (f"{self.written(key)} does not go with --adalora: leave it out" for key in given)
        else:
            given = [key for key in OF_BUDGET if getattr(self, key) is not None]  # which may be 0
            yield from (f"{self.written(key)} is for --adalora: add that" for key in given)
