"""Ranks as actors of a Ray cluster: Ray finds the machines and keeps their GPUs for the run; the ranks do the rest.

Each rank is a process that an actor starts beside it, as `--gpus N` does on one machine: so a rank has a main thread
for signals and ends with its actor. Ray's own collectives are not used. What ranks print comes to this process.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from llmq.comm.environment import RAY, Place
from llmq.comm.launch import LAST_SIGNAL, Group, LocalRank, Running, say, tried
from llmq.errors import UsageError, WorldError

HANDED_ON = ("LLMQ_", "HF_", "WANDB_", "NCCL_")  # the beginnings of variables that ranks get from this process
CONNECT_S = 10.0  # in which a cluster has to take a connection
VISIBLE = "CUDA_VISIBLE_DEVICES"


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
        return tried(group, restarts, lambda *more: _attempt(num, kind, *more))
    finally:
        ray.shutdown()


def _attempt(num: int, kind: str, group: Group, running: Running, more: list[str], number: int) -> int:
    """One start of the ranks, on machines that have room for all of them."""
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
            ray.get(actor.start.remote([*group.command, *more], own, os.getcwd()))
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

    def start(self, command: list[str], environ: dict[str, str], folder: str) -> None:
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
