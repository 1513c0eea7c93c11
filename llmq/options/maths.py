"""How to compute: precision, memory, the schedule of the rate, the optimizer."""

# No `from __future__ import annotations`: pydantic would compile every annotation from text, a tenth of --help's time.

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from llmq.options.field import (
    LARGEST_STEP,
    Computed,
    Count,
    Float,
    Int,
    Named,
    NonNegative,
    Positive,
    Section,
    Share,
    Text,
    option,
    with_commas,
)
from llmq.plugins import table

Narrow = Annotated[Literal["bf16", "fp32"], Computed]
Moment = Annotated[Literal["fp32", "bf16", "e4m3", "int8"], Computed]
FitMay = Annotated[tuple[Literal["states", "matmul"], ...] | None, BeforeValidator(with_commas)]
FP8_MATMULS = ("e4m3", "auto")
Chunks = Literal["auto"] | Positive
FALLING = ("cosine", "linear", "wsd")


def _our_name(schedule: Any) -> Any:
    """That of one of transformers' schedulers."""
    names = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
    return names.get(schedule, schedule) if isinstance(schedule, str) else schedule


Course = Annotated[Literal["cosine", "linear", "constant", "wsd"], BeforeValidator(_our_name)]


class PrecisionOptions(Section):
    title = "Precision"
    model_dtype: Narrow = option("bf16", "Dtype of weights, activations and gradients.")
    matmul_dtype: Annotated[Literal["fp32", "bf16", "e4m3", "auto"], Computed] = option(
        lambda data: data.get("model_dtype", "bf16"),
        "Dtype of the matmuls inside the blocks; auto times each one and uses e4m3 where it is faster.",
        shown="the model dtype",
    )
    gradient_dtype: Literal["e4m3", "e5m2"] | None = option(
        lambda data: "e4m3" if data.get("matmul_dtype") in FP8_MATMULS else None,
        "Dtype of activation gradients in e4m3 matmuls.",
        shown="e4m3 in e4m3 matmuls",
    )
    fp8_scaling: Literal["delayed", "current", "rowwise", "blockwise"] | None = option(
        lambda data: "delayed" if data.get("matmul_dtype") in FP8_MATMULS else None,
        "Scales of e4m3 matmuls: delayed takes one per tensor from earlier steps; the others measure each tensor, row "
        "or 1x128 block (weights 128x128) in one more pass. rowwise and blockwise need compute capability 9.0.",
        shown="delayed in e4m3 matmuls",
    )
    head_dtype: Annotated[Literal["bf16", "e4m3"], Computed] | None = option(
        None, "Dtype of the matmuls of the logits.", shown="the matmul dtype, or the model dtype in e4m3 runs"
    )
    bf16_layers: Text | None = option(
        None,
        "Layers to keep out of e4m3: FIRST,LAST (how many at either end), or names with commas, such as mlp.down, "
        "layers.0 or layers.3.attention.o.",
        metavar="FIRST,LAST|NAMES",
    )
    fp8_layers: Text | None = option(None, "The only layers in e4m3, as in --bf16-layers.", metavar="FIRST,LAST|NAMES")
    log_fp8_every: Count | None = option(
        lambda data: 100 if data.get("matmul_dtype") in FP8_MATMULS else None,
        "Log the errors of all e4m3 copies every N steps, on one micro-batch; 0 never.",
        shown="100 in e4m3 runs",
    )
    fp8_fallback: bool = option(False, "Move a map to the model dtype when --log-fp8-every finds its noise high.")
    opt_m_dtype: Moment = option(
        "fp32", "Dtype of Adam's first moment, or SGD's momentum; all but fp32 are rounded stochastically."
    )
    opt_v_dtype: Moment = option("fp32", "Dtype of Adam's second moment, as of the first; in 8 bits it is its root.")
    master_dtype: Annotated[Literal["bf16", "fp32", "none"], Computed] = option(
        lambda data: data.get("model_dtype", "bf16"),
        "Dtype of the master weights, which the optimizer updates, and of adapters, which are stored in it; none holds "
        "the blocks' matrices in e4m3 alone.",
        "adapter_dtype",
        shown="the model dtype, of adapters fp32",
    )
    grad_accum_dtype: Narrow = option(
        lambda data: data.get("model_dtype", "bf16"), "Dtype of gradients.", shown="the model dtype, of adapters fp32"
    )

    def contradictions(self) -> Iterator[str]:
        if self.bf16_layers is not None and self.fp8_layers is not None:
            yield "--bf16-layers and --fp8-layers both say which sites are in e4m3: give one of them"
        if self.fp8_fallback and self.matmul_dtype in FP8_MATMULS and not self.log_fp8_every:
            yield "--fp8-fallback uses the readings of --log-fp8-every, which is 0: set that, or leave this out"
        if self.fp8_fallback and self.matmul_dtype not in FP8_MATMULS:
            yield f"--fp8-fallback is for e4m3 matmuls, but --matmul-dtype is {self.matmul_dtype}: leave it out"
        for key in ("gradient_dtype", "fp8_scaling", "bf16_layers", "fp8_layers", "log_fp8_every", "head_dtype"):
            if self.matmul_dtype in FP8_MATMULS or (key == "head_dtype" and self.head_dtype == "bf16"):
                continue
            if getattr(self, key) is not None:
                yield f"{self.written(key)} is for e4m3 matmuls, and not for {self.matmul_dtype}: leave it out"


