"""SwiGLU (Shazeer, 2020): act = silu(gate) * up, silu(x) = x * sigmoid(x); gate and up are one tensor, gate first."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise


@op(family="swiglu", forms={"act"}, temporaries=elementwise("act", 2, "gate_up"))
def swiglu_forward(act: Output, /, gate_up: Tensor) -> None:
    """act (B,T,F) <- gate_up (B,T,2F)."""
    act.write(_silu_product(*halves(gate_up.read())))


@op(family="swiglu", forms={"d_gate_up"}, temporaries=elementwise("d_gate_up", 2, "gate_up", "d_act", held=0.5))
def swiglu_backward(d_gate_up: Output, /, d_act: Tensor, gate_up: Tensor) -> None:
    """d_gate_up (B,T,2F) <- d_act (B,T,F), gate_up (B,T,2F).

    d_up = d_act * silu(gate); d_gate = d_act * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate))).
    """
    x, d = gate_up.read(), d_act.read()
    d_x = np.empty_like(x)
    _gradients(*halves(d_x), d, *halves(x))
    d_gate_up.write(d_x)


@op(family="swiglu", temporaries=elementwise("act", 2, "gate", "up"))
def swiglu_apart_forward(act: Output, /, gate: Tensor, up: Tensor) -> None:
    """act (...,F) <- gate, up like act: `swiglu_forward` of two tensors."""
    act.write(_silu_product(gate.read(), up.read()))


@op(family="swiglu", temporaries=elementwise("d_up", 3, "gate", "up", "d_act", held=1))
def swiglu_apart_backward(d_gate: Output, d_up: Output, /, d_act: Tensor, gate: Tensor, up: Tensor) -> None:
    """d_gate, d_up (...,F) <- d_act, gate, up like d_gate; they may be the memory of gate and up."""
    g, u, d = gate.read(), up.read(), d_act.read()
    d_g, d_u = np.empty_like(g), np.empty_like(g)
    _gradients(d_g, d_u, d, g, u)
    d_gate.write(d_g)
    d_up.write(d_u)


def _silu_product(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up in new memory."""
    value = _sigmoid(gate)
    value *= gate
    value *= up
    return value


def _gradients(d_gate: np.ndarray, d_up: np.ndarray, d: np.ndarray, gate: np.ndarray, up: np.ndarray) -> None:
    """d_gate, d_up <- d, the gradient of silu(gate) * up."""
    s = _sigmoid(gate)
    np.multiply(s, gate, out=d_up)
    np.subtract(1, s, out=d_gate)
    d_gate *= d_up
    d_gate += s
    d_gate *= up
    d_gate *= d
    d_up *= d


def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of gate and up in x (...,2F)."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in new memory; exp overflows to infinity for very negative x, which gives the right 0."""
    with np.errstate(over="ignore"):
        s = np.exp(-x)
    s += 1
    return np.divide(1, s, out=s)
