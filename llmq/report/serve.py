"""Serves a report while its runs go on, on this machine only.

The page asks for news by itself. It is made again when a log has changed, and at most for a share of the time, as runs
may need the cores. A page of another site cannot read it: it answers GET of `/` alone, and only where the request names
this machine as its host, which a name that was bound to 127.0.0.1 later (DNS rebinding) does not.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from llmq.errors import LlmqError, UsageError
from llmq.report.page import page, policy
from llmq.report.read import find_log, read_runs, runs_in

HOST = "127.0.0.1"
EVERY_MS = 2000  # between the questions of a page
LEAST_PAUSE = 20  # times what making a page took, before it is made again
TIMEOUT_S = 30  # of a connection that sends nothing


class Live:
    """The page of runs that go on, made again when it is asked for and their logs have changed."""

    def __init__(self, runs: Sequence[Path], ladders: Sequence[Any] = ()) -> None:
        """DataError where a run cannot be read now."""
        self._runs, self._ladders, self._lock = runs, ladders, Lock()
        self._seen: object = None
        self._due = 0.0  # not before this time, by the monotonic clock
        self._page, self._tag = b"", ""
        self._make()

    def get(self) -> tuple[bytes, str]:
        """The page and its tag, which another page does not have."""
        with self._lock:
            if time.monotonic() >= self._due and self._now() != self._seen:
                try:
                    self._make()
                except LlmqError:
                    pass  # a log that is being replaced: what was there is shown until it can be read
            return self._page, self._tag

    def _make(self) -> None:
        began, self._seen = time.monotonic(), self._now()
        self._page = page(read_runs(self._runs, begun=False), ladders=self._ladders, watch_ms=EVERY_MS)
        self._tag = f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'
        self._due = time.monotonic() + LEAST_PAUSE * (time.monotonic() - began)

    def _now(self) -> object:
        """What changes when a log does."""
        found = []
        for run in (one for given in self._runs for one in runs_in(given)):
            try:
                about = os.stat(find_log(run))
                found.append((about.st_ino, about.st_size, about.st_mtime_ns))
            except (OSError, LlmqError):
                found.append((0, 0, 0))
        return found


class Handler(BaseHTTPRequestHandler):
    """Answers GET of `/` with the page."""

    server: Server
    timeout = TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "llmq", ""

    def do_GET(self) -> None:
        """The page; 304 where the asker has it."""
        if self.headers.get("Host") not in self.server.names:
            self._answer(421, b"this server answers to its own address only\n", "text/plain")
        elif self.path != "/":
            self._answer(404, b"the report is at /\n", "text/plain")
        else:
            content, tag = self.server.live.get()
            known = self.headers.get("If-None-Match") == tag
            self._answer(304 if known else 200, b"" if known else content, "text/html; charset=utf-8", tag)

    def _answer(self, code: int, content: bytes, kind: str, tag: str = "") -> None:
        self.send_response(code)
        about = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{policy()}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            **({"ETag": tag} if tag else {}),
        }
        for name, value in about.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing of requests."""


class Server(ThreadingHTTPServer):
    """The server of one report."""

    daemon_threads = True

    def __init__(self, live: Live, port: int) -> None:
        self.live = live
        super().__init__((HOST, port), Handler)
        self.names = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error."""


def serve(runs: Sequence[Path], port: int, ladders: Sequence[Any], say: Callable[[str], object]) -> None:
    """Serves the report of runs until KeyboardInterrupt; `say` gets its address.

    DataError where a run cannot be read, UsageError for a port that cannot be taken.
    """
    live = Live(runs, ladders)
    try:
        server = Server(live, port)
    except OSError as error:
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror or error})"
        raise UsageError(f"--port {port} {why}: name another one, or leave it out for a free one") from error
    with server:
        say(f"http://{HOST}:{server.server_port}/ has the report until Ctrl-C")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            pass  # the way to end it
