"""Copies of a value in other forms, and the scales that quantized forms use or bring with them."""

from dataclasses import replace

import numpy as np

from llmq.operands import Output, Tensor, slices
from llmq.ops.seam import op
from llmq.ops.temporaries import Temporaries
from llmq.scaling import scale_from


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
