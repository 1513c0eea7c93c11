"""SwiGLU on the GPU; see cuda/swiglu.cu."""

from __future__ import annotations

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda.launch import (
    TILE_ROWS,
    TILE_THREADS,
    Kernel,
    access,
    forms,
    launch,
    pointer,
    rows_of,
    tiles,
    type_of,
)


def swiglu_forward(act: Output, /, gate_up: Tensor) -> None:
    """act (B,T,F) <- gate_up (B,T,2F)."""
    _launch("swiglu_forward", act, gate_up.shape, (gate_up,))


def swiglu_backward(d_gate_up: Output, /, d_act: Tensor, gate_up: Tensor) -> None:
    """d_gate_up (B,T,2F) <- d_act (B,T,F), gate_up (B,T,2F)."""
    _launch("swiglu_backward", d_gate_up, gate_up.shape, (d_act, gate_up))


def _launch(entry: str, output: Output, gate_up: tuple[int, ...], read: tuple[Tensor, ...]) -> None:
    if not output.wanted:
        return
    kind, columns, rows = type_of(output), gate_up[-1] // 2, rows_of(gate_up)
    assert all(type_of(tensor) == kind for tensor in read), "activations have one dtype"
    wanted, outputs = forms(output)
    number = access(columns, kind)
    blocks = tiles(rows, columns, int(wanted["FORMS"]), number, TILE_ROWS)
    arguments = (*outputs, *(pointer(tensor) for tensor in read), np.int64(rows))
    launch("swiglu", entry, blocks, TILE_THREADS, arguments, {"T": kind, "F": columns, "N": number, **wanted})


KERNELS = (Kernel(swiglu_forward), Kernel(swiglu_backward))
