"""The ranks of a machine or a Ray cluster: started together, watched, ended together, and again if that is asked for.

Each rank is a process in a session of its own, so that Ctrl-C in a terminal reaches the launcher alone, which passes
every signal on, once to each rank. Rank 0 writes where the launcher does, the others to files. A rank that fails is
missed by the others, whose watchdog ends them; those that have not ended after 20 s are ended here.

A rank is `python -m llmq.comm.launch llmq.cli.start:train ARGUMENTS`. Before anything is imported that starts threads,
it takes the cores that it is given, and asks Linux for a signal when its launcher is gone, so that none is left over.
That is SIGUSR1, after which it ends its step and saves: Linux sends it for each thread of the launcher, and a second
SIGTERM would end the rank within its step.

Of a Ray cluster, Ray finds the machines and keeps their GPUs for the run; the ranks do the rest. An actor starts each
beside it: so a rank has a main thread for signals and ends with its actor. Ray's own collectives are not used.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from llmq.comm.environment import RAY, Place
from llmq.comm.store import StoreServer, in_words
from llmq.disk import storage
from llmq.errors import INTERRUPTED, TERMINATED, UsageError, WorldError
from llmq.hardware.cores import read_cores

if TYPE_CHECKING:
    from llmq.options.run import LaunchOptions

PR_SET_PDEATHSIG = 1
CORES, LAUNCHER, LAST_SIGNAL = "LLMQ_CORES", "LLMQ_LAUNCHER_PID", "LLMQ_LAST_SIGNAL"
ENDINGS = ((20.0, signal.SIGTERM), (28.0, signal.SIGKILL))  # seconds after a failure, and what the others then get
POLL_S = 0.05
TAIL = 20  # lines of a rank's output that are shown when it fails
SIGNALS = {signal.SIGINT: INTERRUPTED, **dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), TERMINATED)}
PLANNED = (0, *sorted(set(SIGNALS.values())))  # exit codes of ranks that ended because they were done, or asked to
AGAIN = (1, WorldError.exit_code)  # exit codes after which another try can go better
HANDED_ON = ("LLMQ_", "HF_", "WANDB_", "NCCL_")  # the beginnings of variables that ranks get from this process
CONNECT_S = 10.0  # in which a cluster has to take a connection
VISIBLE = "CUDA_VISIBLE_DEVICES"
TRIES_TO_END = 3  # signals that end a run: one after the step, one at once, one by SIGKILL


@dataclass(frozen=True)
class Group:
    """What is started on a machine: all its ranks, from `first` on, where port 0 is any that is free.

    `command` is a function that a rank calls, and its arguments. `logs` is the folder for what ranks beyond 0
    print.
    """

    command: tuple[str, ...]
    first: Place
    logs: Path
    cores: Sequence[frozenset[int]] = ()

    @property
    def num(self) -> int:
        """Its ranks."""
        return self.first.local_size or 0

    def log(self, rank: int) -> Path | None:
        """The file for what a rank prints; None for rank 0."""
        return self.logs / f"rank-{rank:05}.log" if rank else None


def start_group(options: LaunchOptions, group: Group, *, on_gpus: bool) -> int:
    """Runs the ranks of a group, here or as actors of a Ray cluster, to their end; returns the exit code."""
    if options.launcher != RAY:
        return run_group(group, options.restart_failed)
    if group.first.size != group.num:
        raise UsageError("--launcher ray chooses the machines itself: leave --nnodes and --node-rank out")
    return run_ray_group(group, options.ray_address, options.restart_failed, on_gpus=on_gpus)


def run_group(group: Group, restarts: int = 0) -> int:
    """Runs the ranks on this machine, up to `restarts` times more if one is lost; returns the exit code."""
    return _tried(group, restarts, _attempt)


def _tried(group: Group, restarts: int, attempt: Callable[[Group, Running, int], int]) -> int:
    """The exit code of the last of several attempts, which have numbers from 0.

    It is that of the first rank that failed for a reason of its own, before those that only missed another.
    """
    again = replace(group, command=(*group.command, "--continue=auto"), first=replace(group.first, again=True))
    with storage(group.logs, "the folder for the output of ranks cannot be made"):
        group.logs.mkdir(parents=True, exist_ok=True)
    with Running() as running:
        for number in range(restarts + 1):
            code = attempt(again if number else group, running, number)
            if code not in AGAIN or running.heard or number == restarts:
                break
            say(f"starting again from the last checkpoint (start {number + 2} of {restarts + 1})")
    return code


def _attempt(group: Group, running: Running, number: int) -> int:
    """One start of the ranks on this machine.

    Each has a port of its own, so that on several machines no rank meets the store of the start before.
    """
    first = group.first
    server, port = None, first.master_port and first.master_port + number
    try:
        if first.rank == 0:
            server = StoreServer(first.master_addr, port, first.size, first.token or "", first.join_s)
            port = server.port
        for index in range(group.num):
            place = replace(first, rank=first.rank + index, local_rank=index, master_port=port, has_store=True)
            cores = ",".join(map(str, sorted(group.cores[index]))) if group.cores else ""
            log = group.log(place.rank)
            with open(log, "ab" if number else "wb") if log else nullcontext() as output:
                rank = LocalRank(group.command, {**place.environ(), CORES: cores}, output)
            running.add(place.rank, rank, log)
        return running.wait()
    finally:
        running.kill()
        if server:
            server.close()


class LocalRank:
    """A process of this machine in a session of its own, which prints into `output`, or where this one does."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None, cwd: str | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llmq.comm.launch", *command],
            env={**os.environ, **environ, LAUNCHER: str(os.getpid())},
            cwd=cwd,
            stdin=None if output is None else subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Its exit code, -N if signal N ended it; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """A signal, if it runs; SIGKILL goes to all that it started, too."""
        if self._process.poll() is None:
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


