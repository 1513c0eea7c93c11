"""Both gradients of an adapter's B in one pass over d_y: on the GPU sums in f32 of all tokens and columns, in order."""

import numpy as np
import pytest

from llmq.operands import Output, Tensor
from llmq.ops.reference import OPS
from llmq.tensor import DTYPES, Form

from .build import output, poisoned, tensor
from .cuda_build import Device

ALPHA = 0.5


def columns_of(rng, shape, before, after):
    """Random columns of a wider bf16 matrix, which the kernel reads where they are."""
    whole = rng.standard_normal((shape[0], before + shape[1] + after)).astype(DTYPES["bf16"])
    return whole, before


@pytest.mark.gpu(emulated="16-300-72")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("start", [None, 3.0], ids=["written", "added"])
@pytest.mark.parametrize(
    ("rank", "tokens", "outputs"), [(16, 300, 72), (32, 300, 72), (16, 1100, 200), (32, 513, 640), (16, 8, 8)]
)
def test_both_gradients_are_the_sums_of_the_products(rank, tokens, outputs, start, dtype):
    rng, device = np.random.default_rng(tokens), Device()
    (y, y_at), (low, low_at) = columns_of(rng, (tokens, outputs), 16, 8), columns_of(rng, (tokens, rank), 16, rank)
    up = rng.standard_normal((outputs, rank)).astype(DTYPES["bf16"])
    d_low, d_up = poisoned(low.shape, "bf16"), poisoned(up.shape, dtype)
    untouched = d_low.copy()
    if start is not None:
        d_up[...] = start
    on_device = {
        name: device.array(array)
        for name, array in {"y": y, "low": low, "up": up, "d_low": d_low, "d_up": d_up}.items()
    }

    def cut(name, first, count):
        return Tensor(name, on_device[name][:, first : first + count], (tokens, count))

    written = Tensor("d_low", on_device["d_low"][:, low_at : low_at + rank], (tokens, rank))
    results = [Output("d_low", (tokens, rank), "bf16", (written,))]
    results += [
        Output("d_up", up.shape, dtype, (Tensor("d_up", on_device["d_up"], up.shape),), accumulate=start is not None)
    ]
    inputs = (cut("y", y_at, outputs), cut("low", low_at, rank), Tensor("up", on_device["up"], up.shape))
    device.run("low_rank_backward", results, inputs, alpha=ALPHA)
    got_low, got_up = device.host(d_low), device.host(d_up).astype(np.float64)
    y64, low64 = y[:, y_at : y_at + outputs].astype(np.float64), low[:, low_at : low_at + rank].astype(np.float64)
    wanted = ALPHA * y64 @ up.astype(np.float64), ALPHA * y64.T @ low64 + (start or 0)
    own = got_low[:, low_at : low_at + rank].astype(np.float64)
    for got, exact, terms, unit in (
        (own, wanted[0], outputs, 2**-8),
        (got_up, wanted[1], tokens, 2**-8 if dtype == "bf16" else 2**-24),
    ):
        assert np.all(np.abs(got - exact) <= 1.01 * unit * np.abs(exact) + terms * 2.0**-24 * 16)
    beside = np.ones(low.shape[1], bool)
    beside[low_at : low_at + rank] = False
    assert got_low[:, beside].tobytes() == untouched[:, beside].tobytes()


ROWS = Form("e4m3", "row", "delayed")
NAMES = ("d_act", "gate_up", "gate_low", "up_low", "gate_b", "up_b")


def halves(rank, tokens, width):
    """Inputs of `swiglu_low_rank_backward`, the low ones being columns of one matrix; and its outputs' shapes."""
    rng = np.random.default_rng([rank, tokens])
    shapes = ((tokens, width), (tokens, 2 * width), *((tokens, rank),) * 2, *((width, rank),) * 2)
    values = {
        name: rng.standard_normal(shape).astype(DTYPES["bf16"]) for name, shape in zip(NAMES, shapes, strict=True)
    }
    return values, (shapes[1], *shapes[2:])


def in_two_calls(values, shapes, dtype, start, amax, activation):
    """What SwiGLU's gradient and then the gradients of each half are."""
    written = [
        output(shape, dtype if n > 2 else "bf16", start=start if n > 2 else None) for n, shape in enumerate(shapes)
    ]
    written[0] = output(shapes[0], "bf16", (None, ROWS), scale=0.01, amax=amax)
    x = {name: tensor(value, "bf16") for name, value in values.items()}
    OPS["swiglu_backward"](written[0], x["d_act"], x["gate_up"], activation=activation)
    value, width = written[0].tensors[0].array, shapes[0][1] // 2
    for n, half in enumerate(("gate", "up")):
        part = Tensor("half", value[:, n * width : (n + 1) * width], (shapes[0][0], width))
        about = {"alpha": (0.5, 2.0)[n]}
        OPS["low_rank_backward"](written[1 + n], written[3 + n], part, x[f"{half}_low"], x[f"{half}_b"], **about)
    return written


