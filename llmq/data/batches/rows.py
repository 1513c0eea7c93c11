"""The rows that a run trains on: how documents lie in them, samples of token files, and windows of these.

Documents are cut into windows, packed whole, or padded, one to a row. A run has one layout, for training and evaluation
and for all sources of a mixture. Where --packing leaves it open, the data decides: rows of a data set are documents of
their own and stay whole (a chat cut in two leaves an answer without its question); text files and token files are read
as one long text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenizer import Sidecar, TemplateNote
from llmq.errors import UsageError
from llmq.tensor import IGNORED

WINDOWS, PACKED, PADDED = "windows", "packed rows", "padded rows"
OPTIONS = {WINDOWS: "--packing=windows", PACKED: "--packing", PADDED: "--no-packing"}
ROUNDS = 6  # of a permutation, each of both halves; 4 pass the statistical tests already
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class RowLayout:
    """The layout of a run's rows, and why it is that one, in words."""

    kind: str = WINDOWS
    why: str = ""

    @classmethod
    def choose(
        cls, packing: bool | str | None, max_docs: int | None, *, has_rows: bool, cannot_pack: str | None = None
    ) -> RowLayout:
        """The layout that --packing asks for, or else that of the data: `has_rows` if any of it is rows of a data set.

        `cannot_pack` says why the device cannot run packed rows, if it cannot: then rows are padded, unless packing was
        asked for, which is a UsageError, as is `max_docs` without packed rows.
        """
        if packing is True and cannot_pack:
            raise UsageError(f"--packing: {cannot_pack}: use --no-packing, which pads rows, or --model-dtype fp32")
        if packing is not None:
            kind = {"windows": WINDOWS, True: PACKED, False: PADDED}[packing]
            found = cls(kind, f"by {OPTIONS[kind]}")
        elif not has_rows:
            found = cls(WINDOWS, "text and token files run on across documents; --packing keeps these whole")
        elif cannot_pack:
            found = cls(PADDED, f"the data is rows, which stay whole, and {cannot_pack}")
        else:
            found = cls(PACKED, "the data is rows, which stay whole; --packing=windows cuts them")
        if max_docs is not None and found.kind != PACKED:
            fix = "leave it out" if cannot_pack else "add --packing, or leave it out"
            raise UsageError(f"--max-docs {max_docs} is for packed rows: {fix}")
        return found

    def refuse_other(self, state: Mapping[str, Any]) -> None:
        """UsageError if a checkpoint, of which this is the `state`, was trained on another layout."""
        if (saved := state["row_layout"]) != self.kind:
            raise UsageError(
                f"the checkpoint was trained on {saved}, and this run would train on {self.kind} ({self.why}): add "
                f"{OPTIONS[saved]} to continue it"
            )


@dataclass(frozen=True)
class RowForm:
    """What rows are made of documents: their layout's kind, their length, and for packed rows the most documents.

    Each document begins with `num_virtual` positions that no token has: those of virtual tokens. UsageError for packed
    or padded rows of one token.
    """

    seq_len: int
    vocab_size: int
    kind: str = WINDOWS
    seed: int = 0  # decides which documents share a row
    max_docs: int | None = None  # None: as few as fill the rows
    num_virtual: int = 0
    placeholders: tuple[int, ...] = ()  # ids that stand for images, which no row may have

    def __post_init__(self) -> None:
        if self.seq_len == 1 and self.kind != WINDOWS:
            raise UsageError("--seq-len 1: a document of one token has no target: use 2 or more, or --packing=windows")

    @property
    def docs(self) -> int | None:
        """Most documents of a packed or padded row, as far as that is known."""
        return 1 if self.kind == PADDED else self.max_docs

    @property
    def room(self) -> int:
        """Most tokens of a document in a row."""
        return self.seq_len - self.num_virtual

    def limits(self, longest: int | None = None) -> tuple[int, int] | None:
        """Most documents of a row, and tokens of a document, at most `longest`; None: rows have no borders."""
        return (self.docs, longest or self.seq_len) if self.docs is not None and self.docs > 1 else None


