"""The reference backend: every op in NumPy, complete and readable; the CPU backend and the oracle of the tests.

An op is a function of one of these modules that has a record (`llmq.ops.seam.op`); a new module is found by itself.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from llmq.ops.seam import OpRecord
from llmq.plugins import Table, table

_MODULES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
OPS: Table[Callable[..., None]] = table(
    "op",
    {
        name: value
        for module in _MODULES
        for name, value in vars(module).items()
        if isinstance(getattr(value, "record", None), OpRecord)
    },
    needs=("record",),
)
