"""The runs of `llmq-bench`: each configuration planned, measured, and shown beside what is predicted.

With `--gpus N` it starts a process for each GPU, each with the arguments of the command.
Without `--models` the device decides: models that fit its memory, in bf16 and in fp8 where the card has it,
as many as can be measured in time at the speed of those before. A measurement that takes longer is cut short.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from llmq.bench.ceilings import look_at
from llmq.bench.configuration import Configuration, configurations, multiplied, shared
from llmq.bench.measured import by_ranks, measured
from llmq.bench.results import document, refuse_place, save, show, show_all, show_machine
from llmq.comm.environment import Place, gpu_index, recognised
from llmq.comm.join import copied_in_words, drawn_token, join_world
from llmq.comm.launch import Group, run_group
from llmq.comm.world import ALONE, World
from llmq.errors import UsageError
from llmq.hardware import device
from llmq.hardware.cores import cores_of_ranks, use_blas_threads
from llmq.hardware.device import Device
from llmq.options.bench import BenchOptions
from llmq.plan import sharding

PROGRAM = "llmq.cli.start:bench"  # what every rank runs
DEFAULT_LEVEL = 1  # of several GPUs


def started(request: BenchOptions, training: Mapping[str, Any], arguments: Sequence[str]) -> int | None:
    """The exit code of the processes that `--gpus` starts; None if this process is to measure.

    What can be refused is refused here, once. UsageError also for GPUs that are not there.
    """
    if request.gpus == 1 or recognised(os.environ, request.gpus) is not None:
        return None
    if training.get("device") == "cpu":
        raise UsageError(f"--gpus {request.gpus} counts GPUs, but --device is cpu: leave one of them out")
    addresses = device.gpu_addresses(request.gpus)
    num = len(addresses)
    if num == 1:
        return None
    _check(request, training, device.pick_device(shared(training).system), num)
    with TemporaryDirectory(prefix="llmq-bench-") as logs:
        first = Place(0, num, 0, num, "127.0.0.1", 0, drawn_token(), "--gpus")
        return run_group(Group((PROGRAM, *arguments), first, Path(logs), cores_of_ranks(num, addresses)))


def run(request: BenchOptions, training: Mapping[str, Any], command: str) -> None:
    """Measures, prints and saves, with the `command` and its options of llmq-train.

    Of many ranks each measures, and the first one prints and saves.
    """
    common, place = shared(training), recognised(os.environ, request.gpus)
    where = device.pick_device(common.system)
    if place is None or place.size == 1:
        run_on(request, training, command, where, ALONE)
        return
    where = device.use(where, partial(gpu_index, place))
    world = join_world(place, where, sharding.copying(common.sharding))
    try:
        run_on(request, training, command, where, world)
    finally:
        world.close()


def run_on(request: BenchOptions, training: Mapping[str, Any], command: str, where: Device, world: World) -> None:
    """The same on a device, as one of the ranks of a world."""
    if where.kind == "cpu":
        use_blas_threads()
    if world.size > 1:
        request = request.model_copy(update={"zero_levels": request.zero_levels or (DEFAULT_LEVEL,)})
    wanted = _check(request, training, where, world.size)
    console = Console(quiet=world.rank > 0)
    machine = look_at(where, multiplied(wanted), world)
    show_machine(console, machine)
    if copied := copied_in_words(world):
        console.print(copied)
    results = []
    for result in measured(request, wanted, machine) if world.size == 1 else by_ranks(wanted, machine, world):
        results.append(result)
        show(console, result)
    if len(wanted) > 1 and request.models:
        show_all(console, results, [one.name for one in wanted])
    if request.save and world.rank == 0:
        save(Path(request.save), document(results, command, machine))


def _check(
    request: BenchOptions, training: Mapping[str, Any], where: Device, num_ranks: int = 1
) -> list[Configuration]:
    """What is measured; all is refused that can be before the first measurement."""
    wanted = configurations(request, training, where, num_ranks)
    if request.save:
        refuse_place(Path(request.save))
    return wanted
