"""What makes a run need less memory: remedies, each a change of the spec, and the options that a changed spec is.

Axes of remedies go from fast to frugal, as a search of their combinations needs it (llmq/engine/search.py). What
changes numbers has no such order, and neither have levels of sharing: of these alternatives a combination has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llmq.model.parameters import padded_vocab
from llmq.optimizers.rule import MASTER, dtype_option, narrower
from llmq.options.field import flag, written
from llmq.plan.arena import aligned
from llmq.plan.levels import LEVELS, at_level, name_of
from llmq.plan.memory import HOSTED, RESIDUAL, ROLES, Memory, fewest_chunks
from llmq.plan.plan import Plan, Scratch, make_plan, scratch_storage
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec
from llmq.stores.sharding import ALONE

Changes = Mapping[str, Any]  # options by key; None: leave it out
Remedy = Callable[[Spec], Spec]
Axis = Sequence[Remedy]
# Each level drops what those before it do, and more.
RECOMPUTE = ("", "swiglu norm", "ffn norm", "ffn norm att", "block")
WIDTHS = {"fp32": 4, "bf16": 2, "int8": 1, "e4m3": 1}
# Chunks of attention's backward, how many times the chunks of logits that there have to be, and tiles of tokens.
Chunks = tuple[int, int, int]
WHOLE, IN_TILES = (1, 1, 1), (4, 4, 4)
CHUNKS: tuple[Chunks, ...] = (WHOLE, (4, 4, 1), IN_TILES, (4, 4, 16))  # in 16 attention's backward takes 87% longer
TILE_TOKENS = 2048  # of a tile or a chunk at least: products of fewer are slow, which no prediction knows


@dataclass(frozen=True)
class Terms:
    """What remedies keep, and how far they go.

    A step has `samples` on each rank, in micro-batches of one of `sizes`, whose work is cut into some of
    `chunks`. `counts_steps`: the number of micro-batches is an option, and does not follow from that of all samples.
    The logits are cut by `gpu_bytes`. `auto_chunks`: attention's backward runs in as few chunks as fit, with no option
    for it. What is on the host leaves it only if that is where memory is missing (`may_undo`), and nothing goes there
    that is the device itself (not `may_host`). The size of a micro-batch is named even where it stays, if another one
    is the default (`names_size`). Options that are `given` stay.
    """

    samples: int
    sizes: tuple[int, ...]
    chunks: tuple[Chunks, ...] = CHUNKS
    counts_steps: bool = True
    gpu_bytes: int = 0
    may_undo: bool = False
    may_host: bool = True
    auto_chunks: bool = False
    names_size: bool = False
    given: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Alternative:
    """Remedies that have no order: what changes `kinds` of numbers; `relaxed`: as planned for a run that need not
    repeat its bits."""

    remedies: tuple[Remedy, ...] = ()
    kinds: int = 0
    relaxed: bool = False

    def of(self, spec: Spec) -> Spec:
        """The spec with all of them."""
        for remedy in self.remedies:
            spec = remedy(spec)
        return spec

    def __add__(self, other: Alternative) -> Alternative:
        return Alternative(self.remedies + other.remedies, self.kinds + other.kinds, self.relaxed or other.relaxed)


NOTHING = Alternative()


def axes(spec: Spec, terms: Terms) -> list[Axis]:
    """What changes no number."""
    # those that decide most are first, as a search divides by them first
    first = [_hosted(spec, terms), _batches(spec, terms), _recomputed(spec)]
    found = [*first, _residual(spec, terms), _chunks(spec, terms), _extras(spec)]
    return [[one for one in axis if is_open(spec, one(spec), terms)] for axis in found]


def alternatives(spec: Spec, *, may_relax: bool) -> list[Alternative]:
    """What changes numbers, or the bits of the next run, the mildest first."""
    # The deterministic attention backward of cuDNN has a workspace that grows with the square of the sequence.
    found = [Alternative(relaxed=True)] if may_relax else []
    if spec.freezes:
        nf4 = Alternative((lambda spec: spec.with_base("nf4"),), 1)
        return [*found, nf4] if spec.base in (None, "bf16") and spec.adapts_maps else found
    return [*found, *moments(spec)]


def last_alternatives(spec: Spec, terms: Terms) -> list[Alternative]:
    """The least that states take, where nothing else is enough."""
    if spec.freezes:
        return []
    dtypes = spec.precision
    states = _with_dtypes(narrower(spec.hyper.rule, 1))
    found = [states + _with_dtypes(master=dtypes.model, grad=dtypes.model)]
    # Many ranks have neither: `refuse` of spec.py says why.
    if spec.sharding.size == 1:
        least = states + _with_dtypes(master="none")
        row = partial(_in_batches, size=1, terms=terms)
        fused = least + Alternative((partial(_with, fused=True),))
        found += [least, fused, Alternative((row,)) + fused]
    return found


def moments(spec: Spec) -> list[Alternative]:
    """Dtypes of the optimizer's states of which some take fewer bytes than now and none more."""
    found = []
    for states in (narrower(spec.hyper.rule, num_bytes) for num_bytes in (2, 1)):
        widths = [(WIDTHS[dtype], WIDTHS.get(spec.precision.of_state(name), 8)) for name, dtype in states.items()]
        if all(a <= b for a, b in widths) and any(a < b for a, b in widths):
            found.append(_with_dtypes(states))
    return found