class Rows(NamedTuple):
    """Samples as they go into a batch, n rows of T tokens."""

    tokens: np.ndarray  # (n,T) int32
    targets: np.ndarray  # (n,T) int32; -100 is not trained
    borders: np.ndarray | None  # (n,D+1) int32: starts of a row's documents, then T repeated; None: not packed

    @classmethod
    def empty(cls, count: int, seq_len: int, docs: int | None) -> Rows:
        """Rows to be filled: tokens 0 that are not trained, as one document, with room for `docs`; None: no borders."""
        tokens = np.zeros((count, seq_len), np.int32)
        borders = None if docs is None else np.full((count, docs + 1), seq_len, np.int32)
        if borders is not None:
            borders[:, 0] = 0
        return cls(tokens, np.full_like(tokens, IGNORED), borders)

    @classmethod
    def stacked(cls, rows: Iterable[Rows]) -> Rows:
        """Rows of several one after the other, which have borders for equally many documents, or none."""
        parts = zip(*rows, strict=True)
        tokens, targets, borders = (None if part[0] is None else np.concatenate(part) for part in parts)
        assert tokens is not None and targets is not None
        return cls(tokens, targets, borders)

    def put(self, at: np.ndarray | slice, rows: Rows) -> None:
        """Writes `rows` in the place of those `at`, which are empty so far and may have room for more documents."""
        self.tokens[at], self.targets[at] = rows.tokens, rows.targets
        if self.borders is not None and rows.borders is not None:
            self.borders[at, : rows.borders.shape[1]] = rows.borders


def aim(targets: np.ndarray, ids: np.ndarray, trained: np.ndarray | bool) -> None:
    """Writes the targets (n - 1,) of a document's ids (n,): each the next id, if that is trained, (n - 1,) or True."""
    targets[:] = ids[1:]
    if isinstance(trained, np.ndarray):
        targets[~trained] = IGNORED


class RowSource:
    """Rows of a form, of the tokens of some files: what is known of them, however they are read."""

    num_windows: int | None = None  # how many rows an epoch has, if that is known ahead

    def __init__(self, form: RowForm, files: Sequence[TokenFile] = ()) -> None:
        self.form, self.token_files = form, tuple(files)
        self.seq_len, self.num_virtual = form.seq_len, form.num_virtual  # with virtual tokens before each document
        self.num_tokens = sum(file.num_tokens for file in files)
        self.limits = form.limits()  # most documents of a row, and tokens of a document; None: no borders

    def facts(self) -> dict[str, str]:
        """How full the rows are and what is trained of them, in words, as far as that is known."""
        return {"rows": f"at most {self.limits[0]} documents in each"} if self.limits else {}

    def sidecars(self) -> list[tuple[TokenFile, Sidecar]]:
        """The files that have sidecars, with these."""
        files = self.token_files
        return [(file, found) for file in files if (found := Sidecar.read(file.path, file.num_tokens)) is not None]

    @property
    def end_token_ids(self) -> set[int]:
        """The tokens that end documents and trained turns, as far as that is known: by the files' sidecars."""
        return {number for _, sidecar in self.sidecars() for number in sidecar.end_token_ids}

    def templates(self) -> list[tuple[TemplateNote, float]]:
        """The chat templates that rendered the data, each with its part of the trained tokens."""
        found = [(known.chat_template, file.num_tokens / self.num_tokens) for file, known in self.sidecars()]
        return [(note, share) for note, share in found if note is not None]


class Samples(RowSource):
    """Rows that are numbered from 0, of any kind."""

    num_windows: int

    def order(self, places: np.ndarray, seed: int) -> np.ndarray:
        """Which sample (n,) int64 is at each of `places` (n,) of the endless sequence of `seed`; see sample_order."""
        return sample_order(places, self.num_windows, seed)

    def read(self, samples: np.ndarray) -> Rows:
        """The samples with the numbers `samples` (n,); DataError if an id is not in the vocabulary."""
        raise NotImplementedError


def share(count: int, total: int) -> str:
    """A count and its share of the total, in words."""
    return f"{count:,}, {100 * count / max(total, 1):.2f}%"


