"""The watchdog: every rank says where it is, is told who is lost, says so, and ends with WorldError's exit code.

A rank that is killed is noticed at once, one that is stopped or cut off by its silence, and one that stands still by
the others, which wait for it in a later collective (llmq/comm/board.py judges). What may take long is announced: see
`Watchdog.long`. The main thread of a rank may be stuck where no exception reaches it, so the process ends from here.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from llmq.comm.board import SILENCE, Beat, LostRank
from llmq.comm.launch import WATCHDOG_S
from llmq.comm.rendezvous import Store, connect
from llmq.comm.store_server import PURPOSE
from llmq.comm.watch_desk import seconds_of_beat
from llmq.comm.wire import Refused, WrongToken
from llmq.errors import WorldError

CONNECT_S = 10.0
VERDICT_S = 5.0  # that a rank whose world broke waits to hear who is lost
LAST_WORDS_S = 15.0  # for what a rank prints and logs before it ends
STACK_CHARACTERS = 100_000


@dataclass(frozen=True)
class WatchReport:
    """What rank `rank` was told before it ended: the ranks that are lost, and its own Python stacks at that time."""

    rank: int
    lost: tuple[LostRank, ...]
    stacks: str

    def __str__(self) -> str:
        return f"rank {self.rank} ends, because {'; '.join(map(str, self.lost))}"

    @property
    def all_stacks(self) -> str:
        """The stacks of the lost ranks that could say theirs, and its own."""
        each = {one.rank: one.stacks for one in self.lost if one.stacks} | {self.rank: self.stacks}
        return "\n".join(f"Python stacks of rank {rank}:\n{stacks}" for rank, stacks in each.items())


class Watchdog:
    """The watchdog of this rank, during a `with` block; all ranks have one, best as soon as they have joined the store.

    `progress` is called every second, mostly from a thread of its own, and must not wait for anything. A rank is lost
    if it is not heard, or if the others wait for it, for `patience` seconds: longer than any rank computes between two
    collectives, and than one collective takes. Then every rank prints a WatchReport on stderr, adds its stacks to the
    file `stacks`, gives it to `on_lost` (which may write the end of a log, within seconds), and ends with exit code 6.

    Where the block ends with an exception, the others are told, unless they fail as well: this rank ends as the
    exception says. WorldErrors wait for the report, which names who is lost. A rank that keeps the store closes that
    after the block (`StoreServer.close`), so that the others can be told.
    """

    def __init__(
        self,
        store: Store,
        progress: Callable[[], Beat],
        stacks: Path,
        *,
        patience: float = WATCHDOG_S,
        on_lost: Callable[[WatchReport], None] = lambda report: None,
    ) -> None:
        self._store, self._progress, self._stacks, self._on_lost = store, progress, stacks, on_lost
        self._patience, self._interval = patience, seconds_of_beat(patience)
        self._doing: list[str] = []
        self._sends = threading.Lock()
        self._is_over = threading.Event()
        self._keepers: list[tuple[int, Beat | None]] = []
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        store = self._store
        try:
            self._channel = connect(store.host, store.port, store.token, PURPOSE, time.monotonic() + CONNECT_S)
            self._send({"op": "watch", "rank": store.rank, "patience": self._patience, "keeper": store.is_keeper})
        except (OSError, Refused, WrongToken) as error:
            raise WorldError(f"rank {store.rank} cannot reach the store to be watched: {error}") from error
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, WorldError):
            self._thread.join(VERDICT_S)  # which ends the process, if it hears who is lost
        self._is_over.set()
        self._beat()
        clean = error is None or (isinstance(error, SystemExit) and not error.code)
        with suppress(OSError):
            why = "" if error is None else f"{type(error).__name__}: {error}"[:STACK_CHARACTERS]
            self._send({"op": "bye"} if clean else {"op": "failed", "why": why})
            if not clean:
                self._channel.socket.shutdown(socket.SHUT_WR)
        self._thread.join(CONNECT_S)
        self._channel.close()

    @contextmanager
    def long(self, what: str) -> Iterator[None]:
        """Around what may take longer than the patience, such as an export: the others may wait for it."""
        self._doing.append(what)
        self._beat()
        try:
            yield
        finally:
            self._doing.remove(what)
            self._beat()

    def _beat(self) -> None:
        """A sign of life, which may be the last one that the connection takes: the thread notices that."""
        with suppress(OSError):
            self._send({"op": "beat", **asdict(self._progress()), "doing": ", ".join(self._doing)})

    def _send(self, message: dict[str, Any]) -> None:
        with self._sends:
            self._channel.send(message, until=time.monotonic() + CONNECT_S)

    def _run(self) -> None:
        try:
            self._watch()
        except (OSError, Refused) as error:
            if not self._is_over.is_set():
                self._end(self._store_lost(f"its connection has ended ({error})"))
        except BaseException:
            traceback.print_exc()
            os._exit(WorldError.exit_code)  # an unwatched rank would not be noticed by the others

    def _watch(self) -> None:
        silent = 0.0  # in rounds of this loop, so that a process that was stopped itself forgives the store
        poll = select.poll()
        poll.register(self._channel.socket, select.POLLIN)
        while silent < SILENCE * self._patience:
            self._beat()
            silent += self._interval
            until = time.monotonic() + self._interval
            while (left := until - time.monotonic()) > 0 and poll.poll(1000 * left):
                message, _ = self._channel.receive(until=time.monotonic() + self._patience)
                silent = 0.0
                if "end" in message:
                    return
                if "stacks" in message:
                    self._send({"op": "stacks", "text": _stacks()})
                if "lost" in message:
                    self._end([_lost_rank(one) for one in message["lost"]])
                if "keepers" in message:
                    self._keepers = [(rank, Beat(**beat) if beat else None) for rank, beat in message["keepers"]]
        self._end(self._store_lost(f"no answer for {silent:.0f} s: its process, or its machine, is stopped or cut off"))

    def _store_lost(self, why: str) -> list[LostRank]:
        """The rank that keeps the store, or else the launcher."""
        lost = [LostRank(rank, f"it keeps the store; {why}", beat) for rank, beat in self._keepers]
        return lost or [LostRank(None, f"it keeps the store; {why}", None)]

    def _end(self, lost: list[LostRank]) -> NoReturn:
        """Says who is lost, and ends the process, even if printing or logging is stuck."""
        report = WatchReport(self._store.rank, tuple(lost), _stacks())
        words = threading.Thread(target=self._say, args=(report,), daemon=True)
        words.start()
        words.join(LAST_WORDS_S)
        os._exit(WorldError.exit_code)

    def _say(self, report: WatchReport) -> None:
        said = f"{report}. Python stacks are in {self._stacks}"
        acts = (
            lambda: print(said, file=sys.stderr, flush=True),
            lambda: self._write(report),
            lambda: self._on_lost(report),
        )
        for act in acts:  # each by itself: a disk that is stuck keeps no rank from saying who is lost
            try:
                act()
            except Exception:
                traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader has ended, or it is closed
                stream.flush()

    def _write(self, report: WatchReport) -> None:
        """Adds the stacks to their file, or prints them where that cannot be written."""
        try:
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with open(self._stacks, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {report}\n{report.all_stacks}\n\n")
        except OSError as error:
            print(f"{self._stacks} cannot be written: {error}\n{report.all_stacks}", file=sys.stderr, flush=True)


def _lost_rank(values: dict[str, Any]) -> LostRank:
    beat = values["beat"]
    return LostRank(values["rank"], values["why"], Beat(**beat) if beat else None, values["stacks"])


def _stacks() -> str:
    """The Python stacks of this process's threads, the main one first; the watchdog's own is left out."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    text = [
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident is not None and thread.ident in frames and thread is not threading.current_thread()
    ]
    return "".join(text)[:STACK_CHARACTERS].rstrip()
