"""Where the ranks of a run find each other: each joins a small store, and waits there until all have come.

The server is in llmq/comm/store_server.py, what goes over the sockets in llmq/comm/wire.py. Ranks and server may start
in any order. A rank asks again until the server is there, and the server says which ranks are missing at the deadline.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from llmq.comm.store_server import MESSAGE_BYTES, PURPOSE, StoreServer
from llmq.comm.wire import HANDSHAKE_S, Channel, Frame, Refused, WrongToken, calling
from llmq.errors import WorldError

__all__ = ["Store", "StoreServer"]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0  # between two attempts to join
ANSWER_S = 10.0  # that the server's answer may take beyond what it was asked to wait


class Store:
    """A rank's connection to the store, where ranks set and get values of a few MiB. Threads take turns.

    `seen` is the address that the server sees this rank at; None on the server's own machine, which others reach at
    `host`. `is_keeper` says that the server is in this process. Every method raises WorldError when a rank or the store
    is lost, and names the rank. Then every call does.
    """

    def __init__(
        self, channel: Channel, host: str, port: int, rank: int, size: int, token: str, welcome: dict[str, Any]
    ) -> None:
        self.host, self.port, self.rank, self.size, self.token = host, port, rank, size, token
        is_here = ipaddress.ip_address(welcome["address"]).is_loopback
        self.seen: str | None = None if is_here else welcome["address"]
        self.is_keeper: bool = is_here and welcome["pid"] == os.getpid()
        self._channel, self._turn = channel, threading.Lock()
        self._problem: str | None = None

    @classmethod
    def join(cls, host: str, port: int, rank: int, size: int, token: str, deadline: float) -> Store:
        """The store, once all `size` ranks have joined it; server and ranks may start in any order.

        WorldError after `deadline` seconds, naming the ranks that are missing, and at once if the store has another
        token or another number of ranks, or if this rank has joined before.
        """
        if not token:
            raise WorldError("the job's token is empty, so that anyone could join the run: give it a random one")
        until = time.monotonic() + deadline

        def attempt() -> Store:
            channel = connect(host, port, token, PURPOSE, until)
            try:
                left = max(0.0, until - time.monotonic())
                channel.send({"op": "join", "rank": rank, "size": size, "seconds": left}, until=until)
                answer, _ = channel.receive(until=until + ANSWER_S)
                if "error" in answer:
                    raise WorldError(answer["error"])
                return cls(channel, host, port, rank, size, token, answer)
            except BaseException:
                channel.close()
                raise

        try:
            return retried(attempt, until)
        except WrongToken as error:
            text = f"the store at {host}:{port} belongs to another job: give all ranks the same LLMQ_JOB_TOKEN"
            raise WorldError(text) from error
        except (OSError, Refused) as error:
            text = f"rank {rank} found no store at {host}:{port} within {deadline:g} s ({error})"
            advice = "the process that keeps it (rank 0 or the launcher) is missing, or the address is another"
            raise WorldError(f"{text}: {advice}") from error

    def set(self, key: str, value: bytes) -> None:
        """Keeps a value, in place of one that was there."""
        _check_size(repr(key), len(value))
        self._ask({"op": "set", "key": key}, value)

    def get(self, key: str, timeout: float) -> bytes:
        """A value, once it is set. WorldError if that takes more than `timeout` seconds."""
        until = time.monotonic() + timeout + ANSWER_S
        return self._ask({"op": "get", "key": key, "seconds": timeout}, limit=MESSAGE_BYTES, until=until)[1]

    def gather(self, message: Any) -> list[Any]:
        """The messages of all ranks in order, each what JSON can hold; every rank makes this call."""
        body = json.dumps(message, separators=(",", ":")).encode()
        _check_size("the message", len(body))
        _, found = self._ask({"op": "gather"}, body, limit=self.size * (MESSAGE_BYTES + 1) + 1)
        return json.loads(found)

    def lost(self) -> dict[int, str]:
        """The ranks that are lost, each with the reason, in the order in which they were."""
        return dict(self._ask({"op": "lost"})[0]["lost"])

    def close(self) -> None:
        """Leaves: the others do not take this rank for lost."""
        if self._problem is None:
            try:
                self._ask({"op": "bye"}, until=time.monotonic() + ANSWER_S)
            except WorldError:
                pass  # the store has ended before
        self._end("this rank has left the store")

    def _ask(self, head: dict[str, Any], body: bytes = b"", *, limit: int = 0, until: float | None = None) -> Frame:
        """The store's answer."""
        with self._turn:
            if self._problem is not None:
                raise WorldError(self._problem)
            try:
                self._channel.send(head, body, until=until)
                answer, found = self._channel.receive(limit=limit, until=until)
            except (OSError, Refused) as error:
                self._end(f"the store at {self.host}:{self.port} is lost ({error}): the process that kept it has ended")
                raise WorldError(self._problem) from error
            except BaseException:  # an interrupt between question and answer: the next answer would be this one's
                self._end("a call to the store was interrupted")
                raise
            if "error" in answer:
                raise WorldError(answer["error"])
            return answer, found

    def _end(self, problem: str) -> None:
        self._problem = problem
        self._channel.close()


def connect(host: str, port: int, token: str, purpose: str, until: float) -> Channel:
    """A connection on which both sides have proved themselves. OSError, Refused or WrongToken if there is none."""
    until = min(until, time.monotonic() + HANDSHAKE_S)
    connection = socket.create_connection((host, port), timeout=max(0.1, until - time.monotonic()))
    channel = Channel(connection)
    try:
        if connection.getsockname() == connection.getpeername():  # where no one listens, TCP can meet itself
            raise ConnectionRefusedError("nothing listens there")
        channel.shake_hands(calling(token, purpose), until)
        return channel
    except BaseException:
        channel.close()
        raise


def retried(attempt: Callable[[], Any], until: float) -> Any:
    """What `attempt` returns, tried again after OSError and Refused, in growing pauses, as long as there is time.

    WrongToken is raised at once; the last error when the time is over.
    """
    pause = FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except WrongToken:
            raise
        except (OSError, Refused):
            left = until - time.monotonic()
            if left <= 0:
                raise
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(1.5 * pause, LONGEST_PAUSE_S)


def _check_size(what: str, num_bytes: int) -> None:
    if num_bytes > MESSAGE_BYTES:
        raise WorldError(f"{what} has {num_bytes} bytes, and the store takes at most {MESSAGE_BYTES}")
