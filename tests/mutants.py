"""Values that JSON may have where others are meant, the places to put them, and bytes that were damaged."""

import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

ODD: list[Any] = [
    *(None, True, False, 0, -1, 2**62, -(2**63), 10**30, 1e-320, 1e308, -1e308, 0.5, "NaN", "Infinity", "-Infinity"),
    *("", "x", "</script><b>", "\udcff", "\x00", "$_{", "train", "step", [], {}, [[]], {"a": {}}, [{"a": 1}], [None]),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place of a value that can be changed: what holds it, and its key there."""
    keys = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def change(chance: random.Random, value: Any, others: Sequence[Any] = ODD) -> None:
    """Takes one or two values out, or puts in their place some that are there, odd ones, or some of `others`."""
    for _ in range(chance.randrange(1, 3)):
        held, key = chance.choice(places(value))
        match chance.randrange(5):
            case 0:
                del held[key]
            case 1:
                other, at = chance.choice(places(value))
                held[key] = deepcopy(other[at])
            case 2:
                held[key] = deepcopy(chance.choice(ODD))
            case _:
                held[key] = deepcopy(chance.choice(others))


def damaged(chance: random.Random, content: bytes) -> bytes:
    """Some bytes are others, and the end may be missing."""
    found = bytearray(content[: chance.randrange(len(content) + 1)] if chance.random() < 0.5 else content)
    for _ in range(chance.randrange(4)):
        if found:
            found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found)
