"""Rotary position embedding (Su et al., 2021) of query and key heads, in Hugging Face's rotate-half convention.

Channel i of a head's first half and channel i of its second half form a pair, turned by the angle position * freq[i].
The table (`llmq.model.rope.rope_table`) holds cos and sin of every angle.
"""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import Arguments, op
from llmq.ops.temporaries import turn
from llmq.tensor import stored_bytes


def _value_heads(call: Arguments) -> int:
    """In place, value heads are not written, and read only if another form is made of them."""
    given = next(iter(call.reads.values()))
    heads, kv_heads = call.numbers["num_heads"], call.numbers["num_kv_heads"]
    size = stored_bytes(given) * kv_heads // (heads + 2 * kv_heads)
    return sum(size * (2 if len(call.writes[name]) == 1 else 1) for name in call.in_place)


@op(family="rope", shares={"out": "qkv"}, untouched=_value_heads, temporaries=turn("out", "qkv"))
def rope_forward(
    out: Output, /, qkv: Tensor, table: Tensor, positions: Tensor, *, num_heads: int, num_kv_heads: int
) -> None:
    """out (B,T,(Hq+2Hkv)*Hd) <- qkv like out, table (max_T,Hd) cos | sin, positions (B,T) int32.

    Per query and key head with halves x1, x2: out1 = x1 cos - x2 sin, out2 = x2 cos + x1 sin; value heads are copied.
    """
    cos, sin = _cos_sin(table, positions)
    out.write(turned(qkv.read(), cos, sin, num_heads + num_kv_heads, num_heads + 2 * num_kv_heads))


@op(
    family="rope",
    shares={"d_qkv": "d_out"},
    forms={"d_qkv"},
    untouched=_value_heads,
    temporaries=turn("d_qkv", "d_out"),
)
def rope_backward(
    d_qkv: Output, /, d_out: Tensor, table: Tensor, positions: Tensor, *, num_heads: int, num_kv_heads: int
) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd) <- d_out like d_qkv, table (max_T,Hd), positions (B,T): the turn backwards."""
    cos, sin = _cos_sin(table, positions)
    d_qkv.write(turned(d_out.read(), cos, -sin, num_heads + num_kv_heads, num_heads + 2 * num_kv_heads))


def _cos_sin(table: Tensor, positions: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (B,T,1,Hd/2) of every position's angles."""
    rows = table.read_rows(positions.read())[:, :, None]
    half = rows.shape[-1] // 2
    return rows[..., :half], rows[..., half:]


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, num_turned: int, num_all: int) -> np.ndarray:
    """x (B,T,heads*Hd) with its first `num_turned` of `num_all` heads turned, in new memory."""
    out = np.empty_like(x)
    heads, after = (a.reshape(*x.shape[:2], num_all, -1) for a in (x, out))
    half = cos.shape[-1]
    x1, x2 = heads[:, :, :num_turned, :half], heads[:, :, :num_turned, half:]
    np.subtract(x1 * cos, x2 * sin, out=after[:, :, :num_turned, :half])
    np.add(x2 * cos, x1 * sin, out=after[:, :, :num_turned, half:])
    after[:, :, num_turned:] = heads[:, :, num_turned:]
    return out
