"""The rows that a run trains on: how documents lie in them, samples of token files, and windows of these.

Documents are cut into windows, packed whole, or padded, one to a row. A run has one layout, for training and evaluation
and for all sources of a mixture. Where --packing leaves it open, the data decides: rows of a data set are documents of
their own and stay whole (a chat cut in two leaves an answer without its question); text files and token files are read
as one long text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmq.data.batches.permutation import sample_order
from llmq.data.rows.find_sources import matched
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenizer import SUFFIX, Sidecar, TemplateNote, same_ids, tokenizer_hash
from llmq.errors import DataError, UsageError, all_problems, noted
from llmq.tensor import IGNORED

WINDOWS, PACKED, PADDED = "windows", "packed rows", "padded rows"
OPTIONS = {WINDOWS: "--packing=windows", PACKED: "--packing", PADDED: "--no-packing"}
KINDS = {"windows": WINDOWS, True: PACKED, False: PADDED}  # by the value of --packing
CHECKED_WHOLE = 1 << 26  # tokens: the ids of files up to this (256 MiB) are all checked when training starts
CHECKED_ENDS = 1 << 20  # tokens at each end that are checked in larger ones; every batch is checked in any case


@dataclass(frozen=True)
class RowLayout:
    """The layout of a run's rows, and why it is that one, in words."""

    kind: str = WINDOWS
    why: str = ""

    @classmethod
    def asked_for(cls, packing: bool | str) -> RowLayout:
        """That of a value of --packing."""
        return cls(KINDS[packing], f"by {OPTIONS[KINDS[packing]]}")

    def refuse_other(self, state: Mapping[str, Any]) -> None:
        """UsageError if a checkpoint, of which this is the `state`, was trained on another layout."""
        # Runs that did not store it had windows where --packing was left open.
        saved = state.get("row_layout") or KINDS.get(state["options"].get("packing"), WINDOWS)
        if saved != self.kind:
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
        """Most documents of a row, and most tokens of a document, which are at most `longest`; None for rows without
        borders."""
        return (self.docs, longest or self.seq_len) if self.docs is not None and self.docs > 1 else None


def choose_row_layout(
    packing: bool | str | None, max_docs: int | None, *, has_rows: bool, cannot_pack: str | None = None
) -> RowLayout:
    """The layout that --packing asks for, or else that of the data: `has_rows` if any of it is rows of a data set.

    `cannot_pack` says why the device cannot run packed rows, if it cannot: then rows are padded, unless packing was
    asked for, which is a UsageError, as is `max_docs` without packed rows.
    """
    if packing is True and cannot_pack:
        raise UsageError(f"--packing: {cannot_pack}: use --no-packing, which pads rows, or --model-dtype fp32")
    if packing is not None:
        found = RowLayout.asked_for(packing)
    elif not has_rows:
        found = RowLayout(WINDOWS, "text and token files run on across documents; --packing keeps these whole")
    elif cannot_pack:
        found = RowLayout(PADDED, f"the data is rows, which stay whole, and {cannot_pack}")
    else:
        found = RowLayout(PACKED, "the data is rows, which stay whole; --packing=windows cuts them")
    if max_docs is not None and found.kind != PACKED:
        fix = "leave it out" if cannot_pack else "add --packing, or leave it out"
        raise UsageError(f"--max-docs {max_docs} is for packed rows: {fix}")
    return found


class Rows(NamedTuple):
    """Samples as they go into a batch, n rows of T tokens."""

    tokens: np.ndarray  # (n,T) int32
    targets: np.ndarray  # (n,T) int32; -100 is not trained
    borders: np.ndarray | None  # (n,D+1) int32: starts of a row's documents, then T repeated; None: not packed

    def put(self, at: np.ndarray | slice, rows: Rows) -> None:
        """Writes `rows` in the place of those `at`, which are empty so far and may have room for more documents."""
        self.tokens[at], self.targets[at] = rows.tokens, rows.targets
        if self.borders is not None and rows.borders is not None:
            self.borders[at, : rows.borders.shape[1]] = rows.borders