class Windows(Samples):
    """The windows of several token files, numbered through in the order of the files.

    A file of n tokens has floor((n - 1) / seq_len) windows from its start; the tokens after the last are not used,
    unless `with_tails` makes one more window of them, whose rest is tokens 0 that are not trained. Windows with virtual
    tokens have as many tokens fewer of the file. Documents run on from one window into the next, without a border.
    """

    def __init__(self, files: Sequence[TokenFile], form: RowForm, *, with_tails: bool = False) -> None:
        super().__init__(form, files)
        room = form.room - 1 if with_tails else 0  # the most tokens that a window may lack
        self._ends = np.cumsum([(max(file.num_tokens - 1, 0) + room) // form.room for file in files])
        self.num_windows = int(self._ends[-1]) if files else 0

    def facts(self) -> dict[str, str]:
        """What is trained, of files with masks."""
        if all(file.mask_bits is None for file in self.token_files):
            return {}
        return {"trained tokens": share(sum(file.num_trained for file in self.token_files), self.num_tokens)}

    def read(self, samples: np.ndarray) -> Rows:
        """The windows with the numbers `samples` (n,), not packed. Targets that the file's masks exclude are -100."""
        rows = Rows.empty(len(samples), self.seq_len, None)
        for row, sample in enumerate(np.asarray(samples).tolist()):
            number = int(np.searchsorted(self._ends, sample, side="right"))
            window = sample - (int(self._ends[number - 1]) if number else 0)
            file, start = self.token_files[number], window * self.form.room
            ids, trained = file.part(start, min(start + self.form.room + 1, file.num_tokens), self.form.vocab_size)
            place = slice(self.num_virtual, self.num_virtual + len(ids) - 1)
            rows.tokens[row, place] = ids[:-1]
            aim(rows.targets[row, place], ids, trained)
        return rows


def sample_order(places: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """Which sample (n,) int64 in 0 .. num_samples - 1 is at each of `places` (n,), counted through all epochs.

    Place p lies in epoch p // num_samples; each epoch of each seed has a permutation of its own. It is computed place
    by place and never stored: a table would cost memory and time with every epoch and every resume. It is the Feistel
    network of Black and Rogaway ("Ciphers with Arbitrary Finite Domains", 2002): a number below a * b is a pair (left
    below a, right below b), and each round adds to one half a keyed function of the other, modulo that half's size.
    With a about sqrt(N) and b just large enough, at most a - 1 of the a * b numbers are no samples; those few walk on
    through the permutation until they reach one (cycle walking), which keeps it a permutation.
    """
    places = np.asarray(places, np.int64)
    assert num_samples > 0 and (places >= 0).all()
    epochs, x = np.divmod(places, num_samples)
    a = isqrt(num_samples - 1) + 1
    b = -(-num_samples // a)
    keys = _mix(_mix(np.full(len(x), seed % 2**64, np.uint64)) ^ epochs.astype(np.uint64))
    x = _permute(x.astype(np.uint64), keys, a, b)
    while (outside := x >= num_samples).any():
        x[outside] = _permute(x[outside], keys[outside], a, b)
    return x.astype(np.int64)


def mixed(seed: int, *words: int) -> int:
    """A 64-bit seed of its own for `words` (each below 2^64) of `seed`."""
    state = _mix(np.array([seed % 2**64], np.uint64))
    for word in words:
        state = _mix(state ^ np.uint64(word))
    return int(state[0])


def _permute(x: np.ndarray, keys: np.ndarray, a: int, b: int) -> np.ndarray:
    """A keyed permutation of 0 .. a * b - 1, applied to `x` (n,) uint64 with `keys` (n,) uint64."""
    left, right = x // np.uint64(b), x % np.uint64(b)
    for _ in range(ROUNDS):
        keys = keys + _GOLDEN
        left = (left + _mix(_mix(keys) ^ right) % np.uint64(a)) % np.uint64(a)
        keys = keys + _GOLDEN
        right = (right + _mix(_mix(keys) ^ left) % np.uint64(b)) % np.uint64(b)
    return left * np.uint64(b) + right


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which every input bit moves about half of the output bits.

    The output function of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
