"""A run on several GPUs from Python: this process is the first rank, and starts the others beside it."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from llmq.comm.environment import JOIN_S, RAY, Place, recognised, starts_ranks
from llmq.comm.launch import CORES, ENDINGS, PLANNED, POLL_S, LocalRank, tail_of
from llmq.comm.store import StoreServer
from llmq.disk import storage
from llmq.errors import UsageError, WorldError
from llmq.files.source import find_source
from llmq.hardware import device
from llmq.hardware.cores import cores_of_ranks
from llmq.model.family_table import FAMILIES
from llmq.options.parse import Options, arguments_of, plugins_of
from llmq.plugins import GROUP, table

HOST = "127.0.0.1"
PROGRAM = "llmq.cli.start:train"  # what the other ranks run


@contextmanager
def started(options: Options) -> Iterator[Place | None]:
    """Within, the other ranks of a run on `gpus` of this machine are there; this process's place among them.

    None for one GPU, and where a launcher started this process as a rank. UsageError for GPUs that are not there.
    """
    flat = options.to_flat()
    gpus, launcher = flat["gpus"], flat["launcher"]
    if flat["dry_run"] or not starts_ranks(launcher, recognised(os.environ, gpus), gpus):
        yield None
        return
    if launcher == RAY:
        raise UsageError("launcher='ray' is for the command: llmq-train --launcher ray starts actors of a cluster")
    addresses = device.gpu_addresses(gpus)
    if len(addresses) == 1:
        yield None
        return
    refuse_local(options)
    with others(options, len(addresses), cores_of_ranks(len(addresses), addresses)) as place:
        yield place


def refuse_local(options: Options) -> None:
    """UsageError for plug-ins that other processes of the run would not find."""
    flat = options.to_flat()
    named = {f"{kind} {name}" for _, kind, name in plugins_of(flat) if name in table(kind).local}
    if FAMILIES.local and flat["family"] is None:
        model = find_source(flat["model"], from_scratch=flat["from_scratch"]).config
        named |= {f"family {name}" for name in FAMILIES.local if name == model.architecture}
    if named:
        raise UsageError(
            f"{', '.join(sorted(named))} is registered in this process alone, and gpus={flat['gpus']} starts others: "
            f"install a package that has it as an entry point of the group {GROUP}, or train on one GPU"
        )


@contextmanager
def others(options: Options, num: int, cores: Sequence[frozenset[int]] = ()) -> Iterator[Place]:
    """Within, ranks 1 to `num` - 1 run as processes, which print into files beside the log; the place of rank 0.

    Where this rank ends with an error, the others end soon after. WorldError if another one failed.
    """
    token, logs = secrets.token_hex(16), Path(options.to_flat()["log_file"]).parent
    server = StoreServer(HOST, 0, num, token, JOIN_S)
    first = Place(0, num, 0, num, HOST, server.port, token, "--gpus", has_store=True)
    ranks: dict[int, LocalRank] = {}
    watching, problem = threading.Event(), None
    watcher = threading.Thread(target=_watch, args=(ranks, server, watching), name="llmq-ranks", daemon=True)
    try:
        with storage(logs, "the folder for the output of ranks cannot be made"):
            logs.mkdir(parents=True, exist_ok=True)
        for rank in range(1, num):
            place = replace(first, rank=rank, local_rank=rank)
            own = ",".join(map(str, sorted(cores[rank]))) if cores else ""
            with open(logs / f"rank-{rank:05}.log", "wb") as output:
                ranks[rank] = LocalRank([PROGRAM, *arguments_of(options)], {**place.environ(), CORES: own}, output)
        watcher.start()
        yield first
    except WorldError as error:  # of this rank, which misses another
        problem = error
    finally:
        codes = _ended(ranks)
        watching.set()
        server.close()
    failed = [rank for rank, code in codes.items() if code not in PLANNED]
    if failed:
        log = logs / f"rank-{failed[0]:05}.log"
        raise WorldError(f"rank {failed[0]} ended with exit code {codes[failed[0]]}{tail_of(log)}") from problem
    if problem is not None:
        raise problem


def _watch(ranks: Mapping[int, LocalRank], server: StoreServer, done: threading.Event) -> None:
    """Once a rank has failed, this one does not wait for it to come."""
    while not done.wait(POLL_S):
        if failed := [number for number, rank in ranks.items() if rank.poll() not in (None, *PLANNED)]:
            server.refuse(f"rank {failed[0]} has ended")
            return


def _ended(ranks: dict[int, LocalRank]) -> dict[int, int]:
    """The exit codes of all ranks, having ended those that do not end by themselves."""
    began, endings = time.monotonic(), list(ENDINGS)
    while any(rank.poll() is None for rank in ranks.values()):
        if endings and time.monotonic() - began > endings[0][0]:
            _, number = endings.pop(0)
            for rank in ranks.values():
                rank.send(number)
        time.sleep(POLL_S)
    return {number: rank.poll() or 0 for number, rank in ranks.items()}
