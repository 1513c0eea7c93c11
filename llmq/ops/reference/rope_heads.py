"""Rotary position embedding (rope.py) of queries and keys that are two tensors of heads, as transformers has them."""

from llmq.operands import Output, Tensor
from llmq.ops.reference.rope import turned
from llmq.ops.seam import op
from llmq.ops.temporaries import Temporaries


def _of_heads(a: Temporaries) -> int:
    """Of q or of k: its values, turned ones, and products with cos and sin."""
    pairs = zip(a.outputs, a.inputs, strict=False)
    return a.copies("cos", "sin") + a.size("sin") // 2 + max(a.size(read) + 2 * a.size(out) for out, read in pairs)


@op(family="rope", temporaries=_of_heads)
def rope_heads_forward(out_q: Output, out_k: Output, /, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """out_q (B,T,Hq,Hd), out_k (B,T,Hkv,Hd) <- q, k like them, cos, sin (B or 1,T,Hd), whose halves are equal.

    Heads as transformers has them, which may be strided views; out_q and out_k may be the memory of q and k.
    """
    _turn_heads(out_q, q, cos, sin, 1)
    _turn_heads(out_k, k, cos, sin, 1)


@op(family="rope", temporaries=_of_heads)
def rope_heads_backward(
    d_q: Output, d_k: Output, /, d_out_q: Tensor, d_out_k: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """d_q (B,T,Hq,Hd), d_k (B,T,Hkv,Hd) <- d_out_q, d_out_k like them, cos, sin (B or 1,T,Hd): the turn backwards."""
    _turn_heads(d_q, d_out_q, cos, sin, -1)
    _turn_heads(d_k, d_out_k, cos, sin, -1)


def _turn_heads(out: Output, x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
    half = x.shape[-1] // 2
    c, s = (angles.read()[:, :, None, :half] for angles in (cos, sin))
    heads = x.shape[2]
    value = x.read().reshape(*x.shape[:2], -1)
    out.write(turned(value, c, sign * s, heads, heads).reshape(out.shape))
