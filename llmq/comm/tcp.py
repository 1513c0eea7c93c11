"""A world of processes with a socket between each two of them: for runs on the CPU, on one machine or several.

What others use Gloo for. All sockets are read and written at once by the thread that calls, as far as each is ready, so
that arrays of any size pass each other without filling up a buffer that both sides wait for. Each rank listens,
connects to the ranks below it and is called by those above it; both sides prove that they have the job's token.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import Any

import numpy as np

from llmq.comm.membership import Membership
from llmq.comm.store import in_words
from llmq.comm.wire import HANDSHAKE_S, Channel, Door, Refused, introduced
from llmq.errors import WorldError

PURPOSE = "peer"
HEADER = struct.Struct("!QQ")  # the number of the exchange, the bytes that follow
MESSAGE_BYTES = 64 << 20  # of `gather`
CONNECT_S = 60.0
LOST_S = 0.5  # until the store has noticed what a broken connection shows


class TcpWorld:
    """This rank among those of the store at `host` and `port`, once all have come and are connected to each other.

    WorldError where they do not come within `deadline` seconds, or cannot be reached within CONNECT_S; later it names
    the rank that was lost. A rank that hangs is not noticed here, but by the store (llmq/comm/store.py).
    """

    def __init__(self, host: str, port: int, rank: int, size: int, token: str, deadline: float) -> None:
        self.rank, self.size = rank, size
        self._problem: str | None = None
        self._number, self._is_inside = 0, False
        callers: Queue[tuple[int, socket.socket]] = Queue()

        def let_in(channel: Channel, address: str) -> None:
            match head := channel.receive(time.monotonic() + HANDSHAKE_S):
                case {"from": int(caller), "to": int(called)} if called == rank < caller < size:
                    channel.send({})
                    callers.put((caller, channel.socket))
                case _:
                    raise Refused(f"it is no rank that calls this one: {head}")

        door = Door(host, 0, token, PURPOSE, size, let_in)
        try:
            self.membership = Membership.join(host, port, rank, size, token, deadline, own_port=door.port)
            until = time.monotonic() + CONNECT_S
            found = {other: _call(other, self.membership, token, until) for other in range(rank)}
            while missing := set(range(size)) - {rank, *found}:
                try:
                    caller, connection = callers.get(timeout=max(0.0, until - time.monotonic()))
                except Empty:
                    text = f"rank {rank} was not called by {in_words(missing)} within {CONNECT_S:g} s"
                    raise WorldError(text) from None
                found[caller] = connection
        finally:
            door.close()
        self._sockets = dict(sorted(found.items()))
        for peer in self._sockets.values():
            peer.setblocking(False)

    def progress(self) -> tuple[str, int]:
        """What this rank waits for, if it does, and the number of exchanges that it has begun."""
        return ("exchange" if self._is_inside else "", self._number)

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> None:
        """Sends to and receives from all others at once."""
        if self._problem is not None:
            raise WorldError(self._problem)
        self._number, self._is_inside = self._number + 1, True
        peers = []
        for rank, connection in self._sockets.items():
            sending, receiving = _bytes_of(outgoing[rank]), _bytes_of(incoming[rank])
            peers.append(_Peer(rank, connection, self._number, sending, receiving))
        try:
            _move(peers)
        except _PeerLost as lost:
            # That rank may have ended because of another: the store knows which was first.
            rank, reason = lost.args
            why = f"rank {rank} has ended, and rank {self.rank} waits for it ({reason})"
            raise self._ended(self.membership.lost_within(LOST_S) or why) from lost
        except WorldError as error:
            raise self._ended(f"{error}: the ranks make different calls") from error
        except BaseException:  # half of an array may be on its way
            self._ended("an exchange with the other ranks was interrupted")
            raise
        finally:
            self._is_inside = False
        incoming[self.rank][...] = outgoing[self.rank]

    def gather(self, message: Any) -> list[Any]:
        """First the lengths, then the messages as JSON."""
        mine = np.frombuffer(json.dumps(message, separators=(",", ":")).encode(), np.uint8)
        if mine.size > MESSAGE_BYTES:
            raise WorldError(f"a message of {mine.size} bytes, above the limit of {MESSAGE_BYTES}")
        lengths = np.zeros((self.size, 1), np.int64)
        self.exchange([np.array([mine.size])] * self.size, list(lengths))
        found = [np.empty(min(int(length), MESSAGE_BYTES), np.uint8) for (length,) in lengths]
        self.exchange([mine] * self.size, found)
        return [json.loads(text.tobytes()) for text in found]

    def close(self) -> None:
        """Ends the connections, and leaves the store."""
        self._ended("this rank has left the run")
        self.membership.close()

    def _ended(self, problem: str) -> WorldError:
        """The error of this call and of every later one; the others notice, too."""
        self._problem = self._problem or problem
        for connection in self._sockets.values():
            connection.close()
        return WorldError(self._problem)


def _call(rank: int, member: Membership, token: str, until: float) -> socket.socket:
    """A connection to a rank. WorldError if there is none."""
    host, port = member.places[rank]
    hello = {"from": member.rank, "to": rank}
    try:
        return introduced(host, port, token, PURPOSE, lambda: hello, until)[0].socket
    except (OSError, Refused) as error:
        text = f"rank {member.rank} cannot connect to rank {rank} at {host}:{port} within {CONNECT_S:g} s ({error})"
        raise WorldError(f"{text}: is a firewall between them?") from error


class _PeerLost(Exception):
    """A rank, and why its connection is lost."""


class _Peer:
    """What is still to be sent to a rank and received from it in one exchange. An array of no bytes is not sent."""

    def __init__(
        self, rank: int, connection: socket.socket, number: int, sending: memoryview, receiving: memoryview
    ) -> None:
        self.rank, self.connection, self._right = rank, connection, (number, len(receiving))
        self._header = memoryview(bytearray(HEADER.size))
        self.sending = [memoryview(HEADER.pack(number, len(sending))), sending] if sending else []
        self.receiving = [self._header, receiving] if receiving else []

    @property
    def events(self) -> int:
        """What to wait for."""
        return (select.POLLOUT if self.sending else 0) | (select.POLLIN if self.receiving else 0)

    def step(self) -> None:
        """Sends and receives what can be without waiting."""
        try:
            with suppress(BlockingIOError):
                if self.sending:
                    _advance(self.sending, self.connection.sendmsg(self.sending))
            with suppress(BlockingIOError):
                if self.receiving:
                    count = self.connection.recvmsg_into(self.receiving)[0]
                    if not count:
                        raise _PeerLost(self.rank, "its connection is closed")
                    _advance(self.receiving, count)
                    self._check()
        except OSError as error:
            raise _PeerLost(self.rank, str(error)) from error

    def _check(self) -> None:
        """WorldError if the header is here and is not as expected."""
        if len(self.receiving) < 2 and (found := HEADER.unpack(self._header)) != self._right:
            (number, length), (my_number, my_length) = found, self._right
            sends, expects = f"{length} bytes in exchange {number}", f"{my_length} in exchange {my_number}"
            raise WorldError(f"rank {self.rank} sends {sends}, and {expects} are expected")


def _move(peers: list[_Peer]) -> None:
    """Until all is sent and received."""
    for peer in peers:
        peer.step()
    while left := {peer.connection.fileno(): peer for peer in peers if peer.events}:
        poll = select.poll()
        for number, peer in left.items():
            poll.register(number, peer.events)
        for number, _ in poll.poll():
            left[number].step()


def _advance(parts: list[memoryview], count: int) -> None:
    """Takes the first `count` bytes off."""
    while parts and count >= len(parts[0]):
        count -= len(parts.pop(0))
    if count:
        parts[0] = parts[0][count:]


def _bytes_of(array: np.ndarray) -> memoryview:
    """An array's own memory."""
    assert array.flags.c_contiguous, "a world moves contiguous arrays"
    return array.reshape(-1).view(np.uint8).data