def empty_rows(count: int, seq_len: int, docs: int | None) -> Rows:
    """Rows to be filled: tokens 0 that are not trained, as one document, with room for `docs` (None: no borders)."""
    tokens = np.zeros((count, seq_len), np.int32)
    borders = None if docs is None else np.full((count, docs + 1), seq_len, np.int32)
    if borders is not None:
        borders[:, 0] = 0
    return Rows(tokens, np.full_like(tokens, IGNORED), borders)


def stacked(rows: Sequence[Rows]) -> Rows:
    """Rows of several one after the other, which have borders for equally many documents, or none."""
    tokens, targets, borders = zip(*rows, strict=True)
    return Rows(
        np.concatenate(tokens), np.concatenate(targets), None if borders[0] is None else np.concatenate(borders)
    )


def aim(targets: np.ndarray, ids: np.ndarray, trained: np.ndarray | bool) -> None:
    """Writes the targets (n - 1,) of a document's ids (n,): each the next id, if that is trained, (n - 1,) or True."""
    targets[:] = ids[1:]
    if isinstance(trained, np.ndarray):
        targets[~trained] = IGNORED


class RowSource:
    """Rows of a form, of the tokens of some files: what is known of them, however they are read."""

    limits: tuple[int, int] | None = None  # most documents of a row, and tokens of a document; None: no borders

    def __init__(self, form: RowForm, files: Sequence[TokenFile] = ()) -> None:
        self.form, self.token_files = form, tuple(files)
        self.seq_len, self.num_virtual = form.seq_len, form.num_virtual  # with virtual tokens before each document
        self.files = [(file.path, file.num_tokens) for file in files]

    @property
    def num_tokens(self) -> int:
        """Those of all files."""
        return sum(count for _, count in self.files)

    @property
    def end_token_ids(self) -> set[int]:
        """The tokens that end documents and trained turns, as far as that is known: by the files' sidecars."""
        return {number for _, sidecar in sidecars(self.token_files) for number in sidecar.ends()}

    def templates(self) -> list[tuple[TemplateNote, float]]:
        """The chat templates that rendered the data, each with its part of the trained tokens."""
        found = [(known.chat_template, file.num_tokens / self.num_tokens) for file, known in sidecars(self.token_files)]
        return [(note, share) for note, share in found if note is not None]


class Samples(RowSource):
    """Rows that are numbered from 0, of any kind."""

    num_windows: int  # how many there are: one epoch

    def order(self, places: np.ndarray, seed: int) -> np.ndarray:
        """Which sample (n,) int64 is at each of `places` (n,) of the endless sequence of `seed`.

        Place s has sample s % N of epoch s // N's permutation.
        """
        return sample_order(places, self.num_windows, seed)

    def read(self, samples: np.ndarray) -> Rows:
        """The samples with the numbers `samples` (n,); DataError if an id is not in the vocabulary."""
        raise DataError("the data is not tokenized yet: run without --dry-run")


class FileSamples(Samples):
    """Samples that are cut from the tokens of several files one after the other."""

    def __init__(self, files: Sequence[TokenFile], form: RowForm) -> None:
        """DataError if an id is found that is not of the form's vocabulary; see CHECKED_WHOLE."""
        super().__init__(form, files)
        self.file_starts = np.cumsum([0, *(file.num_tokens for file in files)])
        with all_problems() as problems:
            for file in files:
                with noted(problems):
                    if file.num_tokens <= CHECKED_WHOLE:
                        file.check_ids(form.vocab_size)
                    else:
                        file.check_ids(form.vocab_size, 0, CHECKED_ENDS)
                        file.check_ids(form.vocab_size, file.num_tokens - CHECKED_ENDS)

    def part(self, number: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | bool]:
        """Ids (n,) of the tokens [start, stop) of a file, and which but the first are trained: (n - 1,) or all."""
        file = self.token_files[number]
        file.check_ids(self.form.vocab_size, start, stop)
        return file.tokens[start:stop], file.mask_bits is None or file.trained(start + 1, stop)


