"""A plan that does not fit: what makes it fit by itself, how many bytes are missing, and which option would help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from llmq.disk import MIB, shown
from llmq.errors import MemoryLimitError, UsageError
from llmq.optimizers.rule import MASTER, dtype_flags, narrower
from llmq.plan.arena import aligned
from llmq.plan.few_layers import least_bytes
from llmq.plan.levels import LEVELS, at_level
from llmq.plan.memory import HOSTED, RESIDUAL, Memory
from llmq.plan.plan import Plan, Scratch, make_plan, scratch_storage
from llmq.plan.spec import Spec
from llmq.stores.sharding import Sharding
from llmq.tensor import stored_bytes

TILES = 4
MARK = "(which changes numbers)"
SURE = 0.95  # of what few layers say that many need: shares of ranks differ by whole tiles


def with_fitting_chunks(plan: Plan, free_bytes: int, scratch_bytes: Scratch | None) -> Plan:
    """`plan`, or if that does not fit, the same with attention's backward in the fewest chunks of the batch that do.

    With the most chunks if no number of them fits, unless they need no less.
    """
    scratch = plan.persistent.get(scratch_storage("main"))
    if plan.total_bytes <= free_bytes or scratch is None:
        return plan
    (size,) = scratch.shape
    room = free_bytes - (plan.total_bytes - aligned(size))
    most = plan.spec.batch_size
    for chunks in range(2, most + 1):
        # A piece of the batch takes its share of the workspace, or more: what is skipped here cannot fit.
        if most % chunks == 0 and (chunks * room >= size or chunks == most):
            smaller = _changed(plan, scratch_bytes, memory=replace(plan.spec.memory, attention_chunks=chunks))
            if smaller.total_bytes <= free_bytes or (chunks == most and smaller.total_bytes < plan.total_bytes):
                return smaller
    return plan


def refuse_if_too_large(
    plan: Plan, free_bytes: int, scratch_bytes: Scratch | None = None, relaxed_scratch: Scratch | None = None
) -> None:
    """MemoryLimitError if the plan needs more than `free_bytes`.

    `scratch_bytes` is what the plan was made with, `relaxed_scratch` the same for a run that need not repeat its bits;
    None where there is no such run.
    """
    missing = plan.total_bytes - free_bytes
    if missing <= 0:
        return
    chunks = plan.spec.memory.attention_chunks
    chunked = f" with attention's backward in {chunks} chunks" if chunks > 1 else ""
    needs = f"the run needs {shown(plan.total_bytes)}{chunked}"
    start = f"{needs}, {shown(free_bytes)} are free, {shown(missing)} are missing"
    helping = remedy(plan, free_bytes, scratch_bytes, relaxed_scratch)
    raise MemoryLimitError(f"{start}{helping}", requests(plan))


def remedy(
    plan: Plan, free_bytes: int, scratch_bytes: Scratch | None = None, relaxed_scratch: Scratch | None = None
) -> str:
    """What ends the message that a plan does not fit: the nearest setting that does, with what it needs."""
    if "update" not in plan.programs:
        return ": use a smaller --batch-size, --max-tokens or --max-length"
    workspace = _with_less_workspace(plan, scratch_bytes, relaxed_scratch)
    for remedies in chain([workspace], ([found] for found in _smaller_plans(plan, free_bytes, scratch_bytes))):
        fitting = [f"{change} needs {shown(p.total_bytes)}" for change, p in remedies if p.total_bytes <= free_bytes]
        if fitting:
            return f": {', '.join(fitting)}"
    return ", and no memory option makes it fit: train a smaller model, or use a device with more memory"


def requests(plan: Plan, home: str = "device") -> str:
    """A table of what the run asks of a home, by segment of the plan, the largest first."""
    found = [(size, name) for name, size in plan.table(home).items() if size]
    lines = [f"  {'segment':<14}{'MiB':>12}"]
    lines += [f"  {name:<14}{size / MIB:>12,.1f}" for size, name in sorted(found, key=lambda one: (-one[0], one[1]))]
    lines.append(f"  {'all':<14}{sum(size for size, _ in found) / MIB:>12,.1f}")
    return "\n".join(lines)


def refuse_if_host_is_small(
    plan: Plan, host_free_bytes: int | None, free_bytes: int | None = None, scratch_bytes: Scratch | None = None
) -> None:
    """MemoryLimitError if what the plan keeps on the host needs more than what is free there, if that is known.

    The rest is as of `host_remedy`.
    """
    if host_free_bytes is None:
        return
    missing = plan.host_bytes - max(host_free_bytes, 0)
    if plan.host_bytes and missing > 0:
        helping = host_remedy(plan, host_free_bytes, free_bytes, scratch_bytes)
        raise MemoryLimitError(
            f"the run keeps {shown(plan.host_bytes)} in host memory, {shown(max(host_free_bytes, 0))} are free there, "
            f"{shown(missing)} are missing{helping}",
            requests(plan, "host"),
        )


def host_remedy(
    plan: Plan, host_free_bytes: int, free_bytes: int | None = None, scratch_bytes: Scratch | None = None
) -> str:
    """What ends the message that the host has too little: the nearest setting that fits there and in the `free_bytes`
    of the device; where those are not known, one that needs no more of the device."""
    room = plan.total_bytes if free_bytes is None else free_bytes
    for change, moved, values in _with_less_on_host(plan):
        try:
            if plan.host_bytes - moved > host_free_bytes:
                continue  # without a plan, of which a large model's takes seconds
            smaller = _changed(plan, scratch_bytes, **values)
        except UsageError:
            continue
        if smaller.host_bytes <= host_free_bytes and smaller.total_bytes <= room:
            needs = f"{shown(smaller.host_bytes)} of the host and {shown(smaller.total_bytes)} of the device"
            return f": {change} needs {needs}"
    largest = max(plan.table("host").items(), key=lambda one: one[1])
    return f": leave out --offload flags ({largest[0]} takes most: {shown(largest[1])}), or use a smaller model"


def _with_less_on_host(plan: Plan) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(change, bytes that leave the host at most, fields of the spec): one thing less on the host, the smallest first,
    then narrower moments, which change numbers."""
    memory, precision = plan.spec.memory, plan.spec.precision
    held: dict[str, int] = defaultdict(int)
    for ref in plan.persistent.values():
        if ref.home == "host":
            held[ref.space] += aligned(stored_bytes(ref))
    held["quant"] = held["weight"]
    without: list[tuple[int, str, dict[str, Any]]] = []
    if memory.offload:
        without.append((plan.arena_bytes("host"), "without --offload-residual", {"offload": ()}))
    for flag, space in HOSTED.items():
        # streamed weights have their masters on the host
        gone = {space, "master"} if space == "weight" else {space}
        if space in memory.host and not (space == "master" and "weight" in memory.host):
            left = tuple(each for each in memory.host if each not in gone)
            moved = sum(held[each] for each in gone)
            without.append((moved, f"without --{flag.replace('_', '-')}", {"host": left}))
    if "quant" in memory.host:
        left = tuple(each for each in memory.host if each != "quant")
        change = "--no-persistent-quants in place of --offload-quants"
        without.append((held["quant"], change, {"host": left, "persistent_quants": False}))
    for moved, change, fields in sorted(without, key=lambda one: one[0]):
        yield change, moved, {"memory": replace(memory, **fields)}
    rule = plan.spec.hyper.rule
    moments = {kind.name for kind in rule.states} & set(memory.host)
    for dtypes in (narrower(rule, 2), narrower(rule, 1)) if moments else ():
        change = f"{dtype_flags(dtypes)} {MARK}"
        yield change, sum(held[space] for space in moments), {"precision": precision.with_states(dtypes)}


