"""What generation computes, against the whole forward and the ops that it joins; which tokens the cuts leave."""

import numpy as np
import pytest

from llmq.errors import UsageError
from llmq.model.config import RopeConfig
from llmq.model.rope import rope_table
from llmq.ops import cuda
from llmq.ops.reference import OPS
from llmq.ops.reference.generation import gumbel, threshold
from llmq.ops.reference.swiglu import formulas
from llmq.ops.seam import Arguments
from llmq.tensor import DTYPES, Ref

from .build import output, run, tensor
from .cuda_build import Device

HQ, HKV, HD, T = 6, 2, 4, 11
HEADS = {"num_heads": HQ, "num_kv_heads": HKV}


@pytest.mark.parametrize(("window", "cap"), [(None, None), (1, None), (4, None), (99, None), (4, 0.7)])
def test_a_token_sees_what_it_sees_in_the_whole_sequence(window, cap):
    """Sequences of different lengths, whose tokens before the last one were written to a cache in another order."""
    rng = np.random.default_rng(0)
    qkv, table = rng.standard_normal((3, T, (HQ + 2 * HKV) * HD)), rope_table(RopeConfig(), HD, T, np.float64)
    places = np.broadcast_to(np.arange(T, dtype=np.int32), (3, T))
    numbers = {**HEADS, "window": window, "softmax_scale": HD**-0.5, "softcap": cap}
    (turned,) = run("rope_forward", [qkv.shape], qkv, table, places, **HEADS)
    att, _ = run("attention_forward", [(3, T, HQ * HD), (3, HQ, T)], turned, None, longest=None, **numbers)
    order, last = [1, 2, 0], np.array([[4], [0], [T - 1]], np.int32)  # of the cache: which sequence, and its last token
    owners = np.full((3, T), -1, np.int32)
    for sequence, row in enumerate(order):
        owners[row, : last[sequence, 0]] = sequence
    cache = output((3, T, 2 * HKV * HD), "fp64")
    OPS["cache_write"](cache, tensor(turned), tensor(places), tensor(owners), **HEADS)
    rows = np.stack([qkv[row, last[sequence]] for sequence, row in enumerate(order)])
    held = cache.tensors[0].array
    found, after = run("attention_cached", [(3, 1, HQ * HD), held.shape], rows, held, table, last, **numbers)
    for sequence, row in enumerate(order):
        at = last[sequence, 0]
        np.testing.assert_allclose(found[sequence, 0], att[row, at], rtol=1e-12)
        np.testing.assert_allclose(after[sequence, : at + 1], turned[row, : at + 1, HQ * HD :], rtol=1e-12)
        assert np.isnan(after[sequence, at + 1 :]).all()  # poison


def test_padding_is_not_written_and_the_rest_of_the_cache_stays():
    qkv = np.ones((1, 3, (HQ + 2 * HKV) * HD))
    cache = output((2, T, 2 * HKV * HD), "fp32")
    cache.tensors[0].array[...] = 7
    places, owners = np.array([[5, 0, 0]], np.int32), np.array([[1, -1, -1]], np.int32)
    OPS["cache_write"](cache, tensor(qkv, "fp32"), tensor(places), tensor(owners), **HEADS)
    array = cache.tensors[0].array
    assert (array[1, 5] == 1).all()
    array[1, 5] = 7
    assert (array == 7).all()


EPS = 1e-5
UNIT = {"bf16": 2.0**-8, "fp32": 2.0**-24}


