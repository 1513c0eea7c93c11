"""Attention of one new token per sequence to a cache of keys and values, and what fills the cache.

A cache (B,S,2*Hkv*Hd) has for each sequence and position the key heads, then the value heads, as they lie in the
packed row of q, k and v after the rotary embedding.
"""

import numpy as np

from llmq.operands import Output, Tensor, round_to
from llmq.ops.seam import Arguments, op
from llmq.ops.temporaries import Temporaries


def _temporaries(a: Temporaries) -> int:
    """The cache as ops compute with it, and the keys and scores of one sequence."""
    of_one = 2 * a.size("cache") // a.inputs["cache"].shape[0]
    return a.copies("qkv", "cache") + 4 * a.size("qkv") + of_one


@op(family="copies", temporaries=lambda a: a.copies("rot") + a.size("rot"))
def cache_write(
    cache: Output, /, rot: Tensor, positions: Tensor, sequences: Tensor, *, num_heads: int, num_kv_heads: int
) -> None:
    """cache (B,S,2*Hkv*Hd) <- rot (R,T,(Hq+2Hkv)*Hd), positions, sequences (R,T) int32; the rest of cache stays.

    cache[sequences[r,t], positions[r,t]] = the keys and values of rot[r,t]; a negative sequence is padding. No two
    tokens have the same place.
    """
    if not cache.wanted:
        return
    (target,) = cache.tensors
    packed = rot.read()
    there, width = sequences.read() >= 0, cache.shape[-1]
    rows = round_to(packed[there][:, packed.shape[-1] - width :], cache.dtype)
    target.array[sequences.read()[there], positions.read()[there]] = rows


def _multiply_adds(call: Arguments) -> int:
    """Of one product, with all of the cache in use."""
    b, _, width = call.reads["qkv"].shape
    heads, kv_heads = call.numbers["num_heads"], call.numbers["num_kv_heads"]
    length = call.reads["cache"].shape[1]
    return int(b * heads * (width // (heads + 2 * kv_heads)) * min(length, call.numbers["window"] or length))


@op(family="attention forward", products=2, multiply_adds=_multiply_adds, temporaries=_temporaries)
def attention_cached(
    att: Output,
    new_cache: Output,
    /,
    qkv: Tensor,
    cache: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    softmax_scale: float,
) -> None:
    """att (B,1,Hq*Hd), new_cache (B,S,2*Hkv*Hd) <- qkv (B,1,(Hq+2Hkv)*Hd), cache, table (S,Hd), positions (B,1).

    The new token of sequence b is at i = positions[b] (int32). Its query and key are turned by the rotary embedding, as
    in `rope_forward`; its key and value are put in the cache there, in whose memory the new one may be. Then the query
    sees the keys j with i - window < j <= i (no window: all j <= i). Query head h reads key head h // (Hq / Hkv).
    """
    packed, (b, _, width) = qkv.read(), qkv.shape
    head_dim, group = width // (num_heads + 2 * num_kv_heads), num_heads // num_kv_heads
    heads, at = packed.reshape(b, -1, head_dim), positions.read()[:, 0]
    c, s = np.split(table.read()[at][:, None], 2, axis=-1)
    one, other = np.split(heads[:, : num_heads + num_kv_heads], 2, axis=-1)
    turned = np.concatenate([one * c - other * s, other * c + one * s], axis=-1)
    rows = np.concatenate([turned[:, num_heads:], heads[:, num_heads + num_kv_heads :]], axis=1).reshape(b, -1)
    rows, held = round_to(rows, new_cache.dtype).astype(packed.dtype), cache.read()
    q = turned[:, :num_heads].reshape(b, num_kv_heads, group, head_dim)
    out = np.empty(q.shape, q.dtype)
    for sequence, last in enumerate(at):
        seen = slice(max(0, last + 1 - (window or last + 1)), last)
        kept = np.concatenate([held[sequence, seen], rows[sequence : sequence + 1]])
        k, v = kept.reshape(-1, 2, num_kv_heads, head_dim).transpose(1, 2, 0, 3)  # (Hkv,keys,Hd)
        scores = q[sequence] @ k.transpose(0, 2, 1) * q.dtype.type(softmax_scale)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[sequence] = p @ v / p.sum(axis=-1, keepdims=True)
    att.write(out.reshape(b, 1, -1))
    if new_cache.wanted:
        (target,) = new_cache.tensors
        if not np.shares_memory(target.array, cache.array):
            target.array[...] = cache.array
        target.array[np.arange(b), at] = round_to(rows, new_cache.dtype)
