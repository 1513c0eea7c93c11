"""The store at which the ranks of a run meet: it waits until all have come, keeps what they set, and names who is lost.

One thread with asyncio, in the process of rank 0 or of the launcher. A connection that does not prove within seconds
that it knows the job's token is closed; there is room for a bounded number of such strangers, the oldest of which makes
room for the next. A rank that leaves says so. One whose connection ends without that is lost, and with it all that
the others wait for here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import threading
import time
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from llmq.comm.watch_desk import WatchDesk
from llmq.comm.wire import (
    HANDSHAKE_S,
    Refused,
    WrongToken,
    answering,
    frame,
    keep_alive,
    listening,
    read_frame,
    shake_hands,
)
from llmq.errors import WorldError

PURPOSE = "store"
MESSAGE_BYTES = 64 << 20  # of a value, or of one rank's message
NUM_STRANGERS = 64  # connections that have proved nothing yet, and one for each rank
NUM_NOTES = 8
ENDED = (OSError, EOFError, Refused)  # a connection that broke off; asyncio.IncompleteReadError is an EOFError
Result = TypeVar("Result")


class NoAnswer(Exception):
    """What a rank gets instead of an answer."""


class StoreServer:
    """A store for `size` ranks, at `port` of this machine (0: any that is free), until it is closed.

    The ranks have `deadline` seconds from now to come. Where `host` is plainly this machine (127.0.0.1), only this
    machine can connect. WorldError if the port cannot be used.
    """

    def __init__(self, host: str, port: int, size: int, token: str, deadline: float) -> None:
        if not token:
            raise WorldError("the job's token is empty, so that anyone could join the run: give it a random one")
        try:
            self._socket = listening(host, port)
        except OSError as error:
            raise WorldError(
                f"the store of the run cannot use port {port} ({error.strerror}): choose another"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._size, self._token, self._deadline = size, token, deadline
        self._until = time.monotonic() + deadline
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._grace = 0.0
        self._all_here: asyncio.Future[None] = self._loop.create_future()
        self._joined: dict[int, str] = {}  # the addresses of ranks that are here
        self._left: list[int] = []
        self._lost: dict[int, str] = {}  # why, in the order in which they were lost
        self._notes: list[str] = []  # what may explain why a rank is missing
        self._values: dict[str, asyncio.Future[bytes]] = {}
        self._messages: dict[int, bytes] = {}
        self._gathered: asyncio.Future[bytes] = self._loop.create_future()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._members: set[asyncio.Task[Any]] = set()
        self._desk = WatchDesk(size)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self, grace: float = 60.0) -> None:
        """Ends the store, as soon as all ranks that are here have left, or after `grace` seconds."""
        self._grace = grace
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket)
        await self._closing.wait()
        if self._members:
            await asyncio.wait(self._members, timeout=self._grace)
        self._desk.end()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its end."""
        try:
            keep_alive(writer.get_extra_info("socket"))
            address = _plain(writer.get_extra_info("peername"))
            request = await self._let_in(reader, writer, address)
            task = asyncio.current_task()
            assert task is not None
            self._members.add(task)
            task.add_done_callback(self._members.discard)
            if request.get("op") == "watch":
                await self._desk.serve(request, reader, writer)
            else:
                await self._rank(request, address, reader, writer)
        except ENDED:
            pass  # whom it belonged to is known where it matters
        except asyncio.CancelledError:
            pass  # the store is closing; asyncio would report it
        finally:
            writer.close()

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> dict[str, Any]:
        """The first request of a connection that has proved itself. Refused if it does not, or not in time."""
        self._strangers[writer] = None
        if len(self._strangers) > NUM_STRANGERS + self._size:
            next(iter(self._strangers)).transport.abort()
        try:
            await asyncio.wait_for(shake_hands(answering(self._token, PURPOSE), reader, writer), HANDSHAKE_S)
            request, _ = await asyncio.wait_for(read_frame(reader, limit=0), HANDSHAKE_S)
            return request
        except WrongToken:
            self._note(f"a process on {address} with another job token was refused")
            raise
        except asyncio.TimeoutError as error:
            raise Refused("it said nothing in time") from error
        finally:
            self._strangers.pop(writer)

    async def _rank(
        self, request: dict[str, Any], address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A rank joins and then asks for this and that, until it leaves or is lost."""
        rank = request.get("rank")
        if problem := self._unfit(rank, request.get("size"), address):
            self._note(problem)
            await _reply(writer, {"error": problem})
            return
        assert isinstance(rank, int)
        self._joined[rank] = address
        left = False
        try:
            if len(self._joined) == self._size and not self._all_here.done():
                self._all_here.set_result(None)
            await _unless_closed(self._wait_for_all(float(request["seconds"])), reader)
            await _reply(writer, {"address": address, "pid": os.getpid()})
            while not left:
                head, body = await read_frame(reader, limit=MESSAGE_BYTES)
                left = head.get("op") == "bye"
                await self._answer(rank, head, body, reader, writer)
        except NoAnswer as problem:
            await _reply(writer, {"error": str(problem)})
        finally:
            self._gone(rank, left)

    def _unfit(self, rank: Any, size: Any, address: str) -> str | None:
        """Why a rank cannot join, if it cannot."""
        if size != self._size:
            return f"rank {rank} on {address} belongs to a run of {size} ranks, and this one has {self._size}"
        if type(rank) is not int or not 0 <= rank < self._size:
            return f"there is no rank {rank} (of {address}) in a run of {self._size}: ranks are 0 to {self._size - 1}"
        if rank in self._joined or rank in self._left or rank in self._lost:
            there = self._joined.get(rank, "a process that has ended")
            return f"rank {rank} joined twice, from {there} and from {address}: two processes have the same rank"
        return None

    async def _wait_for_all(self, seconds: float) -> None:
        """Until every rank is here. NoAnswer, for all that wait, as soon as one of them has waited long enough."""
        left = self._until - time.monotonic()
        try:
            await asyncio.wait_for(asyncio.shield(self._all_here), min(seconds, left))
        except asyncio.TimeoutError:
            if not self._all_here.done():
                waited = round(seconds, 1) if seconds < left else self._deadline
                _fail(self._all_here, NoAnswer(self._missing(waited)))
            self._all_here.result()

    def _missing(self, waited: float) -> str:
        missing = [rank for rank in range(self._size) if rank not in self._joined]
        text = f"of {self._size} ranks, {in_words(missing)} did not come within {waited:g} s"
        return "; ".join([text, *self._notes])

    async def _answer(
        self, rank: int, head: dict[str, Any], body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Does what a rank asks for; a NoAnswer here is an answer too."""
        try:
            match head:
                case {"op": "set", "key": str(key)}:
                    self._value(key, new=True).set_result(body)
                    await _reply(writer, {})
                case {"op": "get", "key": str(key), "seconds": float() | int() as seconds}:
                    await _reply(writer, {}, await _unless_closed(self._get(key, seconds), reader))
                case {"op": "gather"}:
                    await _reply(writer, {}, await _unless_closed(self._gather(rank, body), reader))
                case {"op": "lost"}:
                    await _reply(writer, {"lost": list(self._lost.items())})
                case {"op": "bye"}:
                    await _reply(writer, {})
                case _:
                    raise Refused(f"an unknown request: {head}")
        except NoAnswer as problem:
            await _reply(writer, {"error": str(problem)})

    def _value(self, key: str, *, new: bool = False) -> asyncio.Future[bytes]:
        """What is known as `key`, or will be; `new` replaces a known one."""
        if key not in self._values or (new and self._values[key].done()):
            self._values[key] = self._loop.create_future()
        return self._values[key]

    async def _get(self, key: str, seconds: float) -> bytes:
        value = self._value(key)
        if not value.done():
            self._check()
        try:
            return await asyncio.wait_for(asyncio.shield(value), seconds)
        except asyncio.TimeoutError:
            raise NoAnswer(f"no rank has set {key!r} within {seconds:g} s") from None

    async def _gather(self, rank: int, body: bytes) -> bytes:
        """A list of JSON of all ranks' messages, as soon as the last one has come."""
        self._check()
        if self._left:
            raise NoAnswer(f"the run has ended for {in_words(self._left)}, and rank {rank} waits for the message")
        self._messages[rank] = body
        gathered = self._gathered
        if len(self._messages) == self._size:
            gathered.set_result(b"[" + b",".join(self._messages[r] for r in range(self._size)) + b"]")
            self._messages, self._gathered = {}, self._loop.create_future()
        return await asyncio.shield(gathered)

    def _check(self) -> None:
        """NoAnswer if a rank is lost."""
        if self._lost:
            raise NoAnswer("; ".join(f"rank {rank} is lost: {why}" for rank, why in self._lost.items()))

    def _gone(self, rank: int, left: bool) -> None:
        """A rank's connection has ended. Before all were here, it may come again."""
        address = self._joined.pop(rank)
        complete = self._all_here.done() and not self._all_here.exception()
        if not complete or self._closing.is_set():
            return
        if left:
            self._left.append(rank)
            problem = NoAnswer(f"the run has ended for rank {rank}, and the others wait for its message")
            waiting = [self._gathered] if self._messages else []
        else:
            self._lost[rank] = f"its process on {address} has ended"
            problem = NoAnswer(f"rank {rank} is lost: {self._lost[rank]}")
            waiting = [self._gathered, *self._values.values()]
            self._desk.unwatched_lost(rank, self._lost[rank])
        for future in waiting:
            if not future.done():
                _fail(future, problem)

    def _note(self, text: str) -> None:
        if text not in self._notes and len(self._notes) < NUM_NOTES:
            self._notes.append(text)


def in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 1, 4 to 7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    words = [" to ".join(map(str, span)) for span in spans]
    return f"rank{'s' if len(words) > 1 or ' ' in words[0] else ''} {', '.join(words)}"


def _plain(peer: Any) -> str:
    """The address of a connection's other side; that of IPv4 in an IPv6 socket as IPv4's."""
    if not peer:
        raise Refused("it has ended")
    found = ipaddress.ip_address(peer[0].partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


def _fail(future: asyncio.Future[Any], problem: NoAnswer) -> None:
    """Whoever waits for it gets the problem; it may be no one, which asyncio would report."""
    future.set_exception(problem)
    future.exception()


async def _reply(writer: asyncio.StreamWriter, head: dict[str, Any], body: bytes = b"") -> None:
    writer.writelines([frame(head, len(body)), body])
    await writer.drain()


async def _unless_closed(work: Coroutine[Any, Any, Result], reader: asyncio.StreamReader) -> Result:
    """What `work` returns. ConnectionError if the rank, which now has to wait, ends its connection before."""
    task, ended = asyncio.ensure_future(work), asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionResetError("it has ended, or does not wait for its answer")
        return task.result()
    finally:
        task.cancel()
        ended.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)