def drawn(rows, k, n, gated, dtype, seed=0):
    """x, norm, weight and bias."""
    rng = np.random.default_rng([rows, k, n, seed])
    shapes = ((rows, 1, k), (k,), ((1 + gated) * n, k), ((1 + gated) * n,))
    return [tensor(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize(("normed", "offset"), [(True, 0), (True, 1), (False, 0)], ids=["norm", "1 + norm", "plain"])
def test_it_has_the_bits_of_the_three_ops(normed, offset, dtype):
    x, norm, weight, bias = drawn(2, 24, 10, True, dtype)
    about = {"eps": EPS, "offset": offset}
    between = tensor(run("rmsnorm_forward", [x.shape, (2, 1)], x, norm, **about, dtype=dtype)[0], dtype)
    read = between if normed else x
    (gate_up,) = run("linear_forward", [(2, 1, 20)], read, weight, bias, None, dtype=dtype)
    (act,) = run("swiglu_forward", [(2, 1, 10)], tensor(gate_up, dtype), dtype=dtype)
    given = (x, norm if normed else None, weight, bias, None)
    (got,) = run("token_linear", [(2, 1, 10)], *given, **about, gated=True, dtype=dtype)
    np.testing.assert_array_equal(got, act)
    (got,) = run("token_linear", [(2, 1, 20)], *given[:4], tensor(gate_up, dtype), **about, gated=False, dtype=dtype)
    (added,) = run("linear_forward", [(2, 1, 20)], read, weight, bias, tensor(gate_up, dtype), dtype=dtype)
    np.testing.assert_array_equal(got, added)
    other = {"activation": "gelu_tanh", "dtype": dtype}
    (act,) = run("swiglu_forward", [(2, 1, 10)], tensor(gate_up, dtype), **other)
    (got,) = run("token_linear", [(2, 1, 10)], *given, **about, gated=True, **other)
    np.testing.assert_array_equal(got, act)


# units of f32 that an activation errs by far from zero, where it is next to nothing
FAR = {"silu": lambda x: 0, "gelu": lambda x: 1.5 * x**2, "gelu_tanh": lambda x: x**3 / 3}


def rounded(value, dtype, error):
    """A value in a dtype, and how far off one may be that was computed with an error."""
    kind = DTYPES[dtype]
    low, high, here = (np.asarray(v).astype(kind).astype(np.float64) for v in (value - error, value + error, value))
    return here, np.maximum(high - here, here - low)


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize(("n", "k", "offset"), [(37, 64, 1), (130, 1032, 0), (4099, 72, 0), (9, 4232, 0)], ids=str)
def test_the_kernel_computes_norm_product_and_swiglu(n, k, offset, rows, dtype):
    """In every split of a row, and with rows that a block takes one after the other.

    Bound: what is rounded in between may be rounded the other way where f32 errs (gamma of a sum of k, and 8 roundings
    more in the norm); that goes through the product as its magnitude, and through an activation, whose slope is below
    1.13 in the gate per unit of up. A factor below 2^-126 is 0.
    """
    device, w = Device(), 2.0**-24
    x, norm, weight, bias = drawn(rows, k, n, True, dtype)
    values = [one.read().astype(np.float64) for one in (x, norm, weight, bias)]
    exact = values[0] / np.sqrt(np.mean(values[0] ** 2, axis=-1, keepdims=True) + EPS) * (values[1] + offset)
    normed, off = rounded(exact, dtype, (k / 32 + 16) * w * np.abs(exact))
    for activation in ("", "silu", *(("gelu", "gelu_tanh") if (n, rows) == (37, 3) else ())):
        gated = activation != ""
        got = output((rows, 1, n * (2 - gated)), dtype)
        numbers = {"eps": EPS, "gated": gated, "offset": offset, "activation": activation or "silu"}
        given = dict(zip(("x", "norm", "weight", "bias"), (x, norm, weight, bias), strict=True))
        device.call("token_linear", {"y": got}, {**given, "residual": None}, **numbers)
        found = device.host(got.tensors[0].array).astype(np.float64)
        product = normed @ values[2].T + values[3]
        magnitude = np.abs(normed) @ np.abs(values[2]).T + np.abs(values[3])
        error = off @ np.abs(values[2]).T + (k + 4) * w * magnitude
        if gated:
            pairs = zip(np.split(product, 2, axis=-1), np.split(error, 2, axis=-1), strict=True)
            (gate, gate_off), (up, up_off) = (rounded(value, dtype, most) for value, most in pairs)
            value = formulas(activation)[0](gate)
            product = value * up
            error = 1.13 * gate_off * (np.abs(up) + up_off) + np.abs(value) * up_off
            units = 4 * (np.abs(gate) + 8) + FAR[activation](np.abs(gate))
            error = error + units * w * np.abs(product) + 2.0**-126 * np.abs(gate * up)
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


def test_an_odd_width_in_bf16_is_refused():
    """Where there is no plan, too."""
    refuse = cuda.KERNELS["token_linear"].refuse
    for dtype, width in (("bf16", 66), ("fp32", 67)):
        refuse(Arguments({"x": Ref("x", "activation", (1, 1, width), dtype)}, {}, {}), 90)
    with pytest.raises(UsageError, match="a tensor 67 wide cannot be read 4 bytes at a time in bf16"):
        refuse(Arguments({"x": Ref("x", "activation", (1, 1, 67), "bf16")}, {}, {}), 90)


OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}


def drawn_tokens(logits, count=1, **numbers) -> np.ndarray:
    """`count` tokens from the same logits, each at a position of its own."""
    rows = np.broadcast_to(logits, (count, 1, len(logits)))
    positions = np.arange(count, dtype=np.int32)[:, None]
    shapes = [(count, 1), (count, 1)]
    given = (rows, positions, np.zeros(count, np.int32))
    tokens, after = run("sample", shapes, *given, vocab_size=len(logits), **{**OFF, **numbers})
    assert (after == positions + 1).all()
    return tokens[:, 0].astype(int)


def test_temperature_zero_takes_the_first_of_the_largest():
    assert drawn_tokens(np.array([1.0, 3.0, 2.0, 3.0]), temperature=0.0)[0] == 1


@pytest.mark.parametrize(
    ("cuts", "left"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1, 2}),  # two are equal
        ({"top_k": 1}, {0}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.45}, {0, 1, 2}),
        ({"top_p": 0.85}, {0, 1, 2, 3}),
        ({"min_p": 0.45}, {0, 1, 2}),
        # 0.4 of the 0.8 that top-k leaves, of which the first has half
        ({"top_k": 3, "top_p": 0.4, "min_p": 0.01}, {0}),
    ],
)
def test_the_cuts_leave_the_most_likely(cuts, left):
    """Of probabilities 0.4, 0.2, 0.2, 0.15, 0.05."""
    tokens = drawn_tokens(np.log([0.4, 0.2, 0.2, 0.15, 0.05]) + 3, 500, **cuts)
    assert set(tokens) == left


