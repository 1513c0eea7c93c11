"""What a run needs and what there is: memory and disk; refused before the first allocation."""

from __future__ import annotations

from pathlib import Path

from llmq.backends import Backend
from llmq.backends.opening import open_backend
from llmq.disk import check_free_space
from llmq.engine.advice import Limits, refuse_if_too_large
from llmq.files.writers import checkpoint_bytes
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.options.parse import Options
from llmq.plan import memory
from llmq.plan.slots import listed
from llmq.training.describe import level_lines
from llmq.training.log import RunLog
from llmq.training.ready import Ready


def limits_of(options: Options, where: Device, backend: Backend, micro_steps: int) -> Limits:
    """What there is for a run with these options, whose steps have so many micro-batches."""
    is_gpu = where.kind == "cuda"
    strict = is_gpu and device.backend_settings(options.system, where)["deterministic"]
    return Limits(
        device.memory_bytes(where)[1],
        backend.scratch_bytes,
        open_backend("planned", deterministic=False).scratch_bytes if strict else None,
        device.host_bytes(options.system, where),
        where.num_sharing,
        in_one=not is_gpu,
        micro_steps=micro_steps,
        has_global_batch=options.to_flat()["global_batch_size"] is not None,
        gpu_bytes=device.memory_bytes(where)[0] if is_gpu else 0,
        auto_chunks=memory.chooses_attention_chunks(options.memory),
        card=where.card,
    )


def check_memory(run: Ready, options: Options, log: RunLog) -> None:
    """MemoryLimitError if the plan does not fit on the device, or in the memory of this host; a dry run for many says
    first what every level takes."""
    room = limits_of(options, run.device, run.backend, run.data.grad_accumulation)
    levels = level_lines(run, room.free_bytes) if run.is_dry else ()
    for line in (*listed(run.plan, run.options["debug_memory"]), *levels):
        log.say(line)
    refuse_if_too_large(run.plan, room)


def check_disk(run: Ready, done: int) -> dict[str, tuple[Path, int]]:
    """Bytes of the checkpoints after the step `done` and of the model; StorageError if they do not fit on the disk."""
    first, last = done + 1, run.trains.schedule.steps
    one = checkpoint_bytes([each.tensor for each in run.checkpoint_slices])
    saved = (run.results.checkpoints.folder, run.results.checkpoints.peak_bytes(one, first, max(first, last)))
    needs = {"the checkpoints": saved}
    for what, export in zip(("the model", "the merged model"), run.results.exports, strict=False):
        needs[what] = (export.folder, export.check(room=not run.device.planned))
    if not run.device.planned:
        check_free_space(needs)
    return needs
