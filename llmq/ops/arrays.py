"""The kernels as functions on arrays: NumPy's on the CPU, CuPy's and whatever has `__dlpack__` on the CPU or a GPU.

Results are new arrays of NumPy, on a GPU of CuPy, or they are written into `out`, which is returned then: an array, or
a tuple in the order of the results in which None stands for a new one. It may be an input where a function says so. On
a GPU launches go to CuPy's current stream, and `allocate(num_bytes)` gives scratch, an array of the GPU, in place of
CuPy's pool. No input is copied.

Float operands of a call have one dtype: fp32, bf16 (of ml_dtypes), on the CPU also fp64. Statistics and losses are
fp32, or fp64 too. All are contiguous, and on a GPU aligned to 16 bytes. What does not fit raises UsageError; targets,
positions and borders are looked at on the CPU alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from llmq.errors import UsageError
from llmq.ops import linear_maps as maps
from llmq.ops.exchange import DeviceArray as DeviceArray
from llmq.ops.exchange import as_array as as_array
from llmq.ops.exchange import operand
from llmq.ops.routines import Allocate, Given, Operands, Routine, single
from llmq.scaling import SCALINGS
from llmq.tensor import LARGEST, Form

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = Any  # of any library
SCALED = ("current", "rowwise", "blockwise", "tilewise")  # how copies may be scaled
LAYOUTS = {"row": frozenset({"rows", "rows_scale"}), "col": frozenset({"columns", "columns_scale"})}
LAYOUTS["both"] = LAYOUTS["row"] | LAYOUTS["col"]


class Lent(TypedDict, total=False):
    """Memory of the caller: for results, and for scratch."""

    out: Any
    allocate: Allocate


# lengths that follow from others


def _even(known: Mapping[str, int], numbers: Mapping[str, Any]) -> dict[str, int]:
    """Of a head that has halves, the length; and of angles for one row or for each."""
    rows = {"R": known["B"] if known["R"] > 1 else 1} if "R" in known else {}
    return {"H": max(2, known["H"] // 2 * 2), **rows}


def _of_heads(known: Mapping[str, int], numbers: Mapping[str, Any]) -> dict[str, int]:
    """Width of packed heads, by that of one."""
    return {"Q": (numbers["num_heads"] + 2 * numbers["num_kv_heads"]) * known["H"], **_even(known, numbers)}


def _of_attention(known: Mapping[str, int], numbers: Mapping[str, Any]) -> dict[str, int]:
    """Width of the packed heads and of att, and number of query heads."""
    heads, kv_heads = numbers["num_heads"], numbers["num_kv_heads"]
    head_dim = max(1, known["Q"] // (heads + 2 * kv_heads))
    return {"Q": (heads + 2 * kv_heads) * head_dim, "A": heads * head_dim, "G": heads}


def _of_halves(known: Mapping[str, int], numbers: Mapping[str, Any]) -> dict[str, int]:
    half = max(1, known["D"] // 2)
    return {"D": 2 * half, "F": half}


# numbers that are looked at


def _in_table(operands: Operands) -> None:
    num_rows = operands.given("table").shape[0]
    operands.refuse("positions", lambda x: (x < 0) | (x >= num_rows), f"and the table has rows 0 to {num_rows - 1}")


def _ascending(operands: Operands) -> None:
    last = operands.given("qkv").shape[1]
    why = f"not ascending from 0 to {last}"
    operands.refuse("borders", lambda x: (x[:, 0] != 0) | (x[:, -1] != last) | (np.diff(x) < 0).any(axis=1), why)


_RMSNORM = single("rmsnorm_forward", "x ...C, rstd ... stat <- res ...C, weight C")
_RMSNORM_BACKWARD = single(
    "rmsnorm_backward", "d_out ...C, d_weight C grad <- d_x ...C, d_res? ...C, res ...C, weight C, rstd ... stat"
)
_TURN = "table PH stat, positions BT int"
_ROPE = single("rope_forward", f"out BTQ <- qkv BTQ, {_TURN}", check=_in_table, lengths=_of_heads)
_ROPE_BACKWARD = single("rope_backward", f"d_qkv BTQ <- d_out BTQ, {_TURN}", check=_in_table, lengths=_of_heads)
_VIEWS: Any = {"lengths": _even, "takes_views": True}
_ANGLES = "cos RTH, sin RTH"
_ROPE_HEADS = single("rope_heads_forward", f"out_q BTGH, out_k BTKH <- q BTGH, k BTKH, {_ANGLES}", **_VIEWS)
_ROPE_HEADS_BACKWARD = single(
    "rope_heads_backward", f"d_q BTGH, d_k BTKH <- d_out_q BTGH, d_out_k BTKH, {_ANGLES}", **_VIEWS
)
_SWIGLU = single("swiglu_forward", "act ...F <- gate_up ...D", lengths=_of_halves)
_SWIGLU_BACKWARD = single("swiglu_backward", "d_gate_up ...D <- d_act ...F, gate_up ...D", lengths=_of_halves)
_SWIGLU_APART = single("swiglu_apart_forward", "act ...F <- gate ...F, up ...F", "swiglu")
_SWIGLU_APART_BACKWARD = single(
    "swiglu_apart_backward", "d_gate ...F, d_up ...F <- d_act ...F, gate ...F, up ...F", "swiglu_backward"
)


def _attention(op: str, axes: str) -> list[Routine]:
    """Without documents and with them, which have other axes of log-sums."""
    kinds: Any = (("BGT", None), ("BTG", _ascending))
    return [single(op, axes.format(lse=lse), check=check, lengths=_of_attention) for lse, check in kinds]


_ATTENTION = _attention("attention_forward", "att BTA, lse {lse} stat <- qkv BTQ, borders? BD int")
_ATTENTION_BACKWARD = _attention(
    "attention_backward", "d_qkv BTQ <- d_att BTA, qkv BTQ, att BTA, lse {lse} stat, borders? BD int"
)


@dataclass(frozen=True)
class Quantized:
    """Copies in fp8 (uint8 in CuPy) of values of `shape` and `dtype`: `rows`, and `columns` (K,M), which is transposed.

    Scales multiply the copies. What was not made is None.
    """

    rows: Array
    columns: Array
    rows_scale: Array
    columns_scale: Array
    format: str
    scaling: str
    shape: tuple[int, ...]
    dtype: str

    def copy(self, layout: str, name: str) -> Given:
        """One of both as a call takes it."""
        data, scale = (self.rows, self.rows_scale) if layout == "row" else (self.columns, self.columns_scale)
        if data is None:
            raise UsageError(f"{name} is quantized without {layout}s, which the product reads: use layout='both'")
        form = Form(self.format, layout, self.scaling)
        return Given(operand(data, name), self.shape, self.dtype, form, operand(scale, f"the scale of {name}"))


def rmsnorm(
    res: Array, weight: Array, *, eps: float, offset: float = 0.0, **memory: Unpack[Lent]
) -> tuple[Array, Array]:
    """x (...,C), rstd (...) <- res (...,C), weight (C,): res * rstd * (weight + offset), rstd = 1 / sqrt(mean(res^2) +
    eps). The offset is 0, or 1 (Gemma)."""
    return _RMSNORM(res, weight, numbers={"eps": eps, "offset": offset}, **memory)


def rmsnorm_backward(
    d_x: Array,
    res: Array,
    weight: Array,
    rstd: Array,
    d_res: Array | None = None,
    *,
    offset: float = 0.0,
    needs: Collection[str] = ("res", "weight"),
    **memory: Unpack[Lent],
) -> tuple[Array, Array]:
    """d_out (...,C), d_weight (C,) <- d_x, res (...,C), weight (C,), rstd (...); d_res (...,C) is added to d_out.

    d_out may be d_x or d_res; d_weight may be fp32. What is not in `needs` is None. The offset is that of forward.
    """
    wanted = _needed(needs, res="d_out", weight="d_weight")
    return _RMSNORM_BACKWARD(d_x, d_res, res, weight, rstd, numbers={"offset": offset}, wanted=wanted, **memory)


def rope(
    qkv: Array, table: Array, positions: Array, *, num_heads: int, num_kv_heads: int, **memory: Unpack[Lent]
) -> Array:
    """out <- qkv (B,T,(Hq+2Hkv)*Hd), table (P,Hd) of cos | sin in fp32, positions (B,T) int32.

    Query and key heads are turned: channel i of a head's first half and of its second half are a pair. out may be qkv.
    """
    numbers = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return _ROPE(qkv, table, positions, numbers=numbers, **memory)


def rope_backward(
    d_out: Array, table: Array, positions: Array, *, num_heads: int, num_kv_heads: int, **memory: Unpack[Lent]
) -> Array:
    """d_qkv <- d_out (B,T,(Hq+2Hkv)*Hd), table, positions as in `rope`. out may be d_out."""
    numbers = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return _ROPE_BACKWARD(d_out, table, positions, numbers=numbers, **memory)


def rope_heads(q: Array, k: Array, cos: Array, sin: Array, **memory: Unpack[Lent]) -> tuple[Array, Array]:
    """q', k' <- q (B,T,Hq,Hd), k (B,T,Hkv,Hd), cos, sin (B or 1,T,Hd), whose halves are equal, in the dtype of q.

    Heads as transformers has them: q, k and out may be views whose last axis is contiguous. out may be q and k.
    """
    return _ROPE_HEADS(q, k, cos, sin, **memory)


def rope_heads_backward(d_q: Array, d_k: Array, cos: Array, sin: Array, **memory: Unpack[Lent]) -> tuple[Array, Array]:
    """Gradients of q and k <- those of q' and k', cos, sin as in `rope_heads`. out may be d_q and d_k."""
    return _ROPE_HEADS_BACKWARD(d_q, d_k, cos, sin, **memory)


def swiglu(gate: Array, up: Array | None = None, **memory: Unpack[Lent]) -> Array:
    """act (...,F) = silu(gate) * up <- gate, up (...,F), or one array gate_up (...,2F) of both, gate first."""
    return _SWIGLU(gate, **memory) if up is None else _SWIGLU_APART(gate, up, **memory)


def swiglu_backward(d_act: Array, gate: Array, up: Array | None = None, **memory: Unpack[Lent]) -> Any:
    """d_gate, d_up (...,F) <- d_act, gate, up (...,F); or one d_gate_up (...,2F) <- d_act, gate_up.

    out may be gate and up.
    """
    return _SWIGLU_BACKWARD(d_act, gate, **memory) if up is None else _SWIGLU_APART_BACKWARD(d_act, gate, up, **memory)


def attention(
    qkv: Array,
    borders: Array | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None = None,
    scale: float | None = None,
    **memory: Unpack[Lent],
) -> tuple[Array, Array]:
    """att (B,T,Hq*Hd), lse (B,Hq,T) <- qkv (B,T,(Hq+2Hkv)*Hd), causal; a query sees `window` keys at most, its own too.

    `scale` multiplies q k (None: 1 / sqrt(Hd)); lse = log(sum over seen keys of exp(scale q k)). `borders` (B,D+1)
    int32 are the first tokens of a row's documents, ascending from 0, then T repeated; lse is (B,T,Hq) then.
    """
    packed = operand(qkv, "qkv")  # beside qkv, which keeps its memory
    numbers = _attention_numbers(packed.shape, num_heads, num_kv_heads, window, scale)
    return _ATTENTION[borders is not None](packed, borders, numbers=numbers, **memory)


def attention_backward(
    d_att: Array,
    qkv: Array,
    att: Array,
    lse: Array,
    borders: Array | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None = None,
    scale: float | None = None,
    **memory: Unpack[Lent],
) -> Array:
    """d_qkv like qkv <- d_att, att (B,T,Hq*Hd), qkv, lse and the rest as in `attention`."""
    packed = operand(qkv, "qkv")  # beside qkv, which keeps its memory
    numbers = _attention_numbers(packed.shape, num_heads, num_kv_heads, window, scale)
    return _ATTENTION_BACKWARD[borders is not None](d_att, packed, att, lse, borders, numbers=numbers, **memory)


def _attention_numbers(
    qkv: tuple[int, ...], num_heads: int, num_kv_heads: int, window: int | None, scale: float | None
) -> dict[str, Any]:
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise UsageError(f"attention: {num_heads} query heads are no multiple of {num_kv_heads} key-value heads")
    if window is not None and window < 1:
        raise UsageError(f"attention: a window of {window} keys sees nothing: use 1 or more, or None for all")
    width = qkv[-1] if qkv else 0
    scale = max(1, width // (num_heads + 2 * num_kv_heads)) ** -0.5 if scale is None else scale
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return {**heads, "window": window, "longest": None, "softmax_scale": scale}


def linear(
    x: Array | Quantized,
    weight: Array | Quantized,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    dtype: str | None = None,
    scaling: str = "current",
    **memory: Unpack[Lent],
) -> Array:
    """y (...,N) = x weight^T + bias + residual <- x (...,K), weight (N,K), bias (N,), residual (...,N).

    out may be residual. With `dtype` "e4m3", or with an operand that is Quantized (in rows), the product is in fp8:
    arrays are quantized with `scaling` (current, rowwise or blockwise) into temporaries.
    """
    copies = _copy("x", x, "row"), _copy("weight", weight, "row")
    return maps.LINEAR(*copies, bias, residual, numbers=_precision(dtype, scaling, x, weight), **memory)


def linear_backward(
    d_y: Array | Quantized,
    x: Array | Quantized | None,
    weight: Array | Quantized | None,
    *,
    needs: Collection[str] = ("x", "weight"),
    dtype: str | None = None,
    scaling: str = "current",
    **memory: Unpack[Lent],
) -> tuple[Array, Array, Array]:
    """d_x (...,K), d_weight (N,K), d_bias (N,) <- d_y (...,N), x (...,K), weight (N,K).

    `needs` are among "x", "weight" and "bias"; what is not is None. d_weight may be fp32. fp8 as in `linear`, where d_x
    reads d_y in rows and weight in columns, d_weight d_y and x in columns, and d_bias d_y as values.
    """
    wanted = _needed(needs, x="d_x", weight="d_weight", bias="d_bias")
    if "bias" in needs and isinstance(d_y, Quantized):
        raise UsageError("linear_backward: the gradient of the bias reads d_y as values, and it is quantized")
    reads = [layout for layout, name in (("row", "x"), ("col", "weight")) if name in needs] or ["row"]
    inputs = (
        _copy("d_y", d_y, reads[0]),
        _copy("d_y", d_y, reads[1]) if isinstance(d_y, Quantized) and len(reads) > 1 else None,
        _copy("x", x, "col") if "weight" in needs else None,
        _copy("weight", weight, "col") if "x" in needs else None,
    )
    numbers = _precision(dtype, scaling, d_y, x, weight)
    return maps.LINEAR_BACKWARD(*inputs, numbers=numbers, wanted=wanted, **memory)


def linear_cross_entropy(
    x: Array,
    weight: Array,
    targets: Array,
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    needs: Collection[str] = ("x", "weight"),
    **memory: Unpack[Lent],
) -> tuple[Array, Array, Array]:
    """loss (...), d_x (...,C), d_weight (V,C) <- x (...,C), weight (V,C), targets (...) int32: -log p by x weight^T.

    Logits exist for `chunk` tokens at a time (None: up to 256 MiB of them). loss is that of each token, 0 where the
    target is -100. The gradients, of the sum of losses, are made in the same pass; what is not in `needs` is None, and
    d_weight may be fp32. `z_loss` times log(sum(exp(logits)))^2 is added; rows from `vocab_size` on are no tokens.
    """
    wanted = _needed(needs, x="d_x", weight="d_weight") | {"loss"}
    if chunk is not None and chunk < 1:
        raise UsageError(f"linear_cross_entropy: a chunk of {chunk} tokens is none: use 1 or more, or None")
    numbers = {"chunk": chunk, "z_loss": z_loss, "vocab_size": vocab_size}
    return maps.HEAD(x, weight, targets, numbers=numbers, wanted=wanted, **memory)


def quantize(
    x: Array,
    *,
    format: str = "e4m3",
    scaling: str = "current",
    layout: str = "row",
    out: Quantized | None = None,
    allocate: Allocate = None,
) -> Quantized:
    """Copies of x (...,K) in fp8, `format` e4m3 or e5m2: x / scale, saturated, rounded to nearest even.

    `layout`: "row", "col" (transposed, for products over the other axes) or "both". `scaling`: current (one scale, amax
    over the largest number of the format), rowwise (one a row), blockwise (of 128 numbers) or tilewise (of 128 x 128).
    """
    for name, value, known in (("format", format, LARGEST), ("scaling", scaling, SCALED), ("layout", layout, LAYOUTS)):
        if value not in known:
            raise UsageError(f"quantize: {name} {value!r} is none of {', '.join(known)}")
    values = operand(x, "x")  # beside x, which keeps its memory
    wanted = LAYOUTS[layout] - (frozenset() if SCALINGS[scaling].owns_scales or layout != "both" else {"columns_scale"})
    into = None if out is None else (out.rows, out.rows_scale, out.columns, out.columns_scale)
    numbers = {"format": format, "scaling": scaling}
    found = maps.QUANTIZE(values, numbers=numbers, wanted=wanted, out=into, allocate=allocate)
    rows, rows_scale, columns, columns_scale = found
    shared = rows_scale if "columns" in wanted and columns_scale is None else columns_scale
    return Quantized(rows, columns, rows_scale, shared, format, scaling, values.shape, values.dtype)


def dequantize(copy: Quantized, dtype: str | None = None, **memory: Unpack[Lent]) -> Array:
    """Values (...,K) <- the rows of a copy, in `dtype`, or in that of the values that it was made of."""
    return maps.DEQUANTIZE(copy.copy("row", "copy")._replace(dtype=dtype or copy.dtype), **memory)


def _copy(name: str, x: Any, layout: str) -> Any:
    """An operand of a product: of one that is quantized, the copy in this layout."""
    if isinstance(x, Quantized):
        return x.copy(layout, name)
    return operand(x, name) if x is None else x  # refuses None: a routine takes it for what is not read


def _precision(dtype: str | None, scaling: str, *operands: Any) -> dict[str, Any]:
    """Numbers of a linear map."""
    if dtype not in (None, "e4m3") or scaling not in maps.SCALED:
        known = f"dtype e4m3 or None, and scaling {', '.join(maps.SCALED)}"
        raise UsageError(f"linear: dtype {dtype!r} with scaling {scaling!r} is unknown: use {known}")
    return {"in_fp8": dtype == "e4m3" or any(isinstance(x, Quantized) for x in operands), "scaling": scaling}


def _needed(needs: Collection[str], **outputs: str) -> frozenset[str]:
    """The outputs that are needed, by the names that callers have for them."""
    if unknown := set(needs) - set(outputs):
        raise UsageError(f"needs has {', '.join(sorted(unknown))}: use {', '.join(outputs)}")
    return frozenset(outputs[name] for name in needs)
