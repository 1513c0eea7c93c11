"""Causal attention with grouped queries and an optional sliding window: att = softmax(scale * q k^T) v.

Query head h reads key and value head h // (Hq / Hkv). Query i sees keys j with i - window < j <= i (no window: all
j <= i). Rows with borders hold several documents, each a sequence of its own: no query sees another document's keys.
Work goes in blocks of queries per sequence and key head, so that no (T,T) matrix exists; keys that no query of a block
sees are skipped. Each block sees all its keys at once, which makes the softmax plain (no online rescaling). Every
sequence is computed by itself, so the result does not depend on the row or the batch it is in.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import Arguments, op
from llmq.ops.temporaries import Temporaries

QUERY_BLOCK = 64  # queries of one head per block: the scores of a block of a short sequence stay in the L2 cache


def _multiply_adds(call: Arguments) -> int:
    """Of one product as large as all scores: the keys that each query sees, by the head's channels."""
    b, t, width = call.reads["qkv"].shape
    heads, window = call.numbers["num_heads"], min(call.numbers["window"] or t, t)
    head_dim = width // (heads + 2 * call.numbers["num_kv_heads"])
    seen = window * (window + 1) // 2 + (t - window) * window  # keys, summed over the queries of a sequence
    return b * heads * head_dim * seen


def _blocks_of(value: str, arrays: int) -> Callable[[Temporaries], int]:
    """Whole tensors read, the value, and `arrays` of the scores of one block of queries of a key head's group; backward
    has their slopes at a cap, too."""

    def rule(a: Temporaries) -> int:
        length = a.inputs["qkv"].shape[1]
        keys = min(length, a.numbers["longest"] or length, (a.numbers["window"] or length) + QUERY_BLOCK)
        group = a.numbers["num_heads"] // a.numbers["num_kv_heads"]
        scores = a.width * min(QUERY_BLOCK, length) * keys * group
        slopes = scores if value == "d_qkv" and a.numbers.get("softcap") is not None else 0
        return a.copies("qkv", "att", "d_att") + a.size(value) + max(arrays * scores + slopes, a.writing(value))

    return rule


