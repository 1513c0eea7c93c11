"""From the data options to batches: what is trained on, in which order, read ahead of the training thread.

The order of the samples is one endless sequence: place s holds sample s % N of epoch s // N's permutation, so that the
last step of an epoch wraps into the next, and training can start at any place. A mixture has an order of its own over
the same places (mixture.py); a stream has no places, and continues from its state (stream.py). A rank of W takes rows
of each group of W * batch_size consecutive places; what a whole step sees does not depend on W.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.data.batches.augment import Augmentation, open_augmentation
from llmq.data.batches.batch import Batch
from llmq.data.batches.mixture import MixEntry, Mixture, Share, mix_file, read_mix
from llmq.data.batches.packing import Packs, open_packs, refuse_single_tokens
from llmq.data.batches.permutation import sample_order
from llmq.data.batches.read_ahead import ReadAhead
from llmq.data.batches.row_layout import PADDED, WINDOWS, RowLayout, choose_row_layout
from llmq.data.batches.stream import PackedStream, Stream
from llmq.data.batches.windows import Rows, Samples, Windows, open_windows, require_one_tokenizer
from llmq.data.tokens.sidecar import Sidecar, tokenizer_folder
from llmq.errors import DataError, UsageError
from llmq.tensor import IGNORED

if TYPE_CHECKING:
    from llmq.data.batches.prepare import Named
    from llmq.options.sections import DataOptions


@dataclass(frozen=True, eq=False)
class Data:
    """The data of a run. A step takes batch_size * grad_accumulation samples on each of the ranks."""

    train: Samples | Stream
    eval: Samples | None
    batch_size: int
    seq_len: int
    grad_accumulation: int
    seed: int
    world: int
    augment: Augmentation | None = None
    layout: RowLayout = field(default_factory=RowLayout)

    @property
    def limits(self) -> tuple[int, int] | None:
        """Most documents of a row, and most tokens of a document; None if rows have no borders."""
        found = [samples.limits for samples in (self.train, self.eval) if samples and samples.limits]
        return (max(docs for docs, _ in found), max(longest for _, longest in found)) if found else None

    def facts(self) -> dict[str, str]:
        """What a run should know of its rows, in words: their layout, how full they are, and what is trained."""
        parts: list[tuple[str, Samples | Stream | None]] = [("", self.train), ("eval ", self.eval)]
        if isinstance(self.train, Mixture):
            parts += [(f"{name}: ", source) for name, source in zip(self.train.names, self.train.sources, strict=True)]
        found = {"layout": f"{self.layout.kind} ({self.layout.why})"}
        if (count := self.train.num_windows) is not None and count < (needed := self.samples_per_step):
            unit = "windows" if self.layout.kind == WINDOWS else "rows"
            found["note"] = (
                f"the data has {count} {unit} and a step takes {needed}, so that it sees {unit} more than once: a "
                "smaller --grad-accumulation or --batch-size avoids that"
            )
        for name, samples in parts:
            if isinstance(samples, Packs):
                size, most = samples.num_windows * self.seq_len, samples.docs_per_row
                kind = f"at most {most} documents in each" if most > 1 else "a document in each"
                found[f"{name}rows"] = f"{samples.num_windows:,}, {100 * samples.fill:.2f}% full, {kind}"
                found[f"{name}trained tokens"] = _share(samples.num_trained, size)
            elif isinstance(samples, PackedStream) and samples.limits:
                found[f"{name}rows"] = f"at most {samples.max_docs} documents in each"
            elif isinstance(samples, Windows) and any(file.mask_bits is not None for file in samples.token_files):
                trained = sum(file.num_trained for file in samples.token_files)
                found[f"{name}trained tokens"] = _share(trained, samples.num_tokens)
        return found

    @property
    def samples_per_step(self) -> int:
        return self.batch_size * self.grad_accumulation * self.world

    def loader(self, rank: int = 0) -> Loader:
        """A loader of the training data for one rank; call its `start`."""
        return Loader(self.train, self.batch_size, self.seq_len, self.seed, rank, self.world, augment=self.augment)

    def shares(self, num_samples: int) -> list[Share]:
        """What each source gives to the first `num_samples` samples; empty if the data is no mixture."""
        return self.train.shares(num_samples) if isinstance(self.train, Mixture) else []

    def identity(self) -> dict[str, Any]:
        """What a run that continues another must have in common with it, beside the seed; as JSON knows it."""
        train = self.train
        return {
            "seq_len": self.seq_len,
            "training samples": train.num_windows,
            **({"training files": [file.fingerprint for file in train.token_files]} if train.token_files else {}),
            **({"data, tokenizer and template": train.key} if isinstance(train, Stream) else {}),
            **({"mixture": train.identity()} if isinstance(train, Mixture) else {}),
            **({"augment": [list(rate) for rate in self.augment.rates]} if self.augment else {}),
            **({"documents of a row": self.limits[0]} if self.limits else {}),
        }

    def epoch(self, position: int, stream: Mapping[str, int] | None) -> float:
        """Passes over the training data after `position` samples; those of a stream are in its state."""
        if self.train.num_windows is None:
            return float(stream["epoch"]) if stream else 0.0
        return position / self.train.num_windows

    def tokenizer_folder(self) -> Path | None:
        """Folder with the files of the tokenizer that made the training data; None if no file has a sidecar."""
        return next((tokenizer_folder(path, sidecar) for path, sidecar in self._sidecars()), None)

    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end documents and trained turns of the training data, as far as its sidecars tell."""
        ends = {number for _, sidecar in self._sidecars() for number in sidecar.ends()}
        return tuple(sorted(ends | set(self.train.end_token_ids if isinstance(self.train, Stream) else ())))

    def _sidecars(self) -> Iterator[tuple[Path, Sidecar]]:
        for file in self.train.token_files:
            if sidecar := Sidecar.read(file.path, file.num_tokens):
                yield file.path, sidecar


