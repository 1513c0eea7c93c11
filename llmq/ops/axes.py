"""The axes of a routine's operands, as in "x ...C, rstd ... stat <- res ...C, weight C, bias? C": outputs, then inputs.

Axes are letters, each of one length in a call; `...C` is any axes and then C. A word after them says the dtype: `stat`
is fp32, and fp64 beside values in fp64; `int` is int32; `grad` that of the values, or fp32. Without one it is the dtype
that all values of the call have. An input with `?` may be None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

VALUES = ("bf16", "fp32", "fp64")


class Axes(NamedTuple):
    """Those of one operand: whether any lead, the letters after them, the word that says the dtype."""

    leads: bool
    letters: str
    kind: str
    is_optional: bool

    def __str__(self) -> str:
        names = [*(["..."] * self.leads), *self.letters]
        return f"({', '.join(names)}{',' * (len(names) == 1)})"

    def fit(self, shape: tuple[int, ...]) -> bool:
        """Whether a shape has as many."""
        return len(shape) >= len(self.letters) if self.leads else len(shape) == len(self.letters)

    def lengths(self, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        """Each letter with its length; `...` has those of all axes that lead."""
        first = len(shape) - len(self.letters)
        if self.leads:
            yield "...", shape[:first]
        yield from zip(self.letters, shape[first:], strict=True)

    def shape(self, known: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape with these lengths."""
        return (*(known["..."] if self.leads else ()), *(known[letter] for letter in self.letters))

    def dtypes(self, values: str) -> tuple[str, ...]:
        """Those that it may be in, beside values in a dtype."""
        wide = values if values == "fp64" else "fp32"
        return {"": (values,), "stat": (wide,), "int": ("int32",), "grad": (values, wide)}[self.kind]


def parsed(text: str) -> tuple[dict[str, Axes], ...]:
    """The axes of outputs and of inputs, by name."""
    sides = [[operand.split() for operand in side.split(", ")] for side in text.split(" <- ")]
    return tuple({name.removesuffix("?"): _axes(name, *about) for name, *about in side} for side in sides)


def _axes(name: str, letters: str, kind: str = "") -> Axes:
    return Axes(letters.startswith("..."), letters.removeprefix("..."), kind, name.endswith("?"))
