"""What the ranks of a run agree on: the one protocol that every kind of world has.

A world moves bytes and nothing else: what is added up, and in which order, is an op's business
(llmq/ops/reference/collectives.py), so that every kind of world gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class World(Protocol):
    """Ranks from 0 to `size` - 1, each of which makes the same calls in the same order.

    `exchange`: `incoming[r]` becomes what rank r has as `outgoing[rank]`, for every rank r, this one as well. Arrays
    are contiguous and sizes agree in pairs; an array of no bytes is not sent. `gather` gives the messages of all ranks
    in order; a message is what JSON can hold. Both raise WorldError when a rank is lost; after that, every call does.
    """

    rank: int
    size: int

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> None: ...
    def gather(self, message: Any) -> list[Any]: ...
    def close(self) -> None: ...


class GpuWorld(World, Protocol):
    """A world whose ops are its own: those that a rank calls within a `group` may be made as one.

    `known` is kept by who makes the same group again, with the same addresses: the world notes there what ranks have to
    tell each other of it. A program that has `captured` collectives in a graph is asked to `forget` it before the ranks
    part.
    """

    def group(self, known: dict[str, Any] | None = None) -> AbstractContextManager[None]: ...
    def captured(self, program: Any) -> None: ...


class OneRank:
    """A run of a single process."""

    rank, size = 0, 1

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> None:
        """A copy."""
        incoming[0][...] = outgoing[0]

    @contextmanager
    def group(self, known: dict[str, Any] | None = None) -> Iterator[None]:
        """Nothing is sent."""
        yield

    def captured(self, program: Any) -> None:
        """No graph keeps it from ending."""

    def gather(self, message: Any) -> list[Any]:
        """The message itself."""
        return [message]

    def close(self) -> None:
        """Nothing to do."""


ALONE = OneRank()


@dataclass(frozen=True)
class Copying:
    """What copy engines move where they can: gathers, and what each rank sends to each other; None: as timed."""

    gathers: bool | None = None
    exchanges: bool | None = None

    @property
    def demanded(self) -> tuple[str, ...]:
        """The options that were given."""
        options = {"--memcpy-all-gather": self.gathers, "--memcpy-send-recv": self.exchanges}
        return tuple(option for option, given in options.items() if given)

    @property
    def in_words(self) -> str:
        """What is copied; empty if nothing is."""
        moved = [what for what, is_copied in (("weights", self.gathers), ("gradients", self.exchanges)) if is_copied]
        return f"{' and '.join(moved)} by copy engines" if moved else ""


NO_COPIES = Copying(False, False)
