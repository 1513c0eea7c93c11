"""Copies that come with scales of their own: one per row, per block of a row, or per 128 x 128 numbers."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op
from llmq.scaling import scale_from


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
