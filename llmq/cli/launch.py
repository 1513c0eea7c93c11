"""`llmq-launch`: starts the processes of one machine, of a run on several or on the CPU; and `llmq-train --gpus N`."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from llmq.cli import shell
from llmq.comm.environment import JOIN_S, TRAIN
from llmq.errors import UsageError
from llmq.options.field import written
from llmq.options.parse import Options

PROGRAM = "llmq.cli.start:train"  # what every rank runs


def started(options: Options, arguments: Sequence[str]) -> int | None:
    """The exit code of the processes that `llmq-train` starts by its options; None if this process is to train."""
    from llmq.comm.environment import recognised, starts_ranks

    flat = options.to_flat()
    gpus = flat["gpus"]
    if flat["dry_run"] or not starts_ranks(flat["launcher"], recognised(os.environ, gpus), gpus):
        return None
    return _start(options, arguments, TRAIN, gpus=gpus)


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
    *, arguments: tuple[str, ...], gpus: int | None, procs: int | None, join_timeout: float, **machines: Any
) -> int:
    """Starts this machine's ranks and waits for them; returns the exit code."""
    from llmq.cli.train import options_of
    from llmq.comm.environment import recognised

    if (gpus is None) == (procs is None):
        raise UsageError("give --gpus N for GPUs, or --procs N for processes on the CPU")
    nnodes, node_rank = machines["nnodes"], machines["node_rank"]
    if node_rank >= nnodes:
        raise UsageError(f"--node-rank {node_rank} of --nnodes {nnodes} is none: machines are 0 to {nnodes - 1}")
    if nnodes > 1 and (machines["master_addr"] is None or machines["master_port"] is None):
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
    flags = {**machines} if nnodes > 1 else {}
    flags |= {"procs": procs} if procs else {"gpus": gpus}
    flags |= {} if join_timeout == JOIN_S else {"join_timeout": f"{join_timeout:g}"}
    start = ("llmq-launch", *(written(name, value, "=") for name, value in flags.items()), "--")
    return _start(options, arguments, start, gpus=gpus, procs=procs, join_s=join_timeout, **machines)


def _start(
    options: Options,
    arguments: Sequence[str],
    start: tuple[str, ...],
    *,
    gpus: int | None,
    procs: int | None = None,
    join_s: float = JOIN_S,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> int:
    """Starts the ranks of this machine, or those of a Ray cluster; returns the exit code.

    `start` is the command that starts as many again. Of a single machine any free port will do.
    """
    from llmq.comm.environment import RAY, Place
    from llmq.comm.launch import Group, start_group
    from llmq.comm.world import derived_token
    from llmq.hardware import device
    from llmq.hardware.cores import cores_of_ranks

    here = options.to_flat()["launcher"] != RAY  # else GPUs are counted in the cluster, and Ray chooses cores
    addresses = device.gpu_addresses(gpus) if gpus is not None and here else None
    num = procs or (len(addresses) if addresses is not None else gpus or 0)
    token = os.environ.get("LLMQ_JOB_TOKEN") or (
        secrets.token_hex(16) if nnodes == 1 else derived_token(f"llmq-launch {master_addr}:{master_port}")
    )
    first = Place(
        rank=node_rank * num,
        size=nnodes * num,
        local_rank=0,
        local_size=num,
        master_addr=master_addr or "127.0.0.1",
        master_port=master_port or 0,
        token=token,
        kind="llmq-launch" if procs or nnodes > 1 else "--gpus",
        join_s=join_s,
        start=start,
    )
    logs = Path(options.to_flat()["log_file"]).parent
    group = Group((PROGRAM, *arguments), first, logs, cores_of_ranks(num, addresses) if here else ())
    return start_group(options.launch, group, on_gpus=procs is None)


if __name__ == "__main__":
    shell.main(command)
