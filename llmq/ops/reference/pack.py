"""What frozen weights of few bits are made with, beside `quantize`: scales of NF4 in 8 bits, and largest magnitudes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmq.few_bits import NF4_BLOCK, unpacked
from llmq.operands import Output, Tensor, round_to
from llmq.ops.seam import op
from llmq.scaling import BLOCK, Nested


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
