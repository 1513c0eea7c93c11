"""Token files seen as samples: consecutive windows that do not overlap, each with the targets shifted by one."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from llmq.data.tokens.sidecar import SUFFIX, Sidecar, same_ids, tokenizer_hash
from llmq.data.tokens.token_file import TokenFile
from llmq.errors import DataError
from llmq.tensor import IGNORED

CHECKED_WHOLE = 1 << 26  # tokens: the ids of files up to this (256 MiB) are all checked when training starts
CHECKED_ENDS = 1 << 20  # tokens at each end that are checked in larger ones; every batch is checked in any case


class Rows(NamedTuple):
    """Samples as they go into a batch, n rows of T tokens."""

    tokens: np.ndarray  # (n,T) int32
    targets: np.ndarray  # (n,T) int32; -100 is not trained
    borders: (
        np.ndarray | None
    )  # (n,D+1) int32: starts of a row's documents, ascending, then T repeated; None: not packed


class Samples(Protocol):
    """What a loader reads: samples that are numbered from 0, of any kind."""

    seq_len: int
    num_tokens: int
    token_files: tuple[TokenFile, ...]

    @property
    def limits(self) -> tuple[int, int] | None:
        """Most documents of a row, and most tokens of a document; None if rows have no borders."""

    @property
    def num_windows(self) -> int:
        """How many samples there are: one epoch."""

    @property
    def files(self) -> list[tuple[Path, int]]:
        """Path and number of tokens of each file."""

    def read(self, samples: np.ndarray) -> Rows:
        """The samples with the numbers `samples` (n,); DataError if an id is not in the vocabulary."""


class Windows:
    """The windows of several token files, numbered through in the order of the files.

    A file of n tokens has floor((n - 1) / seq_len) windows from its start; the tokens behind the last are not used,
    unless `with_tails` makes one more window of them, whose rest is tokens 0 that are not trained.
    """

    limits = None  # documents run on from one window into the next, and are not told apart

    def __init__(self, files: Sequence[TokenFile], seq_len: int, vocab_size: int, *, with_tails: bool = False) -> None:
        """DataError if an id is found that is not below `vocab_size`: see require_ids."""
        self.token_files = tuple(files)
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.num_tokens = sum(file.num_tokens for file in files)
        room = seq_len - 1 if with_tails else 0  # a window may lack so many tokens
        counts = [(max(file.num_tokens - 1, 0) + room) // seq_len for file in files]
        self._ends = np.cumsum(np.array(counts, np.int64))
        self.num_windows = int(self._ends[-1]) if counts else 0
        require_ids(files, vocab_size)

    @property
    def files(self) -> list[tuple[Path, int]]:
        """Path and number of tokens of each file."""
        return [(file.path, file.num_tokens) for file in self.token_files]

    def read(self, samples: np.ndarray) -> Rows:
        """The windows with the numbers `samples` (n,), not packed.

        Targets that the file's masks exclude are -100. Raises DataError if an id is not in the vocabulary.
        """
        tokens = np.zeros((len(samples), self.seq_len), np.int32)
        targets = np.full_like(tokens, IGNORED)
        for row, sample in enumerate(np.asarray(samples).tolist()):
            index = int(np.searchsorted(self._ends, sample, side="right"))
            file = self.token_files[index]
            window = sample - (int(self._ends[index - 1]) if index else 0)
            start = window * self.seq_len
            stop = min(start + self.seq_len, file.num_tokens - 1)
            count = stop - start
            file.check_ids(self.vocab_size, start, stop + 1)
            tokens[row, :count] = file.tokens[start:stop]
            targets[row, :count] = file.tokens[start + 1 : stop + 1]
            if file.mask_bits is not None:
                targets[row, :count][~file.trained(start + 1, stop + 1)] = IGNORED
        return Rows(tokens, targets, None)


def open_windows(patterns: Iterable[str], seq_len: int, vocab_size: int, *, with_tails: bool = False) -> Windows:
    """The windows of all files that `patterns` (paths or globs) name: in the order given, sorted within a glob.

    Raises one DataError with everything that is wrong: no match, a file named twice, a bad file, a foreign id,
    files of different tokenizers (as their sidecars tell).
    """
    return Windows(open_files(patterns), seq_len, vocab_size, with_tails=with_tails)


def open_files(patterns: Iterable[str]) -> list[TokenFile]:
    """The token files that `patterns` name, opened; errors as for open_windows, but for foreign ids."""
    problems: list[str] = []
    files: list[TokenFile] = []
    for path in matched(patterns, problems, skip=SUFFIX):
        try:
            files.append(TokenFile.open(path))
        except DataError as error:
            problems.append(str(error))
    _raise(problems)
    require_one_tokenizer(files)
    return files


def require_ids(files: Iterable[TokenFile], vocab_size: int) -> None:
    """Raises DataError if an id that is looked at here is not below `vocab_size`: see CHECKED_WHOLE."""
    problems = []
    for file in files:
        try:
            if file.num_tokens <= CHECKED_WHOLE:
                file.check_ids(vocab_size)
            else:
                file.check_ids(vocab_size, 0, CHECKED_ENDS)
                file.check_ids(vocab_size, file.num_tokens - CHECKED_ENDS)
        except DataError as error:
            problems.append(str(error))
    _raise(problems)


def matched(patterns: Iterable[str], problems: list[str], skip: str | None = None) -> list[Path]:
    """The files that `patterns` name; adds to `problems` what matches nothing or is named twice.

    A wildcard does not match names that end in `skip`; a pattern that is itself the name of a file is that file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        if Path(pattern).exists() or not glob.has_magic(pattern):
            names = [Path(pattern)]
        else:
            hits = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
            names = [Path(hit) for hit in hits if Path(hit).is_file() and not (skip and hit.endswith(skip))]
            if not names:
                problems.append(
                    f"no file matches {pattern}: check the path (the shell passes a quoted glob on as it is)"
                )
        for name in names:
            if name in found:
                problems.append(f"{name} is named twice: name every file once")
            found[name] = None
    return list(found)


def require_one_tokenizer(files: Iterable[TokenFile], model: Path | None = None) -> None:
    """Raises DataError if the files' headers and sidecars tell of more than one tokenizer, or are unreadable.

    `model` is the folder of the model: if it has a tokenizer.json, the files must have the ids of that.
    """
    problems: list[str] = []
    first: dict[str, tuple[TokenFile, str, Path | None]] = {}  # tokenizer hash -> who has it, its name, its folder
    for file in files:
        try:
            sidecar = Sidecar.read(file.path, file.num_tokens)
        except DataError as error:
            problems.append(str(error))
            continue
        said = sidecar.tokenizer if sidecar is not None else None
        found = file.tokenizer_sha256 or (said.sha256 if said else None)
        if said and found != said.sha256:
            problems.append(
                f"{file.path} and its sidecar tell of different tokenizers: make both again, or delete the sidecar"
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
                f"{file.path} is of another tokenizer ({name}) than the model's in {model}: tokenize the text with "
                f"--tokenizer {model}, or train another model"
            )
    _raise(problems)


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise DataError("\n".join(problems))
