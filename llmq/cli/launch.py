"""`llmq-launch`: starts the processes of one machine, of a run on several or on the CPU; and `llmq-train --gpus N`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from llmq.cli import shell
from llmq.comm.environment import JOIN_S, TRAIN
from llmq.errors import UsageError
from llmq.options.parse import Options

PROGRAM = "llmq.cli.start:train"  # what every rank runs


def started(options: Options, arguments: Sequence[str]) -> int | None:
    """The exit code of the processes that `llmq-train` starts by its options; None if this process is to train."""
    from llmq.comm.environment import recognised, starts_ranks
    from llmq.hardware import device

    flat = options.to_flat()
    if flat["dry_run"]:
        return None
    gpus = device.asked_gpus(options.system)
    if not starts_ranks(flat["launcher"], recognised(os.environ, gpus), gpus):
        return None
    return _start(options, arguments, Machines(), gpus=gpus)


@dataclass(frozen=True)
class Machines:
    """Which machine of how many this is, and where they meet; of one machine, any free port will do."""

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    join_s: float = JOIN_S

    def command(self, ranks: str) -> tuple[str, ...]:
        """`llmq-launch` with its options, of which `ranks` says how many each machine starts, up to the `--`."""
        machines = (f"--nnodes={self.count}", f"--node-rank={self.rank}")
        store = (f"--master-addr={self.host}", f"--master-port={self.port}")
        patience = () if self.join_s == JOIN_S else (f"--join-timeout={self.join_s:g}",)
        return ("llmq-launch", *((*machines, *store) if self.count > 1 else ()), ranks, *patience, "--")


@shell.version_option
@click.command(
    "llmq-launch",
    context_settings=shell.SETTINGS,
    help="Trains on several machines, or with several processes on the CPU: run it on each machine, with the same "
    "arguments but for --node-rank. On a single machine with GPUs, llmq-train --gpus N does the same.",
    epilog="Example: llmq-launch --nnodes 2 --node-rank 0 --master-addr node1 --master-port 29400 --gpus 8 -- "
    "--model Qwen/Qwen3-8B --data chats.jsonl",
)
@click.option("--nnodes", "--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of machines.")
@click.option("--node-rank", type=click.IntRange(0), default=0, show_default=True, help="Which of them this is.")
@click.option("--master-addr", metavar="HOST", help="Name or address of machine 0, whose output is the run's.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="A free port of machine 0.")
@click.option("--gpus", type=click.IntRange(0), help="GPUs on each machine, with a process for each; 0 takes all.")
@click.option("--procs", type=click.IntRange(1), help="Processes on each machine, for --device cpu.")
@click.option(
    "--join-timeout",
    type=shell.Number(min=0, min_open=True),
    default=JOIN_S,
    show_default=True,
    help="Seconds in which all processes have to come; those that did not are named.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- ARGUMENTS OF llmq-train")
def command(
    *,
    nnodes: int,
    node_rank: int,
    master_addr: str | None,
    master_port: int | None,
    gpus: int | None,
    procs: int | None,
    join_timeout: float,
    arguments: tuple[str, ...],
) -> int:
    """Starts this machine's ranks and waits for them; returns the exit code."""
    from llmq.cli.train import options_of
    from llmq.comm.environment import recognised

    if (gpus is None) == (procs is None):
        raise UsageError("give --gpus N for GPUs, or --procs N for processes on the CPU")
    if node_rank >= nnodes:
        raise UsageError(f"--node-rank {node_rank} of --nnodes {nnodes} is none: machines are 0 to {nnodes - 1}")
    if nnodes > 1 and (master_addr is None or master_port is None):
        raise UsageError(f"--nnodes {nnodes} needs --master-addr and --master-port, the same on every machine")
    if (place := recognised(os.environ)) is not None and place.kind != "srun":
        raise UsageError(
            f"two launchers at once: {place.kind} started llmq-launch ({place.variables}): start llmq-train with it"
        )
    options = options_of(arguments)
    asked = options.to_flat()["gpus"]
    if options.to_flat()["dry_run"]:
        raise UsageError("--dry-run plans for one process: use llmq-train, with --gpus N for the ranks of many")
    if asked not in (1, gpus):
        given = f"--gpus {gpus}" if procs is None else f"--procs {procs}"
        raise UsageError(f"--gpus is {asked} for llmq-train, and llmq-launch has {given}: leave it out after the --")
    machines = Machines(nnodes, node_rank, master_addr or Machines.host, master_port or 0, join_timeout)
    start = machines.command(f"--procs={procs}" if procs else f"--gpus={gpus}")
    return _start(options, arguments, machines, gpus=gpus, procs=procs, start=start)


def _start(
    options: Options,
    arguments: Sequence[str],
    machines: Machines,
    *,
    gpus: int | None,
    procs: int | None = None,
    start: tuple[str, ...] = TRAIN,
) -> int:
    """Starts the ranks of this machine, or those of a Ray cluster; returns the exit code."""
    from llmq.comm.environment import RAY, Place
    from llmq.comm.launch import Group, start_group
    from llmq.comm.world import derived_token
    from llmq.hardware import device
    from llmq.hardware.cores import cores_of_ranks

    here = options.to_flat()["launcher"] != RAY  # else GPUs are counted in the cluster, and Ray chooses cores
    addresses = device.gpu_addresses(gpus) if gpus is not None and here else None
    num = procs or (len(addresses) if addresses is not None else gpus or 0)
    token = os.environ.get("LLMQ_JOB_TOKEN") or (
        secrets.token_hex(16) if machines.count == 1 else derived_token(f"llmq-launch {machines.host}:{machines.port}")
    )
    first = Place(
        rank=machines.rank * num,
        size=machines.count * num,
        local_rank=0,
        local_size=num,
        master_addr=machines.host,
        master_port=machines.port,
        token=token,
        kind="llmq-launch" if procs or machines.count > 1 else "--gpus",
        join_s=machines.join_s,
        start=start,
    )
    logs = Path(options.to_flat()["log_file"]).parent
    group = Group((PROGRAM, *arguments), first, logs, cores_of_ranks(num, addresses) if here else ())
    return start_group(options.launch, group, on_gpus=procs is None)


if __name__ == "__main__":
    shell.main(command)
