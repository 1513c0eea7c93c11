"""The sections of the log that say what a run is, before it begins: options, system, model, data, memory."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

from llmq.data.chat.encode import sample_text
from llmq.disk import MIB, shown
from llmq.engine.predict import predicted_rate
from llmq.hardware import device
from llmq.model.parameters import num_parameters, rows_of_file
from llmq.plan import memory
from llmq.plan.levels import name_of, needs_by_level
from llmq.training.log import SUMMARY
from llmq.training.ready import Ready, checkpoint_bytes_of

MUCH_FREE = 0.25  # of the memory listed: beyond this the allocator table hints at what would use it


def describe(run: Ready, given: Collection[str], matmuls: Mapping[str, str]) -> None:
    """Writes the sections. `given` are the options that are no defaults, and `matmuls` the choices of timing.

    Nothing is refused from here on: an error is the first thing that is seen of a run.
    """
    plan, log = run.plan, run.log
    log.options(run.options, given)
    log.section("system", device.system_facts(run.device), "System 0")
    config, size = plan.spec.config, num_parameters(rows_of_file(plan.rows))
    log.section("model", {"path": run.source.name, "parameters": size, "architecture": config.architecture})
    log.say(f"Model: {run.source.name}, {size / 1e6:,.1f} million parameters")
    if text := config.rope.changes_at(plan.spec.seq_len):
        log.say(text)
    if not all(row.trainable for row in plan.rows):
        trained, every = (num_parameters(kept) for kept in ([row for row in plan.rows if row.trainable], plan.rows))
        counts = f"{trained:,} of {every:,} parameters are trained ({trained / every:.2%}), the others frozen"
        log.say(f"{plan.spec.trained}: {counts}")
    _describe_data(run)
    if matmuls:
        log.section("matmuls", matmuls, "Matmuls")
    _describe_memory(run)


def _describe_data(run: Ready) -> None:
    """What is trained on, and for how long; a sample of it where a part is masked."""
    data, steps, log = run.data, run.schedule.steps, run.log
    files = {"train": data.train.token_files, "eval": data.eval.token_files if data.eval else ()}
    windows, mixture = data.train.num_windows, data.shares(steps * data.samples_per_step)
    facts = {
        "tokens per step": data.samples_per_step * data.tokens_per_row,  # without virtual ones; packed rows have fewer
        "steps per epoch": None if windows is None else -(-windows // data.samples_per_step),
        "steps": steps if data.is_there else run.options["steps"],
        **data.facts(),
    }
    listed = {kind: [{"path": str(f.path), "tokens": f.num_tokens} for f in found] for kind, found in files.items()}
    shares = {"mixture": [asdict(share) for share in mixture]} if mixture else {}
    log.section("dataset", {**listed, **shares, **facts})
    log.head("Dataset")
    width = max((len(str(file.path)) for found in files.values() for file in found), default=0)
    for kind, found in ((kind, found) for kind, found in files.items() if found):
        total, several = sum(file.num_tokens for file in found), "" if len(found) == 1 else "s"
        log.say(f"  {kind + ':':<6} {total:,} tokens in {len(found)} file{several}")
        for file in found:
            log.say(f"    {file.path!s:<{width}}  {file.num_tokens:>15,} tokens")
    for one in mixture:
        part = f"{100 * one.share:.2f}% of the tokens, {one.samples:,} samples, {one.epochs:.2f} epochs"
        log.say(f"  {one.name}: {part}")
    log.items(facts)
    log.say_of_data()
    if sample := sample_text(data.train.token_files, data.tokenizer_folder):
        log.say(sample)


def _describe_memory(run: Ready) -> None:
    """The allocator table: MiB of the device, and of the host where the run has anything there."""
    plan, log = run.plan, run.log
    table, host = ({name: size / MIB for name, size in plan.table(home).items()} for home in ("device", "host"))
    host = {name: mib for name, mib in host.items() if mib}
    if (chunks := plan.spec.memory.attention_chunks) > 1 and run.options["attn_bwd_chunks"] == memory.AUTO:
        log.say(f"Attention's backward runs in {chunks} chunks of the batch, so that it needs less memory")
    total, free = device.memory_bytes(run.device)
    left, other = max(free - plan.total_bytes, 0) / MIB, table.pop("Other")
    table |= {"Free": left, "Reserved": max(total - free, 0) / MIB, "Other": other}
    log.section("allocator", table)
    log.section("host_memory", host)
    log.head("Allocator State")
    width = max(map(len, table))
    if host:
        log.say(f"  {'':<{width}} {'device':>12}     {'host':>12}")
    for name, mib in table.items():
        hosted = f" {host.get(name, 0):>12,.1f} MiB" if host else ""
        log.say(f"  {name:<{width}} {mib:>12,.1f} MiB{hosted}")
    if left > MUCH_FREE * (listed := sum(table.values())):
        fewer = ", or fewer --recompute flags," if plan.spec.memory.flags else ""
        share = f"{left:,.0f} MiB ({100 * left / listed:.0f}%) are free"
        log.say(f"  Hint: {share}: a larger --batch-size{fewer} would use them.")


def describe_dry(run: Ready, needs: Mapping[str, tuple[Path, int]]) -> None:
    """What a dry run says at its end, beside notices and warnings, for which a run has its log: that its plan fits, and
    what it `needs` on the disk."""
    plan, log, (_, free) = run.plan, run.log, device.memory_bytes(run.device)
    log.say_waiting()
    size, card, data = plan.spec.sharding.size, run.device.card, run.data
    name = card.name if card else run.device.kind
    fits = f"{shown(plan.total_bytes)} of {shown(free)} that are free on {f'each of {size} ' if size > 1 else ''}{name}"
    rate = predicted_rate(plan, card, data.samples_per_step * data.seq_len)
    text = "" if rate is None else f", {rate * data.tokens_per_row / data.seq_len:,.0f} tokens/s predicted"
    log.say(f"The plan fits: {fits}{text}", least=SUMMARY)
    hosted = f"{shown(plan.host_bytes)} of the run, and " if plan.host_bytes else ""
    log.say(f"In host memory: {hosted}{shown(checkpoint_bytes_of(run.plan))} for a copy of what a checkpoint holds")
    log.say("On disk: " + ", ".join(f"{what} {shown(size)}" for what, (_, size) in needs.items()))


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