def masters(spec: Spec) -> list[Alternative]:
    """Masters that are the weights which forward reads, and none but what is held in 8 bits."""
    dtypes = spec.precision
    if spec.freezes or dtypes.master == "none":
        return []
    return [_with_dtypes(master=dtype) for dtype in dict.fromkeys((dtypes.model, "none")) if dtype != dtypes.master]


def matmuls(precision: Precision) -> Alternative:
    """Matmuls of another dtype, with all that follows from it."""
    return Alternative((lambda spec: replace(spec, precision=precision),), 1)


def in_one_pass(terms: Terms) -> Alternative:
    """The update in backward, with all samples of a step in one micro-batch."""
    return Alternative((partial(_in_batches, size=terms.samples, terms=terms), partial(_with, fused=True)))


def levels(spec: Spec) -> list[Alternative]:
    """The level that shares out all there is, which changes no bit; of what lives on the host a rank then has less."""
    most = at_level(spec.sharding, LEVELS[-1])
    shared = Alternative((lambda spec: replace(spec, sharding=most),))
    return [NOTHING, *([shared] if spec.sharding not in (ALONE, most) else [])]


def is_open(before: Spec, after: Spec, terms: Terms) -> bool:
    """Whether what is given stays in `after`."""
    return terms.given.isdisjoint(changes(before, after, replace(terms, names_size=False)))


def _with(spec: Spec, **fields: Any) -> Spec:
    """The spec with some fields of its memory changed."""
    return replace(spec, memory=replace(spec.memory, **fields))


def _with_dtypes(states: Mapping[str, str] | None = None, **dtypes: str) -> Alternative:
    """Dtypes of states, by name, and others."""

    def changed(spec: Spec) -> Spec:
        precision = replace(spec.precision.with_states(states or {}), **dtypes)  # type: ignore[arg-type]
        # A master that is the weight itself lives where forward reads it.
        keeps = precision.has_own_master or "weight" in spec.memory.host
        host = tuple(space for space in spec.memory.host if keeps or space != MASTER)
        return _with(replace(spec, precision=precision), host=host)

    return Alternative((changed,), 1)


def _hosted(spec: Spec, terms: Terms) -> list[Remedy]:
    """What lives on the host, or is made for each use: each keeps there what those before it do, and more, but for
    copies of weights."""
    dtypes, now, trains = spec.precision, set(spec.memory.host), not spec.freezes
    streams, names = "weight" in now, [kind.name for kind in spec.hyper.rule.states]
    states = {*names, *({MASTER} if dtypes.has_own_master else ())}
    # Each set has all those before it: a search may then bound what lies between by its ends.
    chain = [set[str](), *({name} for name in names[:-1] if trains), *([states] if states else [])]
    chain += [] if spec.memory.fused else [{*states, "grad"}]
    rungs = [(spaces, spec.memory.persistent_quants) for spaces in chain]
    if streams:
        rungs = [({*spaces, MASTER, "weight"}, is_kept) for spaces, is_kept in rungs]
    elif trains and dtypes.matmul == "e4m3" and dtypes.master != "none" and spec.memory.persistent_quants:
        copies = [*([(set[str](), False)] if spec.sharding.size == 1 else []), ({"quant"}, True)]
        rungs = [rungs[0], *copies, *rungs[1:], *(({*spaces, *chain[-1]}, is_kept) for spaces, is_kept in copies)]
    if trains and not streams and dtypes.master != "none":
        rungs.append(({*chain[-1], MASTER, "weight"}, True))
    # What the run asks for may be no rung; it is one then, as the search begins from it.
    if (now, spec.memory.persistent_quants) not in rungs:
        rungs.insert(1, (now, spec.memory.persistent_quants))
    found = [one for one in rungs if terms.may_undo or now <= one[0]]
    return [
        partial(_with, host=tuple(one for one in HOSTED.values() if one in spaces), persistent_quants=is_kept)
        for spaces, is_kept in (found if terms.may_host else found[:1])
    ]


