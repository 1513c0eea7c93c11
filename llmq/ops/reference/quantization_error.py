"""How far a copy in fp8 is from its value: what the statistics of fp8 runs are made from."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op
from llmq.tensor import DTYPES, LARGEST

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