class MemoryOptions(Section):
    title = "Memory"
    fit: bool = option(
        False, "Choose what is not given of batch, recomputing, offloading and chunks for the fastest step that fits."
    )
    fit_may: FitMay = option(
        None,
        "What --fit may also choose although it changes numbers, with commas: states (--opt-m-dtype, --opt-v-dtype, "
        "--master-dtype), matmul (--matmul-dtype).",
        metavar="[states,matmul]",
        shown="nothing",
    )
    recompute_swiglu: bool = option(False, "Recompute SwiGLU in the backward pass.")
    recompute_norm: bool = option(False, "Recompute the norms in the backward pass.")
    recompute_ffn: bool = option(False, "Recompute the whole MLP in the backward pass.")
    recompute_qkv: bool = option(False, "Recompute the q, k and v projections in the backward pass.")
    recompute_att: bool = option(False, "Recompute the whole attention in the backward pass.")
    recompute_block: bool = option(
        False, "Recompute the whole block in the backward pass.", "gradient_checkpointing", "activation_checkpointing"
    )
    offload_residual: bool = option(False, "Keep the residual stream in host memory from forward to backward.")
    offload_master: bool = option(False, "Keep the master weights in host memory.")
    offload_opt_m: bool = option(False, "Keep Adam's first moment, or SGD's momentum, in host memory.")
    offload_opt_v: bool = option(False, "Keep Adam's second moment in host memory.")
    offload_optimizer: bool = option(
        False, "Keep both moments, or SGD's momentum, in host memory, and masters that are not the weights themselves."
    )
    offload_gradients: bool = option(False, "Keep the gradients of a step in host memory.")
    offload_quants: bool = option(False, "Keep e4m3 copies of weights in host memory, and fetch them a layer ahead.")
    persistent_quants: bool = option(
        True,
        "Keep the e4m3 copies of weights over all steps, on the GPU or with --offload-quants on the host; without it "
        "they are made of the master weights for each use, which takes two bytes a parameter less.",
    )
    use_zero_copy: bool = option(
        False, "Update what --offload flags keep in host memory in place, without copies to the GPU and back."
    )
    write_combined: bool = option(
        False,
        "Allocate host memory of --offload flags write-combined, which some GPUs read faster and CPUs very slowly.",
    )
    stream_weights: bool = option(
        False, "Keep the weights of the blocks in host memory, and all masters; layers come one ahead of their use."
    )
    fused_update: bool = option(
        False,
        "Update the weights of each layer in backward, as soon as it has its gradients, which are then freed. Needs "
        "--grad-accumulation 1, and --grad-clip 0 or --clip-by last.",
    )
    lmhead_chunks: Count = option(0, "Compute the logits in N chunks to save memory; 0 chooses by size.")
    seq_tiles: Positive = option(
        1, "Run the MLP with its norm in N tiles of tokens, and the logits in N chunks or more, to save memory."
    )
    attn_bwd_chunks: Chunks = option(
        "auto", "Run attention's backward in N chunks (same bits); auto takes as few as fit.", metavar="auto|INT"
    )

    def contradictions(self) -> Iterator[str]:
        if self.fit_may and not self.fit:
            yield f"--fit-may {','.join(self.fit_may)} says what --fit may choose: add --fit, or leave it out"
        if self.offload_quants and not self.persistent_quants:
            yield "--no-persistent-quants leaves no copies for --offload-quants to keep: leave one of them out"


