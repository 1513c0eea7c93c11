"""RMSNorm of all query heads of a token as one vector, and of all its key heads (OLMo 2); values pass unchanged.

qkv (B,T,(Hq+2Hkv)*Hd) holds the query heads, then the key heads, then the value heads.
"""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.qk_norm import value_heads
from llmq.ops.seam import op
from llmq.ops.temporaries import Temporaries


def _temporaries(a: Temporaries, arrays: int) -> int:
    """The packed heads as they are made, and `arrays` of the queries alone, which are no fewer than the keys."""
    heads, kv_heads = a.numbers["num_heads"], a.numbers["num_kv_heads"]
    return a.copies("qkv") + a.size("qkv") + arrays * a.size("qkv") * heads // (heads + 2 * kv_heads)


@op(family="norms", temporaries=lambda a: _temporaries(a, 1))
def wide_qk_norm_forward(
    out: Output,
    rstd: Output,
    /,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> None:
    """out (B,T,(Hq+2Hkv)*Hd), rstd (B,T,2) <- qkv like out, q_weight (Hq*Hd,), k_weight (Hkv*Hd,).

    Of queries, and of keys: out = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps).
    """
    x = qkv.read()
    value, s = x.copy(), np.empty((*x.shape[:2], 2), x.dtype)
    for i, (part, weight) in enumerate(zip(_parts(value, num_heads, num_kv_heads), (q_weight, k_weight), strict=True)):
        s[..., i] = 1 / np.sqrt(np.mean(part * part, axis=-1) + x.dtype.type(eps))
        part *= s[..., i, None]
        part *= weight.read()
    out.write(value)
    rstd.write(s)


@op(family="norms", shares={"d_qkv": "d_out"}, untouched=value_heads, temporaries=lambda a: _temporaries(a, 2))
def wide_qk_norm_backward(
    d_qkv: Output,
    d_q_weight: Output,
    d_k_weight: Output,
    /,
    d_out: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rstd: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd), d_q_weight (Hq*Hd,), d_k_weight (Hkv*Hd,) <- d_out, qkv like d_qkv, weights, rstd.

    Of queries, and of keys, with n = x * rstd and g = d_out * weight: d_x = rstd * (g - n * mean(g * n)); a weight's
    gradient is the sum of d_out * n over tokens.
    """
    value = d_out.read().copy()
    s, of_q, of_k = rstd.read(), (q_weight, d_q_weight), (k_weight, d_k_weight)
    parts = (_parts(each, num_heads, num_kv_heads) for each in (value, qkv.read()))
    for i, (d, x, (weight, d_weight)) in enumerate(zip(*parts, (of_q, of_k), strict=True)):
        n = x * s[..., i, None]
        d_weight.write((d * n).sum(axis=(0, 1)))
        d *= weight.read()
        n *= np.mean(d * n, axis=-1, keepdims=True)
        d -= n
        d *= s[..., i, None]
    d_qkv.write(value)


def _parts(x: np.ndarray, num_heads: int, num_kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of the queries and of the keys of x (B,T,(Hq+2Hkv)*Hd)."""
    head_dim = x.shape[-1] // (num_heads + 2 * num_kv_heads)
    queries, keys, _ = np.split(x, [num_heads * head_dim, (num_heads + num_kv_heads) * head_dim], axis=-1)
    return queries, keys
