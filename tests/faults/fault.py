"""One fault: what it replaces, by what, and how it is planted."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Fault:
    """`wrong(real, *arguments)` is called in place of `target`, `package.module:name`, or `:Class.method`."""

    wrong: Callable[..., Any]
    target: str
    tests: tuple[str, ...]

    def find(self) -> tuple[Any, str, Any]:
        """What holds the target, under which name, and the target as it lies there."""
        module, _, path = self.target.partition(":")
        *way, name = path.split(".")
        holder = import_module(module)
        for step in way:
            holder = getattr(holder, step)
        return holder, name, holder[name] if isinstance(holder, Mapping) else inspect.getattr_static(holder, name)


def plant(fault: Fault) -> None:
    """Puts the fault in its target's place for the rest of the process."""
    holder, name, found = fault.find()
    real = found.__func__ if isinstance(found, classmethod) else found

    @wraps(real)
    def planted(*arguments: Any, **numbers: Any) -> Any:
        return fault.wrong(real, *arguments, **numbers)

    if isinstance(holder, dict):
        holder[name] = planted
    else:
        setattr(holder, name, classmethod(planted) if isinstance(found, classmethod) else planted)
