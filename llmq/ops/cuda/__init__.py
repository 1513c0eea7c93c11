"""The CUDA backend: kernels of `cuda/` behind the names and signatures of the reference. Imports without CuPy or a GPU.

Every module has a `Kernel` for each of its ops. Matrix products and attention come from cuBLASLt and cuDNN, whose
handles their modules take (`linear.linear_kernels`, `attention.attention_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmq.ops.cuda import (
    bias,
    cast,
    copy,
    cross_entropy,
    embedding,
    embedding_noise,
    gather,
    optimizer,
    qk_norm,
    quantization_error,
    quantize,
    rmsnorm,
    rope,
    swiglu,
)
from llmq.ops.cuda.launch import Kernel

_MODULES = (
    bias,
    cast,
    copy,
    cross_entropy,
    embedding,
    embedding_noise,
    gather,
    optimizer,
    qk_norm,
    quantization_error,
    quantize,
    rmsnorm,
    rope,
    swiglu,
)
KERNELS: Mapping[str, Kernel] = {kernel.launch.__name__: kernel for module in _MODULES for kernel in module.KERNELS}
OPS: Mapping[str, Callable[..., None]] = {name: kernel.launch for name, kernel in KERNELS.items()}
