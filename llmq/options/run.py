"""What a run leaves, and where it runs: log, evaluation, checkpoints, export, device."""

# No `from __future__ import annotations`: pydantic would compile every annotation from text, a tenth of --help's time.

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from llmq.options.field import (
    Count,
    DeviceName,
    Float,
    Int,
    Named,
    NonNegative,
    Path,
    Positive,
    Section,
    Size,
    Text,
    Texts,
    dtype_name,
    is_file_name,
    option,
    with_commas,
)

RUN_FOLDER = "runs/%n"
TRACE = f"{RUN_FOLDER}/trace.json.gz"
LARGEST_SEED = 2**64 - 1  # two 32-bit words of a Philox key


def _which_checkpoint(value: Any) -> Any:
    if isinstance(value, bool) or value in ("true", "True", "false", "False"):  # resume_from_checkpoint: true
        return "newest" if value in (True, "true", "True") else None
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return value


def _trackers(value: Any) -> Any:
    """Names with commas, where a part such as `entity=mine` is another option of the name before it; `none` is none."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)) or not all(isinstance(item, str) for item in given):
        return value
    found: list[str] = []
    for part in (part.strip() for item in given for part in item.split(",")):
        if found and "=" in part.partition(":")[0]:
            found[-1] += f",{part}"
        elif part and part != "none":
            found.append(part)
    return tuple(dict.fromkeys(found)) or None


Resets = Annotated[tuple[Literal["optimizer", "data", "lr"], ...] | None, BeforeValidator(with_commas)]
Checkpoint = Annotated[int | Path | None, BeforeValidator(_which_checkpoint)]


AnswerMetric = Literal["exact_match", "bleu", "rouge"]
AnswerScore = Literal["eval_exact_match", "eval_bleu", "eval_rouge1", "eval_rouge2", "eval_rougeL"]
# What releases before this called eval/loss is the eval_loss of logs and of Python.
Metric = Annotated[
    Literal["eval_loss", "eval_accuracy", AnswerScore],
    BeforeValidator(lambda value: "eval_loss" if value == "eval/loss" else value),
]


class LogOptions(Section):
    title = "Log and evaluation"
    name: Text = option("", "Name of the run; %n in paths.", "run_name", shown="the last part of --model")
    log_file: Path = option(f"{RUN_FOLDER}/log.jsonl", "Log of the run, as JSON lines.")
    log_every: Positive = option(1, "Log every N steps.", "logging_steps")
    eval_every_n_steps: Count = option(100, "Evaluate every N steps; 0 never.", "eval_steps")
    eval_num_steps: Count = option(100, "Batches per evaluation; 0 uses all.")
    final_eval: Literal["sample", "all"] = option(
        "sample", "Held-out data of the last evaluation: a sample of --eval-num-steps batches, or all of it."
    )
    eval_metrics: Annotated[tuple[AnswerMetric, ...], BeforeValidator(with_commas), Field(min_length=1)] | None = (
        option(
            None,
            "Score the model's answers to held-out questions at every evaluation, by names with commas.",
            shown="off",
            metavar="[exact_match,bleu,rouge]",
        )
    )
    eval_answers: Positive = option(64, "Most held-out questions that --eval-metrics asks.")
    sample_prompts: Path | None = option(
        None, "Complete this file's prompts (lines of text, or JSON lines) at every evaluation.", shown="off"
    )
    sample_tokens: Positive = option(64, "Most new tokens of a completion of --sample-prompts.")
    sample_temperature: NonNegative = option(
        0.0, "Divide logits by this before drawing completions; 0 takes the most likely tokens."
    )
    sample_length: Annotated[Int, Field(ge=2)] | None = option(
        None, "Most tokens of a prompt and its answer that callbacks have the model write.", shown="off"
    )
    verbosity: Int = option(
        0,
        "Lines on the console: 1 adds the learning rate and memory to steps and lists all options, -1 leaves "
        "evaluations, warnings and the summary, -2 only errors. -v, -q and -qq are short for these.",
        ge=-2,
        le=1,
    )
    panel: Literal["auto", "on", "off"] = option(
        "auto", "Panel with the newest numbers in place of lines of steps; auto shows it on a terminal with colours."
    )
    log_gpu_util: Count = option(0, "Log the GPU's clocks, power and temperature every N steps; 0 never.")

    def contradictions(self) -> Iterator[str]:
        if self.name in (".", "..") or re.search(r"[/\\%\x00-\x1f]", self.name) or not is_file_name(self.name):
            yield f"--name {self.name!r} cannot be part of a path: use letters, digits, '.', '-' and '_'"
        if self.panel == "on" and self.verbosity < 0:
            yield f"--panel on shows steps, and --verbosity {self.verbosity} leaves them out: leave one of them out"
        if self.sample_prompts is not None and not self.eval_every_n_steps:
            shows = f"--sample-prompts {self.sample_prompts} shows completions at evaluations"
            yield f"{shows}, and --eval-every-n-steps 0 makes none: leave one of them out"
        if self.eval_metrics is None and self.eval_answers != 64:
            yield f"{self.written('eval_answers')} is for --eval-metrics: give that, or leave it out"
        if self.eval_metrics is not None and self.sample_temperature:
            yield f"--eval-metrics scores the most likely answers: leave {self.written('sample_temperature')} out"


class StoppingOptions(Section):
    title = "Callbacks and early stopping"
    callback: Annotated[Texts, AfterValidator(Named("callback", ("early_stopping",)))] | None = option(
        None, "Plug-in to call at the moments of the run; may be repeated.", metavar="NAME", kind="repeatable"
    )
    report_to: Annotated[
        Texts | None, BeforeValidator(_trackers), AfterValidator(Named("callback", ("wandb", "tensorboard", "mlflow")))
    ] = option(
        None,
        "Trackers that get the log of the run while it trains: wandb, tensorboard and mlflow, or a plug-in's.",
        shown="none",
        metavar="NAME[,NAME]",
    )
    early_stopping_patience: Positive | None = option(
        None, "Stop when the metric has not improved in N evaluations in a row.", "patience", shown="off"
    )
    early_stopping_metric: Text = option(
        "eval_loss", "What must improve: eval_loss, eval_accuracy, or a number that a callback logs.", metavar="NAME"
    )
    early_stopping_min_delta: NonNegative = option(0.0, "Least difference that counts as an improvement.")

    def contradictions(self) -> Iterator[str]:
        given = {"early_stopping_metric": "eval_loss", "early_stopping_min_delta": 0.0}
        for key, default in given.items():
            if self.early_stopping_patience is None and getattr(self, key) != default:
                yield f"{self.written(key)} is for early stopping: add --early-stopping-patience, or leave it out"


class FaultOptions(Section):
    title = "Faults"
    on_nonfinite: Literal["skip", "stop", "rollback"] = option(
        "skip",
        "After a step whose loss or gradient is not finite: skip its update, and end the run after ten in a row; stop "
        "the run; or rollback to the last checkpoint and go on with the data that follows.",
    )
    debug_nan: bool = option(
        False, "Compute a step that is not finite once more, and name the first op whose output is not finite."
    )
    on_spike: Literal["warn", "skip", "rollback"] | None = option(
        None,
        "After a loss far above the last ones: warn; skip the update; or rollback as with --on-nonfinite.",
        shown="off",
    )
    spike_window: Annotated[Int, Field(ge=4, le=10_000)] = option(50, "Losses that --on-spike compares with.")
    spike_zscore: Float = option(6.0, "Standard deviations above their mean that make a loss a spike.", gt=0)
    rollback_limit: Positive = option(3, "Rollbacks to one checkpoint after which the run ends.")

    def contradictions(self) -> Iterator[str]:
        goes_back = "rollback" in (self.on_nonfinite, self.on_spike)
        needs = {
            "spike_window": (50, self.on_spike, "--on-spike"),
            "spike_zscore": (6.0, self.on_spike, "--on-spike"),
            "rollback_limit": (3, goes_back, "--on-nonfinite rollback or --on-spike rollback"),
        }
        for key, (default, is_used, what) in needs.items():
            if not is_used and getattr(self, key) != default:
                yield f"{self.written(key)} is for {what}: add that, or leave it out"


class CheckpointOptions(Section):
    title = "Checkpoints"
    checkpoint_dir: Path = option(f"{RUN_FOLDER}/checkpoints", "Folder for checkpoints.")
    ckpt_interval: Count = option(100, "Save a checkpoint every N steps; 0 saves only at the end.", "save_steps")
    ckpt_keep_n: Count = option(2, "Newest checkpoints to keep; 0 keeps all.", "save_total_limit")
    ckpt_major: Count = option(0, "Save at multiples of N steps, too, and never delete these checkpoints; 0 for none.")
    save_best: Metric | None = option(
        None, "Save after each evaluation that is the best so far, and never delete the best checkpoint.", shown="off"
    )
    continue_: Checkpoint = option(
        None,
        "Resume from a checkpoint: the newest in --checkpoint-dir (newest, or no value), a step, or a folder; auto "
        "resumes from the newest, or starts at step 0 if there is none.",
        "resume_from_checkpoint",
        metavar="[newest|auto|STEP|PATH]",
        kind="optional_value",
    )
    reset: Resets = option(
        None,
        "What a resumed run starts again, with commas: optimizer (moments at zero), data (its first sample; it may be "
        "other data), lr (the schedule, over the steps that are left).",
        shown="nothing",
        metavar="[optimizer,data,lr]",
    )

    def beside(self, log: LogOptions) -> Iterator[str]:
        """Contradictions with what is measured."""
        measured = (*(log.eval_metrics or ()), "loss", "accuracy")
        if self.save_best is not None and not self.save_best.removeprefix("eval_").startswith(measured):
            yield f"{self.written('save_best')} is of answers: add --eval-metrics exact_match, bleu or rouge with it"

    def contradictions(self) -> Iterator[str]:
        if self.reset and self.continue_ is None:
            yield f"--reset {','.join(self.reset)} is for a run that resumes: add --continue, or leave it out"


class ExportOptions(Section):
    title = "Export"
    out_dir: Path = option(f"{RUN_FOLDER}/model", "Folder for the finished model.", "output_dir")
    export_dtype: Annotated[Literal["bf16", "fp16", "fp32"], BeforeValidator(dtype_name)] | None = option(
        None, "Dtype of the exported weights.", shown="that of --model"
    )
    overwrite: bool = option(False, "Replace an earlier run: log, checkpoints and model.", "overwrite_output_dir")
    export_anyway: bool = option(False, "Export even if the last step was refused, or a number is not finite.")


class SystemOptions(Section):
    title = "System"
    device: DeviceName = option(
        "auto", "Device; auto uses a GPU if it can, else the CPU; or the backend of a plug-in.", metavar="auto|cuda|cpu"
    )
    gpus: Int = option(1, "Number of GPUs of this machine, with a process for each; 0 takes all that CUDA sees.", ge=0)
    gpu: Text | None = option(
        None, "GPU to plan for with --dry-run, present or not, such as H200 or 'RTX 4090'; or its size, such as 24GiB."
    )
    memory_limit: Size | None = option(
        None, "Take the device to have so much memory in all, such as 16GiB.", metavar="SIZE", shown="all that it has"
    )
    host_memory_limit: Size | None = option(
        None,
        "Keep no more than so much in the host memory of a machine, all processes of the run together, such as "
        "100GiB; of a virtual machine whose memory grows as it is used, what it may grow to.",
        metavar="SIZE",
        shown="what is free",
    )
    use_cuda_graphs: bool = option(True, "Launch each program as one CUDA graph; off: kernel by kernel (same bits).")
    deterministic: bool = option(True, "Give the same bits on every run; off, attention's backward needs less memory.")
    seed: Int = option(0, "Seed for initial weights, data order and stochastic rounding.", ge=0, le=LARGEST_SEED)

    def contradictions(self) -> Iterator[str]:
        if self.gpu is not None and self.device == "cpu":
            yield f"--gpu {self.gpu} plans for a GPU, but --device is cpu: use --device cuda, or leave --gpu out"
        if self.gpus != 1 and self.device == "cpu":
            fix = f"llmq-launch --procs {max(self.gpus, 2)} starts processes for the CPU"
            yield f"--gpus {self.gpus} counts GPUs, but --device is cpu: {fix}"


class LaunchOptions(Section):
    title = "Launch"
    launcher: Literal["auto", "ray"] = option(
        "auto", "How the processes of several GPUs are started; auto starts them here, ray as actors of a Ray cluster."
    )
    ray_address: Text | None = option(
        None, "Address of a running Ray cluster, such as auto or node1:6379.", shown="a cluster on this machine alone"
    )
    restart_failed: Count = option(
        lambda fields: 3 if fields["launcher"] == "ray" else 0,
        "Start all processes again from the last checkpoint when one is lost, up to N times.",
        shown="3 with --launcher ray, else 0",
    )

    def contradictions(self) -> Iterator[str]:
        if self.ray_address is not None and self.launcher != "ray":
            yield f"--ray-address {self.ray_address} is for a Ray cluster: add --launcher ray, or leave it out"


class ProfileOptions(Section):
    title = "Profile"
    profile: Positive | None = option(
        None, "Write a Chrome trace of N steps, after two of warm-up, by op and lane.", shown="off", metavar="N"
    )
    profile_file: Path = option(TRACE, "The trace, for ui.perfetto.dev; compressed if it ends in .gz.")

    def contradictions(self) -> Iterator[str]:
        # its default has the run's name in it, where the options are those of a run
        if self.profile is None and not fnmatchcase(str(self.profile_file), TRACE.replace("%n", "*")):
            yield f"--profile-file {self.profile_file} is for a profile: add --profile 3, or leave it out"


class RunOptions(Section):
    title = "Run"
    dry_run: bool = option(False, "Check options, data and memory, print tokens, steps and the memory table, and stop.")
    debug_memory: Path | None = option(
        None, "List the plan's tensors in a file, or with - on the console: bytes, home, lifetime, place.", shown="off"
    )
