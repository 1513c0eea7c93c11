"""What a run needs and what there is: memory, disk, evaluations; refused before the first allocation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmq.backends import open_backend
from llmq.data.batches.loader import Data
from llmq.disk import check_free_space
from llmq.errors import UsageError
from llmq.files.checkpoint import EVAL_LOSS, Checkpoints
from llmq.files.writers import checkpoint_bytes
from llmq.hardware import device
from llmq.options.parse import Options
from llmq.plan.advice import refuse_if_host_is_small, refuse_if_too_large
from llmq.plan.slots import listed
from llmq.training.describe import level_lines
from llmq.training.log import RunLog

if TYPE_CHECKING:
    from llmq.training.job import Job


def check_best(checkpoints: Checkpoints, data: Data, *, evaluates: bool) -> None:
    """UsageError if the best checkpoint is to be kept and nothing is evaluated."""
    if checkpoints.saves_best and (data.eval is None or not evaluates):
        raise UsageError(
            f"--save-best {EVAL_LOSS} goes by evaluations, and this run makes none: give evaluation data and "
            "--eval-every-n-steps above 0, or leave it out"
        )


def check_memory(job: Job, options: Options, log: RunLog) -> None:
    """MemoryLimitError if the plan does not fit on the device, or in the memory of this host; a dry run for many says
    first what every level takes."""
    strict = job.device.kind == "cuda" and device.backend_settings(options.system, job.device)["deterministic"]
    relaxed = open_backend("planned", deterministic=False).scratch_bytes if strict else None
    free = device.memory_bytes(job.device)[1]
    levels = level_lines(job, free) if job.plans_only else ()
    for line in (*listed(job.plan, job.options["debug_memory"]), *levels):
        log.say(line)
    refuse_if_too_large(job.plan, free, job.backend.scratch_bytes, relaxed)
    host = device.host_bytes(options.system, job.device)
    if host is not None and job.device.kind == "cpu":
        host -= job.plan.total_bytes  # it is all in one memory, so that nothing is gained by what is not on the host
    room = free if job.device.kind == "cuda" else None
    refuse_if_host_is_small(job.plan, host, room, job.backend.scratch_bytes)


def check_disk(job: Job, done: int) -> dict[str, tuple[Path, int]]:
    """Bytes of the checkpoints after the step `done` and of the model; StorageError if they do not fit on the disk."""
    first, last = done + 1, job.schedule.steps
    one = checkpoint_bytes(job.checkpoint_pieces)
    saved = (job.checkpoints.folder, job.checkpoints.peak_bytes(one, first, max(first, last)))
    needs = {"the checkpoints": saved}
    named = [f"adapter {one.name}" for one in job.members] or ["the model", "the merged model"]
    for what, export in zip(named, job.exports, strict=False):
        needs[what] = (export.folder, export.check(room=not job.device.planned))
    if not job.device.planned:
        check_free_space(needs)
    return needs
