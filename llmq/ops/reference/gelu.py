"""Activations in silu's place: values in new memory, and values and slopes, which are written to two arrays.

- gelu: x Phi(x), Phi the normal distribution (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016)
- gelu_tanh: x (1 + tanh(c (x + 0.044715 x^3))) / 2, c = sqrt(2 / pi), which is near gelu (the same)
- relu2: max(x, 0)^2 (So et al., "Primer", 2021)
"""

import math
from collections.abc import Callable

import numpy as np

from llmq.ops.temporaries import Temporaries, elementwise

IN_PLACE = ("gelu_tanh", "relu2")  # those whose values need no array beside them
TWICE_C, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715  # of gelu_tanh


def forward_temporaries(x: str) -> Callable[[Temporaries], int]:
    """What the value of an activation needs, and what is made of it in its memory."""
    return lambda a: elementwise("act", 1 if a.numbers.get("activation") in IN_PLACE else 2, x)(a)


def gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x)."""
    value = _normal(x)
    value *= x
    return value


def gelu_both(value: np.ndarray, slope: np.ndarray, x: np.ndarray) -> None:
    """The slope is Phi(x) + x times the density exp(-x^2 / 2) / sqrt(2 pi)."""
    p = _normal(x)
    np.multiply(p, x, out=value)
    np.multiply(x, x, out=slope)
    slope *= -0.5
    np.exp(slope, out=slope)
    slope *= x
    slope *= 1 / math.sqrt(2 * math.pi)
    slope += p


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x s, with s = (1 + tanh(c (x + 0.044715 x^3))) / 2."""
    value = _sigmoid_of_cubic(x)
    value *= x
    return value


def gelu_tanh_both(value: np.ndarray, slope: np.ndarray, x: np.ndarray) -> None:
    """The slope is s + (1 - s) x s 2c (1 + 3 * 0.044715 x^2), with s = sigmoid(2c (x + 0.044715 x^3))."""
    s = _sigmoid_of_cubic(x)
    np.multiply(s, x, out=value)
    np.multiply(x, x, out=slope)
    slope *= 3 * CUBE * TWICE_C
    slope += TWICE_C
    slope *= value
    slope *= 1 - s
    slope += s


def relu2(x: np.ndarray) -> np.ndarray:
    """max(x, 0)^2."""
    value = np.maximum(x, 0)
    value *= value
    return value


def relu2_both(value: np.ndarray, slope: np.ndarray, x: np.ndarray) -> None:
    """The slope is 2 max(x, 0)."""
    np.maximum(x, 0, out=slope)
    np.multiply(slope, slope, out=value)
    slope *= 2


def _sigmoid_of_cubic(x: np.ndarray) -> np.ndarray:
    """sigmoid(2c (x + 0.044715 x^3)) in new memory: (1 + tanh(u)) / 2 is sigmoid(2u), which loses no digits near 0."""
    s = x * x
    s *= -TWICE_C * CUBE
    s -= TWICE_C
    s *= x
    with np.errstate(over="ignore"):
        np.exp(s, out=s)
    s += 1
    return np.divide(1, s, out=s)


def _normal(x: np.ndarray) -> np.ndarray:
    """Phi(x) = erfc(-x / sqrt(2)) / 2 in new memory. NumPy has no erfc: one call for each number, 0.1 us."""
    z = x * -math.sqrt(0.5)
    p = np.fromiter(map(math.erfc, z.flat), z.dtype, z.size).reshape(z.shape)
    p *= 0.5
    return p