def _with_less_workspace(
    plan: Plan, scratch_bytes: Scratch | None, relaxed_scratch: Scratch | None
) -> Iterator[tuple[str, Plan]]:
    """Changes that make only the scratch memory smaller, which attention's backward may need much of."""
    if not any(ref.space == "workspace" for ref in plan.persistent.values()):
        return
    if relaxed_scratch is not None:
        yield "--no-deterministic", _changed(plan, relaxed_scratch)
    if plan.spec.memory.attention_chunks < plan.spec.batch_size:
        each = replace(plan.spec.memory, attention_chunks=plan.spec.batch_size)
        yield f"--attn-bwd-chunks {plan.spec.batch_size}", _changed(plan, scratch_bytes, memory=each)


def _smaller_plans(plan: Plan, free_bytes: int, scratch_bytes: Scratch | None) -> Iterator[tuple[str, Plan]]:
    """Other changes of the run's options that need less memory, the mildest first; none that is sure to need too much.

    Levels of sharing change no bit of the run.
    """
    block = replace(plan.spec.memory, flags=("recompute_block",))
    one = replace(plan.spec.memory, attention_chunks=1)
    rule = plan.spec.hyper.rule
    dtypes = narrower(rule, 2)
    moments = plan.spec.precision.with_states(dtypes)
    least = replace(moments, master=plan.spec.precision.model, grad=plan.spec.precision.model)
    narrow = f"{dtype_flags(dtypes)} {MARK}"
    smallest = f"--batch-size 1 --recompute-block {dtype_flags(dtypes)}".rstrip()
    unwatched: list[tuple[str, dict[str, Any]]] = [("--log-fp8-every 0", {"observe": False})] if plan.observed else []
    remade = replace(plan.spec.memory, persistent_quants=False)
    has_quants = plan.spec.precision.matmul == "e4m3" and remade != plan.spec.memory
    silent: list[tuple[str, dict[str, Any]]] = []
    if plan.spec.completions is not None:
        silent = [("leaving out --sample-prompts", {"completions": None})]
    states = (*dtypes, *((MASTER,) if plan.spec.precision.has_own_master else ()))
    hosted = " --offload-optimizer" if states else ""
    everything = (
        "--recompute-block --offload-residual --offload-optimizer --offload-gradients --stream-weights, which "
        "needs host memory instead,"
    )
    sharding = plan.spec.sharding
    levels = [(level, at_level(sharding, level)) for level in LEVELS if sharding.size > 1]
    shared: list[tuple[str, dict[str, Any]]] = [
        (f"--zero-level {level}", {"sharding": more}) for level, more in levels if _shares_more(more, sharding)
    ]
    attempts: list[tuple[str, dict[str, Any]]] = [
        *silent,
        *shared,
        *unwatched,
        *([("--no-persistent-quants", {"memory": remade})] if has_quants and "quant" not in remade.host else []),
        ("--recompute-block", {"memory": block}),
        *([(narrow, {"precision": moments})] if dtypes else []),
        *([(f"--recompute-block {narrow}", {"precision": moments, "memory": block})] if dtypes else []),
        (
            f"--recompute-block --offload-residual{hosted}, which needs host memory instead,",
            {"memory": _on_host(plan, block, states)},
        ),
        (everything, {"memory": _on_host(plan, block, (*states, "grad", "weight"))}),
        ("--batch-size 1 (with more --grad-accumulation)", {"memory": one, "batch_size": 1}),
        (
            f"{smallest}, default --master-dtype and --grad-accum-dtype {MARK}",
            {"precision": least, "memory": replace(block, attention_chunks=1), "batch_size": 1},
        ),
        *_in_tiles(plan, block),
        *_in_8_bits(plan, replace(block, attention_chunks=1)),
    ]
    for change, values in attempts:
        change, values = _with_all_adapters(plan.spec, change, values)
        try:
            if SURE * least_bytes(_spec_of(plan, **values), scratch_bytes) <= free_bytes:
                yield change, _changed(plan, scratch_bytes, **values)
        except UsageError:
            continue