@op(family="attention forward", products=2, multiply_adds=_multiply_adds, temporaries=_blocks_of("att", 2))
def attention_forward(
    att: Output,
    lse: Output,
    /,
    qkv: Tensor,
    borders: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    longest: int | None,
    softmax_scale: float,
    softcap: float | None = None,
) -> None:
    """att (B,T,Hq*Hd), lse (B,Hq,T) <- qkv (B,T,(Hq+2Hkv)*Hd); lse = log sum over seen keys of exp(scale q k).

    `borders` (B,D+1) int32: the first tokens of a row's documents, ascending from 0, then T repeated; None: each row is
    one document. What is longer than `longest` tokens (the padding after a document) is cut into as many documents.
    lse is (B,T,Hq) where there are borders, as cuDNN keeps that of ragged documents.
    `softcap`: scores s = scale q k are softcap * tanh(s / softcap) in their place (Gemma 2, 2024).
    """
    q, k, v = _groups(qkv.read(), num_heads, num_kv_heads)
    out = np.empty(q.shape, q.dtype)
    sums = np.empty((*q.shape[:3], q.shape[3] // k.shape[3]), q.dtype)
    for b, queries, keys, mask in _blocks(q.shape[0], q.shape[1], borders, window, longest, q.dtype):
        for h in range(num_kv_heads):
            p = _masked(_scores(q[b, queries, h], k[b, keys, h], softmax_scale, softcap), mask)
            largest = p.max(axis=-1, keepdims=True)
            p -= largest
            np.exp(p, out=p)
            total = p.sum(axis=-1, keepdims=True)
            o = p.reshape(-1, p.shape[-1]) @ v[b, keys, h]
            o /= total.reshape(-1, 1)
            out[b, queries, h] = o.reshape(len(mask), -1)
            sums[b, queries, h] = (largest + np.log(total))[..., 0]
    att.write(out.reshape(*q.shape[:2], -1))
    sums = sums.reshape(*q.shape[:2], -1)
    lse.write(sums.transpose(0, 2, 1) if borders is None else sums)


# of its five products, the one that makes p again is forward's
@op(family="attention backward", products=5, remade=1, multiply_adds=_multiply_adds, temporaries=_blocks_of("d_qkv", 3))
def attention_backward(
    d_qkv: Output,
    /,
    d_att: Tensor,
    qkv: Tensor,
    att: Tensor,
    lse: Tensor,
    borders: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    longest: int | None,
    softmax_scale: float,
    softcap: float | None = None,
) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd) <- d_att (B,T,Hq*Hd), qkv, att like d_att, lse, borders as in forward.

    The probabilities come back from lse: p = exp(scale * q k^T - lse). Then d_v = p^T d_att, d_p = d_att v^T,
    d_s = p * (d_p - rowsum(d_att * att)), d_q = scale * d_s k, d_k = scale * d_s^T q, the last two and d_v summed over
    the query heads of a group. At a soft-cap d_s goes by 1 - (s / softcap)^2 of the capped score s.
    """
    x = qkv.read()
    q, k, v = _groups(x, num_heads, num_kv_heads)
    d_x = np.zeros_like(x)
    d_q, d_k, d_v = _groups(d_x, num_heads, num_kv_heads)
    d_out, out = d_att.read().reshape(q.shape), att.read().reshape(q.shape)
    sums = lse.read().transpose(0, 2, 1) if borders is None else lse.read()
    sums = sums.reshape(*q.shape[:3], -1)
    hd = k.shape[-1]
    for b, queries, keys, mask in _blocks(q.shape[0], q.shape[1], borders, window, longest, q.dtype):
        for h in range(num_kv_heads):
            s = _scores(q[b, queries, h], k[b, keys, h], softmax_scale, softcap)
            slope = None if softcap is None else 1 - (s / s.dtype.type(softcap)) ** 2
            p = _masked(s, mask)
            p -= sums[b, queries, h][..., None]
            p = np.exp(p, out=p).reshape(-1, p.shape[-1])
            do = d_out[b, queries, h].reshape(-1, hd)
            d_s = do @ v[b, keys, h].T
            d_s -= (do * out[b, queries, h].reshape(-1, hd)).sum(axis=-1, keepdims=True)
            d_s *= p
            d_s *= softmax_scale
            if slope is not None:
                d_s *= slope
            d_v[b, keys, h] += p.T @ do
            d_q[b, queries, h] = (d_s @ k[b, keys, h]).reshape(len(mask), -1)
            d_k[b, keys, h] += d_s.T @ q[b, queries, h].reshape(-1, hd)
    d_qkv.write(d_x)


def _groups(x: np.ndarray, num_heads: int, num_kv_heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of x (B,T,(Hq+2Hkv)*Hd): q (B,T,Hkv,G*Hd), the G query heads of a key head together; k, v (B,T,Hkv,Hd)."""
    hd = x.shape[-1] // (num_heads + 2 * num_kv_heads)
    cuts = np.split(x, [num_heads * hd, (num_heads + num_kv_heads) * hd], axis=-1)
    q, k, v = (part.reshape(*x.shape[:2], num_kv_heads, -1) for part in cuts)
    return q, k, v


def _blocks(
    batch: int, length: int, borders: Tensor | None, window: int | None, longest: int | None, dtype: np.dtype
) -> Iterator[tuple[int, slice, slice, np.ndarray]]:
    """Row, a block of its queries, the keys that any of them sees, and what to add to their scores: 0 or -inf.

    Documents of equal length share the masks, and those of one document come in order.
    """
    places = defaultdict(list)  # (row, first token) of the documents, by their length
    marks = [[0, length]] * batch if borders is None else borders.read().tolist()
    for b, row in enumerate(marks):
        for first, stop in pairwise(row):
            for start in range(first, stop, longest or length):
                places[min(stop - start, longest or length)].append((b, start))
    for size, starts in places.items():
        for begin in range(0, size, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, size)
            low = 0 if window is None else max(0, begin - window + 1)
            i, j = np.arange(begin, end)[:, None], np.arange(low, end)
            seen = (j <= i) if window is None else (j <= i) & (j > i - window)
            mask = np.where(seen, 0, -np.inf).astype(dtype)
            for b, first in starts:
                yield b, slice(first + begin, first + end), slice(first + low, first + end), mask


def _scores(q: np.ndarray, k: np.ndarray, softmax_scale: float, softcap: float | None) -> np.ndarray:
    """Scores (queries*G,keys) of q (queries,G*Hd) and k (keys,Hd); the group is part of the matmul's rows."""
    s = q.reshape(-1, k.shape[-1]) @ k.T
    s *= softmax_scale
    if softcap is not None:
        s /= softcap
        np.tanh(s, out=s)
        s *= softcap
    return s


def _masked(s: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Scores (queries,G,keys), in place, of which those of keys that a query does not see are -inf."""
    s = s.reshape(len(mask), -1, s.shape[-1])
    s += mask[:, None]
    return s
