"""The cache and attention to it: one new token per sequence sees what the whole forward shows it."""

import numpy as np
import pytest

from llmq.model.config import RopeConfig
from llmq.model.rope import rope_table
from llmq.ops.reference import OPS

from .build import output, run, tensor

HQ, HKV, HD, T = 6, 2, 4, 11
HEADS = {"num_heads": HQ, "num_kv_heads": HKV}


@pytest.mark.parametrize("window", [None, 1, 4, 99])
def test_a_token_sees_what_it_sees_in_the_whole_sequence(window):
    """Sequences of different lengths, whose tokens before the last one were written to a cache in another order."""
    rng = np.random.default_rng(0)
    qkv, table = rng.standard_normal((3, T, (HQ + 2 * HKV) * HD)), rope_table(RopeConfig(), HD, T, np.float64)
    places = np.broadcast_to(np.arange(T, dtype=np.int32), (3, T))
    numbers = {**HEADS, "window": window, "softmax_scale": HD**-0.5}
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
