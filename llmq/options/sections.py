"""Which options there are: each is a field of a section, and each section is read by exactly one other module.

Sections are frozen, so a run cannot change its own settings. Whether options of a section fit together is a function of
their values alone (`contradictions`), never of which were typed and which are defaults; a default that depends on
another option (`master_dtype` on `model_dtype`) is resolved here, so readers see plain values.
"""

# No `from __future__ import annotations`: pydantic would compile every annotation from text, a tenth of --help's time.

import os
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from llmq.options import rate_rules
from llmq.options.rate_rules import final_fraction, our_name
from llmq.options.section import Float, Floats, Int, Path, Paths, Section, Text, Texts, describe, flag, option

LARGEST_STEP = 2**31 - 1  # the step number is an int32 on the device
LARGEST_SEED = 2**64 - 1  # two 32-bit words of a Philox key
RUN_FOLDER = "runs/%n"

Narrow = Literal["bf16", "fp32"]
FP8_MATMULS = ("e4m3", "auto")


def _which_checkpoint(value: Any) -> Any:
    if isinstance(value, bool) or value in ("true", "True", "false", "False"):  # resume_from_checkpoint: true
        return "newest" if value in (True, "true", "True") else None
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return value


def _file_at_home(value: Any) -> Any:
    path = os.path.expanduser(value) if isinstance(value, str) else value
    return path if isinstance(path, str) and os.path.isfile(path) else value


def _how_to_pack(value: Any) -> Any:
    known = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}
    found = known.get(value.lower(), value) if isinstance(value, str) else value
    if found in (None, True, False, "windows"):
        return found
    raise ValueError("give windows, true (the same as --packing) or false (--no-packing)")


Packing = Annotated[Literal["windows"] | bool | None, BeforeValidator(_how_to_pack)]
Template = Annotated[Text, BeforeValidator(_file_at_home)]
Chunks = Literal["auto"] | Annotated[Int, Field(ge=1, le=LARGEST_STEP)]
Checkpoint = Annotated[int | Path | None, BeforeValidator(_which_checkpoint)]
Course = Annotated[Literal["cosine", "linear", "constant", "wsd"], BeforeValidator(our_name)]


class ModelOptions(Section):
    title = "Model"
    model: Path = option(
        ...,
        "Model to train: a folder, a Hugging Face hub name, or a preset such as Qwen2.5-0.5B.",
        "model_name_or_path",
    )
    revision: Text | None = option(None, "Branch, tag or commit of a hub model.", "model_revision")
    from_scratch: bool = option(False, "Start from random weights, N(0, 0.02), residual projections over sqrt(2L).")
    init_proj_to_zero: bool = option(
        False, "Start the attention and MLP output projections at zero; needs --from-scratch."
    )

    def contradictions(self) -> Iterator[str]:
        if self.init_proj_to_zero and not self.from_scratch:
            yield "--init-proj-to-zero would overwrite the weights that are loaded: add --from-scratch, or leave it out"


