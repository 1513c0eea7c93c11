"""A run made ready, before memory is allocated: what it computes and with what, and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmq.backends import Backend
from llmq.data.batches.loader import Data
from llmq.files.checkpoint import Checkpoints
from llmq.files.huggingface import Export
from llmq.files.source import ModelSource, Values, fingerprint
from llmq.files.tensor_files import Piece
from llmq.files.writers import TensorSlice
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.plan.plan import Plan
from llmq.plan.precision import Precision, Watching
from llmq.row import Row
from llmq.tensor import DTYPES
from llmq.training.gpu_log import GpuWatch
from llmq.training.run_data import RunData
from llmq.training.samples import SamplePrompts

Replan = Callable[[Precision, int], Plan]  # a plan with other dtypes, where some more bytes are free than now


@dataclass(frozen=True)
class Results:
    """Where what a run leaves goes, and what the user should know of it before training starts."""

    exports: tuple[Export, ...]  # the model, or the adapter, and that merged; of several adapters each
    exports_anyway: bool
    checkpoints: Checkpoints
    resume: Path | None  # the checkpoint that it continues
    continue_command: str
    notices: tuple[str, ...]
    warnings: tuple[str, ...] = ()  # what may spoil the run


@dataclass(frozen=True)
class Ready:
    """A run, checked and planned."""

    device: Device
    backend: Backend
    source: ModelSource
    values: Values  # of rows before the first step
    trains: RunData
    samples: SamplePrompts | None
    plan: Plan
    replan: Replan
    watching: Watching  # of fp8 copies
    gpu: GpuWatch
    options: Mapping[str, Any]
    fitted: Mapping[str, Any]  # options that --fit chose
    can_restart: bool  # processes that are lost
    results: Results

    @property
    def data(self) -> Data:
        """The batches."""
        return self.trains.data

    @property
    def is_dry(self) -> bool:
        """Whether the run is only planned."""
        return bool(self.options["dry_run"])

    @cached_property
    def light_s(self) -> float:
        """Seconds for a token at the speed of light, by the dtypes of the plan's sites."""
        return self.plan.spec.light_s(device.peaks(self.device))

    @cached_property
    def base(self) -> str | None:
        """The fingerprint of the model that frozen rows are loaded from."""
        return fingerprint(self.source)

    def frozen(self) -> Iterable[tuple[Row, np.ndarray]]:
        """Rows that no checkpoint holds, with their values."""
        rows = self.plan.loaded_anew
        return self.values(rows) if rows else ()

    @property
    def checkpoint_slices(self) -> list[TensorSlice]:
        """What this rank writes of a checkpoint, which may be all."""
        return [
            TensorSlice(Piece(name, one.whole, DTYPES[one.dtype]), one.start, one.shape)
            for name, one in self.plan.saved().items()
        ]

    @property
    def checkpoint_copy_bytes(self) -> int:
        """Host memory that a copy of that takes."""
        return sum(each.piece.num_bytes for each in self.checkpoint_slices)
