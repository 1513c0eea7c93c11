"""The one protocol of all that is read in order, be it rows, documents or batches: it can be entered at any position.

`read(position)` yields (position after the item, item). A position is JSON: a manifest or a checkpoint keeps
it, and a stream that is read from there has the same items. A stream that wraps others makes its position of theirs:

    FileRows, Shuffled, Mixed      rows of files, in an order, or of several streams of rows
    TextWork, RowWork, tokenized   batches of text or rows, and their tokens
    StreamedRows                   rows of T tokens, pass after pass
    RankBatches                    the batches of one rank, of streamed rows or of samples in token files

`ReadAhead` reads any of them in a thread.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Position = Any
START: Position = ()

POLL_S = 0.2  # from one look at the caller's `stop` to the next, while there is no item
JOIN_S = 2.0  # for the thread to end; one that waits for a network longer than that is left to itself


class Stream(Protocol[T_co]):
    """Items in an order of their own."""

    def read(self, position: Position = START) -> Iterator[tuple[Position, T_co]]:
        """The items after `position`, each with the position after it."""


class Stopped(Exception):
    """The caller's `stop` came true while it waited for an item."""


class ReadAhead(Generic[T]):
    """The items of an iterator, of which a thread reads up to `ahead` early.

    What the iterator raises is raised in its place, and ever after. The thread ends with `close` (or leaving a `with`),
    or when this is collected.
    """

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._queue: queue.Queue[T | BaseException] = queue.Queue(ahead)
        self._end: BaseException | None = None
        stopped = threading.Event()
        self._stop = weakref.finalize(self, _stop, self._queue, stopped)
        arguments = (items, self._queue, stopped)  # not this object, which the thread would keep alive
        self._thread = threading.Thread(target=_run, args=arguments, name="llmq-read", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self.take(lambda: False)

    def take(self, stop: Callable[[], bool]) -> T:
        """The next item; StopIteration at the end, Stopped if `stop` comes true while there is no item yet."""
        while self._end is None:
            try:
                item = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                if stop():
                    raise Stopped from None
                continue
            if not isinstance(item, BaseException):
                return item
            self._end = item
        raise self._end

    def close(self) -> None:
        """Ends the thread, and waits for it up to JOIN_S."""
        self._stop()
        self._thread.join(JOIN_S)
        self._end = self._end or Stopped()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()


def _run(items: Iterator[T], results: queue.Queue[T | BaseException], stopped: threading.Event) -> None:
    try:
        for item in items:
            results.put(item)
            if stopped.is_set():
                return
        results.put(StopIteration())
    except BaseException as error:  # it belongs to the thread that takes the items
        results.put(error)


def _stop(results: queue.Queue[T | BaseException], stopped: threading.Event) -> None:
    """Asks the thread to end, without waiting: the garbage collector may call this from that very thread."""
    stopped.set()
    # The thread puts at most one more item after the stop, so one free place lets it end.
    with suppress(queue.Empty):
        while True:
            results.get_nowait()
