"""Copies of a value in other forms, the scales that these use or bring with them, and how far copies are off."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from llmq.few_bits import NF4_BLOCK, unpacked
from llmq.operands import Output, Tensor, round_to, slices
from llmq.ops.seam import op
from llmq.ops.temporaries import Temporaries
from llmq.scaling import BLOCK, Nested, scale_from
from llmq.tensor import DTYPES, LARGEST


def _temporaries(a: Temporaries) -> int:
    if not a.writing("out") and a.in_rows("x"):
        return 0
    return max(a.reading("x"), a.copies("x") + a.writing("out"))


@op(family="quantize", forms={"out"}, cast_from={"out": "x"}, temporaries=_temporaries)
def cast(out: Output, /, x: Tensor) -> None:
    """out, in every wanted form, <- x (the same shape). fp8 columns of fp8 rows are the same bytes and scales."""
    if x.form is not None and [target.form for target in out.tensors] == [replace(x.form, layout="col")]:
        (columns,) = out.tensors
        rows = x.array.reshape(-1, x.shape[-1])
        columns.array[...] = rows.T
        if x.form.owns_scales:
            assert columns.scale is not None and x.scale is not None
            columns.scale[...] = x.form.scales.turned(x.scale, *rows.shape)
    elif out.in_rows and (x.form is None or not x.form.owns_scales):
        for start, count in slices(x.shape):
            out.chunk(start, count).write(x.chunk(start, count).read())
    else:
        out.write(x.read())


@op(family="quantize", temporaries=lambda a: max(a.reading("x"), a.copies("x") + a.size("x")))
def amax_scale(scale: Output, /, x: Tensor, *, limit: float) -> None:
    """scale (1,) <- x (any shape): amax(|x|) / limit, which maps amax to `limit`; 1 if amax is 0 or not finite."""
    amax = np.array([np.abs(x.read()).max(initial=0)], np.float32)
    scale.write(scale_from(amax, np.float32(limit), np.ones(1, np.float32)))


@op(family="optimizer")
def scale_update(
    new_scale: Output,
    new_history: Output,
    new_amax: Output,
    /,
    scale: Tensor,
    history: Tensor,
    amax: Tensor,
    limits: Tensor,
    apply: Tensor,
) -> None:
    """new_scale (N,), new_history (H,N), new_amax (N,) <- scale, amax, limits (N,), history (H,N), apply (1,).

    Delayed scaling: amax enters the history (newest first), whose maximum / limit is the next scale, unless that
    maximum is 0 or not finite. A cell whose amax is not finite, and every cell when apply is 0, keeps its scale and its
    history: a step that changes no weight changes no scale. amax starts again from 0.
    """
    seen, past = amax.read(), history.read()
    used = np.isfinite(seen) & (apply.read() != 0)
    pushed = np.where(used, np.concatenate([seen[None], past[:-1]]), past)
    updated = np.where(used, scale_from(pushed.max(axis=0), limits.read(), scale.read()), scale.read())
    new_scale.write(updated)
    new_history.write(pushed)
    new_amax.write(np.zeros_like(seen))


@op(family="quantize", cast_from={"out": "x"}, temporaries=lambda a: a.copies("x") + max(a.size("x"), a.writing("out")))
def quantize(out: Output, scale: Output, /, x: Tensor, *, limit: float) -> None:
    """out, in every wanted form with its scales (`llmq.operands.own_scales`), and scale (1,) <- x (like out).

    `scale` is that of `amax_scale`, for other copies of x: amax(|x|) / limit, 1 if amax is 0 or not finite.
    """
    value = x.read()
    out.write(value)
    if scale.wanted:
        amax = np.array([np.abs(value).max(initial=0)], np.float32)
        scale.write(scale_from(amax, np.float32(limit), np.float32(1)))


@op(family="quantize")
def nest(out: Output, /, absmax: Tensor, *, group: int, borders: tuple[int, ...]) -> None:
    """out (bytes,) uint8, as `Nested(group)` lays them out, <- absmax (n,) f32, the scales of NF4's blocks.

    Each tensor's scales, which end at `borders`, are less their mean, and 256 of them have an f32 scale (the double
    quantization of QLoRA; Dettmers et al., 2023).
    """
    out.write(Nested(group).stored(absmax.read().astype(np.float32), [0, *borders]))


@op(family="quantize")
def amax(out: Output, /, x: Tensor, *, in_bf16: bool) -> None:
    """out (1,) f32 <- the largest magnitude of x (any shape, in any form), exact or in bf16."""
    read = reader(x)
    rows = range(0, int(np.prod(x.shape[:-1])), BLOCK)
    largest = np.max([np.abs(read(start)).max(initial=0) for start in rows])
    out.write(round_to(largest, "bf16" if in_bf16 else "fp64").astype(np.float64).reshape(1))


def reader(x: Tensor) -> Callable[[int], np.ndarray]:
    """A function that reads 128 matrix rows of x, or those that are left, from the given one on: NF4's scales of blocks
    are made once."""
    rows, width = int(np.prod(x.shape[:-1])), x.shape[-1]
    if x.form is None or x.form.scaling is None or not isinstance(x.form.scales, Nested):
        return lambda start: x.chunk(start, min(BLOCK, rows - start)).read()
    assert x.scale is not None
    absmax = x.form.scales.absmax(x.scale, x.array.size * 2 // NF4_BLOCK)

    def read(start: int) -> np.ndarray:
        count = min(BLOCK, rows - start)
        blocks = unpacked(x.array[start : start + count], "nf4").reshape(-1, NF4_BLOCK)
        first = start * width // NF4_BLOCK
        return (blocks * absmax[first : first + len(blocks), None]).reshape(count, width)

    return read


HALF_STEP = (
    1 / 28,
    1 / 14,
)  # of the largest finite number, of e4m3 and e5m2: rounding alone ends there from so far beyond


@op(family="quantize", temporaries=lambda a: a.copies("x", "copy") + 15 * a.size("x") // 2)
def quantization_error(new_error: Output, /, error: Tensor, x: Tensor, copy: Tensor) -> None:
    """new_error (6,) <- error (6,), x (any shape), its `copy` in fp8 rows (the same shape).

    In order: largest |x|, sum of x^2, sum of (x - copy)^2, numbers clipped (beyond the largest finite one by more than
    rounding), numbers flushed (not zero in x, zero in the copy), numbers in all. The first is the maximum of both, the
    others are added. Numbers that are not finite count in the last only.
    """
    assert copy.form is not None and copy.form.layout == "row" and copy.scale is not None
    values, stored = (tensor.read().astype(np.float32, copy=False).ravel() for tensor in (x, copy))
    raw = copy.array.astype(np.float32).ravel()
    finite = np.isfinite(values)
    values, stored, raw = values[finite], stored[finite], raw[finite]
    # the scale of each number, as the copy gives it where it is at the largest finite one
    limit, half_step = np.float32(LARGEST[copy.form.dtype]), HALF_STEP[copy.form.dtype == "e5m2"]
    edge = np.abs(raw) == limit
    clipped = np.abs(values[edge]) > np.abs(stored[edge]) / limit * np.float32(limit * (1 + half_step))
    wide = values.astype(np.float64)
    found = [
        np.abs(values).max(initial=0),
        np.square(wide).sum(),
        np.square(wide - stored).sum(),
        np.count_nonzero(clipped),
        np.count_nonzero((values != 0) & (raw == 0)),
        x.array.size,
    ]
    before = error.read()
    after = before + np.array(found)
    after[0] = max(before[0], found[0])
    new_error.write(after.astype(DTYPES["fp32"]))