def _batches(spec: Spec, terms: Terms) -> list[Remedy]:
    """Smaller micro-batches."""
    sizes = (spec.batch_size,) if spec.memory.fused else terms.sizes  # a fused step has one micro-batch
    return [partial(_in_batches, size=size, terms=terms) for size in sizes]


def _recomputed(spec: Spec) -> list[Remedy]:
    """What is made again in backward, beside what is already."""
    found: dict[frozenset[str], Remedy] = {}
    # Of levels with the same roles the first: the others would be the same plan once more.
    for level in RECOMPUTE:
        names = {*spec.memory.flags, *(f"recompute_{name}" for name in level.split())}
        flags = tuple(name for name in ROLES if name in names)
        found.setdefault(Memory(flags).roles, partial(_with, flags=flags))
    return list(found.values())


def _residual(spec: Spec, terms: Terms) -> list[Remedy]:
    """Streams between sublayers on the device, or on the host."""
    others = tuple(name for name in spec.memory.offload if name != RESIDUAL)
    stay, move = partial(_with, offload=others), partial(_with, offload=(*others, RESIDUAL))
    if RESIDUAL in spec.memory.offload and not terms.may_undo:
        return [move]
    return [stay, move] if terms.may_host else [stay]


def _chunks(spec: Spec, terms: Terms) -> list[Remedy]:
    """Attention's backward and logits in smaller chunks, and the MLP in tiles."""
    least = 1 if terms.auto_chunks else spec.memory.attention_chunks
    return [
        partial(_chunked, attention=max(count, least), times=times, tiles=tiles, terms=terms)
        for count, times, tiles in terms.chunks
        if tiles <= IN_TILES[-1] or spec.seq_len >= tiles * TILE_TOKENS
    ]


def _extras(spec: Spec) -> list[Remedy]:
    """What trains nothing: errors of fp8 copies that are measured, and then texts that are written."""
    # Errors of copies are of less use than texts, so they go first.
    found: list[Remedy] = [lambda spec: spec]
    found += [lambda spec: replace(spec, observe=False)] if spec.observe else []
    found += [lambda spec: replace(spec, observe=False, completions=None)] if spec.completions else []
    return found


def _is_cut(spec: Spec, terms: Terms) -> bool:
    """Whether the chunks of the logits are other than their size asks for."""
    return spec.memory.head_chunks != _fewest(spec, terms)


def _fewest(spec: Spec, terms: Terms) -> int:
    """Chunks of the logits where their number is not given."""
    logit_bytes = padded_vocab(spec.config) * spec.loss.logit_bytes(spec.precision.model)
    tokens = spec.batch_size * spec.seq_len
    return max(fewest_chunks(tokens, logit_bytes, terms.gpu_bytes), spec.memory.seq_tiles)


def _in_batches(spec: Spec, *, size: int, terms: Terms) -> Spec:
    """The spec with micro-batches of another size."""
    # No more chunks than rows, and as large as they were at least.
    chunks = divisor(size, min(spec.memory.attention_chunks, size))
    sized = replace(_with(spec, attention_chunks=chunks), batch_size=size)
    return sized if _is_cut(spec, terms) else _with(sized, head_chunks=_fewest(sized, terms))