class ShardingOptions(Section):
    title = "Sharing among GPUs"
    zero_level: Int = option(
        1,
        "What the GPUs of a run share out instead of each holding all: 0 nothing, 1 master weights and moments, 2 "
        "gradients as well, 3 weights as well.",
        "zero_stage",
        ge=0,
        le=3,
    )
    shard_gradients: bool = option(False, "Share out gradients, as --zero-level 2 does.")
    shard_weights: bool = option(False, "Share out weights, as --zero-level 3 does, but not gradients.")
    reduce_dtype: Narrow | None = option(None, "Dtype in which gradients travel.", shown="that of the gradients")
    all_to_all_reduce: bool = option(
        False, "Sum gradients where they arrive, in fp32 and in the order of ranks, not on their way from GPU to GPU."
    )
    gradient_compression: Literal["none", "e4m3"] = option(
        "none",
        "Send gradients in e4m3 with a scale for each 128x128 numbers, and sum them as --all-to-all-reduce does.",
    )
    memcpy_all_gather: bool | None = option(
        None, "Gather weights by copy engines, not by NCCL.", shown="what is faster"
    )
    memcpy_send_recv: bool | None = option(
        None, "Exchange the gradients of --all-to-all-reduce by copy engines, not by NCCL.", shown="what is faster"
    )

    def contradictions(self) -> Iterator[str]:
        if self.memcpy_send_recv and not self.all_to_all_reduce and self.gradient_compression == "none":
            yield "--memcpy-send-recv is for gradients that are exchanged: add --all-to-all-reduce, or leave it out"
        if self.gradient_compression != "none" and self.reduce_dtype is not None:
            said = f"--gradient-compression {self.gradient_compression} is what gradients travel in"
            yield f"{said}, and --reduce-dtype {self.reduce_dtype} as well: use one of them"
        if self.zero_level == 0 and (self.shard_gradients or self.shard_weights):
            given = "--shard-weights" if self.shard_weights else "--shard-gradients"
            yield f"--zero-level 0 shares out nothing, and {given} something: use --zero-level 1 with it"


def final_fraction(options: Mapping[str, Any]) -> float:
    """What --final-lr-fraction is where it is not given, from the other options of the schedule."""
    if options["min_lr"] is not None and options["learning_rate"] > 0:
        return min(options["min_lr"] / options["learning_rate"], 1.0)
    return 0.0 if options["lr_schedule"] in FALLING or options["cooldown"] else 1.0


class ScheduleOptions(Section):
    title = "Schedule"
    steps: Positive | None = option(None, "Optimizer steps.", "max_steps", shown="by --epochs")
    epochs: Float | None = option(
        lambda data: 1.0 if data.get("steps") is None else None,
        "Passes over the training data; replaces --steps.",
        "num_train_epochs",
        shown="1 without --steps",
        gt=0,
        le=LARGEST_STEP,
    )
    learning_rate: NonNegative = option(
        1e-5, "Peak learning rate.", "lr", shown="1e-05, of adapters 0.0002, of --ia3 0.003"
    )
    lr_schedule: Course = option(
        "constant",
        "Learning-rate schedule: cosine and linear fall from the peak to --final-lr-fraction of it; wsd stays "
        "constant, then falls over --cooldown.",
        "lr_scheduler_type",
    )
    warmup: Count = option(0, "Steps of linear warmup to the peak.", "warmup_steps")
    warmup_ratio: Float | None = option(None, "Warmup as a fraction of all steps; replaces --warmup.", ge=0, le=1)
    cooldown: Count = option(0, "Steps at the end in which the rate falls linearly to its final value; 0 for none.")
    min_lr: NonNegative | None = option(None, "Final learning rate; replaces --final-lr-fraction.")
    final_lr_fraction: Float = option(
        final_fraction, "Final rate, as a fraction of the peak.", shown="0 if the rate falls, else 1", ge=0, le=1
    )

    def contradictions(self) -> Iterator[str]:
        if self.steps is not None and self.epochs is not None:
            yield f"--steps {self.steps} and --epochs {self.epochs:g} both say how long to train: give one of them"
        if self.steps is not None:
            yield from self.too_short(self.steps)
        rate, final, min_lr, cooldown = self.learning_rate, self.final_lr_fraction, self.min_lr, self.cooldown
        said = f"--final-lr-fraction {final:g}" if min_lr is None else f"--min-lr {min_lr:g}"
        if self.lr_schedule == "wsd" and not cooldown:
            yield "--lr-schedule wsd falls over the --cooldown steps, which are 0: set --cooldown, or use constant"
        elif min_lr is not None and min_lr > rate:
            yield f"--min-lr {min_lr:g} is above the --learning-rate {rate:g}: use that or less"
        elif min_lr is not None and not math.isclose(final * rate, min_lr, rel_tol=1e-9):
            asked = f"the second asks for {final * rate:g}"
            yield f"{said} and --final-lr-fraction {final:g} disagree: {asked}; give one of the two"
        elif cooldown and final == 1:
            yield f"--cooldown {cooldown} falls to {said}, which is the peak: use less (0 by default), or --cooldown 0"
        elif self.lr_schedule not in FALLING and not cooldown and final != 1:
            yield f"{said} is never reached by --lr-schedule {self.lr_schedule}: set --cooldown, or use linear"

    def warmup_steps(self, steps: int) -> int:
        """Steps of warmup in a run of `steps`: --warmup, or the part --warmup-ratio of them, rounded up."""
        if self.warmup_ratio is None:
            return self.warmup
        return math.ceil(Fraction(repr(self.warmup_ratio)) * steps)  # as written, not as binary: 0.07 of 100 is 7

    def too_short(self, steps: int) -> Iterator[str]:
        """A message if warmup and cooldown do not fit into a run of `steps`, or two options disagree about warmup."""
        warmup, ratio, num_steps = self.warmup, self.warmup_ratio, self.warmup_steps(steps)
        said = f"--warmup {warmup}" if ratio is None else f"--warmup-ratio {ratio:g} ({num_steps} steps)"
        if ratio is not None and warmup not in (0, num_steps):
            asked = f"the second asks for {num_steps} of {steps} steps"
            yield f"--warmup {warmup} and --warmup-ratio {ratio:g} disagree: {asked}; give one of the two"
        elif num_steps + self.cooldown > steps:
            both = f"{said} and --cooldown {self.cooldown} need {num_steps + self.cooldown} steps"
            yield f"{both}, but the run has {steps}: shorten them, or train for longer"


