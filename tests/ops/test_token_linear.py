"""A token's linear map with its norm and SwiGLU: the three ops one after the other, in every split, and its kernel."""

import numpy as np
import pytest

from llmq.errors import UsageError
from llmq.ops.cuda import token_linear
from llmq.ops.reference import OPS
from llmq.ops.seam import Arguments
from llmq.tensor import DTYPES, Ref

from .build import output, run, tensor
from .cuda_build import Device

EPS = 1e-5
UNIT = {"bf16": 2.0**-8, "fp32": 2.0**-24}


def drawn(rows, k, n, gated, dtype, seed=0):
    """x, norm, weight and bias."""
    rng = np.random.default_rng([rows, k, n, seed])
    shapes = ((rows, 1, k), (k,), ((1 + gated) * n, k), ((1 + gated) * n,))
    return [tensor(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
def test_it_has_the_bits_of_the_three_ops(normed, dtype):
    x, norm, weight, bias = drawn(2, 24, 10, True, dtype)
    between = tensor(run("rmsnorm_forward", [x.shape, (2, 1)], x, norm, eps=EPS, dtype=dtype)[0], dtype)
    read = between if normed else x
    (gate_up,) = run("linear_forward", [(2, 1, 20)], read, weight, bias, None, dtype=dtype)
    (act,) = run("swiglu_forward", [(2, 1, 10)], tensor(gate_up, dtype), dtype=dtype)
    given = (x, norm if normed else None, weight, bias, None)
    (got,) = run("token_linear", [(2, 1, 10)], *given, eps=EPS, gated=True, dtype=dtype)
    np.testing.assert_array_equal(got, act)
    (got,) = run("token_linear", [(2, 1, 20)], *given[:4], tensor(gate_up, dtype), eps=EPS, gated=False, dtype=dtype)
    (added,) = run("linear_forward", [(2, 1, 20)], read, weight, bias, tensor(gate_up, dtype), dtype=dtype)
    np.testing.assert_array_equal(got, added)


def rounded(value, dtype, error):
    """A value in a dtype, and how far off one may be that was computed with an error."""
    kind = DTYPES[dtype]
    low, high, here = (np.asarray(v).astype(kind).astype(np.float64) for v in (value - error, value + error, value))
    return here, np.maximum(high - here, here - low)


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(37, 64), (130, 1032), (4099, 72), (9, 4232)], ids=str)
def test_the_kernel_computes_norm_product_and_swiglu(n, k, rows, dtype):
    """In every split of a row, and with rows that a block takes one after the other.

    Bound: what is rounded in between may be rounded the other way where f32 errs (gamma of a sum of k, and 8 roundings
    more in the norm); that goes through the product as its magnitude, and through SwiGLU, whose slope is below 1.1 in
    the gate per unit of up. A sigmoid below 2^-126 is 0.
    """
    device, w = Device(), 2.0**-24
    x, norm, weight, bias = drawn(rows, k, n, True, dtype)
    values = [one.read().astype(np.float64) for one in (x, norm, weight, bias)]
    exact = values[0] / np.sqrt(np.mean(values[0] ** 2, axis=-1, keepdims=True) + EPS) * values[1]
    normed, off = rounded(exact, dtype, (k / 32 + 16) * w * np.abs(exact))
    for gated in (False, True):
        got = output((rows, 1, n * (2 - gated)), dtype)
        given = dict(zip(("x", "norm", "weight", "bias"), (x, norm, weight, bias), strict=True))
        device.call("token_linear", {"y": got}, {**given, "residual": None}, eps=EPS, gated=gated)
        found = device.host(got.tensors[0].array).astype(np.float64)
        product = normed @ values[2].T + values[3]
        magnitude = np.abs(normed) @ np.abs(values[2]).T + np.abs(values[3])
        error = off @ np.abs(values[2]).T + (k + 4) * w * magnitude
        if gated:
            pairs = zip(np.split(product, 2, axis=-1), np.split(error, 2, axis=-1), strict=True)
            (gate, gate_off), (up, up_off) = (rounded(value, dtype, most) for value, most in pairs)
            silu = gate / (1 + np.exp(-gate))
            product = silu * up
            error = 1.1 * gate_off * (np.abs(up) + up_off) + np.abs(silu) * up_off
            error = error + (np.abs(gate) + 8) * 4 * w * np.abs(product) + 2.0**-126 * np.abs(gate * up)
        bound = UNIT[dtype] * (np.abs(product) + error) * (1 + 2**-6) + error
        assert (np.abs(found - product) <= bound).all()


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("n", "k"), [(37, 64), (300, 2056), (9, 8264), (4099, 6)], ids=str)
def test_the_kernel_adds_a_residual_and_takes_rows_of_any_even_width(n, k, dtype):
    """Bound: the rounding of y, and gamma of a sum of k products and two more."""
    device = Device()
    x, _, weight, bias = drawn(1, k, n, False, dtype)
    residual = tensor(np.random.default_rng(1).standard_normal((1, 1, n)), dtype)
    got, exact = output((1, 1, n), dtype), output((1, 1, n), "fp64")
    read = {"x": x, "norm": None, "weight": weight, "bias": bias, "residual": residual}
    device.call("token_linear", {"y": got}, read, eps=0.0, gated=False)
    wide = [one and tensor(one.read().astype(np.float64)) for one in read.values()]
    OPS["token_linear"](exact, *wide, eps=0.0, gated=False)
    expected = exact.tensors[0].array
    terms = np.abs(wide[0].array) @ np.abs(wide[2].array).T + np.abs(bias.read()) + np.abs(residual.read())
    bound = UNIT[dtype] * np.abs(expected) * (1 + 2**-6) + (k + 4) * 2.0**-24 * terms
    assert (np.abs(device.host(got.tensors[0].array).astype(np.float64) - expected) <= bound).all()


def test_a_row_is_split_only_where_few_warps_would_not_read_all_of_it():
    taken = {
        (1152, 4, 0): 1,
        (4864, 4, 1): 1,
        (896, 19, 0): 4,
        (4608, 14, 0): 2,
        (18944, 14, 1): 2,
        (151936, 4, 0): 1,
        (3584, 74, 0): 8,
        (9, 99, 0): 8,
    }
    for (rows, accesses, gated), split in taken.items():
        assert token_linear._split(rows, accesses, gated) == split


def test_a_second_round_of_few_blocks_is_not_begun():
    assert [token_linear._blocks(needed, 528) for needed in (144, 528, 608, 1055, 1056, 18992)] == [
        144, 528, 528, 528, 1056, 18992
    ]  # fmt: skip


def test_an_odd_width_in_bf16_is_refused():
    """Where there is no plan, too."""
    refuse = token_linear.KERNELS[0].refuse
    for dtype, width in (("bf16", 66), ("fp32", 67)):
        refuse(Arguments({"x": Ref("x", "activation", (1, 1, width), dtype)}, {}, {}), 90)
    with pytest.raises(UsageError, match="a tensor 67 wide cannot be read 4 bytes at a time in bf16"):
        refuse(Arguments({"x": Ref("x", "activation", (1, 1, 67), "bf16")}, {}, {}), 90)
