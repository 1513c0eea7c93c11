"""The cache and attention to it: one new token per sequence sees what the whole forward shows it."""

import numpy as np
import pytest

from llmq.ops.reference import OPS

from .build import output, run, tensor

HQ, HKV, HD, T = 6, 2, 4, 11
HEADS = {"num_heads": HQ, "num_kv_heads": HKV}


@pytest.mark.parametrize("window", [None, 1, 4, 99])
def test_a_token_sees_what_it_sees_in_the_whole_sequence(window):
    """Sequences of different lengths, written to a cache of other sequences in another order."""
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((3, T, (HQ + 2 * HKV) * HD))
    numbers = {**HEADS, "window": window, "softmax_scale": HD**-0.5}
    att, _ = run("attention_forward", [(3, T, HQ * HD), (3, HQ, T)], qkv, None, longest=None, **numbers)
    owners = np.broadcast_to(np.array([[2], [0], [1]], np.int32), (3, T))
    places = np.broadcast_to(np.arange(T, dtype=np.int32), (3, T))
    cache = output((3, T, 2 * HKV * HD), "fp64")
    OPS["cache_write"](cache, tensor(qkv), tensor(places), tensor(owners), **HEADS)
    last = np.array([[4], [0], [T - 1]], np.int32)
    rows = np.stack([qkv[owner, last[sequence]] for sequence, owner in enumerate((1, 2, 0))])
    (found,) = run("attention_cached", [(3, 1, HQ * HD)], rows, cache.tensors[0].array, last, **numbers)
    for sequence, owner in enumerate((1, 2, 0)):
        np.testing.assert_allclose(found[sequence, 0], att[owner, last[sequence, 0]], rtol=1e-12)


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
