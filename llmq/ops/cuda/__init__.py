"""The CUDA backend: kernels of `cuda/` behind the names and signatures of the reference. Imports without CuPy or a GPU.

A module lists in `KERNELS` a `Kernel` for each of its ops; a new module is found by itself. Matrix products and
attention come from cuBLASLt and cuDNN, whose handles their modules take (`linear.linear_kernels`,
`attention.attention_kernels`).
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules

from llmq.ops.cuda import launch as gpu

_MODULES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
KERNELS: Mapping[str, gpu.Kernel] = {
    kernel.launch.__name__: kernel for module in _MODULES for kernel in getattr(module, "KERNELS", ())
}
OPS: Mapping[str, Callable[..., None]] = {name: kernel.launch for name, kernel in KERNELS.items()}
