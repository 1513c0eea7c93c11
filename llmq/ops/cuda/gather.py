"""One position of each sequence on the GPU; see cuda/gather.cu."""

from __future__ import annotations

import numpy as np

from llmq.ops.cuda.compile import Constants
from llmq.ops.cuda.launch import Kernel, access, launch, plain, pointer, type_of
from llmq.tensor import Output, Tensor


def gather_rows(out: Output, /, x: Tensor, index: Tensor) -> None:
    """out (B,1,C) <- x (B,T,C), index (B,) int32."""
    if not out.wanted:
        return
    batch, length, columns = x.shape
    assert type_of(out) == type_of(x)
    constants: Constants = {"T": type_of(x), "C": columns, "N": access(columns, type_of(x))}
    arguments = (plain(out), pointer(x), pointer(index), np.int64(length))
    launch("gather", "gather_rows", batch, 128, arguments, constants)


KERNELS = (Kernel(gather_rows),)