def _chunked(spec: Spec, *, attention: int, times: int, tiles: int, terms: Terms) -> Spec:
    """The spec with more chunks, as many as divide its batch and tokens."""
    tokens = spec.batch_size * spec.seq_len
    most = max(tokens // TILE_TOKENS, 1)
    tiles = max(spec.memory.seq_tiles, divisor(tokens, min(tiles, most)))
    found = _with(spec, attention_chunks=divisor(spec.batch_size, attention), seq_tiles=tiles)
    if _is_cut(spec, terms):
        return found
    fewest = _fewest(found, terms)
    return _with(found, head_chunks=divisor(tokens, max(min(times * fewest, most), fewest)))


def divisor(number: int, least: int) -> int:
    """The smallest divisor of a number that is no smaller, or all of it."""
    return next((n for n in range(max(min(least, number), 1), number) if number % n == 0), number)


def typed(options: Changes) -> str:
    """Options as typed."""
    texts = (f"without {flag(key)}" if value is None else written(key, value) for key, value in options.items())
    return " ".join(texts)


def changes(before: Spec, after: Spec, terms: Terms) -> dict[str, Any]:
    """The options that make `after` of the run whose spec is `before`."""
    found: dict[str, Any] = {}
    if after.sharding != before.sharding:
        found["zero_level"] = int(name_of(after.sharding))
    found |= dict(_dtypes_changed(before, after))
    found |= _hosts_changed(before, after)
    old, new = before.memory, after.memory
    if after.batch_size != before.batch_size or terms.names_size:
        found["batch_size"] = after.batch_size
    if after.batch_size != before.batch_size and terms.counts_steps:
        found["grad_accumulation"] = terms.samples // after.batch_size
    if new.fused and not old.fused:
        found["fused_update"] = True
        found |= {"grad_accumulation": 1} if after.batch_size < terms.samples else {}
    found |= {name: True for name in new.flags if name not in old.flags}
    if old.persistent_quants != new.persistent_quants:
        found["persistent_quants"] = new.persistent_quants
    if (RESIDUAL in old.offload) != (RESIDUAL in new.offload):
        found["offload_residual"] = RESIDUAL in new.offload
    if new.attention_chunks != old.attention_chunks and not terms.auto_chunks:
        found["attn_bwd_chunks"] = new.attention_chunks
    if new.seq_tiles != old.seq_tiles:
        found["seq_tiles"] = new.seq_tiles
    if new.head_chunks != (old.head_chunks if _is_cut(before, terms) else _fewest(after, terms)):
        found["lmhead_chunks"] = new.head_chunks
    found |= {"log_fp8_every": 0} if before.observe and not after.observe else {}
    found |= dict.fromkeys(before.completions.options) if before.completions and not after.completions else {}
    return found


def _dtypes_changed(before: Spec, after: Spec) -> Iterator[tuple[str, Any]]:
    """Options of dtypes that differ."""
    old, new = before.precision, after.precision
    for name in (kind.name for kind in after.hyper.rule.states):
        if new.of_state(name) != old.of_state(name):
            yield dtype_option(name), new.of_state(name)
    for key, name in (("master_dtype", "master"), ("grad_accum_dtype", "grad"), ("matmul_dtype", "matmul")):
        if getattr(new, name) != getattr(old, name):
            yield key, getattr(new, name)
    if after.base != before.base:
        yield "base_dtype", after.base


def _hosts_changed(before: Spec, after: Spec) -> dict[str, bool]:
    """Options of what lives on the host that differ."""
    old, new = _host_options(before), _host_options(after)
    gone = {key: False for key, spaces in old.items() if key not in new and not spaces <= {*after.memory.host}}
    return {**{key: True for key in new if key not in old}, **gone}


def _host_options(spec: Spec) -> dict[str, set[str]]:
    """The options that keep what a spec has on the host there, each with its spaces; all states are one option."""
    left, states = set(spec.memory.host), {kind.name for kind in spec.hyper.rule.states}
    found = {}
    if "weight" in left:
        found["stream_weights"] = {"weight", MASTER}
        left -= found["stream_weights"]
    elif spec.precision.has_own_master:
        states.add(MASTER)
    found |= {key: {HOSTED[key]} for key in ("offload_quants", "offload_gradients") if HOSTED[key] in left}
    if states and states <= left:
        found["offload_optimizer"] = states
        left -= states
    return {**found, **{key: {space} for key, space in HOSTED.items() if space in left and key not in found}}


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
