"""A run made ready, before memory is allocated: what it computes and with what, and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llmq.backends import Backend
from llmq.data.batches.loader import Data
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
from llmq.training.earlier_run import EarlierRun
from llmq.training.log import RunLog
from llmq.training.log_hooks import GpuWatch
from llmq.training.ranks import Ranks
from llmq.training.samples import SamplePrompts
from llmq.training.schedule import Schedule

Replan = Callable[[Precision, int], Plan]  # a plan with other dtypes, where some more bytes are free than now


@dataclass(frozen=True)
class Ready:
    """A run, checked and planned."""

    log: RunLog
    ranks: Ranks
    device: Device
    backend: Backend
    source: ModelSource
    values: Values  # of rows before the first step
    earlier: EarlierRun
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

    @property
    def is_dry(self) -> bool:
        """Whether the run is only planned."""
        return bool(self.options["dry_run"])

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
