"""Gradients that are used where they are made: each part's update its rows in backward, and are gone."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmq.row import Row
from llmq.stores.replicated import Bundle, ReplicatedGrads
from llmq.stores.sharding import part_of
from llmq.tensor import Origin, Ref

# What becomes of a part's gradients, by row name: called with the ops, the part, its rows and the gradients of all.
Use = Callable[[Any, str | int, Sequence[Row], Mapping[str, Ref]], None]


def gradient_slots(refs: Mapping[str, Ref]) -> dict[str, Ref]:
    """By row name, slots in which the gradients of one micro-step are made."""
    return {
        name: replace(
            ref, name=f"gradient/{name}", space="activation", home="device", is_sum=True, origin=Origin(cell=name)
        )
        for name, ref in refs.items()
    }


class FusedGrads(ReplicatedGrads):
    """Gradients of the one micro-step of a step: slots, which `use` reads as soon as a part has written them.

    A tied head adds to the embedding's, which lives until the embedding has written it.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, *, last: bool = False) -> None:
        super().__init__(rows, dtype, last=last)
        self._rows: dict[str | int, list[Row]] = defaultdict(list)
        for row in rows:
            if row.trainable:
                self._rows[part_of(row)].append(row)
        self.refs = gradient_slots(self.refs)
        self.use: Use | None = None

    def walk(self, ops: Any, parts: Iterable[str | int]) -> Iterator[Bundle]:
        """Yields slots for each part's gradients, and has them used."""
        assert self.use is not None
        for part in parts:
            # Slots, not storage: once the update has read them, the planner gives their bytes to the next part's.
            yield self.bundle(part, self.refs)
            self.use(ops, part, self._rows[part], self.refs)
