"""Both gradients of an adapter's B in one pass over d_y on the GPU: sums in f32 of all tokens and columns, in order."""

import numpy as np
import pytest

from llmq.tensor import DTYPES, Output, Tensor

from .build import poisoned
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
