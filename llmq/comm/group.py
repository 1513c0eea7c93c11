"""The ranks of one machine: started together, watched, ended together, and started again if that is asked for.

Each rank is a process in a session of its own, so that Ctrl-C in a terminal reaches the launcher alone, which passes
every signal on, once to each rank. Rank 0 writes where the launcher does, the others to files. A rank that fails is
missed by the others, whose watchdog ends them; those that have not ended after 30 s are ended here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from llmq.comm.launch import JOIN_S, Place
from llmq.comm.rank_process import CORES, LAUNCHER
from llmq.disk import storage
from llmq.errors import INTERRUPTED, TERMINATED, WorldError

ENDINGS = ((30.0, signal.SIGTERM), (40.0, signal.SIGKILL))  # seconds after a failure, and what the others then get
POLL_S = 0.05
TAIL = 20  # lines of a rank's output that are shown when it fails
SIGNALS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: TERMINATED,
    signal.SIGUSR1: TERMINATED,
}
PLANNED = (0, *sorted(set(SIGNALS.values())))  # exit codes of ranks that ended because they were done, or asked to
AGAIN = (1, WorldError.exit_code)  # exit codes after which another try can go better
TRIES_TO_END = 3  # signals that end a run: one after the step, one at once, one by SIGKILL


@dataclass(frozen=True)
class Group:
    """What is started on a machine: ranks `first` to `first + num - 1` of `size`.

    `command` is a function that rank_process calls, and its arguments. `logs` is the folder for what ranks beyond 0
    print, `environ` are further variables of all ranks. Port 0, for a run on one machine, is any that is free.
    """

    command: tuple[str, ...]
    num: int
    token: str
    logs: Path
    kind: str
    size: int = 0  # 0: num
    first: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    cores: Sequence[frozenset[int]] = ()
    environ: dict[str, str] = field(default_factory=dict)
    join_s: float = JOIN_S

    def place(self, index: int, port: int) -> Place:
        """That of its rank number `index`."""
        rank, size = self.first + index, self.size or self.num
        return Place(rank, size, index, self.num, self.host, port, self.token, self.kind, "", "", True, self.join_s)

    def log(self, index: int) -> Path | None:
        """The file for what its rank number `index` prints; None for rank 0."""
        rank = self.first + index
        return self.logs / f"rank-{rank:05}.log" if rank else None


def run_group(group: Group, restarts: int = 0) -> int:
    """Starts the ranks and waits for them, up to `restarts` times more if they fail; returns the exit code.

    It is that of the first rank that failed for a reason of its own, before those that only missed another.
    """
    with storage(group.logs, "the folder for the output of ranks cannot be made"):
        group.logs.mkdir(parents=True, exist_ok=True)
    with _Running() as running:
        for attempt in range(restarts + 1):
            code = _attempt(group, running, attempt)
            if code not in AGAIN or running.heard or attempt == restarts:
                break
            _say(f"starting again from the last checkpoint (start {attempt + 2} of {restarts + 1})")
    return code


def _attempt(group: Group, running: _Running, attempt: int) -> int:
    """One start of the ranks; the exit code of the whole.

    Each has a port of its own, so that on several machines no rank meets the store of the start before.
    """
    from llmq.comm.rendezvous import StoreServer

    command = [sys.executable, "-m", "llmq.comm.rank_process", *group.command]
    command += ["--continue=auto"] if attempt else []
    server, port = None, group.port and group.port + attempt
    try:
        if group.first == 0:
            server = StoreServer(group.host, port, group.size or group.num, group.token, group.join_s)
        port = server.port if server else port
        for index in range(group.num):
            running.start(group, index, command, port, append=attempt > 0)
        return running.wait()
    finally:
        running.kill()
        if server:
            server.close()


class _Running:
    """The processes of a group. While entered, signals go on to them."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, Path | None] = {}
        self._told: dict[int, int] = {}  # how many of the signals a rank has got
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Running:
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._pass_on) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, group: Group, index: int, command: Sequence[str], port: int, *, append: bool) -> None:
        """Starts a rank, with our own variables as its place."""
        place, log = group.place(index, port), group.log(index)
        environ = {**os.environ, **group.environ, **place.environ(), LAUNCHER: str(os.getpid())}
        environ[CORES] = ",".join(map(str, sorted(group.cores[index]))) if group.cores else ""
        output: IO[bytes] | None = open(log, "ab" if append else "wb") if log else None  # noqa: SIM115
        try:
            error = subprocess.STDOUT if output else None
            stdin = subprocess.DEVNULL if output else None
            process = subprocess.Popen(
                command, env=environ, stdin=stdin, stdout=output, stderr=error, start_new_session=True
            )
        finally:
            if output:
                output.close()
        self._logs[place.rank], self._told[place.rank] = log, 0
        self._processes[place.rank] = process
        self._tell()

    def wait(self) -> int:
        """Waits until all have ended, and ends those that outlive a failure; the exit code of the whole."""
        ended: dict[int, int] = {}  # in the order in which they ended
        failed_at, endings = 0.0, list(ENDINGS)
        while len(ended) < len(self._processes):
            there = [(rank, process.poll()) for rank, process in self._processes.items() if rank not in ended]
            ended |= {rank: self._as_planned(code) for rank, code in there if code is not None}
            if not failed_at and any(code not in PLANNED for code in ended.values()):
                failed_at = time.monotonic()
            if failed_at and endings and time.monotonic() - failed_at > endings[0][0]:
                after, number = endings.pop(0)
                left = [rank for rank in self._processes if rank not in ended]
                _say(f"{_ranks(left)} still there {after:g} s after another failed: {signal.Signals(number).name}")
                for rank in left:
                    self._send(rank, number)
            time.sleep(POLL_S)
        return self._outcome(ended)

    def kill(self) -> None:
        """Ends what is left, with all that it started; then there are no ranks."""
        for rank, process in self._processes.items():
            if process.poll() is None:
                self._send(rank, signal.SIGKILL)
                process.wait()
        self._processes = {}

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)
        self._tell()

    def _tell(self) -> None:
        """Sends each rank the signals that it has not got yet, also if another one comes meanwhile."""
        for rank in list(self._processes):
            while self._told[rank] < len(self.heard):
                self._told[rank] += 1
                heard = self.heard[: self._told[rank]]
                to_end = sum(number != signal.SIGUSR1 for number in heard)  # which comes more than once
                self._send(rank, signal.SIGKILL if to_end >= TRIES_TO_END else heard[-1])

    def _send(self, rank: int, number: int) -> None:
        """A signal to a rank; SIGKILL, which it cannot pass on, to all of its session."""
        process = self._processes[rank]
        if process.poll() is None:
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    def _as_planned(self, code: int) -> int:
        """An exit code: of a rank that a signal of ours ended before it could hear it, that of one that did."""
        return SIGNALS[signal.Signals(self.heard[0])] if code < 0 and self.heard else code

    def _outcome(self, ended: dict[int, int]) -> int:
        """The exit code of ranks that have all ended, having said which failed first unless rank 0 has said so."""
        failed = {rank: code for rank, code in ended.items() if code not in PLANNED}
        if not failed:
            return next((code for code in ended.values() if code), 0)
        lost = WorldError.exit_code
        rank = next((rank for rank, code in failed.items() if code != lost), next(iter(failed)))
        code = failed[rank]
        if code < 0:
            _say(f"rank {rank} was ended by {signal.Signals(-code).name}{_tail(self._logs[rank])}")
        elif ended.get(0) != code:
            _say(f"rank {rank} ended with exit code {code}{_tail(self._logs[rank])}")
        return code if code > 0 else lost


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3 is`, `ranks 3, 4 are`."""
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def _tail(log: Path | None) -> str:
    """The last lines of what a rank printed, below a heading; nothing of rank 0."""
    lines = log.read_text("utf-8", errors="replace").splitlines()[-TAIL:] if log else []
    return "".join([f"; the end of {log}:" if lines else "", *(f"\n  {line}" for line in lines)])


def _say(text: str) -> None:
    """A line of the launcher."""
    print(f"llmq: {text}", file=sys.stderr, flush=True)
