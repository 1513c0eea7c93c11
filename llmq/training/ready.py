"""What is known of a run before memory is allocated: what an earlier one left, what is planned, the run made ready."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from llmq.adapters import resolve as adapters
from llmq.backends import Backend
from llmq.backends.opening import open_backend
from llmq.blocks.packed import Packing
from llmq.data.batches.batch import step_of
from llmq.data.batches.loader import Data
from llmq.disk import shown, storage
from llmq.engine.advice import Limits
from llmq.files.checkpoint import Checkpoints, load
from llmq.files.huggingface import Export, is_of_run, refuse_taken
from llmq.files.manifest import Reader
from llmq.files.source import ModelSource, Values, fingerprint
from llmq.files.tensor_files import Piece
from llmq.files.writers import TensorSlice
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.model import optimizer
from llmq.model.config import ModelConfig
from llmq.model.parameters import padded_vocab
from llmq.options.parse import Options
from llmq.plan import levels, loss, memory, precision
from llmq.plan.plan import Plan
from llmq.plan.precision import Precision, Watching
from llmq.plan.spec import Completions, Spec, regularization
from llmq.row import Row
from llmq.tensor import DTYPES
from llmq.training import faults
from llmq.training.evaluation import SamplePrompts
from llmq.training.hooks import GpuWatch
from llmq.training.log import RunLog
from llmq.training.progress import Progress
from llmq.training.ranks import Ranks
from llmq.training.schedule import Schedule

Replan = Callable[[Precision, int], Plan]  # a plan with other dtypes, where some more bytes are free than now


@dataclass(frozen=True)
class EarlierRun:
    """The run's checkpoints, and the one that it continues: its path, state and tensors; None and {} from step 0.

    `starts_over` says that what an earlier run left is to go, `replaces_model` that a model in its place may.
    """

    checkpoints: Checkpoints
    path: Path | None
    state: Mapping[str, Any]
    reader: Reader | None
    starts_over: bool
    replaces_model: bool

    @classmethod
    def open(cls, options: Options, log: RunLog, ranks: Ranks, *, plans_only: bool) -> EarlierRun:
        """What the run continues. The first rank's choice is all ranks'."""
        checkpoints = Checkpoints(options.checkpoint)
        continues = options.to_flat()["continue"] is not None
        starts_over = not continues and (plans_only or options.to_flat()["overwrite"])
        writes = ranks.is_first and not plans_only
        path = None if starts_over else checkpoints.start(log.warn, partial(log.task, words=shown), writes=writes)
        if "resume" in ranks.shared:
            path = Path(ranks.shared["resume"]) if ranks.shared["resume"] else None
        state, reader = load(path, verified=False) if path else ({}, None)  # it was, when it was chosen
        replaces_model = plans_only or is_of_run(options.export, state.get("options", {}))
        if checkpoints.starts_anew:
            log.warn(f"--continue auto found no checkpoint in {checkpoints.folder}: this run begins at step 0")
        return cls(checkpoints, path, state, reader, starts_over, replaces_model)

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return int(self.state.get("step", 0))

    @property
    def progress(self) -> Progress:
        """How far the run is, with what --reset names begun again."""
        return Progress.read(self.state).reset(self.checkpoints.resets) if self.path else Progress()

    def refuse_to_mix(self, options: Options) -> None:
        """UsageError or StorageError if this run would mix with what an earlier one left.

        It is raised where all that is given is known to be good: an advice to delete or resume is for a run that works.
        """
        if not self.starts_over:
            self.checkpoints.refuse_earlier()
        if not self.replaces_model:
            refuse_taken(Path(options.to_flat()["out_dir"]), options.to_flat()["overwrite"])

    def remove(self, log: RunLog) -> None:
        """Removes checkpoints and log of a run that is to go; its model stays until the new one is complete."""
        if not self.starts_over:
            return
        there = self.checkpoints.clear()
        if log.path.is_file():
            there.append(log.path)
            with storage(log.path, "the log cannot be deleted"):
                log.path.unlink()
        if there:
            log.say(f"--overwrite: removed what an earlier run left: {', '.join(map(str, there))}")


@dataclass(frozen=True)
class Facts:
    """What a plan depends on beside options: the model, the device, the borders of rows, and which of `size` ranks."""

    config: ModelConfig
    where: Device
    seed: int = 0
    packing: Packing | None = None
    completions: Completions | None = None
    rank: int = 0
    size: int = 1
    steps: int = 0  # of the run, with which the schedule of AdaLoRA ends
    new_rows: range = range(0)  # of the embedding and the head, of added tokens

    @property
    def gpu_bytes(self) -> int:
        """The memory of a GPU; 0 on the CPU."""
        return device.memory_bytes(self.where)[0] if self.where.kind == "cuda" else 0

    def spec(self, options: Options, dtypes: Precision | None = None) -> Spec:
        """What is to be planned, all options resolved; with `dtypes` where timing has chosen them."""
        b, t, micro_steps = step_of(options.data, self.size)
        dtypes = dtypes or precision.resolve(options.precision, self.config)
        hyper = optimizer.resolve(options.optimizer)
        precision.refuse_unkept(options.precision, hyper.rule)
        reader = loss.resolve(options.loss)
        limits = memory.resolve(
            options.memory,
            hyper.rule,
            batch_size=b,
            seq_len=t,
            logit_bytes=padded_vocab(self.config) * reader.logit_bytes(dtypes.model),
            gpu_bytes=self.gpu_bytes,
            own_master=dtypes.has_own_master,
            micro_steps=micro_steps,
        )
        return Spec(
            self.config,
            dtypes,
            limits,
            hyper,
            b,
            t,
            self.seed,
            self.packing,
            precision.watching(options.precision).every > 0,
            levels.resolve(options.sharding, self.rank, self.size),
            self.completions,
            adapters.resolve(options.adapters, self.config, self.steps, self.new_rows),
            regularization(options.regularization),
            reader,
            faults.skips_spikes(options.faults),
        )

    def limits(self, options: Options, backend: Backend, micro_steps: int) -> Limits:
        """What there is for a run with these options, whose steps have this many micro-batches."""
        is_gpu = self.where.kind == "cuda"
        strict = is_gpu and device.backend_settings(options.system, self.where)["deterministic"]
        return Limits(
            device.memory_bytes(self.where)[1],
            backend.scratch_bytes,
            open_backend("planned", deterministic=False).scratch_bytes if strict else None,
            device.host_bytes(options.system, self.where),
            self.where.num_sharing,
            in_one=not is_gpu,
            micro_steps=micro_steps,
            has_global_batch=options.to_flat()["global_batch_size"] is not None,
            gpu_bytes=self.gpu_bytes,
            auto_chunks=memory.chooses_attention_chunks(options.memory),
            card=self.where.card,
        )


@dataclass(frozen=True)
class Start:
    """What a run starts from, before its data is opened: who runs where, what an earlier run left, and the model with
    its first `values`."""

    asked: Options
    log: RunLog
    ranks: Ranks
    device: Device
    earlier: EarlierRun
    source: ModelSource
    values: Values  # of rows before the first step
    seed: int
    is_dry: bool
    stops_early: bool


@dataclass(frozen=True)
class Ready(Start):
    """A run, checked and planned."""

    backend: Backend
    data: Data
    schedule: Schedule
    samples: SamplePrompts | None
    plan: Plan
    replan: Replan
    watching: Watching  # of fp8 copies
    gpu: GpuWatch
    options: Mapping[str, Any]
    fitted: Mapping[str, Any]  # options that --fit chose
    exports: tuple[Export, ...]  # the model, or the adapter, and that merged; of several adapters each
    continue_command: str

    @cached_property
    def base(self) -> str | None:
        """The fingerprint of the model that frozen rows are loaded from."""
        return fingerprint(self.source)

    def light_s(self, plan: Plan) -> float:
        """Seconds for a token at the speed of light, by the dtypes of the plan's sites."""
        return plan.spec.light_s(device.peaks(self.device))

    def frozen(self, plan: Plan) -> Iterable[tuple[Row, np.ndarray]]:
        """Rows of a plan that no checkpoint holds, with their values."""
        return self.values(plan.loaded_anew) if plan.loaded_anew else ()


def checkpoint_slices(plan: Plan) -> list[TensorSlice]:
    """What this rank writes of a checkpoint, which may be all."""
    pieces = ((Piece(name, one.whole, DTYPES[one.dtype]), one) for name, one in plan.saved().items())
    return [TensorSlice(piece, one.start, one.shape) for piece, one in pieces]


def checkpoint_bytes_of(plan: Plan) -> int:
    """Host memory that a copy of that takes."""
    return sum(each.piece.num_bytes for each in checkpoint_slices(plan))
