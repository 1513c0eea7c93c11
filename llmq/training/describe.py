"""What a run is, said before it begins: options, system, model, data, memory; and in a line what it came to."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.adapters import resolve as adapters
from llmq.data.chat.samples import sample_text
from llmq.disk import MIB, shown
from llmq.engine.predict import predicted_rate
from llmq.hardware import device
from llmq.model.parameters import num_parameters, rows_of_file
from llmq.plan import memory
from llmq.plan.levels import name_of, needs_by_level
from llmq.training.log import SUMMARY, RunLog
from llmq.training.result import TrainResult
from llmq.training.several import listed_members

if TYPE_CHECKING:
    from llmq.training.job import Job


def describe(
    job: Job,
    log: RunLog,
    told: Collection[str],
    matmuls: Mapping[str, str],
    needs: Mapping[str, tuple[Path, int]],
) -> None:
    """The sections of the log that say what will be run; of a dry run, what it `needs` on the disk, too.

    Nothing is refused from here on: an error is the first thing that is seen of a run.
    """
    plan, data, config = job.plan, job.data, job.plan.spec.config
    log.options(job.options, told)
    measured = {"measured": f"matrix products at {job.speed.line}"} if job.speed else {}
    log.system({**device.system_facts(job.device), **measured})
    log.model(job.source.name, parameters=num_parameters(rows_of_file(plan.rows)), architecture=config.architecture)
    if not all(row.trainable for row in plan.rows):
        log.say(adapters.note(plan.spec.adapters, plan.rows))
    if job.members:
        log.adapters({one.name: one.given for one in job.members}, listed_members(job.members, plan))
    windows = data.train.num_windows
    per_epoch = None if windows is None else -(-windows // data.samples_per_step)
    total_steps = job.schedule.steps if data.is_there else job.options["steps"]
    steps = {"tokens per step": job.tokens_per_step, "steps per epoch": per_epoch, "steps": total_steps}
    shares = [asdict(share) for share in data.shares(job.schedule.steps * data.samples_per_step)]
    log.dataset(data.train.files, data.eval.files if data.eval else (), mixture=shares, **steps, **data.facts())
    if sample := sample_text(data.train.token_files, data.tokenizer_folder):
        log.say(sample)
    if matmuls:
        log.matmuls(matmuls)
    table = {name: size / MIB for name, size in plan.table().items()}
    other = table.pop("Other")
    total, free = device.memory_bytes(job.device)
    left = max(free - plan.total_bytes, 0) / MIB
    hint = "a larger --batch-size"
    hint += (", or fewer --recompute flags," if plan.spec.memory.flags else "") + " would use them"
    if (chunks := plan.spec.memory.attention_chunks) > 1 and job.options["attn_bwd_chunks"] == memory.AUTO:
        log.say(f"Attention's backward runs in {chunks} chunks of the batch, so that it needs less memory")
    host = {name: size / MIB for name, size in plan.table("host").items()}
    log.allocator({**table, "Free": left, "Reserved": max(total - free, 0) / MIB, "Other": other}, host, hint=hint)
    if job.plans_only:  # else these go to the log, too, which is not open yet
        for text in job.notices:
            log.say(text)
        for text in (*log.warnings, *job.warnings):
            log.say(f"Warning: {text}", least=SUMMARY)
        log.say(_in_a_line(job, free), least=SUMMARY)
        hosted = f"{shown(plan.host_bytes)} of the run, and " if plan.host_bytes else ""
        log.say(f"In host memory: {hosted}{shown(job.checkpoint_copy_bytes)} for a copy of what a checkpoint holds")
        log.say("On disk: " + ", ".join(f"{what} {shown(size)}" for what, (_, size) in needs.items()))


def _in_a_line(job: Job, free_bytes: int) -> str:
    """What a plan that fits comes to."""
    data, card = job.data, job.device.card
    rate = predicted_rate(job.plan, card, data.samples_per_step * data.seq_len)
    size, name = job.plan.spec.sharding.size, card.name if card else job.device.kind
    where = f"each of {size} {name}" if size > 1 else name
    fits = f"The plan fits: {shown(job.plan.total_bytes)} of {shown(free_bytes)} that are free on {where}"
    return fits if rate is None else f"{fits}, {rate * data.tokens_per_row / data.seq_len:,.0f} tokens/s predicted"


def level_lines(job: Job, free_bytes: int) -> list[str]:
    """What each `--zero-level` takes of a GPU and sends in a step, as a table; nothing for a run on one GPU."""
    sharding = job.plan.spec.sharding
    if sharding.size == 1:
        return []
    levels = needs_by_level(job.plan, job.backend.scratch_bytes, job.data.grad_accumulation)
    hosts = any(needs.host_bytes for needs in levels)
    # what columns are in the allocator table; the rest is that of a micro-batch
    states = ("Master", *job.plan.state_titles.values())
    columns = {"weights": ("Weights",), "gradients": ("Gradients",), "states": states}
    rows = [("", *columns, "activations", "all", *(["host"] if hosts else []), "sent in a step", "")]
    for needs in levels:
        held = [sum(needs.table[name] for name in names) for names in columns.values()]
        host = [needs.host_bytes] if hosts else []
        sizes = (*held, needs.total_bytes - sum(held), needs.total_bytes, *host, needs.sent_bytes)
        fits = "fits" if needs.total_bytes <= free_bytes else "does not fit"
        chosen = " (this run)" if needs.level == name_of(sharding) else ""
        rows.append((f"--zero-level {needs.level}", *map(shown, sizes), fits + chosen))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [f"On each of {sharding.size} GPUs:", *(f"  {line.rstrip()}" for line in lines)]


def summary(result: TrainResult, seconds: float) -> Iterator[str]:
    """What a finished run came to: `12 steps in 0:03:10: training loss 3.1416, evaluation loss 3.2500, ...`; and below
    that the losses of each of several adapters."""
    parts = list(_losses(result.train_loss, result.eval_loss))
    parts += [f"{result.tokens_per_second:,.0f} tokens/s"] if math.isfinite(result.tokens_per_second) else []
    yield f"{result.steps:,} steps in {timedelta(seconds=round(seconds))}: {', '.join(parts)}"
    for name, one in result.adapters.items():
        yield f"  {name}: {', '.join(_losses(one.train_loss, one.eval_loss))}"


def _losses(train_loss: float, eval_loss: float | None) -> Iterator[str]:
    yield f"training loss {train_loss:.4f}"
    if eval_loss is not None and math.isfinite(eval_loss):
        yield f"evaluation loss {eval_loss:.4f}"
