"""SwiGLU (Shazeer, 2020): act = silu(gate) * up, silu(x) = x * sigmoid(x); gate and up are one tensor, gate first."""

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.linear import low_rank_backward
from llmq.ops.seam import Arguments, op
from llmq.ops.temporaries import Temporaries, elementwise, product
from llmq.tensor import DTYPES


@op(family="swiglu", forms={"act"}, temporaries=elementwise("act", 2, "gate_up"))
def swiglu_forward(act: Output, /, gate_up: Tensor) -> None:
    """act (B,T,F) <- gate_up (B,T,2F)."""
    gate, up = _halves(gate_up.read())
    value = _sigmoid(gate)
    value *= gate
    value *= up
    act.write(value)


@op(family="swiglu", forms={"d_gate_up"}, temporaries=elementwise("d_gate_up", 2, "gate_up", "d_act", held=0.5))
def swiglu_backward(d_gate_up: Output, /, d_act: Tensor, gate_up: Tensor) -> None:
    """d_gate_up (B,T,2F) <- d_act (B,T,F), gate_up (B,T,2F).

    d_up = d_act * silu(gate); d_gate = d_act * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate))).
    """
    x, d = gate_up.read(), d_act.read()
    gate, up = _halves(x)
    d_x = np.empty_like(x)
    d_gate, d_up = _halves(d_x)
    s = _sigmoid(gate)
    np.multiply(s, gate, out=d_up)
    np.subtract(1, s, out=d_gate)
    d_gate *= d_up
    d_gate += s
    d_gate *= up
    d_gate *= d
    d_up *= d
    d_gate_up.write(d_x)


def _temporaries(a: Temporaries) -> int:
    """The gradient beside its value as rounded, then the products of a half."""
    of_half = max(product(f"d_{half}_b", "d_act", f"{half}_low")(a) for half in ("gate", "up"))
    return a.copies("gate_up", "d_act") + 2 * a.size("gate_up") + of_half


def _multiply_adds(call: Arguments) -> int:
    """Of each of the four products."""
    rank = call.reads["gate_low"].shape[-1]
    return math.prod(call.reads["d_act"].shape) * rank


@op(
    family="swiglu",
    rows={"d_gate_up"},
    takes_columns=True,
    products=4,
    multiply_adds=_multiply_adds,
    temporaries=_temporaries,
)
def swiglu_low_rank_backward(
    d_gate_up: Output,
    d_gate_low: Output,
    d_up_low: Output,
    d_gate_b: Output,
    d_up_b: Output,
    /,
    d_act: Tensor,
    gate_up: Tensor,
    gate_low: Tensor,
    up_low: Tensor,
    gate_b: Tensor,
    up_b: Tensor,
    *,
    gate_alpha: float,
    up_alpha: float,
) -> None:
    """`swiglu_backward`, and `low_rank_backward` of the gradient's halves.

    d_gate_up (B,T,2F) <- d_act (B,T,F), gate_up (B,T,2F); of gate and of up, whose gradient is read as rounded to its
    dtype, d_low (B,T,R), d_b (F,R) <- low (B,T,R), b (F,R).
    """
    rounded = Tensor("d_gate_up", np.empty(gate_up.shape, DTYPES[d_gate_up.dtype]), gate_up.shape)
    swiglu_backward(Output("d_gate_up", gate_up.shape, d_gate_up.dtype, (rounded,)), d_act, gate_up)
    d_gate_up.write(rounded.read())
    gate, up = (Tensor("half", half, half.shape) for half in _halves(rounded.array))
    low_rank_backward(d_gate_low, d_gate_b, gate, gate_low, gate_b, alpha=gate_alpha)
    low_rank_backward(d_up_low, d_up_b, up, up_low, up_b, alpha=up_alpha)


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of gate and up in x (...,2F)."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in new memory; exp overflows to infinity for very negative x, which gives the right 0."""
    with np.errstate(over="ignore"):
        s = np.exp(-x)
    s += 1
    return np.divide(1, s, out=s)
