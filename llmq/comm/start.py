"""From the options of a launch to ranks: processes on this machine, or actors of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmq.comm.group import Group, run_group
from llmq.comm.launch import Place
from llmq.errors import UsageError

if TYPE_CHECKING:
    from llmq.options.run import LaunchOptions

RAY = "ray"


def starts_ranks(options: LaunchOptions, place: Place | None, gpus: int) -> bool:
    """Whether this process is to start ranks; else it is one itself, or alone. UsageError for two launchers at once."""
    if place is not None and options.launcher == RAY and place.kind != RAY:
        raise UsageError(f"--launcher ray, but {place.kind} started this process ({place.variables}): use one of them")
    return place is None and (gpus != 1 or options.launcher == RAY)


def counts_here(options: LaunchOptions) -> bool:
    """Whether GPUs are counted on this machine; else in the cluster."""
    return options.launcher != RAY


def start_group(options: LaunchOptions, group: Group, *, on_gpus: bool) -> int:
    """Runs the ranks of a group to their end; returns the exit code."""
    if options.launcher != RAY:
        return run_group(group, options.restart_failed)
    if group.size not in (0, group.num):
        raise UsageError("--launcher ray chooses the machines itself: leave --nnodes and --node-rank out")
    from llmq.comm.ray_group import run_ray_group

    return run_ray_group(group, options.ray_address, options.restart_failed, on_gpus=on_gpus)
