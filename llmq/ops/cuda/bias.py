"""The bias gradient on the GPU, from partial column sums; see cuda/bias.cu."""

from __future__ import annotations

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu


def bias_backward(d_bias: Output, /, d_y: Tensor) -> None:
    """d_bias (N,) <- d_y (...,N) in colsum form: (parts,N) f32."""
    if not d_bias.wanted:
        return
    assert d_y.form is not None and d_y.form.layout == "colsum", "the bias gradient is read as column sums"
    parts, columns = d_y.array.shape
    arguments = (d_bias, d_y, np.int32(parts), np.int32(columns), gpu.adds(d_bias))
    blocks = -(-columns // gpu.SUM_COLUMNS)
    gpu.launch("bias", "bias_backward", blocks, gpu.SUM_THREADS, arguments, {"G": gpu.type_of(d_bias)})


KERNELS = (gpu.Kernel(bias_backward),)
