"""The kernels as functions on arrays: NumPy's on the CPU, CuPy's and whatever has `__dlpack__` on the CPU or a GPU.

Results are new arrays of NumPy, on a GPU of CuPy, or they are written into `out`, which is returned then: an array, or
a tuple in the order of the results in which None stands for a new one. It may be an input where a function says so. On
a GPU launches go to CuPy's current stream, and `allocate(num_bytes)` gives scratch, an array of the GPU, in place of
CuPy's pool. No input is copied.

Float operands of a call have one dtype: fp32, bf16 (of ml_dtypes), on the CPU also fp64. Statistics and losses are
fp32, or fp64 too. All are contiguous, and on a GPU aligned to 16 bytes. What does not fit raises UsageError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmq.errors import UsageError
from llmq.ops import linear_maps as maps
from llmq.ops.calls import Allocate, call, given
from llmq.ops.exchange import DeviceArray as DeviceArray
from llmq.ops.exchange import as_array as as_array
from llmq.ops.exchange import operand
from llmq.ops.routines import VALUES, Given, Routine, single
from llmq.scaling import SCALINGS
from llmq.tensor import LARGEST, Form

Array = Any  # of any library
SCALED = ("current", "rowwise", "blockwise", "tilewise")  # how copies may be scaled
LAYOUTS = {"row": frozenset({"rows", "rows_scale"}), "col": frozenset({"columns", "columns_scale"})}
LAYOUTS["both"] = LAYOUTS["row"] | LAYOUTS["col"]

_HEADS = ("num_heads", "num_kv_heads")
_RMSNORM = single("rmsnorm_forward", "rmsnorm", {"x": "...C", "rstd": "... stat"}, {"res": "...C", "weight": "C"})
_RMSNORM_BACKWARD = single(
    "rmsnorm_backward",
    "rmsnorm_backward",
    {"d_out": "...C", "d_weight": "C grad"},
    {"d_x": "...C", "d_res": "...C", "res": "...C", "weight": "C", "rstd": "... stat"},
)


def _of_heads(known: Mapping[str, int], numbers: Mapping[str, Any]) -> dict[str, int]:
    """Width of packed heads, by that of one."""
    return {"Q": (numbers["num_heads"] + 2 * numbers["num_kv_heads"]) * known["H"], **_even(known, numbers)}


def _even(known: Mapping[str, int], numbers: Mapping[str, Any]) -> dict[str, int]:
    """Of a head that has halves, the length; and of angles for one row or for each."""
    rows = {"R": known["B"] if known["R"] > 1 else 1} if "R" in known else {}
    return {"H": max(2, known["H"] // 2 * 2), **rows}


def _of_attention(known: Mapping[str, int], numbers: Mapping[str, Any]) -> dict[str, int]:
    """Width of the packed heads and of att, and number of query heads."""
    heads, kv_heads = (numbers[name] for name in _HEADS)
    head_dim = max(1, known["Q"] // (heads + 2 * kv_heads))
    return {"Q": (heads + 2 * kv_heads) * head_dim, "A": heads * head_dim, "G": heads}


_TURN = {"table": "PH stat", "positions": "BT int"}
_ROPE = single("rope_forward", "rope", {"out": "BTQ"}, {"qkv": "BTQ", **_TURN}, lengths=_of_heads)
_ROPE_BACKWARD = single(
    "rope_backward", "rope_backward", {"d_qkv": "BTQ"}, {"d_out": "BTQ", **_TURN}, lengths=_of_heads
)
_ANGLES = {"cos": "RTH", "sin": "RTH"}
_ROPE_HEADS = single(
    "rope_heads_forward",
    "rope_heads",
    {"out_q": "BTGH", "out_k": "BTKH"},
    {"q": "BTGH", "k": "BTKH", **_ANGLES},
    lengths=_even,
    takes_views=True,
)
_ROPE_HEADS_BACKWARD = single(
    "rope_heads_backward",
    "rope_heads_backward",
    {"d_q": "BTGH", "d_k": "BTKH"},
    {"d_out_q": "BTGH", "d_out_k": "BTKH", **_ANGLES},
    lengths=_even,
    takes_views=True,
)


def _of_halves(known: Mapping[str, int], numbers: Mapping[str, Any]) -> dict[str, int]:
    half = max(1, known["D"] // 2)
    return {"D": 2 * half, "F": half}


_SWIGLU = single("swiglu_forward", "swiglu", {"act": "...F"}, {"gate_up": "...D"}, lengths=_of_halves)
_SWIGLU_BACKWARD = single(
    "swiglu_backward",
    "swiglu_backward",
    {"d_gate_up": "...D"},
    {"d_act": "...F", "gate_up": "...D"},
    lengths=_of_halves,
)
_SWIGLU_APART = single("swiglu_apart_forward", "swiglu", {"act": "...F"}, {"gate": "...F", "up": "...F"})
_SWIGLU_APART_BACKWARD = single(
    "swiglu_apart_backward",
    "swiglu_backward",
    {"d_gate": "...F", "d_up": "...F"},
    {"d_act": "...F", "gate": "...F", "up": "...F"},
)


def _attention(lse: str) -> tuple[Routine, Routine]:
    """Forward and backward where log-sums have these axes."""
    forward = single(
        "attention_forward",
        "attention",
        {"att": "BTA", "lse": f"{lse} stat"},
        {"qkv": "BTQ", "borders": "BD int"},
        lengths=_of_attention,
    )
    backward = single(
        "attention_backward",
        "attention_backward",
        {"d_qkv": "BTQ"},
        {"d_att": "BTA", "qkv": "BTQ", "att": "BTA", "lse": f"{lse} stat", "borders": "BD int"},
        lengths=_of_attention,
    )
    return forward, backward


_ATTENTION, _ATTENTION_OF_DOCUMENTS = _attention("BGT"), _attention("BTG")


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
    res: Array, weight: Array, *, eps: float, out: Any = None, allocate: Allocate = None
) -> tuple[Array, Array]:
    """x (...,C), rstd (...) <- res (...,C), weight (C,): res * rstd * weight, rstd = 1 / sqrt(mean(res^2) + eps)."""
    return call(_RMSNORM, {"res": res, "weight": weight}, {"eps": eps}, out, allocate)


def rmsnorm_backward(
    d_x: Array,
    res: Array,
    weight: Array,
    rstd: Array,
    d_res: Array | None = None,
    *,
    needs: tuple[str, ...] = ("res", "weight"),
    out: Any = None,
    allocate: Allocate = None,
) -> tuple[Array, Array]:
    """d_out (...,C), d_weight (C,) <- d_x, res (...,C), weight (C,), rstd (...); d_res (...,C) is added to d_out.

    d_out may be d_x or d_res; d_weight may be fp32. What is not in `needs` is None.
    """
    inputs = {"d_x": d_x, "d_res": d_res, "res": res, "weight": weight, "rstd": rstd}
    return call(_RMSNORM_BACKWARD, inputs, {}, out, allocate, _needed(needs, res="d_out", weight="d_weight"))


def rope(
    qkv: Array,
    table: Array,
    positions: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    out: Any = None,
    allocate: Allocate = None,
) -> Array:
    """out <- qkv (B,T,(Hq+2Hkv)*Hd), table (P,Hd) of cos | sin in fp32, positions (B,T) int32.

    Query and key heads are turned: channel i of a head's first half and of its second half are a pair. out may be qkv.
    """
    numbers = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return call(_ROPE, {"qkv": qkv, "table": table, "positions": positions}, numbers, out, allocate)


def rope_backward(
    d_out: Array,
    table: Array,
    positions: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    out: Any = None,
    allocate: Allocate = None,
) -> Array:
    """d_qkv <- d_out (B,T,(Hq+2Hkv)*Hd), table, positions as in `rope`. out may be d_out."""
    numbers = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return call(_ROPE_BACKWARD, {"d_out": d_out, "table": table, "positions": positions}, numbers, out, allocate)


def rope_heads(
    q: Array, k: Array, cos: Array, sin: Array, *, out: Any = None, allocate: Allocate = None
) -> tuple[Array, Array]:
    """q', k' <- q (B,T,Hq,Hd), k (B,T,Hkv,Hd), cos, sin (B or 1,T,Hd), whose halves are equal, in the dtype of q.

    Heads as transformers has them: q, k and out may be views whose last axis is contiguous. out may be q and k.
    """
    return call(_ROPE_HEADS, {"q": q, "k": k, "cos": cos, "sin": sin}, {}, out, allocate)


def rope_heads_backward(
    d_q: Array, d_k: Array, cos: Array, sin: Array, *, out: Any = None, allocate: Allocate = None
) -> tuple[Array, Array]:
    """Gradients of q and k <- those of q' and k', cos, sin as in `rope_heads`. out may be d_q and d_k."""
    return call(_ROPE_HEADS_BACKWARD, {"d_out_q": d_q, "d_out_k": d_k, "cos": cos, "sin": sin}, {}, out, allocate)


def swiglu(gate: Array, up: Array | None = None, *, out: Any = None, allocate: Allocate = None) -> Array:
    """act (...,F) = silu(gate) * up <- gate, up (...,F), or one array gate_up (...,2F) of both, gate first."""
    if up is None:
        return call(_SWIGLU, {"gate_up": gate}, {}, out, allocate)
    return call(_SWIGLU_APART, {"gate": gate, "up": up}, {}, out, allocate)


def swiglu_backward(
    d_act: Array, gate: Array, up: Array | None = None, *, out: Any = None, allocate: Allocate = None
) -> Any:
    """d_gate, d_up (...,F) <- d_act, gate, up (...,F); or one d_gate_up (...,2F) <- d_act, gate_up.

    out may be gate and up.
    """
    if up is None:
        return call(_SWIGLU_BACKWARD, {"d_act": d_act, "gate_up": gate}, {}, out, allocate)
    return call(_SWIGLU_APART_BACKWARD, {"d_act": d_act, "gate": gate, "up": up}, {}, out, allocate)


def attention(
    qkv: Array,
    borders: Array | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None = None,
    scale: float | None = None,
    out: Any = None,
    allocate: Allocate = None,
) -> tuple[Array, Array]:
    """att (B,T,Hq*Hd), lse (B,Hq,T) <- qkv (B,T,(Hq+2Hkv)*Hd), causal; a query sees `window` keys at most, its own too.

    `scale` multiplies q k (None: 1 / sqrt(Hd)); lse = log(sum over seen keys of exp(scale q k)). `borders` (B,D+1)
    int32 are the first tokens of a row's documents, ascending from 0, then T repeated; lse is (B,T,Hq) then.
    """
    routine = _ATTENTION[0] if borders is None else _ATTENTION_OF_DOCUMENTS[0]
    packed = given(qkv, "qkv")  # beside qkv, which keeps its memory
    numbers = _attention_numbers(packed.shape, num_heads, num_kv_heads, window, scale)
    return call(routine, {"qkv": packed, "borders": borders}, numbers, out, allocate)


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
    out: Any = None,
    allocate: Allocate = None,
) -> Array:
    """d_qkv like qkv <- d_att, att (B,T,Hq*Hd), qkv, lse and the rest as in `attention`."""
    routine = _ATTENTION[1] if borders is None else _ATTENTION_OF_DOCUMENTS[1]
    packed = given(qkv, "qkv")  # beside qkv, which keeps its memory
    numbers = _attention_numbers(packed.shape, num_heads, num_kv_heads, window, scale)
    inputs = {"d_att": d_att, "qkv": packed, "att": att, "lse": lse, "borders": borders}
    return call(routine, inputs, numbers, out, allocate)


def _attention_numbers(
    qkv: tuple[int, ...], num_heads: int, num_kv_heads: int, window: int | None, scale: float | None
) -> dict[str, Any]:
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise UsageError(f"attention: {num_heads} query heads are no multiple of {num_kv_heads} key-value heads")
    if window is not None and window < 1:
        raise UsageError(f"attention: a window of {window} keys sees nothing: use 1 or more, or None for all")
    scale = max(1, qkv[-1] // (num_heads + 2 * num_kv_heads)) ** -0.5 if scale is None else scale
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
    out: Any = None,
    allocate: Allocate = None,
) -> Array:
    """y (...,N) = x weight^T + bias + residual <- x (...,K), weight (N,K), bias (N,), residual (...,N).

    out may be residual. With `dtype` "e4m3", or with an operand that is Quantized (in rows), the product is in fp8:
    arrays are quantized with `scaling` (current, rowwise or blockwise) into temporaries.
    """
    inputs = {**_copies("x", x, "row"), **_copies("weight", weight, "row"), "bias": bias, "residual": residual}
    return call(maps.LINEAR, inputs, _precision(dtype, scaling, x, weight), out, allocate)


def linear_backward(
    d_y: Array | Quantized,
    x: Array | Quantized | None,
    weight: Array | Quantized | None,
    *,
    needs: tuple[str, ...] = ("x", "weight"),
    dtype: str | None = None,
    scaling: str = "current",
    out: Any = None,
    allocate: Allocate = None,
) -> tuple[Array, Array, Array]:
    """d_x (...,K), d_weight (N,K), d_bias (N,) <- d_y (...,N), x (...,K), weight (N,K).

    `needs` are among "x", "weight" and "bias"; what is not is None. d_weight may be fp32. fp8 as in `linear`, where d_x
    reads d_y in rows and weight in columns, d_weight d_y and x in columns, and d_bias d_y as values.
    """
    wanted = _needed(needs, x="d_x", weight="d_weight", bias="d_bias")
    inputs = _copies("d_y", d_y, *(["row"] if "x" in needs else []), *(["col"] if "weight" in needs else []))
    inputs |= _copies("x", x, "col") if "weight" in needs else {}
    inputs |= _copies("weight", weight, "col") if "x" in needs else {}
    if "bias" in needs and isinstance(d_y, Quantized):
        raise UsageError("linear_backward: the gradient of the bias reads d_y as values, and it is quantized")
    return call(maps.LINEAR_BACKWARD, inputs, _precision(dtype, scaling, d_y, x, weight), out, allocate, wanted)


def linear_cross_entropy(
    x: Array,
    weight: Array,
    targets: Array,
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    needs: tuple[str, ...] = ("x", "weight"),
    out: Any = None,
    allocate: Allocate = None,
) -> tuple[Array, Array, Array]:
    """loss (...), d_x (...,C), d_weight (V,C) <- x (...,C), weight (V,C), targets (...) int32: -log p by x weight^T.

    Logits exist for `chunk` tokens at a time (None: up to 256 MiB of them). loss is that of each token, 0 where the
    target is -100. The gradients, of the sum of losses, are made in the same pass; what is not in `needs` is None, and
    d_weight may be fp32. `z_loss` times log(sum(exp(logits)))^2 is added; rows from `vocab_size` on are no tokens.
    """
    wanted = _needed(needs, x="d_x", weight="d_weight")
    if chunk is not None and chunk < 1:
        raise UsageError(f"linear_cross_entropy: a chunk of {chunk} tokens is none: use 1 or more, or None")
    rows = given(weight, "weight")
    if vocab_size is not None and not 0 < vocab_size <= rows.shape[0]:
        raise UsageError(f"linear_cross_entropy: vocab_size {vocab_size}, and weight has {rows.shape[0]} rows")
    numbers = {"chunk": chunk, "z_loss": z_loss, "vocab_size": vocab_size}
    return call(maps.HEAD, {"x": x, "weight": rows, "targets": targets}, numbers, out, allocate, wanted | {"loss"})


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
    values = given(x, "x")
    wanted = LAYOUTS[layout] - (frozenset() if SCALINGS[scaling].owns_scales or layout != "both" else {"columns_scale"})
    into = None if out is None else (out.rows, out.rows_scale, out.columns, out.columns_scale)
    numbers = {"format": format, "scaling": scaling}
    rows, rows_scale, columns, columns_scale = call(maps.QUANTIZE, {"x": values}, numbers, into, allocate, wanted)
    shared = rows_scale if "columns" in wanted and columns_scale is None else columns_scale
    return Quantized(rows, columns, rows_scale, shared, format, scaling, values.shape, values.dtype)


def dequantize(copy: Quantized, dtype: str | None = None, *, out: Any = None, allocate: Allocate = None) -> Array:
    """Values (...,K) <- the rows of a copy, in `dtype`, or in that of the values that it was made of."""
    rows = copy.copy("row", "copy")
    return call(maps.DEQUANTIZE, {"copy": rows._replace(dtype=dtype or copy.dtype)}, {}, out, allocate)


def _copies(name: str, x: Any, *layouts: str) -> dict[str, Any]:
    """An operand of a product, in the layouts of its copies if it is quantized: the second has a name of its own."""
    if not isinstance(x, Quantized):
        return {name: x}
    return {key: x.copy(layout, name) for key, layout in zip((name, f"{name}_columns"), layouts, strict=False)}


def _precision(dtype: str | None, scaling: str, *operands: Any) -> dict[str, Any]:
    """Numbers of a linear map."""
    if dtype not in (None, *VALUES, "e4m3") or scaling not in maps.SCALED:
        known = f"dtype e4m3 or None, and scaling {', '.join(maps.SCALED)}"
        raise UsageError(f"linear: dtype {dtype!r} with scaling {scaling!r} is unknown: use {known}")
    return {"in_fp8": dtype == "e4m3" or any(isinstance(x, Quantized) for x in operands), "scaling": scaling}


@cache
def _needed(needs: tuple[str, ...], **outputs: str) -> frozenset[str]:
    """The outputs that are needed, by the names that callers have for them."""
    if unknown := set(needs) - set(outputs):
        raise UsageError(f"needs has {', '.join(sorted(unknown))}: use {', '.join(outputs)}")
    return frozenset(outputs[name] for name in needs)