def test_tokens_come_in_proportion():
    """2000 draws: within five standard deviations, at two temperatures."""
    p = np.array([0.5, 0.3, 0.15, 0.05])
    for temperature in (1.0, 0.5):
        expected = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
        found = np.bincount(drawn_tokens(np.log(p), 2000, temperature=temperature), minlength=4) / 2000
        assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / 2000)).all()


def test_noise_is_gumbels_and_depends_on_its_address_alone():
    """Mean 0.5772 and variance pi^2 / 6 of 2^18 numbers, to five standard errors; a shorter row has the same."""
    noise = gumbel(3 + 2**40, 9, 5, 2**18)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.sqrt(np.pi**2 / 6 / 2**18)
    assert abs(noise.var() - np.pi**2 / 6) < 0.05
    np.testing.assert_array_equal(gumbel(3 + 2**40, 9, 5, 77), noise[:77])
    for other in ((4 + 2**40, 9, 5), (3, 9, 5), (3 + 2**40, 8, 5), (3 + 2**40, 9, 4)):
        assert not np.array_equal(gumbel(*other, 77), noise[:77])


def test_equal_logits_stay_together():
    z = np.zeros(10, np.float32)
    assert threshold(z, top_k=3, top_p=0.5, min_p=0.5) <= 0


def test_the_penalty_lowers_seen_tokens_and_the_one_that_is_read():
    logits = np.array([[[2.0, -2.0, 2.0, -2.0, 2.0]]])
    seen, token = np.array([[1, 1, 0, 0, 0]], np.int32), np.array([[4]], np.int32)
    out, after = run("penalize", [(1, 1, 5), (1, 5)], logits, seen, token, penalty=2.0)
    np.testing.assert_array_equal(out[0, 0], [1, -4, 2, -2, 1])
    np.testing.assert_array_equal(after[0], [1, 1, 0, 0, 1])
