"""What generation computes for each new token: attention to a cache, linear maps of few tokens, the choice of the next.

A cache (B,S,2*Hkv*Hd) has for each sequence and position the key heads, then the value heads, as they lie in the
packed row of q, k and v after the rotary embedding.

A token is drawn as the largest of logit + Gumbel noise, which draws from the softmax (Gumbel, 1954; the "Gumbel-max
trick") with no sum over the vocabulary: what runs in another order changes no choice. The noise has an address (seed,
sequence, position, token), so a sequence gets the same tokens in any batch.
"""

import numpy as np

from llmq.operands import Output, Tensor, round_to
from llmq.ops.reference.linear import linear_forward
from llmq.ops.reference.random import SAMPLING, random_words
from llmq.ops.reference.rmsnorm import rmsnorm_forward
from llmq.ops.reference.swiglu import swiglu_forward
from llmq.ops.seam import Arguments, op
from llmq.ops.temporaries import Temporaries, product
from llmq.tensor import DTYPES


def _attention_temporaries(a: Temporaries) -> int:
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


@op(family="attention forward", products=2, multiply_adds=_multiply_adds, temporaries=_attention_temporaries)
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
    softcap: float | None = None,
) -> None:
    """att (B,1,Hq*Hd), new_cache (B,S,2*Hkv*Hd) <- qkv (B,1,(Hq+2Hkv)*Hd), cache, table (S,Hd), positions (B,1).

    The new token of sequence b is at i = positions[b] (int32). Its query and key are turned by the rotary embedding, as
    in `rope_forward`; its key and value are put in the cache there, in whose memory the new one may be. Then the query
    sees the keys j with i - window < j <= i (no window: all j <= i). Query head h reads key head h // (Hq / Hkv).
    `softcap` as in `attention_forward`.
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
        if softcap is not None:
            scores = np.tanh(scores / q.dtype.type(softcap)) * q.dtype.type(softcap)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[sequence] = p @ v / p.sum(axis=-1, keepdims=True)
    att.write(out.reshape(b, 1, -1))
    if new_cache.wanted:
        (target,) = new_cache.tensors
        if not np.shares_memory(target.array, cache.array):
            target.array[...] = cache.array
        target.array[np.arange(b), at] = round_to(rows, new_cache.dtype)


# NumPy needs what the linear map needs, and what lies before and after it.
@op(family="linears forward", temporaries=lambda a: product("y", "x", "weight")(a) + 4 * a.size("x") + 6 * a.size("y"))
def token_linear(
    y: Output,
    /,
    x: Tensor,
    norm: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    eps: float,
    gated: bool,
    activation: str = "silu",
    offset: float = 0.0,
) -> None:
    """y (B,1,N) <- x (B,1,K), norm (K,) or None, weight (N,K), bias (N,) or None, residual (B,1,N) or None.

    rmsnorm_forward with the weight `norm` + `offset`, linear_forward, and, if `gated`, swiglu_forward of its 2N
    columns, without a residual. What is between them is rounded to the dtype of y, as it would be in a slot. No program
    that reads a weight here may write it.
    """
    assert residual is None or not gated
    if norm is not None:
        normed, unwanted = _slot(x.shape, y.dtype), Output("rstd", x.shape[:-1], y.dtype, ())
        rmsnorm_forward(normed, unwanted, x, norm, eps=eps, offset=offset)
        (x,) = normed.tensors
    product = _slot((*x.shape[:-1], weight.shape[0]), y.dtype) if gated else y
    linear_forward(product, x, weight, bias, residual)
    if gated:
        swiglu_forward(y, *product.tensors, activation=activation)


def _slot(shape: tuple[int, ...], dtype: str) -> Output:
    """Memory for a value in between."""
    return Output("between", shape, dtype, (Tensor("between", np.empty(shape, DTYPES[dtype]), shape),))


@op(family="head", temporaries=lambda a: a.copies("logits") + 4 * a.size("out"))
def penalize(out: Output, new_seen: Output, /, logits: Tensor, seen: Tensor, tokens: Tensor, *, penalty: float) -> None:
    """out (B,1,Vp), new_seen (B,Vp) int32 <- logits (B,1,Vp), seen (B,Vp) int32, tokens (B,1) int32.

    `tokens` are seen from now on. The logits of seen tokens are divided by `penalty` where they are positive and
    multiplied with it elsewhere (CTRL; Keskar et al., 2019).
    """
    marks, x = seen.read().copy(), logits.read()[:, 0]
    marks[np.arange(len(marks)), tokens.read()[:, 0]] = 1
    factor = x.dtype.type(penalty)
    out.write(np.where(marks != 0, np.where(x > 0, x / factor, x * factor), x)[:, None])
    new_seen.write(marks)


@op(family="head", temporaries=lambda a: a.copies("logits") + 12 * a.size("logits") // a.inputs["logits"].shape[0])
def sample(
    next_tokens: Output,
    next_positions: Output,
    /,
    logits: Tensor,
    positions: Tensor,
    samples: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    """next_tokens, next_positions (B,1) int32 <- logits (B,1,Vp), positions (B,1) int32, samples (B,) int32.

    Temperature 0 takes the largest logit, of equal ones the first. Otherwise z = logits / temperature is cut in this
    order: to the `top_k` largest (0: all), to the fewest largest whose probabilities, among those left, reach `top_p`
    (1: all), and to those at least `min_p` times as likely as the largest (0: all). Logits equal to the last one that
    stays, stay. The next token has the largest z + noise; `samples` are numbers of sequences, which address it together
    with their positions.
    """
    x, at = logits.read()[:, 0, :vocab_size], positions.read()
    chosen = np.empty(at.shape, np.int32)
    for row, values in enumerate(x):
        if temperature == 0:
            chosen[row] = values.argmax()
            continue
        z = values * values.dtype.type(1 / temperature)
        least = threshold(z, top_k=top_k, top_p=top_p, min_p=min_p)
        noise = gumbel(seed, int(at[row, 0]), int(samples.read()[row]), z.size)
        chosen[row] = np.where(z >= least, z + noise, -np.inf).argmax()
    next_tokens.write(chosen)
    next_positions.write(at + 1)


def threshold(z: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest logit that stays."""
    ordered = np.sort(z)[::-1]
    least = ordered[top_k - 1] if 0 < top_k < z.size else -np.inf
    if top_p < 1:
        left = np.cumsum(np.exp(ordered[ordered >= least].astype(np.float64) - ordered[0]))
        least = ordered[np.searchsorted(left, top_p * left[-1])]
    return float(max(least, ordered[0] + np.log(min_p)) if min_p else least)


def gumbel(seed: int, position: int, sequence: int, count: int) -> np.ndarray:
    """Gumbel noise (count,) f32: -log(-log(1 - u)), u uniform in steps of 2^-32."""
    words = random_words(seed, position, sequence & 0xFFFFFFFF, SAMPLING, 0, -(-count // 4)).T.ravel()[:count]
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    with np.errstate(divide="ignore"):  # u may be rounded to 1: such a token is not drawn
        return -np.log(-np.log1p(-u))