class Running:
    """The ranks of a group. While entered, signals go on to them."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self._ranks: dict[int, LocalRank | RayRank] = {}
        self._logs: dict[int, Path | None] = {}
        self._num_sent = 0  # signals that all ranks have got
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Running:
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def add(self, number: int, rank: LocalRank | RayRank, log: Path | None) -> None:
        """Takes charge of a rank that was started; `log` has what it prints."""
        self._ranks[number], self._logs[number] = rank, log

    def wait(self) -> int:
        """Waits until all have ended, and ends those that outlive a failure; the exit code of the whole."""
        ended: dict[int, int] = {}  # in the order in which they ended
        failed_at, endings = 0.0, list(ENDINGS)
        while len(ended) < len(self._ranks):
            self._send()
            there = [(number, rank.poll()) for number, rank in self._ranks.items() if number not in ended]
            ended |= {number: self._as_planned(code) for number, code in there if code is not None}
            if not failed_at and any(code not in PLANNED for code in ended.values()):
                failed_at = time.monotonic()
            if failed_at and endings and time.monotonic() - failed_at > endings[0][0]:
                after, number = endings.pop(0)
                left = [rank for rank in self._ranks if rank not in ended]
                there_are = f"{in_words(left)} {'is' if len(left) == 1 else 'are'}"
                say(f"{there_are} still there {after:g} s after another failed: {signal.Signals(number).name}")
                for rank in left:
                    self._ranks[rank].send(number)
            time.sleep(POLL_S)
        return self._outcome(ended)

    def kill(self) -> None:
        """Ends what is left; then there are no ranks."""
        for rank in self._ranks.values():
            if rank.poll() is None:
                rank.send(signal.SIGKILL)
            while rank.poll() is None:
                time.sleep(POLL_S)
        self._ranks = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)

    def _send(self) -> None:
        """Sends all ranks the signals that they have not got yet."""
        while self._num_sent < len(self.heard):
            number = self.heard[self._num_sent]
            self._num_sent += 1
            to_end = sum(one != signal.SIGUSR1 for one in self.heard[: self._num_sent])  # which comes more than once
            for rank in self._ranks.values():
                rank.send(signal.SIGKILL if to_end >= TRIES_TO_END else number)

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
            others = (self._logs[other] for other, its in failed.items() if its == lost)  # say what rank 0 cannot
            said = tail_of(self._logs[rank] or next(others, None))
            say(f"rank {rank} was ended by {signal.Signals(-code).name}{said}")
        elif ended.get(0) != code:
            say(f"rank {rank} ended with exit code {code}{tail_of(self._logs[rank])}")
        return code if code > 0 else lost


def tail_of(log: Path | None) -> str:
    """The last lines of what a rank printed, below a heading; nothing of rank 0."""
    lines = log.read_text("utf-8", errors="replace").splitlines()[-TAIL:] if log else []
    return "".join([f"; the end of {log}:" if lines else "", *(f"\n  {line}" for line in lines)])


def say(text: str) -> None:
    """A line of the launcher."""
    print(f"llmq: {text}", file=sys.stderr, flush=True)


def run_ray_group(group: Group, address: str | None, restarts: int, *, on_gpus: bool) -> int:
    """Runs the ranks in the cluster at `address`, or in one of this machine; returns the exit code as run_group does.

    UsageError if Ray is not installed, or the cluster not there or too small. `group.num` 0 takes all of its GPUs.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError('--launcher ray needs the package ray: pip install "llmq-train[ray]"') from error
    host, colon, port = (address or "").rpartition(":")
    try:
        if colon and port.isdigit():  # Ray would try for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        raise UsageError(f"--ray-address {address}: no Ray cluster answers there: {error}") from error
    try:
        kind = "GPU" if on_gpus else "CPU"
        there = int(ray.cluster_resources().get(kind, 0))
        num = group.num or there
        if not 0 < num <= there:
            raise UsageError(f"{num or 'all'} {kind}s are asked for, and the Ray cluster has {there}: ask for fewer")
        return _tried(group, restarts, lambda *about: _ray_attempt(num, kind, *about))
    finally:
        ray.shutdown()


