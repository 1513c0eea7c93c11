"""What makes a run need less memory: remedies in order, each with the options that it is and what it makes of a spec.

Axes of remedies go from fast to frugal, as a search of their combinations needs it (`lattice.fastest`). What changes
numbers has no such order, and neither have levels of sharing: those are frames, of which each combination has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llmq.optimizers.rule import MASTER, dtype_option, narrower, offload_option
from llmq.options.field import flag, written
from llmq.plan.arena import aligned
from llmq.plan.levels import LEVELS, at_level
from llmq.plan.memory import HOSTED, RESIDUAL, ROLES, Memory
from llmq.plan.plan import Plan, Scratch, make_plan, scratch_storage
from llmq.plan.spec import Spec
from llmq.stores.sharding import ALONE

Changes = Mapping[str, Any]  # options by key; None: leave it out
# From fast to frugal; each level drops what those before it do, and more.
RECOMPUTE = ("", "swiglu norm", "ffn norm", "ffn norm att", "block")
WIDTHS = {"fp32": 4, "bf16": 2, "int8": 1, "e4m3": 1}
TILES, LONG = 4, 8192  # tiles of a sequence of at least so many tokens: products of fewer are slow


@dataclass(frozen=True)
class Remedy:
    """Options, and the spec with them; `relaxed`: as planned for a run that need not repeat its bits."""

    options: Changes
    of: Callable[[Spec], Spec]
    relaxed: bool = False


NOTHING = Remedy({}, lambda spec: spec)
Axis = Sequence[Remedy]


def typed(changes: Changes) -> str:
    """Options as typed."""
    texts = (f"without {flag(key)}" if value is None else written(key, value) for key, value in changes.items())
    return " ".join(texts)


def frames(spec: Spec, *, may_relax: bool) -> list[Remedy]:
    """What changes numbers, or the bits of the next run."""
    adapters = spec.adapters
    found = [Remedy({"deterministic": False}, lambda spec: spec, relaxed=True)] if may_relax else []
    if adapters.freezes:
        base = replace(adapters, base="nf4")
        has_maps = bool(adapters.targets) and adapters.base in (None, "bf16")
        held = Remedy({"base_dtype": "nf4"}, lambda spec: replace(spec, adapters=base))
        return [*found, *([held] if has_maps else [])]
    return [*found, *(_with_states(less) for less in narrower_states(spec))]


def last_frames(spec: Spec) -> list[Remedy]:
    """The least that states take, where nothing else is enough."""
    dtypes, states = spec.precision, narrower(spec.hyper.rule, 1)
    if spec.adapters.freezes:
        return []
    own = {"master": dtypes.model, "grad": dtypes.model}
    also = {"master_dtype": dtypes.model, "grad_accum_dtype": dtypes.model}
    found = [_with_states(states, also, **own)]
    if spec.sharding.size == 1:
        least = _with_states(states, {"master_dtype": "none"}, master="none")
        fused = {**least.options, "fused_update": True, "grad_accumulation": 1}
        found += [least, Remedy(fused, lambda spec: _with(least.of(spec), fused=True))]
    return found


def axes(spec: Spec, samples: int | None, *, may_undo: bool, may_host: bool = True) -> list[list[Remedy]]:
    """What changes no number, in steps of so many `samples` on each rank; None: they stay by themselves.

    What is on the host leaves it only if that is where memory is missing (`may_undo`), and nothing goes there that is
    the device itself (not `may_host`).
    """
    # those that decide most are first, as a search divides by them first
    hosted, residual = _hosted(spec, may_undo=may_undo), _residual(spec, may_undo=may_undo)
    if not may_host:
        hosted, residual = hosted[:1], residual[:1]
    return [hosted, _recomputed(spec), _batches(spec, samples), residual, _extras(spec)]


def _with(spec: Spec, **fields: Any) -> Spec:
    """The spec with some fields of its memory changed."""
    return replace(spec, memory=replace(spec.memory, **fields))


def _with_states(states: Mapping[str, str], also: Changes | None = None, **dtypes: Any) -> Remedy:
    """Dtypes of states, by name, and others."""
    options = {**{dtype_option(name): dtype for name, dtype in states.items()}, **(also or {})}

    def changed(spec: Spec) -> Spec:
        precision = replace(spec.precision.with_states(states), **dtypes)
        keeps = precision.has_own_master or "weight" in spec.memory.host
        host = tuple(space for space in spec.memory.host if keeps or space != MASTER)
        return _with(replace(spec, precision=precision), host=host)

    return Remedy(options, changed)


def _extras(spec: Spec) -> list[Remedy]:
    """What trains nothing."""
    found = [NOTHING]
    if spec.observe:
        found.append(Remedy({"log_fp8_every": 0}, lambda spec: replace(spec, observe=False)))
    if spec.completions is not None:
        so_far = found[-1]
        options = {"sample_prompts": None, **so_far.options}
        found.append(Remedy(options, lambda spec: replace(so_far.of(spec), completions=None)))
    return found


def levels(spec: Spec) -> list[Remedy]:
    """The level that shares out all there is, which changes no bit; of what lives on the host a rank then has less."""
    most = at_level(spec.sharding, LEVELS[-1])
    shared = Remedy({"zero_level": LEVELS[-1]}, lambda spec: replace(spec, sharding=most))
    return [NOTHING, *([shared] if spec.sharding not in (ALONE, most) else [])]


def _hosted(spec: Spec, *, may_undo: bool) -> list[Remedy]:
    """What lives on the host, or is made for each use: each keeps there what those before it do, and more, but for
    copies of weights."""
    dtypes, now, trains = spec.precision, set(spec.memory.host), not spec.adapters.freezes
    weights, streams = {"master", "weight"}, "weight" in now
    names = [kind.name for kind in spec.hyper.rule.states]
    states = {*names, *({MASTER} if dtypes.has_own_master and not streams else ())}
    all_states = {"offload_optimizer": True} if states else {}
    all_grads = {**all_states, "offload_gradients": True}
    rungs: list[tuple[dict[str, bool], set[str]]] = [({}, set())]
    rungs += [({offload_option(name): True}, {name}) for name in names[:-1] if trains]
    rungs += [(all_states, states)] if states else []
    rungs += [(all_grads, {*states, "grad"})]
    if streams:
        rungs = [({**options, "stream_weights": True}, {*spaces, *weights}) for options, spaces in rungs]
    elif trains and dtypes.matmul == "e4m3" and spec.memory.persistent_quants:
        copies = [({"persistent_quants": False}, set[str]())] if spec.sharding.size == 1 else []
        copies += [({"offload_quants": True}, {"quant"})]
        rungs[1:1] = copies
        rungs += [({**options, **all_grads}, {*spaces, *states, "grad"}) for options, spaces in copies]
    if trains and not streams and dtypes.master != "none":
        rungs.append(({**all_grads, "stream_weights": True}, {*states, "grad", *weights}))
    own = {flag: True for flag, space in HOSTED.items() if space in now}
    mine = next((options for options, spaces in rungs if spaces == now and "persistent_quants" not in options), None)
    rungs = rungs if mine is not None else [*rungs[:1], (own, now), *rungs[1:]]
    mine = own if mine is None else mine
    covers = {**{flag: {space} for flag, space in HOSTED.items()}, "offload_optimizer": states}
    found = []
    for options, spaces in rungs:
        if may_undo or now <= spaces:
            added = {key: value for key, value in options.items() if key not in mine}
            taken_back = {key: False for key in mine if key not in options and not covers[key] <= spaces}
            persistent = options.get("persistent_quants", spec.memory.persistent_quants)
            fields: dict[str, Any] = {"host": tuple(sorted(spaces)), "persistent_quants": persistent}
            found.append(Remedy({**added, **taken_back}, partial(_with, **fields)))
    return found


def _batches(spec: Spec, samples: int | None) -> list[Remedy]:
    """Attention's backward in two chunks, or as many as there are rows, which `auto` finds; micro-batches of half the
    rows, and of one, or of several adapters one of a row each; and tiles of long rows."""
    chunks = spec.memory.attention_chunks
    raised = chunks == spec.batch_size  # as `auto` does where the plan is too large
    automatic = {} if raised else {"attn_bwd_chunks": "auto"}
    found = [Remedy({}, lambda spec: _with(spec, attention_chunks=1)) if raised else NOTHING]
    counts = sorted({n for n in (2, spec.batch_size) if n > 1 and spec.batch_size % n == 0})  # `auto` takes what fits
    found += [Remedy(automatic, partial(_with, attention_chunks=n)) for n in counts if raised or n > chunks]
    also = {} if chunks == 1 else automatic
    least = spec.adapters.with_one_row_each()
    if least.batch_size is not None:
        rows = partial(_in_batches, size=least.batch_size)
        options = {**also, "batch_size": least.batch_size}
        return [*found, Remedy(options, lambda spec: replace(rows(spec), adapters=least))]
    if spec.memory.fused:
        return found
    half = next((n for n in range(spec.batch_size // 2, 0, -1) if spec.batch_size % n == 0), 1)
    for size in sorted({half, 1} - {spec.batch_size}, reverse=True):
        more = {} if samples is None else {"grad_accumulation": samples // size}
        found.append(Remedy({**also, "batch_size": size, **more}, partial(_in_batches, size=size)))
    if spec.memory.seq_tiles < TILES and spec.seq_len >= LONG and spec.seq_len % TILES == 0:
        row = found[-1]
        found.append(Remedy({**row.options, "seq_tiles": TILES}, lambda spec: _tiled(row.of(spec))))
    return found


def _in_batches(spec: Spec, *, size: int) -> Spec:
    """The spec with smaller micro-batches, whose logits are in chunks of no fewer tokens."""
    most = max(spec.memory.head_chunks * size // spec.batch_size, 1)
    head = next(n for n in range(most, 0, -1) if size * spec.seq_len % n == 0)
    chunks = 1 if spec.memory.attention_chunks == 1 else size
    return replace(_with(spec, head_chunks=head, attention_chunks=chunks), batch_size=size)


def _tiled(spec: Spec) -> Spec:
    return _with(spec, seq_tiles=TILES, head_chunks=max(spec.memory.head_chunks, TILES))


def _recomputed(spec: Spec) -> list[Remedy]:
    """What is made again in backward, beside what is already."""
    found: dict[frozenset[str], Remedy] = {}
    for level in (*RECOMPUTE[:3], RECOMPUTE[-1]):
        names = tuple(f"recompute_{name}" for name in level.split() if f"recompute_{name}" not in spec.memory.flags)
        flags = tuple(flag for flag in ROLES if flag in (*spec.memory.flags, *names))
        found.setdefault(Memory(flags).roles, Remedy(dict.fromkeys(names, True), partial(_with, flags=flags)))
    return list(found.values())


def _residual(spec: Spec, *, may_undo: bool) -> list[Remedy]:
    moved = Remedy({"offload_residual": True}, lambda spec: _with(spec, offload=(*spec.memory.offload, RESIDUAL)))
    if RESIDUAL not in spec.memory.offload:
        return [NOTHING, moved]
    left = tuple(name for name in spec.memory.offload if name != RESIDUAL)
    back = Remedy({"offload_residual": False}, lambda spec: _with(spec, offload=left))
    return [*([back] if may_undo else []), NOTHING]


def narrower_states(spec: Spec) -> list[dict[str, str]]:
    """Dtypes of the optimizer's states, by name, of which some take fewer bytes than now and none more."""
    found = []
    for states in (narrower(spec.hyper.rule, num_bytes) for num_bytes in (2, 1)):
        widths = [(WIDTHS[dtype], WIDTHS.get(spec.precision.of_state(name), 8)) for name, dtype in states.items()]
        if all(a <= b for a, b in widths) and any(a < b for a, b in widths):
            found.append(states)
    return found


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
            smaller = make_plan(_with(plan.spec, attention_chunks=chunks), scratch_bytes)
            if smaller.total_bytes <= free_bytes or (chunks == most and smaller.total_bytes < plan.total_bytes):
                return smaller
    return plan
