"""A GPU that is not here: a plan can be made for it, with the scratch that its ops will need, and nothing be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from llmq.ops import cuda
from llmq.ops.cuda.attention import attention_kernels, is_ours
from llmq.ops.cuda.launch import Kernel
from llmq.ops.cuda.linear import linear_kernels
from llmq.ops.seam import Arguments

if TYPE_CHECKING:
    from llmq.ops.record import Call

ANY_CARD = (9, 0)  # where the card is not known: as much shared memory as any has


class PlannedBackend:
    """What `CudaBackend` asks of memory, by our own ops' shapes and a model of cuDNN's workspaces (H200, 9.19). It has
    no memory itself, and no programs: a run on it ends with its plan.

    Attention's backward takes 2 B Hq T^2 bytes if it is deterministic (1.0 GiB measured at 32x1024 with 14 heads, where
    the model says 0.94), else 8 B Hq T Hd. In packed rows the first counts the longest document squared, as
    often as a row may have documents (and pieces of padding), the second is 4 B T times the width of qkv; and with
    grouped heads 8 B T times that width and the size of a group come on top of both (as measured, to a percent).
    """

    takes_scratch = True

    def __init__(self, *, deterministic: bool = True, capability: tuple[int, int] = ANY_CARD) -> None:
        self._kernels = cuda.kernels(_library_kernels(deterministic))
        self._capability = 10 * capability[0] + capability[1]

    def scratch_bytes(self, call: Call) -> int:
        """Bytes that a call needs beside its arguments. UsageError for what the kernels lack on this GPU."""
        return self._kernels[call.op].needed(call, self._capability)


@cache
def _library_kernels(deterministic: bool) -> Mapping[str, Kernel]:
    """Never launched: there is neither a handle of cuBLASLt nor of cuDNN."""
    forward, backward = attention_kernels(None).values()
    modelled = {
        "attention_forward": replace(forward, scratch_bytes=None),
        "attention_backward": replace(backward, scratch_bytes=partial(_backward_workspace, backward, deterministic)),
    }
    return {**linear_kernels(None), **modelled}


def _backward_workspace(ours: Kernel, deterministic: bool, call: Arguments) -> int:
    if is_ours(call):
        return ours.needed(call)
    b, t, width = call.reads["att"].shape
    heads, kv_heads = call.numbers["num_heads"], call.numbers["num_kv_heads"]
    if "borders" not in call.reads:
        return 2 * b * heads * t * t if deterministic else 8 * b * t * width
    packed, longest = call.reads["qkv"].shape[-1], call.numbers["longest"]
    places = call.reads["borders"].shape[1] - 1 + -(-t // longest) - 1
    square = -(-longest // 64) * 64 * -(-longest // 128) * 128  # cuDNN's tiles
    full = 8 * b * t * packed * heads // kv_heads if heads > kv_heads else 0
    return full + (2 * b * places * heads * square if deterministic else 4 * b * t * packed)
