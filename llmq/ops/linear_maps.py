"""Linear maps on arrays, of values or of copies in fp8, and the head with its loss in chunks of tokens: routines of
several ops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.routines import Fits, Numbers, Operands, Routine
from llmq.sites.fp8 import RECIPES
from llmq.tensor import COLSUM, DTYPES, IGNORED, LARGEST, Form, scale_shape, stored_shape

UNWANTED = Output("unwanted", (), "fp32", ())
WIDTH = 64  # logits lie in rows of a multiple of this, which products read 16 bytes at a time
SCALED = ("current", "rowwise", "blockwise")  # recipes that need no scales of earlier steps
LOGITS_BYTES = 1 << 28  # of a chunk at most, where the caller does not say how many tokens it has
CHUNK_STEP = 128  # tokens


def _read_by(role: str, layout: str, scaling: str) -> Form:
    """The copy of an operand (x, d_y or weight) that a product reads, by a recipe of fp8."""
    recipe = RECIPES[scaling]
    by = recipe.weight if role == "weight" else recipe.rows if layout == "row" else recipe.columns
    return Form("e4m3", layout, by)


def _write(operands: Operands, copies: Sequence[Tensor], x: Tensor) -> None:
    """Copies, in one fp8 format, <- x; those without scales of their own share one."""
    forms = {copy: copy.form for copy in copies if copy.form is not None}
    own = tuple(copy for copy, form in forms.items() if form.owns_scales)
    others = tuple(copy for copy, form in forms.items() if not form.owns_scales)
    cell = _scale(others[0]) if others else UNWANTED
    limit = LARGEST[next(iter(forms.values())).dtype]
    if own:
        operands.ops["quantize"](Output("copies", x.shape, operands.dtype, own), cell, x, limit=limit)
    else:
        operands.ops["amax_scale"](cell, x, limit=limit)
    if others:
        operands.ops["cast"](Output("copies", x.shape, operands.dtype, others), x)


def _scale(copy: Tensor) -> Output:
    """The one scale of a copy."""
    assert copy.scale is not None
    return Output("scale", (1,), "fp32", (Tensor("scale", copy.scale, (1,)),))


def _read(operands: Operands, name: str, *layouts: str) -> list[Tensor]:
    """What products read of an operand: its values, or a copy in each of these layouts."""
    given = operands.given(name)
    if not operands.numbers["in_fp8"]:
        return [given] * len(layouts)
    if given.form is not None:
        found = {x.form.layout: x for x in (given, operands.inputs.get(f"{name}_columns")) if x is not None and x.form}
        return [found[layout] for layout in layouts]
    forms = [_read_by(name, layout, operands.numbers["scaling"]) for layout in layouts]
    made = [operands.make(given.shape, operands.dtype, form) for form in forms]
    shared = made[-1].scale  # of the copies that own none: the last is among them if there are any
    made = [x if form.owns_scales else replace(x, scale=shared) for x, form in zip(made, forms, strict=True)]
    _write(operands, made, given)
    return made


def _linear(operands: Operands) -> None:
    (x,), (weight,) = _read(operands, "x", "row"), _read(operands, "weight", "row")
    added = (operands.inputs[name] for name in ("bias", "residual"))
    operands.ops["linear_forward"](operands.outputs["y"], x, weight, *added)


def _linear_backward(operands: Operands) -> None:
    d_x, d_weight, d_bias = operands.outputs.values()
    layouts = [layout for layout, wanted in (("row", d_x.wanted), ("col", d_weight.wanted)) if wanted]
    d_y = dict(zip(layouts, _read(operands, "d_y", *layouts), strict=True)) if layouts else {}
    if d_x.wanted:
        (weight,) = _read(operands, "weight", "col")
        operands.ops["linear_dgrad"](d_x, d_y["row"], weight, None)
    if d_weight.wanted:
        (x,) = _read(operands, "x", "col")
        operands.ops["linear_wgrad"](d_weight, d_y["col"], x)
    if d_bias.wanted:
        values = operands.given("d_y")
        form = replace(COLSUM, dtype="fp64") if operands.dtype == "fp64" else COLSUM
        sums = operands.make(values.shape, operands.dtype, form)
        operands.ops["cast"](Output("d_y", values.shape, operands.dtype, (sums,)), values)
        operands.ops["bias_backward"](d_bias, sums)


def _head(operands: Operands) -> None:
    """Logits of some tokens at a time, their losses, and what they add to the gradients."""
    loss, d_x, d_weight = operands.outputs.values()
    x, weight, targets = (operands.given(name) for name in ("x", "weight", "targets"))
    count, vocab = math.prod(x.shape[:-1]), weight.shape[0]
    chunk = operands.numbers["chunk"] or _most_tokens(vocab * DTYPES[operands.dtype].itemsize)
    num_tokens = vocab if operands.numbers["vocab_size"] is None else operands.numbers["vocab_size"]
    if not 0 < num_tokens <= vocab:
        raise UsageError(f"{operands.routine}: vocab_size {num_tokens}, and weight has {vocab} rows")
    operands.refuse(
        "targets",
        lambda x: (x != IGNORED) & ((x < 0) | (x >= num_tokens)),
        f"outside the vocabulary of {num_tokens}: use {IGNORED} for what is not trained",
    )
    wide = operands.make((min(chunk, count), -(-vocab // WIDTH) * WIDTH), operands.dtype)
    numbers = {"vocab_size": num_tokens, "z_loss": operands.numbers["z_loss"]}
    for start in range(0, count, chunk):
        size = min(chunk, count - start)
        logits, rows = wide.chunk(0, size), x.chunk(start, size)
        narrow = replace(logits, array=logits.array[:, :vocab], shape=(size, vocab))
        result = Output("logits", narrow.shape, operands.dtype, (narrow,))
        operands.ops["linear_forward"](result, rows, weight, None, None)
        is_trained = d_x.wanted or d_weight.wanted
        d_logits = Output("d_logits", logits.shape, operands.dtype, (logits,) if is_trained else ())
        ids, losses = (_some(x, start, size) for x in (targets, *loss.tensors))
        written = (d_logits, replace(loss, shape=(size,), tensors=(losses,)), UNWANTED)
        operands.ops["cross_entropy"](*written, logits, ids, **numbers)
        if d_x.wanted:
            operands.ops["linear_dgrad"](d_x.chunk(start, size), narrow, weight, None)
        if d_weight.wanted:
            operands.ops["linear_wgrad"](replace(d_weight, accumulate=start > 0), narrow, rows)


def _some(x: Tensor, start: int, count: int) -> Tensor:
    """Those of some tokens, of numbers that tokens have one of."""
    return replace(x, array=x.array.reshape(-1)[start : start + count], shape=(count,))


def _most_tokens(row_bytes: int) -> int:
    """Tokens whose logits fit LOGITS_BYTES."""
    return max(CHUNK_STEP, LOGITS_BYTES // row_bytes // CHUNK_STEP * CHUNK_STEP)


def _quantize(operands: Operands) -> None:
    x = operands.given("x")
    arrays = {name: out.tensors[0].array for name, out in operands.outputs.items() if out.wanted}
    form = Form(operands.numbers["format"], "row", operands.numbers["scaling"])
    copies = []
    for layout, name in (("row", "rows"), ("col", "columns")):
        if name in arrays:
            scale = arrays.get(f"{name}_scale", arrays.get("rows_scale"))
            copies.append(Tensor(name, arrays[name], x.shape, replace(form, layout=layout), scale))
    _write(operands, copies, x)


class _Quantize(Routine):
    """Its results have the shapes of copies and scales."""

    def written(self, name: str, known: Mapping[str, Any], numbers: Numbers, dtype: str) -> Fits:
        """The bytes and the scales of both layouts."""
        shape, layout = (*known["..."], known["K"]), "row" if name.startswith("rows") else "col"
        form = Form(numbers["format"], layout, numbers["scaling"])
        if name.endswith("_scale"):
            return scale_shape(shape, form), (form.scales.dtype,)
        return stored_shape(shape, form), (form.dtype, "uint8")


LINEAR = Routine("linear", "y ...N <- x ...K, weight NK, bias? N, residual? ...N", _linear)
LINEAR_BACKWARD = Routine(
    "linear_backward",
    "d_x ...K, d_weight NK grad, d_bias N grad <- d_y ...N, d_y_columns? ...N, x? ...K, weight? NK",
    _linear_backward,
)
HEAD = Routine(
    "linear_cross_entropy", "loss ... stat, d_x ...C, d_weight VC grad <- x ...C, weight VC, targets ... int", _head
)
QUANTIZE = _Quantize("quantize", "rows ..., rows_scale ..., columns ..., columns_scale ... <- x ...K", _quantize)
DEQUANTIZE = Routine(
    "dequantize",
    "x ...K <- copy ...K",
    lambda operands: operands.ops["cast"](operands.outputs["x"], operands.given("copy")),
)
