"""Virtual tokens: what stands at the first positions of documents, and the gradients of finite differences."""

import numpy as np
import pytest

from llmq.ops.seam import Arguments, record
from llmq.tensor import Ref

from .build import run

POSITIONS = np.array([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]], np.int32)
NUMBERS = {"num_virtual": 2, "channels": 3}


def drawn(seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 5, 4)), rng.standard_normal((2, 3)), rng.standard_normal((2, 5, 4))


def forward(x, virtual):
    return run("virtual_tokens_forward", [x.shape], x, virtual, POSITIONS, dtype="fp64", **NUMBERS)[0]


def test_the_last_channels_of_first_tokens_are_replaced():
    x, virtual, _ = drawn()
    expected = x.copy()
    expected[0, :2, 1:] = expected[0, 3:, 1:] = expected[1, :2, 1:] = virtual
    np.testing.assert_array_equal(forward(x, virtual), expected)


def test_gradients_are_those_of_finite_differences():
    x, virtual, d_out = drawn()
    d_x, d_virtual = run("virtual_tokens_backward", [x.shape, virtual.shape], d_out, POSITIONS, dtype="fp64", **NUMBERS)
    rng, step = np.random.default_rng(1), 1e-6
    to_x, to_virtual = rng.standard_normal(x.shape), rng.standard_normal(virtual.shape)
    for gradient, direction, changed in (
        (d_x, to_x, lambda h: forward(x + h * to_x, virtual)),
        (d_virtual, to_virtual, lambda h: forward(x, virtual + h * to_virtual)),
    ):
        slope = np.sum((changed(step) - changed(-step)) * d_out) / (2 * step)
        assert slope == pytest.approx(float(np.sum(gradient * direction)), rel=1e-8)


def test_in_place_nothing_else_is_moved():
    x, about = Ref("x", "activation", (2, 5, 4), "fp32"), {"numbers": NUMBERS}
    reads = {"d_out": x, "positions": Ref("positions", "batch", (2, 5), "int32")}
    contract, replaced = record("virtual_tokens_backward"), 4 * 2 * 2 * 3
    virtual = Ref("virtual", "grad", (2, 3), "fp32")
    always = 4 * 10 + 4 * 6  # positions and the gradient of the matrix
    for writes, in_place, moved in (
        ({"d_x": (x,), "d_virtual": (virtual,)}, frozenset({"d_x"}), 2 * replaced),
        ({"d_x": (), "d_virtual": (virtual,)}, frozenset(), replaced),
        ({"d_x": (x,), "d_virtual": (virtual,)}, frozenset(), 2 * 4 * 40),
    ):
        call = Arguments(reads, writes, in_place=in_place, **about)
        assert contract.num_bytes(call) == moved + always
