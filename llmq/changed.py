"""A changed copy of a dataclass, for plans, which make a million of them."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any, TypeVar

Instance = TypeVar("Instance")


def changed(one: Instance, **fields: Any) -> Instance:
    """`dataclasses.replace` in a fraction of its time, of a class that has no __post_init__ and no slots.

    Values that the instance has cached are left behind.
    """
    kind: Any = type(one)
    copy: Instance = object.__new__(kind)
    values = vars(copy)
    values.update(vars(one), **fields)
    for name in _cached(kind):
        values.pop(name, None)
    return copy


@cache
def _cached(kind: Any) -> tuple[str, ...]:
    """Names of the cached properties of a class."""
    return tuple(
        name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, cached_property)
    )
