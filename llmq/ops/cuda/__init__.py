"""The CUDA backend: kernels of `cuda/` behind the names and signatures of the reference. Imports without CuPy or a GPU.

A function that a module names like an op launches it, and says by `launch.asks` what else a plan has to know; a new
module is found by itself. Matrix products and attention come from cuBLASLt and cuDNN, whose handles their modules take
(`linear.linear_kernels`, `attention.attention_kernels`).
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules

from llmq.ops.cuda import launch as gpu
from llmq.ops.reference import OPS as REFERENCE

_MODULES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
KERNELS: Mapping[str, gpu.Kernel] = {
    name: getattr(launch, "kernel", None) or gpu.Kernel(launch)
    for module in _MODULES
    for name, launch in vars(module).items()
    if name in REFERENCE and launch.__module__ == module.__name__
}
OPS: Mapping[str, Callable[..., None]] = {name: kernel.launch for name, kernel in KERNELS.items()}
