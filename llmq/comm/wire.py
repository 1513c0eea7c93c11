"""What goes over the sockets of a run: who is let in, and messages of JSON.

Both sides prove that they know the job's token, by answering a random challenge of the other with an HMAC-SHA256; the
token itself is never sent. What follows is neither encrypted nor signed: the network is trusted not to change it.
A message is a JSON object with its length in front; nothing is ever unpickled. multiprocessing.connection has such
proofs, too, but the same ones for both sides: one that took the store's port could send back what a rank proves.
"""

import hmac
import ipaddress
import json
import random
import secrets
import select
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

HANDSHAKE_S = 5.0  # in which a connection has to prove that it belongs to the run
SEND_S = 10.0  # in which the other side has to take a message
ANSWER_S = 10.0  # that an answer may take beyond the deadline
STRANGER_BYTES, MESSAGE_BYTES = 1 << 10, 16 << 20  # of a message before the proof, and after it
LENGTH = struct.Struct("!I")
POLL_S = 0.05  # from one look of a door at whether it is closed to the next
NUM_STRANGERS = 64  # connections that have proved nothing yet, and one for each rank
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0  # between two attempts to connect
WATCHING = "llmq watch"  # what the names of threads begin with whose stacks say nothing of a run


class Refused(Exception):
    """The other side does not speak as a rank of a run does, or not in time."""


class WrongToken(Refused):
    """The other side belongs to another job."""


