"""The CUDA backend: kernels of `cuda/` behind the names and signatures of the reference. Imports without CuPy or a GPU.

A function that a module names like an op launches it, and says by `launch.asks` what else a plan has to know; a new
module is found by itself. Matrix products and attention come from cuBLASLt and cuDNN, whose handles their modules take
(`linear.linear_kernels`, `attention.attention_kernels`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pkgutil import iter_modules

from llmq.errors import UsageError
from llmq.ops.cuda import launch as gpu
from llmq.ops.reference import OPS as REFERENCE
from llmq.ops.seam import Arguments
from llmq.plugins import Table, table

_MODULES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
KERNELS: Table[gpu.Kernel] = table(
    "kernel",
    {
        name: getattr(launch, "kernel", None) or gpu.Kernel(launch)
        for module in _MODULES
        for name, launch in vars(module).items()
        if name in REFERENCE and launch.__module__ == module.__name__
    },
)
OPS: Mapping[str, Callable[..., None]] = {name: kernel.launch for name, kernel in KERNELS.items()}


def kernels(others: Mapping[str, gpu.Kernel]) -> dict[str, gpu.Kernel]:
    """All of them with `others`; one that a plug-in's op lacks refuses its calls."""
    absent = {name: gpu.Kernel(REFERENCE[name], refuse=partial(_refuse, name)) for name in REFERENCE.local}
    return {**absent, **KERNELS, **others}


def _refuse(name: str, call: Arguments, capability: int) -> None:
    raise UsageError(f"the op {name} of a plug-in has no kernel for the GPU: use --device cpu")
