"""What goes over the sockets of a run: who is let in, and frames of JSON and bytes.

Both sides prove that they know the job's token, by answering a random challenge of the other with an HMAC-SHA256; the
token itself is never sent. What follows is neither encrypted nor signed: the network is trusted not to change it.
The handshakes are generators that say what to read and to write, since servers wait with asyncio and clients block.
A frame is a JSON object and bytes behind it, each with its length in front; nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Generator
from typing import Any

MAGIC = b"llmq/1\r\n"  # with what every connection begins, in both directions
CHALLENGE_BYTES = PROOF_BYTES = 32
HANDSHAKE_S = 5.0  # in which a connection has to prove that it belongs to the run
HEAD_BYTES = 1 << 20  # of a frame's JSON
LENGTHS = struct.Struct("!IQ")  # bytes of the JSON, bytes behind it

Handshake = Generator["int | bytes", bytes, None]  # yields how many bytes to read, or what to write
Frame = tuple[dict[str, Any], bytes]


class Refused(Exception):
    """The other side does not speak as a rank of a run does, or not in time."""


class WrongToken(Refused):
    """The other side belongs to another job."""


def calling(token: str, purpose: str) -> Handshake:
    """The handshake of the side that connects. The other side proves itself first, so a wrong token is known here.

    A proof holds for one side, one `purpose` and two challenges: it cannot be sent back or elsewhere. Refused if the
    other side does not answer as expected, WrongToken if it has another token.
    """
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    yield MAGIC + mine
    _check_magic((yield len(MAGIC)))
    theirs = yield CHALLENGE_BYTES
    _check((yield PROOF_BYTES), _proof(token, "answers", purpose, mine, theirs))
    yield _proof(token, "calls", purpose, mine, theirs)


def answering(token: str, purpose: str) -> Handshake:
    """The handshake of the side that was connected to. Errors as in `calling`."""
    _check_magic((yield len(MAGIC)))
    theirs = yield CHALLENGE_BYTES
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    yield MAGIC + mine + _proof(token, "answers", purpose, theirs, mine)
    _check((yield PROOF_BYTES), _proof(token, "calls", purpose, theirs, mine))


def _proof(token: str, side: str, purpose: str, callers: bytes, answerers: bytes) -> bytes:
    text = f"{side} {purpose} ".encode()  # of no fixed length, in front of two that are
    return hmac.digest(token.encode(), text + callers + answerers, "sha256")


def _check(found: bytes, right: bytes) -> None:
    if not hmac.compare_digest(found, right):
        raise WrongToken("it has another job token")


def _check_magic(found: bytes) -> None:
    if found != MAGIC:
        raise Refused("what answers is no process of llmq, or one of another version")


def frame(head: dict[str, Any], num_body: int = 0) -> bytes:
    """A frame up to its last `num_body` bytes, which follow."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return LENGTHS.pack(len(text), num_body) + text


def _lengths(header: bytes, limit: int) -> tuple[int, int]:
    """Of the JSON and of the bytes behind it. Refused if they are above the limits."""
    num_head, num_body = LENGTHS.unpack(header)
    if num_head > HEAD_BYTES or num_body > limit:
        raise Refused(f"a frame of {num_head} and {num_body} bytes, above the limits of {HEAD_BYTES} and {limit}")
    return num_head, num_body


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"a frame that is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise Refused(f"a frame of {type(head).__name__}, not of an object")
    return head


class Channel:
    """A connected socket that sends and receives frames, blocking until a moment of the monotonic clock.

    OSError (TimeoutError is one) if the connection or the time ends, Refused if a frame breaks the limits.
    """

    def __init__(self, connection: socket.socket) -> None:
        keep_alive(connection)
        self.socket = connection

    def shake_hands(self, steps: Handshake, until: float) -> None:
        """Runs a handshake to its end."""
        found: bytes | None = None
        try:
            while True:
                step = steps.send(found)  # type: ignore[arg-type]  # None starts a generator
                found = b""
                if isinstance(step, int):
                    found = self._read(step, until)
                else:
                    self._write(step, until)
        except StopIteration:
            return

    def send(self, head: dict[str, Any], body: bytes = b"", *, until: float | None = None) -> None:
        """Sends a frame."""
        self._write(frame(head, len(body)) + body, until)

    def receive(self, *, limit: int = 0, until: float | None = None) -> Frame:
        """Receives a frame with at most `limit` bytes behind its JSON."""
        num_head, num_body = _lengths(self._read(LENGTHS.size, until), limit)
        return _parsed(self._read(num_head, until)), self._read(num_body, until)

    def close(self) -> None:
        """Ends the connection, for a thread that waits in `receive` as well."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already
        self.socket.close()

    def _read(self, count: int, until: float | None) -> bytes:
        data, have = bytearray(count), 0
        while have < count:
            self.socket.settimeout(_left(until))
            received = self.socket.recv_into(memoryview(data)[have:])
            if not received:
                raise ConnectionResetError("the connection was closed")
            have += received
        return bytes(data)

    def _write(self, data: bytes, until: float | None) -> None:
        self.socket.settimeout(_left(until))
        self.socket.sendall(data)


def _left(until: float | None) -> float | None:
    """Seconds until then, None for ever."""
    if until is None:
        return None
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def keep_alive(connection: socket.socket) -> None:
    """Small messages leave at once, and a machine that is gone is noticed after 15 + 3 * 5 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS calls the first one otherwise
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def shake_hands(steps: Handshake, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Runs a handshake to its end. asyncio.IncompleteReadError or OSError if the connection ends first."""
    found: bytes | None = None
    try:
        while True:
            step = steps.send(found)  # type: ignore[arg-type]  # None starts a generator
            found = b""
            if isinstance(step, int):
                found = await reader.readexactly(step)
            else:
                writer.write(step)
    except StopIteration:
        return


async def read_frame(reader: asyncio.StreamReader, *, limit: int) -> Frame:
    """Receives a frame. Refused if it breaks the limits, asyncio.IncompleteReadError if the connection ends."""
    num_head, num_body = _lengths(await reader.readexactly(LENGTHS.size), limit)
    return _parsed(await reader.readexactly(num_head)), await reader.readexactly(num_body)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens on `port` (0: any that is free). OSError if it cannot.

    Only a `host` that is plainly this machine (localhost, 127.0.0.1, ::1) limits who can connect. Any other name is how
    others call this machine, which itself may know it as 127.0.1.1 (Debian) or not at all (behind NAT).
    """
    if host in ("localhost", "127.0.0.1"):
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    if host == "::1":
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=1024)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError:
            pass  # IPv6 is built in but switched off
    return socket.create_server(("", port), backlog=1024)