def _ray_attempt(num: int, kind: str, group: Group, running: Running, number: int) -> int:
    """One start of the ranks, on machines of the cluster that have room for all of them."""
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    room = placement_group([{"CPU": 1, kind: 1}] * num, strategy="PACK")
    actors: list[Any] = []
    try:
        if not room.wait(group.first.join_s):
            raise WorldError(f"the Ray cluster had no room for {num} ranks within {group.first.join_s:g} s")
        for index in range(num):
            there = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=index)
            settings = {"num_cpus": 1, "num_gpus": int(kind == "GPU"), "scheduling_strategy": there}
            actors.append(ray.remote(Keeper).options(**settings).remote())
        actors, places, visible = _in_order(actors, group.first)
        handed_on = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
        for actor, place, gpus in zip(actors, places, visible, strict=True):
            log = group.log(place.rank)
            own = {**handed_on, **place.environ(), **({VISIBLE: gpus} if gpus else {})}
            ray.get(actor.start.remote(group.command, own, os.getcwd()))
            running.add(place.rank, RayRank(actor, log, append=number > 0), log)
        return running.wait()
    except ray.exceptions.RayActorError as error:
        say(f"an actor was lost before its rank began: {error}")
        return WorldError.exit_code
    finally:
        running.kill()
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(room)


def _in_order(actors: Sequence[Any], like: Place) -> tuple[list[Any], list[Place], list[str]]:
    """The actors by rank, their places, and the GPUs that each rank sees: those of all ranks of its machine.

    The ranks of a machine follow each other, in the order of its GPUs. Rank 0 keeps the store.
    """
    import ray

    found = ray.get([actor.where.remote() for actor in actors])
    machines = list(dict.fromkeys(node for node, *_ in found))
    ranked = sorted(range(len(actors)), key=lambda i: (machines.index(found[i][0]), found[i][2]))
    _, host, _, port = found[ranked[0]]
    places, visible = [], []
    for rank, i in enumerate(ranked):
        here = [other for other in ranked if found[other][0] == found[i][0]]
        place = replace(like, rank=rank, size=len(actors), local_rank=here.index(i), local_size=len(here))
        places.append(replace(place, master_addr=host, master_port=port, kind=RAY))
        visible.append(",".join(found[other][2] for other in here if found[other][2]))
    return [actors[i] for i in ranked], places, visible


class Keeper:
    """The actor of a rank: starts it, and tells how it is. Ray runs its methods one after the other."""

    def __init__(self) -> None:
        self._rank: LocalRank | None = None
        self._output, self._num_read = TemporaryFile(), 0  # noqa: SIM115  # and how many of its bytes are read

    def where(self) -> tuple[str, str, str, int]:
        """The machine, its address, the GPU that Ray keeps for this actor (or nothing), and a port that is free."""
        import ray

        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), ",".join(gpus), free_port()

    def start(self, command: Sequence[str], environ: dict[str, str], folder: str) -> None:
        """Starts the rank with this Python, in a folder that all machines share. It is killed with this actor."""
        last = {LAST_SIGNAL: str(int(signal.SIGKILL))}
        self._rank = LocalRank(command, environ | last, self._output, folder)

    def poll(self) -> tuple[bytes, int | None]:
        """What the rank has printed since the last call, and its exit code once it has ended."""
        assert self._rank
        code = self._rank.poll()
        there = os.fstat(self._output.fileno()).st_size
        printed = os.pread(self._output.fileno(), there - self._num_read, self._num_read)
        self._num_read += len(printed)
        return printed, code

    def send(self, number: int) -> None:
        """A signal to the rank."""
        assert self._rank
        self._rank.send(number)


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


class RayRank:
    """A rank that an actor keeps. What it prints goes to `log`, or where this process prints."""

    def __init__(self, actor: Any, log: Path | None, *, append: bool) -> None:
        self._actor = actor
        self._output = open(log, "ab" if append else "wb") if log else sys.stdout.buffer  # noqa: SIM115
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code; that of SIGKILL if the actor or its machine is lost."""
        import ray

        if self._code is None:
            try:
                printed, self._code = ray.get(self._actor.poll.remote())
            except ray.exceptions.RayActorError:
                printed, self._code = b"", -signal.SIGKILL
            self._output.write(printed)
            self._output.flush()
        return self._code

    def send(self, number: int) -> None:
        """A signal; what is lost gets none."""
        self._actor.send.remote(number)


def main() -> None:
    """Runs the function that the first argument names, with the arguments after it.

    A signal comes when the launcher ends; one that has ended already ends this process now. Where the system has no
    such signal (macOS), a rank ends once it misses the store that its launcher kept.
    """
    function = sys.argv.pop(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(os.environ.get(LAST_SIGNAL, signal.SIGUSR1)))
    if os.getppid() != int(os.environ[LAUNCHER]):
        sys.exit(TERMINATED)
    if cores := read_cores(os.environ.get(CORES, "")):
        os.sched_setaffinity(0, cores)
    module, _, name = function.partition(":")
    getattr(import_module(module), name)()


if __name__ == "__main__":
    main()
