"""A socket from each rank to every other one, for worlds on TCP.

Each rank listens, tells the others through the store where, connects to the ranks below it and is called by those above
it. Both sides of each connection prove that they know the job's token, as at the store.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from llmq.comm.rendezvous import Store, connect, retried
from llmq.comm.store_server import in_words
from llmq.comm.wire import HANDSHAKE_S, Channel, Refused, WrongToken, answering, listening
from llmq.errors import WorldError

PURPOSE = "peer"
NUM_STRANGERS = 64  # connections that have proved nothing yet, and one for each rank


def connected(store: Store, deadline: float) -> dict[int, socket.socket]:
    """The sockets to the other ranks, in order of these; every rank of the store makes this call.

    WorldError after `deadline` seconds, naming the ranks to which there is no connection.
    """
    until = time.monotonic() + deadline
    host = store.host if store.seen is None else ""
    with _Door(listening(host, 0), store, until) as door:
        places = store.gather([store.seen, door.port])
        found = {}
        for rank in range(store.rank):
            address, port = places[rank]
            found[rank] = _call(store, rank, address or store.host, port, until, deadline)
        found |= door.callers(deadline)
    return dict(sorted(found.items()))


def _call(store: Store, rank: int, host: str, port: int, until: float, deadline: float) -> socket.socket:
    """A connection to a rank. WorldError if there is none."""

    def attempt() -> socket.socket:
        channel = connect(host, port, store.token, PURPOSE, until)
        try:
            channel.send({"from": store.rank, "to": rank}, until=until)
            channel.receive(until=until)
            return channel.socket
        except BaseException:
            channel.close()
            raise

    try:
        return retried(attempt, until)
    except (OSError, Refused) as error:
        text = f"rank {store.rank} cannot connect to rank {rank} at {host}:{port} within {deadline:g} s ({error})"
        raise WorldError(f"{text}: is a firewall between them?") from error


class _Door:
    """Where the ranks above this one come in, while it is open."""

    def __init__(self, listener: socket.socket, store: Store, until: float) -> None:
        self.port = listener.getsockname()[1]
        self._listener, self._store, self._until = listener, store, until
        self._expected = set(range(store.rank + 1, store.size))
        self._found: dict[int, socket.socket] = {}
        self._came = threading.Condition()
        self._places = threading.Semaphore(NUM_STRANGERS + store.size)
        self._thread = threading.Thread(target=self._accept, name="door", daemon=True)
        self._thread.start()

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        self._thread.join()

    def callers(self, deadline: float) -> dict[int, socket.socket]:
        """The ranks above, once they are all here."""
        with self._came:
            left = max(0.0, self._until - time.monotonic())
            if not self._came.wait_for(lambda: self._found.keys() == self._expected, left):
                missing = in_words(self._expected - self._found.keys())
                raise WorldError(f"rank {self._store.rank} was not called by {missing} within {deadline:g} s")
            return self._found

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except ConnectionError:
                continue  # it ended before it was accepted
            except OSError:
                return  # the door is closed
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._let_in, args=(connection,), daemon=True).start()
            else:
                connection.close()  # a rank asks again

    def _let_in(self, connection: socket.socket) -> None:
        channel, until = Channel(connection), time.monotonic() + HANDSHAKE_S
        try:
            channel.shake_hands(answering(self._store.token, PURPOSE), until)
            head, _ = channel.receive(until=until)
            rank = head.get("from")
            with self._came:
                if head.get("to") != self._store.rank or rank not in self._expected - self._found.keys():
                    raise Refused("it is no rank that is missing here")
                channel.send({}, until=until)
                self._found[rank] = connection
                self._came.notify_all()
        except (OSError, Refused, WrongToken):
            channel.close()
        finally:
            self._places.release()
