"""From the data options to batches: what is trained on, in which order, read ahead of the training thread.

The order of the samples is one endless sequence: place s holds sample s % N of epoch s // N's permutation, so that the
last step of an epoch wraps into the next, and training can start at any place. A mixture has an order of its own over
the same places (mixture.py); streamed rows have no places, and continue from their state (named_data.py). A rank of W
takes rows of each group of W * batch_size consecutive places; what a whole step sees does not depend on W.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.data.batches.batch import Batch, step_of
from llmq.data.batches.mixture import Mixture, Share
from llmq.data.batches.named_data import NamedData, StreamedRows, no_rows
from llmq.data.batches.packing import Packs
from llmq.data.batches.rows import OPTIONS, PADDED, WINDOWS, RowForm, RowLayout, Rows, RowSource, Samples, Windows
from llmq.data.rows.find_sources import matched
from llmq.data.stream import START, Position, ReadAhead, Stream
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenizer import SUFFIX, Sidecar, same_ids, tokenizer_folder, tokenizer_hash
from llmq.errors import DataError, UsageError, all_problems, noted

# Batches read ahead, of B * T * 8 bytes, 256 KiB at 32 x 1024. They are pageable: the copy into a GPU's pinned ring
# takes 25 us at that size, 0.02% of a step at 250,000 tokens/s, so pinned buffers handed to and fro gain nothing.
PREFETCHED = 4
CHECKED_ENDS = 1 << 20  # tokens at each end of a file that are checked when training starts; the others when read
LEAST_FULL = 0.1  # of rows: below this the run warns of padding
TILE = 16  # tokens of a micro-batch, which e4m3 matmuls need a multiple of

if TYPE_CHECKING:
    from llmq.options.data import DataOptions


@dataclass(frozen=True, eq=False)
class Data:
    """The data of a run. A step takes batch_size * grad_accumulation samples on each of the ranks."""

    train: RowSource  # Samples, StreamedRows, or only the shape of rows
    eval: Samples | None
    batch_size: int
    seq_len: int
    grad_accumulation: int
    seed: int
    world: int
    layout: RowLayout = field(default_factory=RowLayout)

    @property
    def is_there(self) -> bool:
        """False: this is the shape of a plan without data."""
        return isinstance(self.train, Samples | StreamedRows)

    @property
    def limits(self) -> tuple[int, int] | None:
        """Most documents of a row, and most tokens of a document; None if rows have no borders."""
        found = [samples.limits for samples in (self.train, self.eval) if samples and samples.limits]
        return (max(docs for docs, _ in found), max(longest for _, longest in found)) if found else None

    def facts(self) -> dict[str, str]:
        """What the log says of the rows, in words: their layout, how full they are, and what is trained."""
        found = {"layout": f"{self.layout.kind} ({self.layout.why})"}
        if num_virtual := self.train.num_virtual:
            found["virtual tokens"] = f"{num_virtual} before each document"
        if (count := self.train.num_windows) is not None and count < (needed := self.samples_per_step):
            unit = "windows" if self.layout.kind == WINDOWS else "rows"
            found["note"] = (
                f"the data has {count} {unit} and a step takes {needed}, so that it sees {unit} more than once: a "
                "smaller --grad-accumulation or --batch-size avoids that"
            )
        of_eval = self.eval.facts() if self.eval else {}
        return {**found, **self.train.facts(), **{f"eval {name}": value for name, value in of_eval.items()}}

    def warnings(self) -> Iterator[str]:
        """A message if nearly all of the training rows is padding, with what makes it less."""
        sources = self.train.sources if isinstance(self.train, Mixture) else [self.train]
        packs = [samples for samples in sources if isinstance(samples, Packs)]
        full = sum(one.fill * one.num_windows for one in packs) / max(sum(one.num_windows for one in packs), 1)
        if packs and full <= LEAST_FULL:
            enough = -(-max(samples.longest for samples in packs) // TILE) * TILE
            fixes = [f"--seq-len {enough} keeps all documents whole"] * (enough < self.seq_len)
            fixes += ["--packing puts several in a row"] * (self.layout.why == f"by {OPTIONS[PADDED]}")
            advice = f": {', and '.join(fixes)}" if fixes else ""
            yield f"{100 * (1 - full):.0f}% of the training rows of {self.seq_len} tokens is padding{advice}"

    @property
    def samples_per_step(self) -> int:
        return self.batch_size * self.grad_accumulation * self.world

    @property
    def has_padding(self) -> bool:
        """Whether rows of the training data may end with padding."""
        return self.layout.kind != WINDOWS

    @property
    def tokens_per_row(self) -> int:
        """Tokens and padding of a row of one document."""
        return self.seq_len - self.train.num_virtual

    def loader(self, rank: int = 0, position: int = 0, stream: Mapping[str, Any] | None = None) -> Loader:
        """A loader of the training data for one rank, from a place on (see Loader)."""
        assert 0 <= rank < self.world and isinstance(self.train, Samples | StreamedRows)
        return Loader(RankBatches(self.train, self.batch_size, self.seed, rank, self.world), position, stream)

    def held_out(self, num_steps: int | None) -> tuple[int, Iterator[Batch]]:
        """The batches to evaluate on, and their number: at most `num_steps`, or all of them."""
        assert self.eval is not None
        whole = -(-self.eval.num_windows // self.batch_size)
        return min(num_steps or whole, whole), eval_batches(self.eval, self.batch_size, num_steps)

    def beside(self, name: str, patterns: Sequence[str]) -> Samples:
        """Rows of other token files, as those to evaluate on; `name` is what they are called in messages.

        DataError for files that cannot be used, have nothing to predict, or have a document that is longer than all of
        the run's own, where rows are packed: attention is planned for these.
        """
        docs, longest = self.limits or (1, self.seq_len)
        found = open_samples(patterns, replace(self.train.form, max_docs=docs), with_tails=True)
        if not found.num_windows:
            raise DataError(f"{name} has nothing to predict ({found.num_tokens} tokens): give two tokens or more")
        if found.limits is not None and found.limits[1] > longest:
            fixes = "leave it out, put one like it into the held-out data, or use --no-packing"
            raise DataError(
                f"{name} has a document of {found.limits[1]} tokens, and the longest of this run's own data, for which "
                f"packed rows are planned, has {longest}: {fixes}"
            )
        return found

    def shares(self, num_samples: int) -> list[Share]:
        """What each source gives to the first `num_samples` samples; empty if the data is no mixture."""
        return self.train.shares(num_samples) if isinstance(self.train, Mixture) else []

    def identity(self) -> dict[str, Any]:
        """What a run that continues another must have in common with it, beside the seed; as JSON."""
        train = self.train
        return {
            "seq_len": self.seq_len,
            "training samples": train.num_windows,
            **({"training files": [file.fingerprint for file in train.token_files]} if train.token_files else {}),
            **({"data, tokenizer and template": train.key} if isinstance(train, StreamedRows) else {}),
            **({"mixture": train.identity()} if isinstance(train, Mixture) else {}),
            **({"documents of a row": self.limits[0]} if self.limits else {}),
        }

    def epoch(self, position: int, stream: Mapping[str, int] | None) -> float:
        """Passes over the training data after `position` samples; those of a stream are in its state."""
        if self.train.num_windows is None:
            return float(stream["epoch"]) if stream else 0.0
        return position / self.train.num_windows

    def tokenizer_folder(self) -> Path | None:
        """Folder with the files of the tokenizer that made the training data; None if no file has a sidecar."""
        return next((tokenizer_folder(file.path, found) for file, found in self.train.sidecars()), None)


def open_data(
    options: DataOptions,
    vocab_size: int,
    seed: int,
    *,
    tokenizer: Path | None = None,
    named: NamedData | None = None,
    world: int = 1,
    cannot_pack: str | None = None,
    num_virtual: int = 0,
    placeholders: tuple[int, ...] = (),
) -> Data:
    """Opens and checks all token files of a run for a model of `vocab_size` ids, whose `tokenizer` is in a folder.

    `named` is the data of --data, which is tokenized here, if it was not before; `cannot_pack` says why the device
    cannot run packed rows, if it cannot; `num_virtual` the virtual tokens before each document, which count in
    --seq-len; `placeholders` the ids that stand for images. Options that name no data give the shape of a step, for a
    plan.

    Raises UsageError if the global batch is no multiple of what the ranks take at once, or for options that do not fit
    the data (see RowLayout.choose), and DataError if a file is bad (see open_samples) or of another tokenizer, or there
    is no sample to train or evaluate on.
    """
    accumulation = step_of(options, world)[-1]
    if num_virtual and options.seq_len < num_virtual + 2:
        raise UsageError(
            f"--seq-len {options.seq_len} counts the {num_virtual} virtual tokens before each document: use at least "
            f"{num_virtual + 2}"
        )
    named = named and named.find(options.seq_len - num_virtual)
    has_rows = named is not None and any(request.found.is_rows for request in named.requests)
    layout = RowLayout.choose(options.packing, options.max_docs, has_rows=has_rows, cannot_pack=cannot_pack)
    form = RowForm(options.seq_len, vocab_size, layout.kind, seed, options.max_docs, num_virtual, placeholders)
    train, held = _opened(options, form, named, tokenizer)
    return Data(train, held, options.batch_size, options.seq_len, accumulation, seed, world, layout)


def _opened(
    options: DataOptions, form: RowForm, named: NamedData | None, tokenizer: Path | None
) -> tuple[RowSource, Samples | None]:
    """What is trained and evaluated on; see open_data for the errors."""
    names, eval_files = tuple(options.train_file or ()), list(options.eval_file or ())
    found: list[list[str]] | RowSource = [[name] for name in names]
    if named:
        names, (found, eval_files) = tuple(named.options.data or ()), named.open(form)
    elif not names:
        return no_rows(form), None
    train, evaluation = None, None
    with all_problems() as problems:
        with noted(problems):
            train = _open_sources(names, found, options.weight, form) if isinstance(found, list) else found
        with noted(problems):
            docs = (train.limits or (1,))[0] if train else options.max_docs
            evaluation = open_samples(eval_files, replace(form, max_docs=docs), with_tails=True)
    assert train is not None and evaluation is not None
    require_one_tokenizer((*train.token_files, *evaluation.token_files), tokenizer)
    with all_problems() as problems:
        if train.num_windows == 0:
            needs = f": one is {form.room + 1} tokens of a file" if form.kind == WINDOWS else ""
            problems.append(
                f"the training data ({train.num_tokens} tokens) has no sample of seq_len {form.seq_len}{needs}: lower "
                "seq_len, or give more data"
            )
        if eval_files and not evaluation.num_windows:
            problems.append(
                f"the evaluation data ({evaluation.num_tokens} tokens) has nothing to predict: give a file with two "
                "tokens or more"
            )
    return train, evaluation if eval_files else None


def _open_sources(
    names: Sequence[str], files: Sequence[Sequence[str]], weights: Sequence[float] | None, form: RowForm
) -> Samples:
    """The token files of all names as windows or packs, one after the other, or with weights as a mixture.

    DataError names all bad files.
    """
    if weights is None:
        return open_samples([pattern for patterns in files for pattern in patterns], form)
    opened = []
    with all_problems() as problems:
        for patterns in files:
            with noted(problems):
                opened.append(open_samples(patterns, form))
        paths = Counter(file.path for samples in opened for file in samples.token_files)
        problems += [f"{path} is in {n} sources: name every file once" for path, n in paths.items() if n > 1]
    return Mixture(opened, weights, names)


def open_samples(patterns: Sequence[str], form: RowForm, *, with_tails: bool = False) -> Samples:
    """The token files that `patterns` (paths or globs) name as samples: in the order given, sorted within a glob.

    `with_tails` is for windows. Raises one DataError with everything that is wrong: no match, a file named twice, a bad
    file, or one with an id that is not in the vocabulary (see CHECKED_ENDS), or that stands for an image.
    """
    files: list[TokenFile] = []
    with all_problems() as problems:
        for path in matched(patterns, problems, skip=SUFFIX):
            with noted(problems):
                files.append(file := TokenFile.open(path))
                file.check_ids(form.vocab_size, 0, min(CHECKED_ENDS, file.num_tokens))
                file.check_ids(form.vocab_size, max(file.num_tokens - CHECKED_ENDS, 0))
                file.check_without(form.placeholders)
    return Windows(files, form, with_tails=with_tails) if form.kind == WINDOWS else Packs(files, form)


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
                found = file.header.tokenizer_sha256 or (said.sha256 if said else None)
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


def eval_batches(windows: Samples, batch_size: int, num_steps: int | None = None) -> Iterator[Batch]:
    """The windows in the order of the files: at most `num_steps` batches, or all of them.

    The last batch is filled up with rows that are not trained.
    """
    stop = windows.num_windows if num_steps is None else min(num_steps * batch_size, windows.num_windows)
    for start in range(0, stop, batch_size):
        rows = windows.read(np.arange(start, min(start + batch_size, stop)))
        filled = Rows.empty(batch_size, windows.seq_len, None if rows.borders is None else rows.borders.shape[1] - 1)
        filled.put(slice(len(rows.tokens)), rows)
        yield Batch(*filled, position=start + len(rows.tokens), num_virtual=windows.num_virtual)


@dataclass(frozen=True, eq=False)
class RankBatches:
    """The batches of one rank: its rows of each group of batch_size * world consecutive ones, without end.

    A position is the samples that all ranks have taken and, of streamed rows, their own position.
    """

    rows: Samples | StreamedRows
    batch_size: int
    seed: int
    rank: int = 0
    world: int = 1

    def read(self, position: Position = START) -> Iterator[tuple[Position, Batch]]:
        """Batch after batch; see Stream."""
        taken, state = position or (0, None)
        rows, first = self.rows, self.rank * self.batch_size
        streamed = rows.read(state) if isinstance(rows, StreamedRows) else iter(())
        while True:
            places = taken + first + np.arange(self.batch_size)
            taken += self.batch_size * self.world
            if isinstance(rows, StreamedRows):
                # Every rank reads all rows: what is in them depends on all documents before.
                group = list(islice(streamed, self.batch_size * self.world))
                state = dict(group[-1][0])
                found, epoch = Rows.stacked([row for _, row in group[first : first + self.batch_size]]), state["epoch"]
            else:
                found, epoch = rows.read(rows.order(places, self.seed)), taken / rows.num_windows
            yield (taken, state), Batch(*found, places, taken, float(epoch), state, num_virtual=rows.num_virtual)


class Loader(ReadAhead[tuple[Position, Batch]]):
    """A stream of batches, read ahead by one background thread from sample `position` of the sequence of all ranks on:
    0, or the `position` of a batch, of streamed rows with its `stream`."""

    def __init__(self, batches: Stream[Batch], position: int = 0, stream: Mapping[str, Any] | None = None) -> None:
        super().__init__(batches.read((position, stream)), PREFETCHED)

    def next(self, stop: Callable[[], bool] = lambda: False) -> Batch:
        """The next batch; raises here what went wrong while reading it (DataError for a foreign id).

        Stopped if `stop` comes true while there is none yet.
        """
        began = time.perf_counter()
        _, batch = self.take(stop)
        return replace(batch, wait_ms=(time.perf_counter() - began) * 1e3)