OF_RULE = {"adamw": ("beta_1", "beta_2", "adam_epsilon"), "sgd": ("momentum", "nesterov")}


def _with(optimizer: str, value: float) -> Any:
    """The default of an option that other optimizers lack."""
    return lambda data: value if data.get("optimizer") == optimizer else None


def _held(value: Any) -> Any:
    """The name of a loss; a function of the caller's is registered under its own."""
    if isinstance(value, str) and value.endswith("()") and not table("loss").has(value):
        raise ValueError("this was a function of a Python program: give the same in loss=")
    if isinstance(value, str) or not callable(value):
        return value
    name = f"{getattr(value, '__qualname__', type(value).__qualname__)}()"
    table("loss").register(name, value)
    return name


class OptimizerOptions(Section):
    title = "Optimizer"
    optimizer: Annotated[Text, AfterValidator(Named("optimizer", tuple(OF_RULE)))] = option(
        "adamw", "Rule of updates: AdamW, SGD as in PyTorch, or a plug-in.", metavar="adamw|sgd|NAME"
    )
    beta_1: Share | None = option(
        _with("adamw", 0.9), "AdamW: decay rate of the first moment.", "adam_beta1", shown="0.9"
    )
    beta_2: Share | None = option(
        _with("adamw", 0.95), "AdamW: decay rate of the second moment.", "adam_beta2", shown="0.95"
    )
    adam_epsilon: Float | None = option(
        _with("adamw", 1e-8), "AdamW: constant added to the root of the second moment.", shown="1e-08", gt=0
    )
    momentum: Share | None = option(
        _with("sgd", 0.0),
        "SGD: factor of the sum of past gradients in each new one; 0 keeps no such sum.",
        shown="0 with sgd",
    )
    nesterov: bool = option(False, "SGD: look ahead along the momentum (Nesterov).")
    weight_decay: NonNegative = option(
        lambda data: 0.0 if data.get("optimizer") == "sgd" else 0.1,
        "Weight decay of matrices and embeddings; norms and biases have none. AdamW shrinks weights by it; SGD adds it "
        "to the gradient, as in PyTorch.",
        shown="0.1, with sgd 0",
    )
    grad_clip: NonNegative = option(1.0, "Clip the global norm of the gradient to this; 0: never.", "max_grad_norm")
    clip_by: Literal["this", "last"] = option(
        "this", "Step whose norm --grad-clip looks at: this one's, or that of the last one, which is known in backward."
    )

    def contradictions(self) -> Iterator[str]:
        for rule, keys in OF_RULE.items():
            for key in self.given(keys) if rule != self.optimizer else ():
                yield f"{self.written(key)} is for --optimizer {rule}, but it is {self.optimizer}: leave it out"
        if self.nesterov and self.momentum == 0:
            yield "--nesterov looks ahead along the momentum, which is 0: add --momentum 0.9, or leave it out"


class LossOptions(Section):
    title = "Loss"
    loss: Annotated[Text, BeforeValidator(_held), AfterValidator(Named("loss", ("cross_entropy",)))] = option(
        "cross_entropy", "Loss of each token: cross-entropy, or a plug-in.", metavar="cross_entropy|NAME"
    )


class RegularizationOptions(Section):
    title = "Regularization"
    z_loss: NonNegative = option(0.0, "Weight of the squared log-partition (z-loss) in the loss; 0 for none.")
    neftune_alpha: NonNegative = option(
        0.0, "NEFTune: noise up to alpha / sqrt(T C) on the embedded tokens; 0 for none.", "neftune_noise_alpha"
    )