def _share(count: int, total: int) -> str:
    return f"{count:,}, {100 * count / max(total, 1):.2f}%"


def open_data(
    options: DataOptions,
    vocab_size: int,
    seed: int,
    *,
    tokenizer: Path | None = None,
    named: Named | None = None,
    world: int = 1,
    cannot_pack: str | None = None,
) -> Data:
    """Opens and checks all token files of a run for a model of `vocab_size` ids, whose `tokenizer` is in a folder.

    `named` is the data of --data, which is tokenized here, if it was not before; `cannot_pack` says why the device
    cannot run packed rows, if it cannot.

    Raises UsageError if the global batch is no multiple of what the ranks take at once, or for options that do not fit
    the data (see choose_row_layout), and DataError if a file is bad (see open_windows) or of another tokenizer, or
    there is no sample to train or evaluate on.
    """
    per_micro_step = options.batch_size * world
    accumulation = options.grad_accumulation
    if options.global_batch_size is not None:
        accumulation, rest = divmod(options.global_batch_size, per_micro_step)
        if rest or not accumulation:
            on_ranks = f" on {world} ranks" if world > 1 else ""
            lower = max(accumulation, 1) * per_micro_step
            raise UsageError(
                f"global_batch_size {options.global_batch_size} is not a multiple of {per_micro_step}, which is "
                f"batch_size {options.batch_size}{on_ranks}: use {lower} or {lower + per_micro_step}"
            )
    augment = open_augmentation(options.augment, vocab_size, seed)
    requests = named.requests(options.seq_len) if named is not None else ()
    has_rows = any(request.found.is_rows for request in requests)
    layout = choose_row_layout(options.packing, options.max_docs, has_rows=has_rows, cannot_pack=cannot_pack)
    if layout.kind != WINDOWS:
        refuse_single_tokens(options.seq_len)
    source = None
    if named is not None:
        sizes = {"seq_len": options.seq_len, "vocab_size": vocab_size, "max_docs": options.max_docs, "seed": seed}
        source = named.tokenized(requests, layout, **sizes)
        options = options.model_copy(update=source.as_options())
    problems: list[str] = []
    train, evaluation = None, None
    try:
        names = named.names if named is not None else None
        train = source.samples if source and source.samples else _open_train(options, layout, vocab_size, seed, names)
    except DataError as error:
        problems.append(str(error))
    try:
        docs = (train.limits or (1,))[0] if train else options.max_docs
        open_source = _opener(options, layout, vocab_size, seed, docs, with_tails=True)
        evaluation = open_source(options.eval_file or ())
    except DataError as error:
        problems.append(str(error))
    if train is None or evaluation is None:
        raise DataError("\n".join(problems))
    require_one_tokenizer((*train.token_files, *evaluation.token_files), tokenizer)
    if train.num_windows == 0:
        needs = f": one is {options.seq_len + 1} tokens of a file" if layout.kind == WINDOWS else ""
        problems.append(
            f"the training data ({train.num_tokens} tokens) has no sample of seq_len {options.seq_len}{needs}: lower "
            "seq_len, or give more data"
        )
    if options.eval_file is not None and not evaluation.num_windows:
        problems.append(
            f"the evaluation data ({evaluation.num_tokens} tokens) has nothing to predict: give a file with two tokens "
            "or more"
        )
    if problems:
        raise DataError("\n".join(problems))
    return Data(
        train=train,
        eval=evaluation if options.eval_file is not None else None,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        grad_accumulation=accumulation,
        seed=seed,
        world=world,
        augment=augment,
        layout=layout,
    )


