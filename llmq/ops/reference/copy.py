"""Copies between the homes of a tensor, bit for bit: the device's memory and pinned memory of the host.

Each direction has a lane of its own: a link moves both at once. A bench fills its weights with one block of
numbers, over and over.
"""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op


@op(family="copies", lane="to_host", copies=True)
def copy_to_host(out: Output, /, x: Tensor) -> None:
    """out <- x, in the one form that both have, with the scales of a form that owns its scales."""
    _copy(out, x)


@op(family="copies", lane="to_device", copies=True)
def copy_to_device(out: Output, /, x: Tensor) -> None:
    """out <- x, in the one form that both have, with the scales of a form that owns its scales."""
    _copy(out, x)


def _copy(out: Output, x: Tensor) -> None:
    for target in out.tensors:
        alike = (target.form, target.array.shape, target.array.dtype) == (x.form, x.array.shape, x.array.dtype)
        assert alike and not out.accumulate and not out.amax, f"{out.name} is no plain copy of {x.name}"
        target.array[...] = x.array
        if x.form is not None and x.form.owns_scales:
            assert target.scale is not None and x.scale is not None
            target.scale[...] = x.scale


@op(family="copies")
def repeat(out: Output, /, block: Tensor, *, first: int) -> None:
    """out (any shape) <- block (n,): its flat element i is element (first + i) mod n of the block."""
    if out.wanted:
        values, count = block.read(), int(np.prod(out.shape))
        start = first % values.size
        out.write(np.resize(np.roll(values, -start) if start else values, count).reshape(out.shape))
