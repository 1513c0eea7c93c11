"""Multipliers and soft-caps on the GPU; see cuda/scale.cu and cuda/softcap.cu."""

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.ops.seam import Arguments

PACKS = 4  # of a thread (scale.cu, softcap.cu)


def scale(y: Output, /, x: Tensor, residual: Tensor | None, *, factor: float) -> None:
    """y (...,K) <- x (...,K), residual (...,K) or None: factor x + residual; y may be the memory of either."""
    wanted, outputs = _forms(y)
    constants = {**_constants(gpu.type_of(y, x, residual), x), **wanted, "RESIDUAL": int(residual is not None)}
    arguments = (*outputs, x, residual, _count(x), np.float32(factor))
    gpu.launch("scale", "scale", _blocks(x, constants), gpu.TILE_THREADS, arguments, constants)


def _refuse(call: Arguments, capability: int) -> None:
    """UsageError for a cap that is none."""
    gpu.cap_bits(None if math.isinf(call.numbers["cap"]) else call.numbers["cap"])


@gpu.asks(refuse=_refuse)
def softcap_forward(y: Output, /, x: Tensor, *, cap: float, factor: float = 1.0) -> None:
    """y (...,V) <- x (...,V): cap tanh(factor x / cap), or factor x where the cap is infinite."""
    constants = {**_constants(gpu.type_of(y, x), x), "CAPPED": int(math.isfinite(cap)), "FORMS": 0, "E4M3": 0}
    numbers = map(np.float32, (factor, factor / cap, cap))
    arguments = (y, x, _count(x), *numbers)
    gpu.launch("softcap", "softcap_forward", _blocks(x, constants), gpu.TILE_THREADS, arguments, constants)


@gpu.asks(refuse=_refuse)
def softcap_backward(d_x: Output, /, d_y: Tensor, y: Tensor | None, *, cap: float, factor: float = 1.0) -> None:
    """d_x (...,V) <- d_y, y (...,V): factor d_y (1 - (y / cap)^2); y is not read where the cap is infinite."""
    wanted, outputs = _forms(d_x)
    constants = {**_constants(gpu.type_of(d_x, d_y, y), d_y), **wanted, "CAPPED": int(math.isfinite(cap))}
    arguments = (*outputs, d_y, y, _count(d_y), np.float32(factor), np.float32(1 / cap))
    gpu.launch("softcap", "softcap_backward", _blocks(d_y, constants), gpu.TILE_THREADS, arguments, constants)


def _forms(output: Output) -> tuple[dict[str, int | str], tuple[int, ...]]:
    wanted, outputs = gpu.forms(output)
    others = int(wanted["FORMS"]) & ~(gpu.VALUE | gpu.ROW | gpu.AMAX)
    assert not others, f"{output.name}: written as values and fp8 rows only"
    return wanted, outputs


def _constants(kind: str, x: Tensor) -> Constants:
    return {"T": kind, "N": gpu.access(x.shape[-1], kind)}


def _count(x: Tensor) -> np.int64:
    return np.int64(math.prod(x.shape))


def _blocks(x: Tensor, constants: Constants) -> int:
    return -(-math.prod(x.shape) // (gpu.TILE_THREADS * PACKS * int(constants["N"])))
