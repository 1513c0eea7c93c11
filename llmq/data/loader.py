"""From the data options to batches: what is trained on, in which order, read ahead of the training thread.

The order of the samples is one endless sequence: place s holds sample s % N of epoch s // N's permutation, so that the
last step of an epoch wraps into the next, and training can start at any place. A rank of W takes rows of each group of
W * batch_size consecutive places; what a whole step sees does not depend on W.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from llmq.data.permutation import sample_order
from llmq.data.sidecar import Sidecar, tokenizer_folder
from llmq.data.windows import Samples, open_windows, require_one_tokenizer
from llmq.errors import DataError, UsageError
from llmq.tensor import IGNORED

if TYPE_CHECKING:
    from llmq.options import DataOptions

PREFETCHED = 4  # batches read ahead: B * T * 8 bytes each, 256 KiB at 8 x 4096


@dataclass(frozen=True, eq=False)
class Batch:
    """What one rank computes on in one micro-step."""

    tokens: np.ndarray  # (B,T) int32
    targets: np.ndarray  # (B,T) int32; -100 is not trained
    borders: np.ndarray | None  # (B,D+1) int32: starts of each row's documents, then T repeated; None: not packed
    position: int  # samples taken by all ranks up to and with this batch: where to start to get the next one
    wait_ms: float = 0.0  # how long the training thread waited for it


@dataclass(frozen=True, eq=False)
class Data:
    """The data of a run. A step takes batch_size * grad_accumulation samples on each of the ranks."""

    train: Samples
    eval: Samples | None
    batch_size: int
    seq_len: int
    grad_accumulation: int
    seed: int
    world: int

    @property
    def samples_per_step(self) -> int:
        return self.batch_size * self.grad_accumulation * self.world

    def loader(self, rank: int = 0) -> Loader:
        """A loader of the training data for one rank; call its `start`."""
        return Loader(self.train, self.batch_size, self.seq_len, self.seed, rank, self.world)

    def tokenizer_folder(self) -> Path | None:
        """Folder with the files of the tokenizer that made the training data; None if no file has a sidecar."""
        return next((tokenizer_folder(path, sidecar) for path, sidecar in self._sidecars()), None)

    def eos_token_id(self) -> int | None:
        """The token that ends each document of the training data; None if no file has a sidecar."""
        return next((sidecar.tokenizer.eos_token_id for _, sidecar in self._sidecars()), None)

    def _sidecars(self) -> Iterator[tuple[Path, Sidecar]]:
        for file in self.train.token_files:
            if sidecar := Sidecar.read(file.path, file.num_tokens):
                yield file.path, sidecar


def open_data(
    options: DataOptions, vocab_size: int, seed: int, *, tokenizer: Path | None = None, world: int = 1
) -> Data:
    """Opens and checks all token files of a run for a model of `vocab_size` ids, whose `tokenizer` is in a folder.

    Raises UsageError if the global batch is no multiple of what the ranks take at once, and DataError if a file is bad
    (see open_windows) or of another tokenizer, or there are fewer samples than one step or one evaluation needs.
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
    problems, found = [], []
    for patterns in (options.train_file, options.eval_file or ()):
        try:
            found.append(open_windows(patterns, options.seq_len, vocab_size))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    train, evaluation = found
    require_one_tokenizer((*train.token_files, *evaluation.token_files), tokenizer)
    needed = per_micro_step * accumulation
    if train.num_windows < needed:
        problems.append(
            f"the training data has {train.num_windows} windows of seq_len {options.seq_len} ({train.num_tokens} "
            f"tokens), but one step needs {needed} (batch_size {options.batch_size} x grad_accumulation {accumulation}"
            f"{f' x {world} ranks' if world > 1 else ''}): lower one of them, or give more data"
        )
    if options.eval_file is not None and not evaluation.num_windows:
        problems.append(
            f"the evaluation data has {evaluation.num_tokens} tokens and no window of seq_len {options.seq_len}, which "
            f"needs {options.seq_len + 1} tokens in one file: lower seq_len, or give more data"
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
    )


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
        self, windows: Samples, batch_size: int, seq_len: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        assert seq_len == windows.seq_len and 0 <= rank < world
        self.windows, self.batch_size, self.seed = windows, batch_size, seed
        self.rank, self.world = rank, world
        self._reader: _Reader | None = None

    def start(self, position: int = 0) -> Loader:
        """Begins to read at sample `position` of the sequence of all ranks: 0, or the `position` of a batch."""
        self.close()
        self._reader = _Reader(self._batches(position))
        self._collected = weakref.finalize(self, self._reader.stop)
        return self

    def next(self) -> Batch:
        """The next batch; raises here what went wrong while reading it (DataError for a foreign id)."""
        if self._reader is None:
            raise RuntimeError("the loader is not started: call start(position) first")
        began = time.perf_counter()
        batch = self._reader.take()
        return replace(batch, wait_ms=(time.perf_counter() - began) * 1e3)

    def close(self) -> None:
        """Ends the background thread and waits for it; does nothing if there is none."""
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

    def _batches(self, position: int) -> Iterator[Batch]:
        # A generator over local values: the thread that runs it must not keep the loader alive.
        return _training_batches(self.windows, self.batch_size, self.seed, self.rank, self.world, position)


def _training_batches(
    windows: Samples, batch_size: int, seed: int, rank: int, world: int, position: int
) -> Iterator[Batch]:
    while True:
        places = position + rank * batch_size + np.arange(batch_size)
        rows = windows.read(sample_order(places, windows.num_windows, seed))
        position += batch_size * world
        yield Batch(*rows, position)


class _Reader:
    """A thread that runs a generator ahead of its consumer, by at most PREFETCHED items."""

    def __init__(self, items: Iterator[Batch]) -> None:
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(PREFETCHED)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=_run, args=(items, self._queue, self._stop), name="llmq-loader", daemon=True
        )
        self._thread.start()

    def take(self) -> Batch:
        if self._error is None:
            item = self._queue.get()
            if not isinstance(item, BaseException):
                return item
            self._error = item
        raise self._error

    def stop(self) -> None:
        """Tells the thread to end, without waiting: the garbage collector may call this from that very thread."""
        self._stop.set()
        # The thread puts at most one more item after it is told to stop, so one free place lets it end.
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        self.stop()
        self._thread.join()


def _run(items: Iterator[Batch], results: queue.Queue[Batch | BaseException], stop: threading.Event) -> None:
    try:
        for item in items:
            results.put(item)
            if stop.is_set():
                return
    except BaseException as error:  # it belongs to the training thread, which raises it in next()
        results.put(error)
