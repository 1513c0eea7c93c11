"""A rank among the others: it joins the store, says where it is, hears who is lost, and then ends.

A rank that is killed is noticed at once, one that is stopped or cut off by its silence, and one that hangs by
the others, which wait for it in a later collective (llmq/comm/store.py judges). What may take long is announced: see
`Membership.long`. The main thread of a rank may be stuck where no exception reaches it, so a thread ends the process.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

from llmq.comm.store import PURPOSE, SILENCE, Beat, lost_in_words, seconds_of_beat
from llmq.comm.wire import WATCHING, Channel, Refused, WrongToken, introduced
from llmq.errors import WorldError

LEAVE_S = 10.0  # until the store has heard that a rank leaves
VERDICT_S = 5.0  # that a rank whose world broke waits to hear who is lost
LAST_WORDS_S = 15.0  # for what a rank prints and logs before it ends
FAILURE_CHARACTERS = 10_000


class Membership:
    """What a rank has of the store that it has joined. `places` says where each rank is: an address and a port."""

    def __init__(self, channel: Channel, host: str, rank: int, welcome: dict[str, Any]) -> None:
        self.rank = rank
        self.places: list[tuple[str, int]] = [(address or host, port) for address, port in welcome["places"]]
        self._channel, self._keepers = channel, welcome["keepers"] or [None]  # None: the launcher
        self._lost = ""  # who is lost
        self._is_settled = threading.Event()
        self._has_left = False
        self._on_lost: Callable[[str], None] | None = None
        self._progress: Callable[[], Beat] = lambda: Beat(0, "", 0)
        self._doing: list[str] = []
        self._silent_s = 0.0  # since the store was heard
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"{WATCHING}: store", daemon=True)
        self._thread.start()

    @classmethod
    def join(
        cls, host: str, port: int, rank: int, size: int, token: str, deadline: float, *, own_port: int = 0
    ) -> Membership:
        """One of `size` ranks, once all have joined the store; others reach it at `own_port`.

        WorldError after `deadline` seconds, naming the ranks that are missing, and at once if the store has another
        token or another number of ranks, or if this rank has joined before.
        """
        until = time.monotonic() + deadline
        about = {"rank": rank, "size": size, "port": own_port, "pid": os.getpid()}

        def hello() -> dict[str, Any]:
            return {**about, "seconds": max(0.0, until - time.monotonic())}

        try:
            channel, answer = introduced(host, port, token, PURPOSE, hello, until)
        except WrongToken as error:
            text = f"the store at {host}:{port} belongs to another job: give all ranks the same LLMQ_JOB_TOKEN"
            raise WorldError(text) from error
        except (OSError, Refused) as error:
            text = f"rank {rank} found no store at {host}:{port} within {deadline:g} s ({error})"
            advice = "the process that keeps it (rank 0 or the launcher) is missing, or the address is another"
            raise WorldError(f"{text}: {advice}") from error
        if "error" in answer:
            channel.close()
            raise WorldError(answer["error"])
        return cls(channel, host, rank, answer)

    def lost_within(self, seconds: float) -> str:
        """Which ranks are lost, once there are any; empty if there are none after some seconds."""
        self._is_settled.wait(seconds)
        return self._lost

    def close(self) -> None:
        """Leaves: the others do not take this rank for lost."""
        self._leave({"left": True})
        self._channel.end(socket.SHUT_WR)
        self._thread.join(LEAVE_S)  # what it has not read would take the last words along, were this closed before
        self._channel.close()

    @contextmanager
    def watched(
        self,
        progress: Callable[[], Beat],
        stacks: Path,
        *,
        patience: float,
        on_lost: Callable[[str], None] = lambda lost: None,
    ) -> Iterator[Membership]:
        """Around the work of this rank; all ranks have one, best as soon as they have joined.

        `progress` is called every second, mostly from a thread of its own, and must not wait for anything. A rank is
        lost if it is not heard, or if the others wait for it, for `patience` seconds: longer than any rank computes
        between two collectives, and than one collective takes. Then every rank that can prints on stderr who it is,
        adds its Python stacks to the file `stacks`, calls `on_lost` (which may write the end of a log, within seconds),
        and ends with WorldError's exit code.

        Where the block ends with an exception, the others hear of it, unless they fail as well: this rank ends as the
        exception says. A WorldError waits until it is known who is lost. A rank that keeps the store closes that after
        the block (`StoreServer.close`), so that the others can hear.
        """
        try:
            self._channel.send({"watch": float(patience)})
        except OSError as error:
            raise WorldError(f"rank {self.rank} cannot reach the store to be watched: {error}") from error
        self._progress = progress
        with self._turn:
            self._on_lost, lost = lambda lost: self._end(lost, stacks, on_lost), self._lost
        if lost:
            self._on_lost(lost)
        is_over = threading.Event()
        beats = threading.Thread(target=self._beats, args=(is_over, patience), name=f"{WATCHING}: beats", daemon=True)
        beats.start()
        last: dict[str, Any] = {"left": True}
        try:
            yield self
        except BaseException as error:
            if isinstance(error, WorldError) and self.lost_within(VERDICT_S):
                time.sleep(LAST_WORDS_S)  # the thread that heard of it ends the process meanwhile
            if not (isinstance(error, SystemExit) and not error.code):
                last = {"failed": f"{type(error).__name__}: {error}"[:FAILURE_CHARACTERS]}
            raise
        finally:
            is_over.set()
            beats.join()
            self._beat()
            self._leave(last)

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
        """A sign of life, which may be the last one that the connection takes: the listening thread notices that."""
        with suppress(OSError):
            self._channel.send({"beat": astuple(self._progress()), "doing": ", ".join(self._doing)})

    def _beats(self, is_over: threading.Event, patience: float) -> None:
        interval = seconds_of_beat(patience)
        try:
            while True:
                self._beat()
                if is_over.wait(interval):
                    return
                # In rounds of this loop, so that a process that was stopped itself forgives the store.
                self._silent_s += interval
                if (silent := self._silent_s) >= SILENCE * patience:
                    self._miss(f"no answer for {silent:.0f} s: its process, or its machine, is stopped or cut off")
        except BaseException:
            traceback.print_exc()
            os._exit(WorldError.exit_code)  # an unwatched rank would not be noticed by the others

    def _leave(self, last: dict[str, Any]) -> None:
        if not self._has_left:
            self._has_left = True
            with suppress(OSError):
                self._channel.send(last)

    def _listen(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                self._silent_s = 0.0
                if "lost" in message:
                    self._found(str(message["lost"]))
                elif "end" in message:
                    self._has_left = True  # from here on no one is watched
        except (OSError, Refused) as error:
            self._miss(f"its connection has ended ({error})")

    def _miss(self, why: str) -> None:
        """The store itself is lost, and with it the ranks that keep it, or else the launcher."""
        self._found("; ".join(lost_in_words(rank, f"it keeps the store; {why}") for rank in self._keepers))

    def _found(self, lost: str) -> None:
        with self._turn:
            if self._lost or self._has_left:
                return
            self._lost, on_lost = lost, self._on_lost
        self._is_settled.set()
        if on_lost:
            on_lost(lost)

    def _end(self, lost: str, stacks: Path, on_lost: Callable[[str], None]) -> None:
        """Says who is lost, and ends the process, even if printing or logging is stuck."""
        said = f"rank {self.rank} ends, because {lost}"
        found = _stacks()

        def say() -> None:
            acts = (
                lambda: print(f"{said}. Python stacks are in {stacks}", file=sys.stderr, flush=True),
                lambda: _write(stacks, f"{said}\nPython stacks of rank {self.rank}:\n{found}\n"),
                lambda: on_lost(lost),
            )
            for act in acts:  # each by itself: a disk that is stuck keeps no rank from saying who is lost
                try:
                    act()
                except Exception:
                    traceback.print_exc()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # its reader has ended, or it is closed
                    stream.flush()

        words = threading.Thread(target=say, name=f"{WATCHING}: report", daemon=True)
        words.start()
        words.join(LAST_WORDS_S)
        os._exit(WorldError.exit_code)


def _write(path: Path, text: str) -> None:
    """Adds to a file, or prints where that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    except OSError as error:
        print(f"{path} cannot be written: {error}\n{text}", file=sys.stderr, flush=True)


def _stacks() -> str:
    """The Python stacks of this process's threads, the main one first; those that watch are left out."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    return "".join(
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames and not thread.name.startswith(WATCHING)
    ).rstrip()