class DataOptions(Section):
    title = "Data"
    train_file: Paths | None = option(
        None,
        "Token files to train on: a path or glob, repeatable, or a mixture file.",
        metavar="GLOB",
        shown="needed, or --data",
    )
    weight: Floats | None = option(
        None,
        "Share of the tokens from each --train-file or --data, in order; repeatable.",
        metavar="WEIGHT",
    )
    eval_file: Paths | None = option(None, "Held-out token files: a path or glob; repeatable.", metavar="GLOB")
    batch_size: Int = option(
        4, "Sequences per micro-batch and GPU.", "per_device_train_batch_size", "batch", ge=1, le=LARGEST_STEP
    )
    global_batch_size: Int | None = option(
        None, "Sequences per optimizer step; replaces --grad-accumulation.", ge=1, le=LARGEST_STEP
    )
    grad_accumulation: Int = option(
        lambda data: (
            max((data.get("global_batch_size") or 0) // data.get("batch_size", 1), 1)
            if data.get("global_batch_size")
            else 4
        ),
        "Micro-batches per optimizer step.",
        "gradient_accumulation_steps",
        shown="4, or from --global-batch-size",
        ge=1,
        le=LARGEST_STEP,
    )
    seq_len: Int = option(
        1024, "Tokens per sequence.", "seq_length", "max_seq_length", "block_size", ge=1, le=LARGEST_STEP
    )
    augment: Text | None = option(
        None,
        "Noise on the input tokens in training: token-dropout=P, span-shuffle=P, or both.",
        metavar="LIST",
    )
    packing: Packing = option(
        None,
        "Pack whole documents into rows, each with its own positions and attention. --no-packing puts one document in "
        "a padded row; --packing=windows cuts the text every --seq-len tokens.",
        shown="packed for rows (padded on a GPU that cannot pack), windows for text and tokens",
        metavar="[windows]",
        kind="switch",
    )
    max_docs: Int | None = option(
        None, "Largest number of documents in a packed row.", shown="as few as fill the rows", ge=1, le=LARGEST_STEP
    )

    def contradictions(self) -> Iterator[str]:
        if self.max_docs is not None and self.packing in (False, "windows"):
            yield f"--max-docs {self.max_docs} is for packed rows: add --packing, or leave it out"
        elif self.max_docs is not None and self.max_docs > self.seq_len:
            yield f"--max-docs {self.max_docs} is more than the --seq-len {self.seq_len} tokens of a row: use fewer"
        total, micro = self.global_batch_size, self.batch_size
        if total is None:
            return
        if total % micro:
            below = total // micro * micro
            fix = f"{below} or {below + micro}" if below else str(micro)
            yield f"--global-batch-size {total} is not a multiple of --batch-size {micro}: use {fix}"
        elif total != micro * self.grad_accumulation:
            yield (
                f"--global-batch-size {total} and --grad-accumulation {self.grad_accumulation} disagree: with "
                f"--batch-size {micro} the first asks for {total // micro} micro-batches; give one of the two"
            )


class SourceOptions(Section):
    title = "Text, chats and rows"
    data: Paths | None = option(
        None,
        "Text, chats or rows to train on, tokenized once: a file, folder or glob, a data set as "
        "NAME[@REVISION][:CONFIG[:SPLIT[SLICE]]], repeatable, or one mix file (YAML). Replaces --train-file.",
        metavar="NAME-OR-PATH",
    )
    eval_fraction: Float | None = option(
        None,
        "Fraction of the data held out for evaluation; 0 holds out none.",
        shown="the data's own validation split, else 0.1",
        ge=0,
        lt=1,
    )
    data_format: Text | None = option(
        None,
        "Format of the rows: text, messages, sharegpt, prompt-completion, question-answer, alpaca or tokens.",
        shown="from their columns",
        metavar="FORMAT",
    )
    map_: Texts | None = option(None, "Name of a column, such as text=body; repeatable.", metavar="OURS=THEIRS")
    chat_template: Template | None = option(
        None, "Chat template in Jinja: a file or the text itself.", shown="the tokenizer's own", metavar="FILE-OR-TEXT"
    )
    train_on: Text | None = option(
        None,
        "Tokens of a row to train on: assistant, all, last, or roles with commas.",
        shown="answers",
        metavar="WHAT",
    )
    overlong: Literal["turns", "truncate", "split", "drop"] = option(
        "turns",
        "Treatment of rows longer than --seq-len: turns keeps the whole turns of a chat that fit, drops a row without "
        "one, and leaves text whole; truncate cuts off the end, split cuts into pieces, drop leaves the row out.",
    )
    skip_bad_rows: Int = option(0, "Skip up to N broken rows; 0 stops at the first.", ge=0, le=LARGEST_STEP)
    streaming: bool = option(False, "Tokenize while training and keep no token files, for data larger than the disk.")

    def contradictions(self) -> Iterator[str]:
        if self.data is None:
            for d in describe("source", type(self)):
                if d.key != "data" and (value := getattr(self, d.field)) not in (None, d.default):
                    shown = "" if value is True else f" {value}"
                    yield f"{flag(d.key)}{shown} is for --data: give that, or leave it out"
        elif self.streaming and len(self.data) > 1:
            yield f"--streaming reads one data set, but --data is given {len(self.data)} times: give one"
        if self.data is not None and self.streaming and self.eval_fraction:
            yield (
                f"--eval-fraction {self.eval_fraction:g} of a stream is not known ahead: leave it out, so that the "
                "validation split is used if there is one, or set it to 0"
            )

    def beside(
        self, train_file: Sequence[str] | None, eval_file: Sequence[str] | None, weight: Sequence[float] | None
    ) -> Iterator[str]:
        """Contradictions with the options that name token files, and their weights."""
        if train_file is None and self.data is None:
            yield "--train-file is needed: Token files to train on; or --data: text or rows to tokenize"
        for key, files in (("train_file", train_file), ("eval_file", eval_file)):
            if self.data is not None and files is not None:
                given, named = ", ".join(files), ", ".join(self.data)
                yield f"{flag(key)} {given} and --data {named} both say what the data is: give one of them"
        if weight is not None and self.data is not None and len(weight) != len(self.data):
            yield (f"--weight is given {len(weight)} times and --data {len(self.data)} times: give one weight for each")
        if weight is not None and self.streaming:
            yield "--weight is for several sources, but --streaming reads one: leave one of them out"


class PrecisionOptions(Section):
    title = "Precision"
    model_dtype: Narrow = option("bf16", "Dtype of weights, activations and gradients.")
    matmul_dtype: Literal["fp32", "bf16", "e4m3", "auto"] = option(
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
    head_dtype: Literal["bf16", "e4m3"] | None = option(
        None, "Dtype of the matmuls of the logits.", shown="the matmul dtype, or the model dtype in e4m3 runs"
    )
    bf16_layers: Text | None = option(
        None,
        "Layers to keep out of e4m3: FIRST,LAST (how many at either end), or names with commas, such as mlp.down, "
        "layers.0 or layers.3.attention.o.",
        metavar="FIRST,LAST|NAMES",
    )
    fp8_layers: Text | None = option(
        None, "The only layers to run in e4m3, named as in --bf16-layers.", metavar="FIRST,LAST|NAMES"
    )
    log_fp8_every: Int | None = option(
        lambda data: 100 if data.get("matmul_dtype") in FP8_MATMULS else None,
        "Log the errors of all e4m3 copies every N steps, on one micro-batch; 0 never.",
        shown="100 in e4m3 runs",
        ge=0,
        le=LARGEST_STEP,
    )
    fp8_fallback: bool = option(
        False, "Move a linear map to the model dtype when --log-fp8-every finds its signal-to-noise ratio low."
    )
    opt_m_dtype: Narrow = option("fp32", "Dtype of Adam's first moment; bf16 rounds stochastically.")
    opt_v_dtype: Narrow = option("fp32", "Dtype of Adam's second moment; bf16 rounds stochastically.")
    master_dtype: Narrow = option(
        lambda data: data.get("model_dtype", "bf16"),
        "Dtype of the master weights, which the optimizer updates.",
        shown="the model dtype",
    )
    grad_accum_dtype: Narrow = option(
        lambda data: data.get("model_dtype", "bf16"),
        "Dtype of gradients accumulated over micro-batches.",
        shown="the model dtype",
    )

    def contradictions(self) -> Iterator[str]:
        if self.bf16_layers is not None and self.fp8_layers is not None:
            yield "--bf16-layers and --fp8-layers both say which sites are in e4m3: give one of them"
        if self.fp8_fallback and self.matmul_dtype in FP8_MATMULS and not self.log_fp8_every:
            yield "--fp8-fallback goes by the readings of --log-fp8-every, which is 0: set that, or leave this out"
        if self.fp8_fallback and self.matmul_dtype not in FP8_MATMULS:
            yield f"--fp8-fallback is for e4m3 matmuls, but --matmul-dtype is {self.matmul_dtype}: leave it out"
        for key in ("gradient_dtype", "fp8_scaling", "bf16_layers", "fp8_layers", "log_fp8_every", "head_dtype"):
            if self.matmul_dtype in FP8_MATMULS or (key == "head_dtype" and self.head_dtype == "bf16"):
                continue
            if (value := getattr(self, key)) is not None:
                yield (
                    f"{flag(key)} {value} is for e4m3 matmuls, but --matmul-dtype is {self.matmul_dtype}: "
                    f"leave it out, or use --matmul-dtype e4m3"
                )


class MemoryOptions(Section):
    title = "Memory"
    recompute_swiglu: bool = option(False, "Recompute SwiGLU in the backward pass.")
    recompute_norm: bool = option(False, "Recompute the norms in the backward pass.")
    recompute_ffn: bool = option(False, "Recompute the whole MLP in the backward pass.")
    recompute_qkv: bool = option(False, "Recompute the q, k and v projections in the backward pass.")
    recompute_att: bool = option(False, "Recompute the whole attention in the backward pass.")
    recompute_block: bool = option(False, "Recompute the whole block in the backward pass; keeps only its input.")
    lmhead_chunks: Int = option(
        0, "Compute the logits in N chunks to save memory; 0 chooses by size.", ge=0, le=LARGEST_STEP
    )
    attn_bwd_chunks: Chunks = option(
        "auto",
        "Run attention's backward pass in N chunks of the batch, to save memory (same bits); auto uses as few as fit.",
        metavar="auto|INT",
    )


class ScheduleOptions(Section):
    title = "Schedule"
    steps: Int | None = option(None, "Optimizer steps.", "max_steps", shown="by --epochs", ge=1, le=LARGEST_STEP)
    epochs: Float | None = option(
        lambda data: 1.0 if data.get("steps") is None else None,
        "Passes over the training data; replaces --steps.",
        "num_train_epochs",
        shown="1 without --steps",
        gt=0,
        le=LARGEST_STEP,
    )
    learning_rate: Float = option(1e-5, "Peak learning rate.", "lr", ge=0)
    lr_schedule: Course = option(
        "constant",
        "Learning-rate schedule: cosine and linear fall from the peak to --final-lr-fraction of it; wsd stays "
        "constant, then falls over --cooldown.",
        "lr_scheduler_type",
    )
    warmup: Int = option(0, "Steps of linear warmup to the peak.", "warmup_steps", ge=0, le=LARGEST_STEP)
    warmup_ratio: Float | None = option(
        None, "Warmup as a fraction of all steps, rounded up; replaces --warmup.", ge=0, le=1
    )
    cooldown: Int = option(
        0, "Steps at the end in which the rate falls linearly to its final value; 0 for none.", ge=0, le=LARGEST_STEP
    )
    min_lr: Float | None = option(None, "Final learning rate; replaces --final-lr-fraction.", ge=0)
    final_lr_fraction: Float = option(
        final_fraction,
        "Final learning rate, as a fraction of the peak.",
        shown="0 if the rate falls, else 1",
        ge=0,
        le=1,
    )

    def contradictions(self) -> Iterator[str]:
        if self.steps is not None and self.epochs is not None:
            yield f"--steps {self.steps} and --epochs {self.epochs:g} both say how long to train: give one of them"
        if self.steps is not None:
            yield from self.too_short(self.steps)
        yield from rate_rules.contradictions(
            schedule=self.lr_schedule,
            rate=self.learning_rate,
            final=self.final_lr_fraction,
            min_lr=self.min_lr,
            cooldown=self.cooldown,
        )

    def too_short(self, steps: int) -> Iterator[str]:
        """A message if warmup and cooldown do not fit into a run of `steps`."""
        yield from rate_rules.not_fitting(
            warmup=self.warmup, ratio=self.warmup_ratio, cooldown=self.cooldown, steps=steps
        )


class OptimizerOptions(Section):
    title = "Optimizer"
    beta_1: Float = option(0.9, "AdamW: decay rate of the first moment.", "adam_beta1", ge=0, lt=1)
    beta_2: Float = option(0.95, "AdamW: decay rate of the second moment.", "adam_beta2", ge=0, lt=1)
    adam_epsilon: Float = option(1e-8, "AdamW: constant added to the root of the second moment.", gt=0)
    weight_decay: Float = option(
        0.1, "AdamW: weight decay of matrices and embeddings; norms and biases have none.", ge=0
    )
    grad_clip: Float = option(
        1.0, "Clip the global norm of the gradient to this; 0 never clips.", "max_grad_norm", ge=0
    )
    z_loss: Float = option(0.0, "Weight of the squared log-partition (z-loss) in the loss; 0 for none.", ge=0)
    neftune_alpha: Float = option(
        0.0,
        "NEFTune: noise up to alpha / sqrt(T C) on the embedded tokens; 0 for none.",
        "neftune_noise_alpha",
        ge=0,
    )


class LogOptions(Section):
    title = "Log and evaluation"
    name: Text = option(
        "", "Name of the run, which replaces %n in paths.", "run_name", shown="the last part of --model"
    )
    log_file: Path = option(f"{RUN_FOLDER}/log.jsonl", "Log of the run, as JSON lines.", metavar="PATH")
    log_every: Int = option(1, "Log every N steps.", "logging_steps", ge=1, le=LARGEST_STEP)
    eval_every_n_steps: Int = option(100, "Evaluate every N steps; 0 never.", "eval_steps", ge=0, le=LARGEST_STEP)
    eval_num_steps: Int = option(100, "Batches per evaluation in training; 0 uses all.", ge=0, le=LARGEST_STEP)
    log_gpu_util: Int = option(
        0, "Log the GPU's clocks, power and temperature every N steps; 0 never.", ge=0, le=LARGEST_STEP
    )

    def contradictions(self) -> Iterator[str]:
        if self.name in (".", "..") or re.search(r"[/\\%\x00-\x1f]", self.name):
            yield f"--name {self.name!r} cannot be part of a path: use letters, digits, '.', '-' and '_'"


class CheckpointOptions(Section):
    title = "Checkpoints"
    checkpoint_dir: Path = option(f"{RUN_FOLDER}/checkpoints", "Folder for checkpoints.", metavar="DIR")
    ckpt_interval: Int = option(
        100, "Save a checkpoint every N steps; 0 saves only at the end.", "save_steps", ge=0, le=LARGEST_STEP
    )
    ckpt_keep_n: Int = option(2, "Newest checkpoints to keep; 0 keeps all.", "save_total_limit", ge=0, le=LARGEST_STEP)
    continue_: Checkpoint = option(
        None,
        "Resume from a checkpoint: the newest in --checkpoint-dir (newest, or no value), a step, or a folder; auto "
        "resumes from the newest, or starts at step 0 if there is none.",
        "resume_from_checkpoint",
        metavar="[newest|auto|STEP|PATH]",
        kind="optional_value",
    )


class ExportOptions(Section):
    title = "Export"
    out_dir: Path = option(f"{RUN_FOLDER}/model", "Folder for the finished model.", "output_dir", metavar="DIR")
    export_dtype: Literal["bf16", "fp16", "fp32"] | None = option(
        None, "Dtype of the exported weights.", shown="that of --model"
    )
    overwrite: bool = option(False, "Replace the finished model in --out-dir.", "overwrite_output_dir")
    export_anyway: bool = option(
        False, "Export even if the last step was refused, or the evaluation or weights are not finite."
    )


class SystemOptions(Section):
    title = "System"
    device: Literal["auto", "cuda", "cpu"] = option(
        "auto", "Device to compute on; auto uses a GPU if it can, else the CPU."
    )
    gpus: Int = option(1, "Number of GPUs; only 1 is supported for now.", ge=1)
    gpu: Text | None = option(None, "GPU to plan for with --dry-run, present or not, such as H200 or 'RTX 4090'.")
    use_cuda_graphs: bool = option(
        True, "Launch each program as one CUDA graph; off launches kernel by kernel (same bits)."
    )
    deterministic: bool = option(
        True, "Give the same bits on every run; off, attention's backward pass needs less memory."
    )
    seed: Int = option(0, "Seed for initial weights, data order and stochastic rounding.", ge=0, le=LARGEST_SEED)

    def contradictions(self) -> Iterator[str]:
        if self.gpu is not None and self.device == "cpu":
            yield f"--gpu {self.gpu} plans for a GPU, but --device is cpu: use --device cuda, or leave --gpu out"
        if self.gpus > 1:
            yield f"--gpus {self.gpus}: for now a run has one GPU: use --gpus 1"


class RunOptions(Section):
    title = "Run"
    dry_run: bool = option(False, "Check options, data and memory, print tokens, steps and the memory table, and stop.")
