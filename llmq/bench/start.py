"""The processes of `llmq-bench --gpus N`: one for each GPU, each with the arguments of the command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmq.bench.request import check, shared
from llmq.comm.environment import Place, recognised
from llmq.comm.join import drawn_token
from llmq.comm.launch import Group, run_group
from llmq.errors import UsageError
from llmq.hardware import device
from llmq.hardware.cores import cores_of_ranks
from llmq.options.bench import BenchOptions

PROGRAM = "llmq.cli.start:bench"  # what every rank runs


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
    check(request, training, device.pick_device(shared(training).system), num)
    with TemporaryDirectory(prefix="llmq-bench-") as logs:
        first = Place(0, num, 0, num, "127.0.0.1", 0, drawn_token(), "--gpus")
        return run_group(Group((PROGRAM, *arguments), first, Path(logs), cores_of_ranks(num, addresses)))
