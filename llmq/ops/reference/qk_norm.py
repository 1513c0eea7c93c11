"""RMSNorm of each query and key head over its own channels (Qwen3), before the rotary embedding; values pass unchanged.

qkv (B,T,(Hq+2Hkv)*Hd) holds the query heads, then the key heads, then the value heads.
"""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.rmsnorm import moved
from llmq.ops.seam import Arguments, op
from llmq.ops.temporaries import elementwise
from llmq.tensor import stored_bytes


@op(family="norms", temporaries=elementwise("out", 2, "qkv", held=1))
def qk_norm_forward(
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
    offset: float = 0.0,
) -> None:
    """out (B,T,(Hq+2Hkv)*Hd), rstd (B,T,Hq+Hkv) <- qkv like out, q_weight (Hd,), k_weight (Hd,).

    Per head: out = x * rstd * (weight + offset), rstd = 1 / sqrt(mean(x^2) + eps).
    """
    x = qkv.read()
    heads, values = _split(x, num_heads, num_kv_heads)
    s = 1 / np.sqrt(np.mean(heads * heads, axis=-1) + x.dtype.type(eps))
    normed = heads * s[..., None]
    normed *= _weights(q_weight, k_weight, num_heads, num_kv_heads, offset)
    out.write(_joined(normed, values))
    rstd.write(s)


def value_heads(call: Arguments) -> int:
    """Bytes of the value heads of qkv: their gradients are copied from d_out."""
    heads, kv_heads = call.numbers["num_heads"], call.numbers["num_kv_heads"]
    return stored_bytes(call.reads["qkv"]) * kv_heads // (heads + 2 * kv_heads)


@op(family="norms", forms={"d_qkv"}, untouched=value_heads, temporaries=elementwise("d_qkv", 5, "qkv", "d_out", held=3))
def qk_norm_backward(
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
    offset: float = 0.0,
) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd), d_q_weight (Hd,), d_k_weight (Hd,) <- d_out, qkv like d_qkv, weights, rstd.

    Per head, with n = x * rstd and g = d_out * (weight + offset): d_x = rstd * (g - n * mean(g * n)); a weight's
    gradient is the sum of d_out * n over tokens and its heads.
    """
    heads, _ = _split(qkv.read(), num_heads, num_kv_heads)
    d, d_values = _split(d_out.read(), num_heads, num_kv_heads)
    s = rstd.read()[..., None]
    n = heads * s
    g = d * _weights(q_weight, k_weight, num_heads, num_kv_heads, offset)
    d_heads = s * (g - n * np.mean(g * n, axis=-1, keepdims=True))
    per_head = (d * n).sum(axis=(0, 1))
    d_q_weight.write(per_head[:num_heads].sum(axis=0))
    d_k_weight.write(per_head[num_heads:].sum(axis=0))
    d_qkv.write(_joined(d_heads, d_values))


def _split(x: np.ndarray, num_heads: int, num_kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of x (B,T,(Hq+2Hkv)*Hd): query and key heads (B,T,Hq+Hkv,Hd), value heads (B,T,Hkv,Hd)."""
    heads = x.reshape(*x.shape[:2], num_heads + 2 * num_kv_heads, -1)
    return heads[:, :, : num_heads + num_kv_heads], heads[:, :, num_heads + num_kv_heads :]


def _joined(heads: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The inverse of `_split`, in new memory."""
    return np.concatenate([heads, values], axis=2).reshape(*heads.shape[:2], -1)


def _weights(q_weight: Tensor, k_weight: Tensor, num_heads: int, num_kv_heads: int, offset: float) -> np.ndarray:
    """(Hq+Hkv,Hd): what multiplies each query and key head."""
    return np.stack([moved(q_weight, offset)] * num_heads + [moved(k_weight, offset)] * num_kv_heads)