@pytest.mark.parametrize("start", [None, 3.0], ids=["written", "added"])
@pytest.mark.parametrize(("dtype", "activation"), [("fp32", "silu"), ("bf16", "silu"), ("bf16", "gelu")])
def test_one_call_for_both_halves_and_swiglu_is_those_calls(dtype, activation, start):
    values, shapes = halves(16, 50, 24)
    wanted = in_two_calls(values, shapes, dtype, start, 0.25, activation)
    got = [output(x.shape, x.dtype, start=start if n > 2 else None) for n, x in enumerate(wanted)]
    got[0] = output(shapes[0], "bf16", (None, ROWS), scale=0.01, amax=0.25)
    inputs = [tensor(value, "bf16") for value in values.values()]
    numbers = {"gate_alpha": 0.5, "up_alpha": 2.0, "activation": activation}
    OPS["swiglu_low_rank_backward"](*got, *inputs, **numbers)
    for one, other in zip(got, wanted, strict=True):
        assert [x.array.tobytes() for x in one.tensors] == [x.array.tobytes() for x in other.tensors]
        assert {name: cell.tobytes() for name, cell in one.amax.items()} == {
            name: cell.tobytes() for name, cell in other.amax.items()
        }


@pytest.mark.gpu(emulated="16-300-72")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("forms", [(None,), (ROWS,), (None, ROWS)], ids=["value", "rows", "both"])
@pytest.mark.parametrize(
    ("rank", "tokens", "width", "activation"),
    [
        *((*sizes, "silu") for sizes in [(16, 300, 72), (32, 300, 72), (16, 1100, 200), (16, 8, 8)]),
        *((16, 8, 72, activation) for activation in ("gelu", "gelu_tanh")),
    ],
)
def test_swiglu_and_its_adapters_in_one_call_are_those_of_the_reference(rank, tokens, width, activation, forms, dtype):
    values, shapes = halves(rank, tokens, width)
    start, device = 3.0, Device()
    exact = in_two_calls(values, shapes, dtype, start, 0.25, activation)
    low, d_low = np.concatenate([values["gate_low"], values["up_low"]], axis=1), poisoned((tokens, 2 * rank), "bf16")
    d_gate_up = output(shapes[0], "bf16", forms, scale=0.01, amax=0.25 if ROWS in forms else None)
    d_b = [output(shape, dtype, start=start) for shape in shapes[3:]]

    def cut(array, half):
        return Tensor("low", device.array(array)[:, half * rank : (half + 1) * rank], (tokens, rank))

    d_lows = [Output("d_low", (tokens, rank), "bf16", (cut(d_low, half),)) for half in range(2)]
    inputs = [device.tensor(tensor(values[name], "bf16")) for name in NAMES]
    inputs[2:4] = [cut(low, 0), cut(low, 1)]
    written = [device.output(d_gate_up), *d_lows, *map(device.output, d_b)]
    numbers = {"gate_alpha": 0.5, "up_alpha": 2.0, "activation": activation}
    device.run("swiglu_low_rank_backward", written, inputs, **numbers)
    wanted = {x.form: x.array for x in exact[0].tensors}
    for one in d_gate_up.tensors:  # sigmoid is right to a few units of f32
        got, expected = (x.astype(np.float64) for x in (device.host(one.array), wanted[one.form]))
        differs = np.abs(got - expected) > (2**-7 if one.form is None else 2**-3) * np.abs(expected)
        assert not differs.any() and (got != expected).mean() < 0.01
    if d_gate_up.amax:
        np.testing.assert_allclose(device.host(d_gate_up.amax["e4m3"]), exact[0].amax["e4m3"], rtol=2**-7)
    results = [
        device.host(d_low)[:, :rank],
        device.host(d_low)[:, rank:],
        *(device.host(x.tensors[0].array) for x in d_b),
    ]
    for got, expected in zip(results, exact[1:], strict=True):
        expected = expected.tensors[0].array.astype(np.float64)
        unit = 2**-7 if got.dtype == DTYPES["bf16"] else 2**-10
        assert np.abs(got.astype(np.float64) - expected).max() <= unit * np.abs(expected).max()
