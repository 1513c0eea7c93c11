"""Activations on the GPU; see cuda/activation.cu and cuda/activation.cuh."""

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu

NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}  # activation.cuh


def number_of(activation: str) -> int:
    """The constant of a kernel; UsageError for an activation that none has."""
    if activation not in NUMBERS:
        raise UsageError(
            f"the activation {activation} has no kernel for the GPU, which has {', '.join(NUMBERS)}: use --device cpu"
        )
    return NUMBERS[activation]


def activation_forward(act: Output, /, x: Tensor, *, activation: str) -> None:
    """act (...,F) <- x (...,F)."""
    launch_tiles("activation", "activation_forward", act, x.shape[-1], (x,), activation)


def activation_backward(d_x: Output, /, d_act: Tensor, x: Tensor, *, activation: str) -> None:
    """d_x (...,F) <- d_act (...,F), x (...,F)."""
    launch_tiles("activation", "activation_backward", d_x, x.shape[-1], (d_act, x), activation)


def launch_tiles(
    name: str, entry: str, output: Output, columns: int, read: tuple[Tensor, ...], activation: str
) -> None:
    """A kernel whose blocks own tiles of F columns: of both halves, where there are two."""
    kind, rows = gpu.type_of(output, *read), gpu.rows_of(output.shape)
    wanted, outputs = gpu.forms(output)
    number = gpu.access(columns, kind)
    blocks = gpu.tiles(rows, columns, int(wanted["FORMS"]), number, gpu.TILE_ROWS)
    constants = {"T": kind, "F": columns, "N": number, "ACTIVATION": number_of(activation), **wanted}
    gpu.launch(name, entry, blocks, gpu.TILE_THREADS, (*outputs, *read, np.int64(rows)), constants)
