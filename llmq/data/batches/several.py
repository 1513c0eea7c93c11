"""The data of several adapters that are trained at once: rows of each, in their order, make a micro-batch.

Each has a loader of its own, which reads what it would read for a run of that adapter alone. All take the same number
of micro-batches, so that a place in the sequence of all says where each is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import Data, Loader
from llmq.data.batches.mixture import Share
from llmq.data.batches.row_layout import RowLayout
from llmq.data.batches.windows import empty_rows
from llmq.data.tokens.token_file import TokenFile


@dataclass(frozen=True, eq=False)
class AllSamples:
    """What several adapters train or evaluate on, as far as it is said of all of them together."""

    each: tuple[Any, ...]
    seq_len: int
    num_virtual: int = 0

    @property
    def files(self) -> list[tuple[Path, int]]:
        """Path and number of tokens of each file, once."""
        return list(dict.fromkeys(file for one in self.each for file in one.files))

    @property
    def token_files(self) -> tuple[TokenFile, ...]:
        """All files."""
        return tuple(file for one in self.each for file in one.token_files)

    @property
    def num_tokens(self) -> int:
        """Tokens of all files."""
        return sum(count for _, count in self.files)

    @property
    def num_windows(self) -> int | None:
        """An epoch of all together has no number of samples: each has one of its own."""
        return None

    @property
    def limits(self) -> tuple[int, int] | None:
        """Most documents of a row, and most tokens of a document; None if no rows have borders."""
        found = [one.limits or (1, self.seq_len) for one in self.each]
        if not any(one.limits for one in self.each):
            return None
        return max(docs for docs, _ in found), max(longest for _, longest in found)


@dataclass(frozen=True, eq=False)
class SeveralData(Data):
    """The data of several adapters, by name, in the order of their rows in a micro-batch."""

    members: Mapping[str, Data] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Mapping[str, Data]) -> SeveralData:
        """All of them."""
        found = list(members.values())
        first = found[0]
        train: Any = AllSamples(tuple(one.train for one in found), first.seq_len)
        held = tuple(one.eval for one in found if one.eval is not None)
        evaluation: Any = AllSamples(held, first.seq_len) if held else None
        size, kinds = sum(one.batch_size for one in found), dict.fromkeys(one.layout.kind for one in found)
        layout = RowLayout(" and ".join(kinds), first.layout.why if len(kinds) == 1 else "by the data of each adapter")
        about = (size, first.seq_len, first.grad_accumulation, first.seed, first.world, None, layout)
        return cls(train, evaluation, *about, all(one.is_there for one in found), members)

    def facts(self) -> dict[str, str]:
        """What a run should know of its rows, in words, adapter by adapter where they differ."""
        each = {name: one.facts() for name, one in self.members.items()}
        first = next(iter(each.values()))
        if all(facts == first for facts in each.values()):
            return first
        return {f"{name}: {key}": text for name, facts in each.items() for key, text in facts.items()}

    def warnings(self) -> Iterator[str]:
        """Those of each adapter."""
        for name, one in self.members.items():
            yield from (f"adapter {name}: {text}" for text in one.warnings())

    @property
    def has_padding(self) -> bool:
        """Whether rows of the training data may end with padding."""
        return any(one.has_padding for one in self.members.values())

    def loader(self, rank: int = 0) -> SeveralLoader:  # type: ignore[override]
        """A loader of the training data for one rank; call its `start`."""
        loaders = {name: one.loader(rank) for name, one in self.members.items()}
        return SeveralLoader(loaders, self.batch_size, self._docs)

    @property
    def _docs(self) -> int | None:
        return self.limits[0] if self.limits else None

    def shares(self, num_samples: int) -> list[Share]:
        """What each source of a mixture gives to the first `num_samples` samples of all."""
        found = []
        for name, one in self.members.items():
            own = one.shares(self.own_position(one, num_samples))
            found += [replace(share, name=f"{name}: {share.name}") for share in own]
        return found

    def identity(self) -> dict[str, Any]:
        """What a run that continues another must have in common with it; as JSON knows it."""
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

    def tokenizer_folder(self) -> Path | None:
        """Folder with the files of the tokenizer that made the training data; None if no file has a sidecar."""
        return next((folder for one in self.members.values() if (folder := one.tokenizer_folder())), None)

    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end documents of the training data, as far as is known."""
        return tuple(sorted({end for one in self.members.values() for end in one.end_token_ids()}))

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
        return joined(rows, self._docs)


def joined(batches: Sequence[Batch], docs: int | None) -> Batch:
    """One batch of the rows of several, with borders of up to `docs` documents, if any have them."""
    length = batches[0].tokens.shape[1]
    borders = None
    if docs is not None:
        borders = np.full((sum(len(one.tokens) for one in batches), docs + 1), length, np.int32)
        borders[:, 0] = 0
        first = 0
        for one in batches:
            if one.borders is not None:
                borders[first : first + len(one.tokens), : one.borders.shape[1]] = one.borders
            first += len(one.tokens)
    places = [one.places for one in batches if one.places is not None]
    return Batch(
        np.concatenate([one.tokens for one in batches]),
        np.concatenate([one.targets for one in batches]),
        borders,
        np.concatenate(places) if len(places) == len(batches) else None,
        position=sum(one.position for one in batches),
        epoch=min(one.epoch for one in batches),
        wait_ms=sum(one.wait_ms for one in batches),
    )


@dataclass(eq=False)
class SeveralLoader:
    """Loaders of several adapters, by name, that are read in step."""

    loaders: Mapping[str, Loader]
    batch_size: int
    docs: int | None

    def start(self, position: int = 0, stream: Mapping[str, Any] | None = None) -> SeveralLoader:
        """Begins to read at sample `position` of all, and at the places of streams, by name."""
        for name, loader in self.loaders.items():
            loader.start(position * loader.batch_size // self.batch_size, (stream or {}).get(name))
        return self

    def next(self, stop: Callable[[], bool] = lambda: False) -> Batch:
        """The next batch of all; see Loader."""
        found = [loader.next(stop) for loader in self.loaders.values()]
        streams = {name: one.stream for name, one in zip(self.loaders, found, strict=True) if one.stream}
        return replace(joined(found, self.docs), stream=streams or None)  # type: ignore[arg-type]

    def close(self) -> None:
        """Ends the background threads."""
        for loader in self.loaders.values():
            loader.close()

    def __enter__(self) -> SeveralLoader:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()