def _with_all_adapters(spec: Spec, change: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A change that is a micro-batch of one row, of a run of several adapters: one of a row each."""
    if "batch_size" not in values or spec.adapters.batch_size is None:
        return change, values
    smallest = spec.adapters.with_one_row_each()
    size = smallest.batch_size
    said = change.replace("--batch-size 1", f"--batch-size {size}", 1)
    return said, {**values, "adapters": smallest, "batch_size": size}


def _in_tiles(plan: Plan, block: Memory) -> Iterator[tuple[str, dict[str, Any]]]:
    """A run of one sequence in tiles of its tokens."""
    if plan.spec.memory.seq_tiles < TILES and plan.spec.seq_len % TILES == 0:
        chunks = max(block.head_chunks, TILES)
        tiled = replace(block, attention_chunks=1, seq_tiles=TILES, head_chunks=chunks, offload=(RESIDUAL,))
        change = f"--batch-size 1 --recompute-block --offload-residual --seq-tiles {TILES}"
        yield change, {"memory": tiled, "batch_size": 1}


def _in_8_bits(plan: Plan, block: Memory) -> Iterator[tuple[str, dict[str, Any]]]:
    """The least that states take, which changes numbers."""
    dtypes = narrower(plan.spec.hyper.rule, 1)
    moments = plan.spec.precision.with_states(dtypes)
    change = f"--batch-size 1 --recompute-block {dtype_flags(dtypes)}".rstrip()
    yield f"{change} {MARK}", {"precision": moments, "memory": block, "batch_size": 1}
    if not plan.spec.adapters.freezes and plan.spec.sharding.size == 1:
        none = replace(moments, master="none")
        yield f"{change} --master-dtype none {MARK}", {"precision": none, "memory": block, "batch_size": 1}
        hyper = plan.spec.hyper
        if not hyper.grad_clip or hyper.clips_by_last:
            fused = {"precision": none, "memory": replace(block, fused=True), "batch_size": 1}
            yield f"{change} --master-dtype none --fused-update --grad-accumulation 1 {MARK}", fused


def _on_host(plan: Plan, memory: Memory, spaces: Sequence[str]) -> Memory:
    """The same with residuals and these spaces on the host, beside what is there; streamed weights are own masters."""
    masters = ("master",) if "weight" in spaces else ()
    host = tuple(dict.fromkeys((*plan.spec.memory.host, *spaces, *masters)))
    return replace(memory, offload=(RESIDUAL,), host=host)


def _shares_more(sharding: Sharding, than: Sharding) -> bool:
    """Whether everything that is shared out by the second is by the first, and more."""
    pairs = [(sharding.states, than.states), (sharding.gradients, than.gradients), (sharding.weights, than.weights)]
    return sharding != than and all(mine or not other for mine, other in pairs)


def _changed(plan: Plan, scratch_bytes: Scratch | None, **changes: Any) -> Plan:
    """The plan of the same run with some fields of its spec changed."""
    return make_plan(_spec_of(plan, **changes), scratch_bytes)


def _spec_of(plan: Plan, **changes: Any) -> Spec:
    """The spec of a plan with some fields changed."""
    spec = replace(plan.spec, **changes)
    if spec.seq_len * spec.batch_size % spec.memory.head_chunks:
        spec = replace(spec, memory=replace(spec.memory, head_chunks=1))
    return spec