class Channel:
    """A connected socket. Any thread may send, one receives.

    OSError (TimeoutError is one) if the connection or the time (`until`, of the monotonic clock) ends, Refused if what
    comes is no message.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages leave at once
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A machine that is gone is noticed after 15 + 3 * 5 s.
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # macOS calls the first one otherwise
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.settimeout(SEND_S)
        self.socket = connection
        self._sends = threading.Lock()
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)

    def call(self, token: str, purpose: str, until: float) -> None:
        """The handshake of the side that connects. The other side proves itself first, so a wrong token is known here.

        A proof holds for one side, one `purpose` and two challenges: it cannot be sent back or elsewhere. Refused if
        the other side does not answer as expected, WrongToken if it has another token.
        """
        mine = secrets.token_hex(32)
        self.send({"challenge": mine})
        answer = self._greeting(until)
        theirs = str(answer.get("challenge"))
        _check(answer, token, f"answers {purpose} {mine} {theirs}")
        self.send({"proof": _proof(token, f"calls {purpose} {mine} {theirs}")})

    def answer(self, token: str, purpose: str, until: float) -> None:
        """The handshake of the side that was connected to, which says nothing to strangers. Errors as in `call`."""
        theirs, mine = str(self._greeting(until).get("challenge")), secrets.token_hex(32)
        self.send({"challenge": mine, "proof": _proof(token, f"answers {purpose} {theirs} {mine}")})
        _check(self._greeting(until), token, f"calls {purpose} {theirs} {mine}")

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message."""
        text = json.dumps(message, separators=(",", ":")).encode()
        with self._sends:
            self.socket.sendall(LENGTH.pack(len(text)) + text)

    def receive(self, until: float | None = None, limit: int = MESSAGE_BYTES) -> dict[str, Any]:
        """Receives a message of at most `limit` bytes."""
        (num_bytes,) = LENGTH.unpack(self._read(LENGTH.size, until))
        if num_bytes > limit:
            raise Refused(f"a message of {num_bytes} bytes, above the limit of {limit}")
        try:
            message = json.loads(self._read(num_bytes, until))
        except (ValueError, RecursionError) as error:
            raise Refused(f"a message that is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise Refused(f"a message of {type(message).__name__}, not of an object")
        return message

    def end(self, how: int = socket.SHUT_RDWR) -> None:
        """Ends the connection, or one direction of it, for a thread that waits in `receive` as well."""
        with suppress(OSError):  # it has ended already
            self.socket.shutdown(how)

    def close(self) -> None:
        """Ends the connection; no thread receives any more."""
        self.end()
        self.socket.close()

    def _greeting(self, until: float) -> dict[str, Any]:
        try:
            return self.receive(until, STRANGER_BYTES)
        except Refused as error:
            raise Refused("what answers is no process of llmq, or one of another version") from error

    def _read(self, count: int, until: float | None) -> bytes:
        data = bytearray()
        while len(data) < count:
            left = None if until is None else max(0.0, 1000 * (until - time.monotonic()))
            if not self._arrivals.poll(left):
                raise TimeoutError("timed out")
            received = self.socket.recv(count - len(data))
            if not received:
                raise ConnectionResetError("the connection was closed")
            data += received
        return bytes(data)


def _proof(token: str, text: str) -> str:
    assert token, "without a token anyone could join the run"
    return hmac.digest(token.encode(), text.encode(), "sha256").hex()


def _check(message: dict[str, Any], token: str, text: str) -> None:
    if not hmac.compare_digest(str(message.get("proof")).encode(), _proof(token, text).encode()):
        raise WrongToken("it has another job token")


def introduced(
    host: str, port: int, token: str, purpose: str, hello: Callable[[], dict[str, Any]], until: float
) -> tuple[Channel, dict[str, Any]]:
    """A connection on which both sides have proved themselves, and what is answered to `hello`.

    Tried again in growing pauses as long as there is time; then it is the last OSError or Refused. WrongToken is raised
    at once.
    """
    pause = FIRST_PAUSE_S
    while True:
        channel, seconds = None, max(0.1, min(HANDSHAKE_S, until - time.monotonic()))
        try:
            channel = Channel(socket.create_connection((host, port), timeout=seconds))
            if channel.socket.getsockname() == channel.socket.getpeername():
                raise ConnectionRefusedError("nothing listens there")  # and TCP has met itself
            channel.call(token, purpose, time.monotonic() + seconds)
            channel.send(hello())
            return channel, channel.receive(until + ANSWER_S)
        except BaseException as error:
            if channel:
                channel.close()
            left = until - time.monotonic()
            if not isinstance(error, (OSError, Refused)) or isinstance(error, WrongToken) or left <= 0:
                raise
        time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
        pause = min(1.5 * pause, LONGEST_PAUSE_S)


class Door(socketserver.ThreadingTCPServer):
    """A port where processes that prove to have the job's token come in, each to `serve` in a thread of its own.

    `serve` gets the channel, which is its own, and the address that it comes from. Its OSError or Refused closes it.
    A connection that does not prove itself in time is closed, the oldest also where there are more than are allowed;
    `note` gets one with another token.
    """

    daemon_threads, block_on_close = True, False

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        purpose: str,
        num_ranks: int,
        serve: Callable[[Channel, str], None],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__((host, port), socketserver.BaseRequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket, self._token, self._purpose = _listening(host, port), token, purpose
        self.port: int = self.socket.getsockname()[1]
        self._limit, self._serve, self._note = NUM_STRANGERS + num_ranks, serve, note
        self._strangers: dict[Channel, None] = {}  # in the order in which they came
        self._turn = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(POLL_S,), name=f"{WATCHING}: door", daemon=True).start()

    def close(self) -> None:
        """Lets no more in; those that are in stay."""
        self.shutdown()
        self.server_close()
        with self._turn:
            for stranger in self._strangers:
                stranger.end()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One process, from its first message to its end."""
        found = ipaddress.ip_address(client_address[0].partition("%")[0])
        address = str(getattr(found, "ipv4_mapped", None) or found)
        threading.current_thread().name = f"{WATCHING}: {self._purpose} of {address}"
        try:
            channel = Channel(request)
        except OSError:  # it ended before it was accepted
            return
        with self._turn:
            self._strangers[channel] = None
            if len(self._strangers) > self._limit:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.end()
        try:
            try:
                channel.answer(self._token, self._purpose, time.monotonic() + HANDSHAKE_S)
            finally:
                with self._turn:
                    self._strangers.pop(channel, None)
            self._serve(channel, address)
        except WrongToken:
            self._note(f"a process on {address} with another job token was refused")
            channel.close()
        except (OSError, Refused):
            channel.close()


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens on `port` (0: any that is free). OSError if it cannot.

    Only a `host` that is plainly this machine (localhost, 127.0.0.1, ::1) limits who can connect. Any other name is how
    others call this machine, which itself may know it as 127.0.1.1 (Debian) or not at all (behind NAT).
    """
    own = "127.0.0.1" if host == "localhost" else host if host in ("127.0.0.1", "::1") else ""
    if not own and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is built in but switched off
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server((own, port), family=socket.AF_INET6 if ":" in own else socket.AF_INET, backlog=1024)
