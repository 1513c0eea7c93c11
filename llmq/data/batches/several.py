"""The data of several adapters that are trained at once: rows of each, in their order, make a micro-batch.

Each reads what it would read for a run of that adapter alone. All take the same number
of micro-batches, so that a place in the sequence of all says where each is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import Data
from llmq.data.batches.mixture import Share
from llmq.data.batches.row_layout import RowLayout
from llmq.data.batches.windows import Rows, empty_rows
from llmq.data.stream import START, Position, Stream
from llmq.data.tokens.sidecar import TemplateNote
from llmq.data.tokens.token_file import TokenFile


class AllSamples:
    """What several adapters train or evaluate on. An epoch of all has no number of samples: each has its own."""

    num_windows: ClassVar[None] = None

    def __init__(self, sources: Sequence[Any]) -> None:
        self.sources, self.seq_len = tuple(sources), int(sources[0].seq_len)
        self.num_virtual = max(source.num_virtual for source in sources)
        self.token_files: tuple[TokenFile, ...] = tuple(file for source in sources for file in source.token_files)
        self.files: list[tuple[Path, int]] = list(dict.fromkeys(file for source in sources for file in source.files))
        self.num_tokens = sum(count for _, count in self.files)

    @property
    def limits(self) -> tuple[int, int] | None:
        """Most documents of a row, and most tokens of a document; None if no rows have borders."""
        if not any(source.limits for source in self.sources):
            return None
        # A row of a source without borders is one document here.
        found = [source.limits or (1, self.seq_len) for source in self.sources]
        return max(docs for docs, _ in found), max(longest for _, longest in found)

    @property
    def end_token_ids(self) -> set[int]:
        """Those of all sources."""
        return set().union(*(source.end_token_ids for source in self.sources))

    def templates(self) -> list[tuple[TemplateNote, float]]:
        """Those of each source, with their part of the tokens of all."""
        parts = self.parts_of_tokens()
        return [
            (note, share * part)
            for source, part in zip(self.sources, parts, strict=True)
            for note, share in source.templates()
        ]

    def parts_of_tokens(self) -> list[float]:
        """Which part of the trained tokens each source has."""
        return [source.num_tokens / max(self.num_tokens, 1) for source in self.sources]


@dataclass(frozen=True, eq=False)
class SeveralData(Data):
    """The data of several adapters, by name, in the order of their rows in a micro-batch."""

    members: Mapping[str, Data] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Mapping[str, Data]) -> SeveralData:
        """All of them."""
        found = list(members.values())
        first = found[0]
        train: Any = AllSamples([one.train for one in found])
        held = [one.eval for one in found if one.eval is not None]
        evaluation: Any = AllSamples(held) if held else None
        size, kinds = sum(one.batch_size for one in found), dict.fromkeys(one.layout.kind for one in found)
        layout = RowLayout(" and ".join(kinds), first.layout.why if len(kinds) == 1 else "by the data of each adapter")
        about = (size, first.seq_len, first.grad_accumulation, first.seed, first.world, None, layout)
        return cls(train, evaluation, *about, all(one.is_there for one in found), members)

    def facts(self) -> dict[str, str]:
        """What the log says of the rows, in words, adapter by adapter where they differ."""
        each = {name: one.facts() for name, one in self.members.items()}
        first = next(iter(each.values()))
        if all(facts == first for facts in each.values()):
            return first
        return {f"{name}: {key}": text for name, facts in each.items() for key, text in facts.items()}

    def warnings(self) -> Iterator[str]:
        """Those of each adapter."""
        for name, one in self.members.items():
            yield from (f"adapter {name}: {text}" for text in one.warnings())

    def batches(self, rank: int) -> Stream[Batch]:
        """Micro-batches of all adapters for one rank."""
        return JoinedBatches({name: one.batches(rank) for name, one in self.members.items()}, self)

    @property
    def docs(self) -> int | None:
        """Most documents of a row; None if rows have no borders."""
        return self.limits[0] if self.limits else None

    def shares(self, num_samples: int) -> list[Share]:
        """What each source of a mixture gives to the first `num_samples` samples of all."""
        found = []
        for name, one in self.members.items():
            own = one.shares(self.own_position(one, num_samples))
            found += [replace(share, name=f"{name}: {share.name}") for share in own]
        return found

    def identity(self) -> dict[str, Any]:
        """What a run that continues another must have in common with it; as JSON."""
        limits = {"documents of a row": self.limits[0]} if self.limits else {}
        return {"data": {name: one.identity() for name, one in self.members.items()}, **limits}

    def own_position(self, one: Data, position: int) -> int:
        """The samples that one of them has taken, of `position` of all."""
        return position * one.batch_size // self.batch_size

    def own_epoch(self, name: str, position: int, stream: Mapping[str, Any] | None) -> float:
        """Passes of one of them over its data."""
        one = self.members[name]
        return one.epoch(self.own_position(one, position), (stream or {}).get(name))

    def epoch(self, position: int, stream: Mapping[str, Any] | None) -> float:
        """Passes over the training data: the fewest of any."""
        return min(self.own_epoch(name, position, stream) for name in self.members)

    def held_out(self, num_steps: int | None) -> tuple[int, Iterator[Batch]]:
        """The batches to evaluate on, with the rows of each adapter's held-out data, and their number: at most
        `num_steps`, or until all have been seen. An adapter that has no more of it has rows that are not trained."""
        found = [one.held_out(num_steps) if one.eval is not None else (0, iter(())) for one in self.members.values()]
        count = max(own for own, _ in found)
        return count, (self._eval_batch([batches for _, batches in found]) for _ in range(count))

    def _eval_batch(self, each: Sequence[Iterator[Batch]]) -> Batch:
        """The next batch of each, those that are over being empty."""
        sizes = [one.batch_size for one in self.members.values()]
        rows = [
            next(own, None) or Batch(*empty_rows(n, self.seq_len, None)) for own, n in zip(each, sizes, strict=True)
        ]
        return joined(rows, self.docs)


def joined(batches: Sequence[Batch], docs: int | None) -> Batch:
    """One batch of the rows of several, with borders of up to `docs` documents, if any have them."""
    stops = np.cumsum([len(one.tokens) for one in batches]).tolist()
    rows = empty_rows(stops[-1], batches[0].tokens.shape[1], docs)
    for one, stop in zip(batches, stops, strict=True):
        rows.put(slice(stop - len(one.tokens), stop), Rows(one.tokens, one.targets, one.borders))
    places = [one.places for one in batches if one.places is not None]
    whole = np.concatenate(places) if len(places) == len(batches) else None
    return Batch(*rows, whole, sum(one.position for one in batches), min(one.epoch for one in batches))


@dataclass(frozen=True, eq=False)
class JoinedBatches:
    """The batches of several adapters, by name, each with as many micro-batches as the others.

    A position is the samples that all have taken, and the positions of streamed rows by name.
    """

    each: Mapping[str, Stream[Batch]]
    data: SeveralData

    def read(self, position: Position = START) -> Iterator[tuple[Position, Batch]]:
        """Batch after batch; see Stream."""
        taken, streams = position or (0, None)
        own = {name: self.data.own_position(one, taken) for name, one in self.data.members.items()}
        readers = [one.read((own[name], (streams or {}).get(name))) for name, one in self.each.items()]
        for found in zip(*readers, strict=True):
            batches = [batch for _, batch in found]
            streams = {name: one.stream for name, one in zip(self.each, batches, strict=True) if one.stream}
            whole = replace(joined(batches, self.data.docs), stream=streams or None)
            yield (whole.position, whole.stream), whole
