"""A GPU that is not here: a plan can be made for it, with the scratch that its ops will need, and nothing be run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.backends import Call, Memory, Op, arguments
from llmq.ops import cuda
from llmq.ops.cuda.attention import exact_scratch, is_exact
from llmq.ops.cuda.linear import linear_scratch
from llmq.ops.seam import record
from llmq.tensor import DTYPES, Ref

if TYPE_CHECKING:
    from llmq.plan.program import Step

ANY_CARD = (9, 0)  # where nobody says which: as much shared memory as any has


class PlannedBackend:
    """What `CudaBackend` asks of memory, by our own ops' shapes and a model of cuDNN's workspaces (H200, 9.19).

    Attention's backward takes 2 B Hq T^2 bytes if it is deterministic (1.0 GiB measured at 32x1024 with 14 heads, where
    the model says 0.94), else 8 B Hq T Hd. In packed rows the first counts the longest document squared, as
    often as a row may have documents (and pieces of padding), the second is 4 B T times the width of qkv; and with
    grouped heads 8 B T times that width and the size of a group come on top of both (as measured, to a percent).
    """

    ops: Mapping[str, Op] = {}
    algorithms: Mapping[str, Any] = {}
    notices: Sequence[str] = ()

    def __init__(self, *, deterministic: bool = True, capability: tuple[int, int] = ANY_CARD) -> None:
        self._deterministic, self._capability = deterministic, capability

    def scratch_bytes(self, step: Step) -> int:
        """Bytes that a step needs beside its arguments. UsageError for what the kernels lack on this GPU."""
        return planned_scratch(step, self._deterministic, self._capability)

    def prepare(self, steps: Iterable[Step]) -> None:
        """Never called: see `memory`."""
        raise NotImplementedError("a GPU that is only planned for")

    def use_scratch(self, buffer: np.ndarray) -> None:
        """Never called: see `memory`."""
        raise NotImplementedError("a GPU that is only planned for")

    def peak_bytes(self) -> int:
        """Nothing is used."""
        return 0

    def memory(self, persistent: Mapping[str, Ref], arena_bytes: int) -> Memory:
        """There is none: a run on this backend ends with its plan."""
        raise NotImplementedError("a GPU that is only planned for")

    def program(self, calls: Sequence[Call]) -> Call:
        """Never called: see `memory`."""
        raise NotImplementedError("a GPU that is only planned for")


def planned_scratch(step: Step, deterministic: bool, capability: tuple[int, int] = ANY_CARD) -> int:
    """Bytes that a step needs beside its arguments, known without a GPU. UsageError for what the kernels lack on it."""
    if record(step.op).is_linear:
        return linear_scratch()
    call = arguments(step)
    refs = call.reads
    if step.op.startswith("attention_") and is_exact(DTYPES[refs["qkv"].dtype]):
        borders = refs["borders"].shape if "borders" in refs else None
        return exact_scratch(step.op, refs["qkv"].shape, borders, step.numbers)
    if step.op == "attention_backward":
        b, t, width = refs["att"].shape
        heads, kv_heads = step.numbers["num_heads"], step.numbers["num_kv_heads"]
        if "borders" not in refs:
            return 2 * b * heads * t * t if deterministic else 8 * b * t * width
        packed, longest = refs["qkv"].shape[-1], step.numbers["longest"]
        places = refs["borders"].shape[1] - 1 + -(-t // longest) - 1
        square = -(-longest // 64) * 64 * -(-longest // 128) * 128  # cuDNN's tiles
        full = 8 * b * t * packed * heads // kv_heads if heads > kv_heads else 0
        return full + (2 * b * places * heads * square if deterministic else 4 * b * t * packed)
    if step.op == "attention_forward":
        return 0
    major, minor = capability
    cuda.refuse(step.op, refs, transposed=call.writes_columns, capability=10 * major + minor)
    return cuda.scratch_bytes(step.op, {name: ref.shape for name, ref in refs.items()})
