"""SwiGLU (Shazeer, 2020): act = silu(gate) * up, silu(x) = x * sigmoid(x); gate and up are one tensor, gate first.

Others have another activation in silu's place (gelu.py), as GeGLU has a GELU (the same).
"""

from collections.abc import Callable

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.reference.gelu import forward_temporaries, gelu, gelu_both, gelu_tanh, gelu_tanh_both, relu2, relu2_both
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise


@op(family="swiglu", forms={"act"}, temporaries=forward_temporaries("gate_up"))
def swiglu_forward(act: Output, /, gate_up: Tensor, *, activation: str = "silu") -> None:
    """act (B,T,F) <- gate_up (B,T,2F): activation(gate) * up."""
    act.write(product(*halves(gate_up.read()), activation))


@op(family="swiglu", forms={"d_gate_up"}, temporaries=elementwise("d_gate_up", 2, "gate_up", "d_act", held=0.5))
def swiglu_backward(d_gate_up: Output, /, d_act: Tensor, gate_up: Tensor, *, activation: str = "silu") -> None:
    """d_gate_up (B,T,2F) <- d_act (B,T,F), gate_up (B,T,2F).

    d_up = d_act * activation(gate); d_gate = d_act * up times the activation's slope at gate.
    """
    x, d = gate_up.read(), d_act.read()
    d_x = np.empty_like(x)
    gradients(*halves(d_x), d, *halves(x), activation)
    d_gate_up.write(d_x)


def product(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """activation(gate) * up in new memory."""
    in_new_memory, _ = formulas(activation)
    value = in_new_memory(gate)
    value *= up
    return value


def gradients(
    d_gate: np.ndarray, d_up: np.ndarray, d: np.ndarray, gate: np.ndarray, up: np.ndarray, activation: str
) -> None:
    """d_gate, d_up <- d, the gradient of activation(gate) * up."""
    _, both = formulas(activation)
    both(d_up, d_gate, gate)
    d_gate *= up
    d_gate *= d
    d_up *= d


def _silu(x: np.ndarray) -> np.ndarray:
    value = _sigmoid(x)
    value *= x
    return value


def _silu_both(value: np.ndarray, slope: np.ndarray, x: np.ndarray) -> None:
    """The slope is s + (1 - s) x s, with s = sigmoid(x)."""
    s = _sigmoid(x)
    np.multiply(s, x, out=value)
    np.subtract(1, s, out=slope)
    slope *= value
    slope += s


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in new memory; exp overflows to infinity for very negative x, which gives the right 0."""
    with np.errstate(over="ignore"):
        s = np.exp(-x)
    s += 1
    return np.divide(1, s, out=s)


def formulas(
    activation: str,
) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray, np.ndarray, np.ndarray], None]]:
    """What makes the value of an activation in new memory, and what writes value and slope to two arrays."""
    match activation:
        case "silu":
            return _silu, _silu_both
        case "gelu":
            return gelu, gelu_both
        case "gelu_tanh":
            return gelu_tanh, gelu_tanh_both
        case "relu2":
            return relu2, relu2_both
    raise UsageError(f"the activation {activation} is not known: use silu, gelu, gelu_tanh or relu2")


def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of gate and up in x (...,2F)."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