def sidecars(files: Sequence[TokenFile]) -> list[tuple[TokenFile, Sidecar]]:
    """The files that have sidecars, with these."""
    return [(file, found) for file in files if (found := Sidecar.read(file.path, file.num_tokens)) is not None]


class Windows(FileSamples):
    """The windows of several token files, numbered through in the order of the files.

    A file of n tokens has floor((n - 1) / seq_len) windows from its start; the tokens after the last are not used,
    unless `with_tails` makes one more window of them, whose rest is tokens 0 that are not trained. Windows with virtual
    tokens have as many tokens fewer of the file. Documents run on from one window into the next, without a border.
    """

    def __init__(self, files: Sequence[TokenFile], form: RowForm, *, with_tails: bool = False) -> None:
        super().__init__(files, form)
        self._size = form.room
        room = self._size - 1 if with_tails else 0  # the most tokens that a window may lack
        self._ends = np.cumsum((np.maximum(np.diff(self.file_starts) - 1, 0) + room) // self._size)
        self.num_windows = int(self._ends[-1]) if files else 0

    def read(self, samples: np.ndarray) -> Rows:
        """The windows with the numbers `samples` (n,), not packed. Targets that the file's masks exclude are -100."""
        rows = empty_rows(len(samples), self.seq_len, None)
        for row, sample in enumerate(np.asarray(samples).tolist()):
            number = int(np.searchsorted(self._ends, sample, side="right"))
            window = sample - (int(self._ends[number - 1]) if number else 0)
            start = window * self._size
            stop = min(start + self._size + 1, self.token_files[number].num_tokens)
            ids, trained = self.part(number, start, stop)
            place = slice(self.num_virtual, self.num_virtual + len(ids) - 1)
            rows.tokens[row, place] = ids[:-1]
            aim(rows.targets[row, place], ids, trained)
        return rows


def open_files(patterns: Iterable[str]) -> list[TokenFile]:
    """The token files that `patterns` (paths or globs) name: in the order given, sorted within a glob.

    Raises one DataError with everything that is wrong: no match, a file named twice, a bad file.
    """
    files: list[TokenFile] = []
    with all_problems() as problems:
        for path in matched(patterns, problems, skip=SUFFIX):
            with noted(problems):
                files.append(TokenFile.open(path))
    return files


def require_one_tokenizer(files: Iterable[TokenFile], model: Path | None = None) -> None:
    """Raises DataError if the files' headers and sidecars name more than one tokenizer, or are unreadable.

    `model` is the folder of the model: if it has a tokenizer.json, the files must have the ids of that.
    """
    first: dict[str, tuple[TokenFile, str, Path | None]] = {}  # tokenizer hash -> who has it, its name, its folder
    with all_problems() as problems:
        for file in files:
            with noted(problems):
                sidecar = Sidecar.read(file.path, file.num_tokens)
                said = sidecar.tokenizer if sidecar is not None else None
                found = file.tokenizer_sha256 or (said.sha256 if said else None)
                if said and found != said.sha256:
                    problems.append(
                        f"{file.path} and its sidecar name different tokenizers: make both again, or delete the sidecar"
                    )
                elif found:
                    folder = file.path.parent / said.folder if said else None
                    first.setdefault(found, (file, said.source if said else f"sha256 {found[:12]}...", folder))
        if len(first) > 1:
            named = [f"{file.path} ({name})" for file, name, _ in first.values()]
            problems.append(f"the files are of different tokenizers: {', '.join(named)}: tokenize all with one")
        elif first and model is not None and (model / "tokenizer.json").is_file():
            ((found, (file, name, folder)),) = first.items()
            if tokenizer_hash(model) != found and not (folder and same_ids(folder, model)):
                problems.append(
                    f"{file.path} is of another tokenizer ({name}) than the model's in {model}: tokenize the text "
                    f"with --tokenizer {model}, or train another model"
                )