def _open_train(
    options: DataOptions, layout: RowLayout, vocab_size: int, seed: int, names: Sequence[str] | None
) -> Samples:
    """The training data: windows or packs, or a mixture where there are weights. DataError names all bad files.

    `names` are those of the data that each of the token files was made from.
    """
    assert options.train_file is not None
    open_source = _opener(options, layout, vocab_size, seed, options.max_docs)
    if mix := mix_file(options.train_file):
        if options.weight is not None or len(options.train_file) > 1:
            raise UsageError(
                f"--train-file {mix} describes a whole mixture, with its weights: leave out --weight and other files, "
                "or put them into it"
            )
        entries = read_mix(mix)
        if datasets := [entry.data for entry in entries if entry.data is not None]:
            raise UsageError(
                f"{mix}: {', '.join(datasets)}: --train-file takes token files: make them with "
                "tokenize-data, and name them as train_file; or give the mix file as --data"
            )
    elif options.weight is not None:
        if len(options.weight) != len(options.train_file):
            raise UsageError(
                f"--weight is given {len(options.weight)} times and --train-file {len(options.train_file)} times: "
                "give one weight for each"
            )
        made_from: Sequence[str | None] = names or [None] * len(options.weight)
        sources = zip(options.train_file, options.weight, made_from, strict=True)
        entries = [MixEntry((file,), weight, name) for file, weight, name in sources]
    else:
        return open_source(options.train_file)
    return open_mixture(entries, open_source, seed)


def _opener(
    options: DataOptions,
    layout: RowLayout,
    vocab_size: int,
    seed: int,
    max_docs: int | None,
    *,
    with_tails: bool = False,
) -> Callable[[Sequence[str]], Windows | Packs]:
    """What opens files in a layout. `max_docs` (None: packing chooses) is for packed rows, `with_tails` for windows."""
    length = options.seq_len
    if layout.kind == WINDOWS:
        return partial(open_windows, seq_len=length, vocab_size=vocab_size, with_tails=with_tails)
    docs = 1 if layout.kind == PADDED else max_docs
    return partial(open_packs, seq_len=length, vocab_size=vocab_size, seed=seed, max_docs=docs)


def open_mixture(
    entries: Sequence[MixEntry], open_source: Callable[[Sequence[str]], Windows | Packs], seed: int
) -> Mixture:
    """A mixture of token files. Raises DataError and UsageError as what opens them; no file may be in two."""
    problems, sources = [], []
    for entry in entries:
        try:
            sources.append(open_source(entry.train_file))
        except DataError as error:
            problems.append(str(error))
    paths = Counter(file.path for source in sources for file in source.token_files)
    problems += [f"{path} is in {count} sources: name every file once" for path, count in paths.items() if count > 1]
    if problems:
        raise DataError("\n".join(problems))
    return Mixture(sources, [entry.weight for entry in entries], seed, [entry.name for entry in entries])


