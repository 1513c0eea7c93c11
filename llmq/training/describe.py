"""The sections of the log that say what a run is, before it begins: options, system, model, data, memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

from llmq.adapters import resolve as adapters
from llmq.data.chat.encode import sample_text
from llmq.disk import MIB, shown
from llmq.engine.predict import predicted_rate
from llmq.hardware import device
from llmq.model.parameters import num_parameters, rows_of_file
from llmq.plan import memory
from llmq.plan.levels import name_of, needs_by_level
from llmq.training.log import SUMMARY, RunLog
from llmq.training.ready import Ready


def describe(run: Ready, log: RunLog, given: Collection[str], matmuls: Mapping[str, str]) -> None:
    """Writes the sections. `given` are the options that are no defaults, and `matmuls` the choices of timing.

    Nothing is refused from here on: an error is the first thing that is seen of a run.
    """
    plan = run.plan
    log.options(run.options, given)
    log.system(device.system_facts(run.device))
    architecture = plan.spec.config.architecture
    log.model(run.source.name, parameters=num_parameters(rows_of_file(plan.rows)), architecture=architecture)
    if not all(row.trainable for row in plan.rows):
        log.say(adapters.note(plan.spec.adapters, plan.rows))
    _describe_data(run, log)
    if matmuls:
        log.matmuls(matmuls)
    _describe_memory(run, log)


def _describe_data(run: Ready, log: RunLog) -> None:
    """What is trained on, and for how long; a sample of it where a part is masked."""
    data, steps = run.data, run.trains.schedule.steps
    windows = data.train.num_windows
    facts = {
        "tokens per step": data.samples_per_step * data.tokens_per_row,  # without virtual ones; packed rows have fewer
        "steps per epoch": None if windows is None else -(-windows // data.samples_per_step),
        "steps": steps if data.is_there else run.options["steps"],
        **data.facts(),
    }
    shares = [asdict(share) for share in data.shares(steps * data.samples_per_step)]
    log.dataset(data.train.files, data.eval.files if data.eval else (), mixture=shares, **facts)
    if sample := sample_text(data.train.token_files, data.tokenizer_folder):
        log.say(sample)


def _describe_memory(run: Ready, log: RunLog) -> None:
    """The allocator table."""
    plan = run.plan
    table = {name: size / MIB for name, size in plan.table().items()}
    other = table.pop("Other")
    total, free = device.memory_bytes(run.device)
    left = max(free - plan.total_bytes, 0) / MIB
    hint = "a larger --batch-size"
    hint += (", or fewer --recompute flags," if plan.spec.memory.flags else "") + " would use them"
    if (chunks := plan.spec.memory.attention_chunks) > 1 and run.options["attn_bwd_chunks"] == memory.AUTO:
        log.say(f"Attention's backward runs in {chunks} chunks of the batch, so that it needs less memory")
    host = {name: size / MIB for name, size in plan.table("host").items()}
    log.allocator({**table, "Free": left, "Reserved": max(total - free, 0) / MIB, "Other": other}, host, hint=hint)


def describe_dry(run: Ready, log: RunLog, needs: Mapping[str, tuple[Path, int]]) -> None:
    """What a dry run says at its end, beside notices and warnings, for which a run has its log: that its plan fits, and
    what it `needs` on the disk."""
    plan, (_, free) = run.plan, device.memory_bytes(run.device)
    for text in run.results.notices:
        log.say(text)
    for text in (*log.warnings, *run.results.warnings):
        log.say(f"Warning: {text}", least=SUMMARY)
    log.say(_in_a_line(run, free), least=SUMMARY)
    hosted = f"{shown(plan.host_bytes)} of the run, and " if plan.host_bytes else ""
    log.say(f"In host memory: {hosted}{shown(run.checkpoint_copy_bytes)} for a copy of what a checkpoint holds")
    log.say("On disk: " + ", ".join(f"{what} {shown(size)}" for what, (_, size) in needs.items()))


def _in_a_line(run: Ready, free_bytes: int) -> str:
    """What a plan that fits comes to."""
    data, card = run.data, run.device.card
    rate = predicted_rate(run.plan, card, data.samples_per_step * data.seq_len)
    size, name = run.plan.spec.sharding.size, card.name if card else run.device.kind
    where = f"each of {size} {name}" if size > 1 else name
    fits = f"The plan fits: {shown(run.plan.total_bytes)} of {shown(free_bytes)} that are free on {where}"
    return fits if rate is None else f"{fits}, {rate * data.tokens_per_row / data.seq_len:,.0f} tokens/s predicted"


def level_lines(run: Ready, free_bytes: int) -> list[str]:
    """What each `--zero-level` takes of a GPU and sends in a step, as a table; nothing for a run on one GPU."""
    sharding = run.plan.spec.sharding
    if sharding.size == 1:
        return []
    levels = needs_by_level(run.plan, run.backend.scratch_bytes, run.data.grad_accumulation)
    hosts = any(needs.host_bytes for needs in levels)
    # what columns are in the allocator table; the rest is that of a micro-batch
    states = ("Master", *run.plan.state_titles.values())
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