def eval_batches(windows: Samples, batch_size: int, seq_len: int, num_steps: int | None = None) -> Iterator[Batch]:
    """The windows in the order of the files: at most `num_steps` batches, or all of them.

    The last batch is filled up with rows that are not trained.
    """
    assert seq_len == windows.seq_len
    stop = windows.num_windows if num_steps is None else min(num_steps * batch_size, windows.num_windows)
    for start in range(0, stop, batch_size):
        samples = np.arange(start, min(start + batch_size, stop))
        tokens = np.zeros((batch_size, seq_len), np.int32)
        targets = np.full((batch_size, seq_len), IGNORED, np.int32)
        rows = windows.read(samples)
        tokens[: len(samples)], targets[: len(samples)] = rows.tokens, rows.targets
        borders = None
        if rows.borders is not None:
            borders = np.full((batch_size, rows.borders.shape[1]), seq_len, np.int32)
            borders[:, 0] = 0
            borders[: len(samples)] = rows.borders
        yield Batch(tokens, targets, borders, position=start + len(samples))


class Loader:
    """Batches of shuffled windows for one rank, read ahead by one background thread.

    `start` may be called again to go elsewhere; `close` (or leaving a `with`) ends the thread.
    """

    def __init__(
        self,
        windows: Samples | Stream,
        batch_size: int,
        seq_len: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        *,
        augment: Augmentation | None = None,
    ) -> None:
        assert seq_len == windows.seq_len and 0 <= rank < world
        self.windows, self.batch_size, self.seed = windows, batch_size, seed
        self.rank, self.world, self.augment = rank, world, augment
        self._reader: ReadAhead | None = None

    def start(self, position: int = 0, stream: Mapping[str, int] | None = None) -> Loader:
        """Begins to read at sample `position` of the sequence of all ranks: 0, or the `position` of a batch.

        Of a stream, the batch's `stream` is needed too.
        """
        self.close()
        self._reader = ReadAhead(self._batches(position, stream))
        self._collected = weakref.finalize(self, self._reader.stop)
        return self

    def next(self, stop: Callable[[], bool] = lambda: False) -> Batch:
        """The next batch; raises here what went wrong while reading it (DataError for a foreign id).

        Stopped if `stop` comes true while there is none yet.
        """
        if self._reader is None:
            raise RuntimeError("the loader is not started: call start(position) first")
        began = time.perf_counter()
        batch = self._reader.take(stop)
        return replace(batch, wait_ms=(time.perf_counter() - began) * 1e3)

    def close(self) -> None:
        """Ends the background thread; does nothing if there is none."""
        if self._reader is not None:
            self._collected.detach()
            self._reader.close()
            self._reader = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _batches(self, position: int, stream: Mapping[str, int] | None) -> Iterator[Batch]:
        # Generators over local values: the thread that runs one must not keep the loader alive.
        about = (self.batch_size, self.rank, self.world, position, self.augment)
        if isinstance(self.windows, Stream):
            return _streamed_batches(self.windows, stream, *about)
        return _training_batches(self.windows, self.seed, *about)


def _training_batches(
    windows: Samples, seed: int, batch_size: int, rank: int, world: int, position: int, augment: Augmentation | None
) -> Iterator[Batch]:
    while True:
        places = position + rank * batch_size + np.arange(batch_size)
        if isinstance(windows, Mixture):
            rows = windows.read(windows.order(places))
        else:
            rows = windows.read(sample_order(places, windows.num_windows, seed))
        if augment is not None:
            rows = augment(rows, places)
        position += batch_size * world
        yield Batch(*rows, places, position, position / windows.num_windows)


def _streamed_batches(
    stream: Stream,
    state: Mapping[str, int] | None,
    batch_size: int,
    rank: int,
    world: int,
    position: int,
    augment: Augmentation | None,
) -> Iterator[Batch]:
    assert position == 0 or state is not None
    rows = stream.rows(state)
    while True:
        # Every rank reads all rows: what is in them depends on all documents before.
        group = [next(rows) for _ in range(batch_size * world)]
        mine = group[rank * batch_size : (rank + 1) * batch_size]
        borders = [row.borders for row in mine if row.borders is not None]
        batch = Rows(
            np.stack([row.tokens for row in mine]),
            np.stack([row.targets for row in mine]),
            np.stack(borders) if borders else None,
        )
        places = position + rank * batch_size + np.arange(batch_size)
        if augment is not None:
            batch = augment(batch, places)
        position += batch_size * world
        state = group[-1].state
        yield Batch(*batch, places, position, float(state["epoch"]), dict(state))
