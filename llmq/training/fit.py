"""`--fit`: the settings with which a run takes least time inside the memory that there is, by predicted steps.

What comes out are options of the command line, so that it is a command. A setting that is given stays: the search adds
to it. The tokens of a step stay the same, as micro-batches get smaller, where their size is not given. Numbers change
only by what `--fit-may` names, and only where that makes a step 1% faster, or fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from llmq.backends import Backend
from llmq.backends.opening import open_backend
from llmq.disk import shown
from llmq.engine.advice import UNKNOWN, Limits, table
from llmq.engine.cost import Costs
from llmq.engine.predict import assumed, rates_of
from llmq.engine.search import Available, Search
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.options.parse import Options, minimal
from llmq.plan import precision
from llmq.plan.plan import Plan, uncollected
from llmq.plan.remedies import NOTHING, Alternative, Changes, Terms, in_one_pass, masters, matmuls, moments, typed
from llmq.plan.spec import Spec
from llmq.screen import StartTask, unshown

if TYPE_CHECKING:
    from llmq.data.batches.loader import Data

SpecOf = Callable[[Options], Spec]
SEARCHING = "Settings tried, to find those that fit"
BEST = 5  # settings that are printed
MOST_TOKENS = 2**17  # of a micro-batch that holds more than one sequence
SIZES = ("batch_size", "grad_accumulation")
WATCHING = {"log_fp8_every", "sample_prompts", "sample_length"}  # options that a search leaves alone
UNIT = 8192  # tokens of a tile, of which lengths of --longest are multiples: products of more are no faster
HEAD_UNIT = 4096  # of a chunk of logits
LONGEST = 2**24  # tokens that are tried
ALL_MAY = ("states", "matmul")
NUMBERS = ("matmul_dtype", "opt_m_dtype", "opt_v_dtype", "master_dtype")  # that a run keeps when it resumes


@dataclass(frozen=True)
class Fit:
    """Options with the chosen settings in place of --fit, which are `changes`; the plan that they give, and the best
    settings as a table."""

    options: Options
    changes: Changes = field(default_factory=dict)
    plan: Plan | None = None
    lines: tuple[str, ...] = ()

    def resized(self, data: Data) -> Data:
        """The data in micro-batches of the chosen size, as many samples a step."""
        size = int(self.changes.get("batch_size", data.batch_size))
        return replace(data, batch_size=size, grad_accumulation=data.batch_size * data.grad_accumulation // size)


def fitted(
    options: Options,
    spec_of: SpecOf,
    where: Device,
    backend: Backend,
    samples: int,
    *,
    kept: Changes | None = None,
    fixed: Collection[str] | None = None,
    task: StartTask = unshown,
) -> Fit:
    """The best settings of a run that takes this many `samples` a step on each rank.

    `spec_of` resolves options. Many plans are made as for a backend that is planned for, and the last for `backend`.
    Where numbers are `kept`, as of a checkpoint, --fit-may allows none. Options that are `fixed` stay, by default those
    that are given. The `task` counts the settings that were planned. MemoryLimitError with the nearest if none fits.
    """
    if precision.is_auto(options.precision):
        raise UsageError(
            "--fit plans matmuls of one dtype, and --matmul-dtype auto times them first: use e4m3, or bf16 with "
            "--fit-may matmul"
        )
    may = (options.to_flat()["fit_may"] or ()) if kept is None else ()
    start, host = taken(options, kept or {}), device.host_bytes(options.system, where)
    spec, room = spec_of(start), Available(device.memory_bytes(where)[1], UNKNOWN if host is None else host)
    terms = _terms(options, spec, where, samples, frozenset(options.given if fixed is None else fixed))
    modelled = open_backend("planned", **device.backend_settings(options.system, where))
    costs = {False: Costs(modelled.scratch_bytes, backend.scratch_bytes, rates_of(where))}
    alternatives_of = partial(_alternatives, spec, terms, _other_matmuls(start, spec, spec_of, where))
    with task(SEARCHING) as report:
        search = Search(spec, terms, room, costs, plans_first=True, report=report)
        if not (best := search.best(alternatives_of(may), BEST)):
            others = [] if kept else alternatives_of(ALL_MAY)
            raise MemoryLimitError(_shortage(search, alternatives_of(may), others))
    chosen = taken(start, best[0].changes)
    title = f"The fastest by predicted steps in {shown(room.free_bytes)}{assumed(where)}, and those that need less; "
    lines = (f"{title}1 is taken:", *table(best, where.num_sharing))
    return Fit(chosen, best[0].changes, costs[False].plan(spec_of(chosen)), lines)


def with_longest(options: Options, spec_of: SpecOf, limits: Limits) -> Fit:
    """The longest sequence whose plan fits in the settings that a run has (`llmq-estimate --longest`).

    A line says also what a run that need not repeat its bits would have, if there is one and it is longer. Tiles of the
    MLP and chunks of the logits, where they are not given, are as many as the length has units. UsageError beside
    --seq-len and --fit, MemoryLimitError if one unit does not fit.
    """
    explicit, room, costs = minimal(options), limits.room, limits.costs
    if refused := [f"--{key.replace('_', '-')}" for key in ("seq_len", "fit") if key in explicit]:
        raise UsageError(
            f"--longest looks for the length in the settings that are given: leave out {', '.join(refused)}"
        )
    one = {"batch_size": 1, **({} if "global_batch_size" in explicit else {"grad_accumulation": 1})}

    def settings(units: int) -> dict[str, int]:
        tiles = {"seq_tiles": units, "lmhead_chunks": units * UNIT // HEAD_UNIT}
        return {"seq_len": units * UNIT, **{key: count for key, count in tiles.items() if key not in explicit}}

    def parsed(units: int) -> Options:
        return Options.parse({**one, **explicit, **settings(units)})

    with uncollected():
        most = {relaxed: _longest(of, lambda units: spec_of(parsed(units)), room) for relaxed, of in costs.items()}
    longest, more = most[False], most.get(True, 0)
    hint = f"--no-deterministic allows {UNIT * more:,}" if more > longest else ""
    if not longest:
        hint = hint or "add --recompute-block, --offload-residual or --base-dtype nf4"
        raise MemoryLimitError(
            f"--longest: not even {UNIT:,} tokens fit in {shown(room.free_bytes)} with these settings: {hint}"
        )
    chosen = parsed(longest)
    line = f"The longest sequence in {shown(room.free_bytes)}, in steps of {UNIT:,} tokens: {typed(settings(longest))}"
    line = f"{line}; {hint} tokens" if hint else line
    return Fit(chosen, settings(longest), costs[False].plan(spec_of(chosen)), (line,))


def _longest(costs: Costs, spec_at: Callable[[int], Spec], room: Available) -> int:
    """The most units that fit, by the plan of the whole in the end; 0 if none does."""

    def misses(units: int) -> bool:
        return bool(room.missing(costs.of(spec_at(units), 1)))

    most, high = LONGEST // UNIT, 1
    while high <= most and not misses(high):
        high *= 2
    low = high // 2
    found = low + bisect_left(range(low + 1, min(high, most + 1)), True, key=misses)
    while found:
        costs.plan(spec_at(found))  # of all layers, with which `misses` counts from then on
        if not misses(found):
            break
        found -= 1
    return found


def taken(options: Options, changes: Changes) -> Options:
    """The options of a run with settings that a search chose in place of --fit."""
    explicit, flat = minimal(options), options.to_flat()
    explicit |= {key: flat[key] for key in ("continue", "reset") if flat[key] is not None}
    # what follows from the size of all micro-batches together is found again
    follows = {"grad_accumulation"} if "global_batch_size" in explicit else set()
    return Options.parse({**{k: v for k, v in explicit.items() if k not in {"fit", "fit_may", *follows}}, **changes})


def _terms(options: Options, spec: Spec, where: Device, samples: int, given: frozenset[str]) -> Terms:
    """What the settings of a run have in common."""
    is_open = given.isdisjoint(SIZES)
    return Terms(
        samples,
        _sizes(samples, spec.seq_len) if is_open else (spec.batch_size,),
        counts_steps=options.to_flat()["global_batch_size"] is None,
        gpu_bytes=device.memory_bytes(where)[0] if where.kind == "cuda" else 0,
        names_size=is_open,
        given=given | WATCHING,
    )


def _sizes(samples: int, seq_len: int) -> tuple[int, ...]:
    """Sizes of a micro-batch, each at most half of the one before."""
    found: list[int] = []
    for size in range(samples, 0, -1):
        small = size * seq_len <= MOST_TOKENS or size == 1
        if samples % size == 0 and small and (not found or 2 * size <= found[-1] or size == 1):
            found.append(size)
    return tuple(found)


def _other_matmuls(options: Options, spec: Spec, spec_of: SpecOf, where: Device) -> list[Alternative]:
    """Matmuls in bf16 in place of e4m3, or the other way round, if the run can have these."""
    other = "bf16" if spec.precision.matmul == "e4m3" else "e4m3"
    if spec.precision.model != "bf16" or (other == "e4m3" and not device.has_fp8(where)):
        return []
    try:
        return [matmuls(spec_of(taken(options, {"matmul_dtype": other})).precision)]
    except UsageError:
        return []


def _alternatives(spec: Spec, terms: Terms, matmuls: Sequence[Alternative], may: Collection[str]) -> list[Alternative]:
    """Changes of numbers that are allowed, and the update in backward: less memory, and faster at once."""
    states = [moments(spec), masters(spec)] if "states" in may else []
    fused = [in_one_pass(terms)] if terms.sizes[0] == terms.samples and not spec.memory.fused else []
    parts = [matmuls if "matmul" in may else [], *states, fused]
    return [sum(alternative, NOTHING) for alternative in product(*([NOTHING, *part] for part in parts))]


def _shortage(search: Search, alternatives: Sequence[Alternative], others: Sequence[Alternative]) -> str:
    """What to say where nothing fits: the setting that misses least, and whether more of --fit-may would help."""
    nearest, room = search.nearest(alternatives), search.room
    if nearest is None:
        return f"--fit: no setting of this run can be planned in {shown(room.free_bytes)}: leave --fit out to see why"
    cost, advice = nearest.cost, ""
    sizes = ((cost.num_bytes, room.free_bytes, ""), (cost.host_bytes, room.host_bytes, " of the host"))
    needs = [
        f"{shown(size)}{of}, {shown(free)} are free, {shown(size - free)} are missing"
        for size, free, of in sizes
        if size > free
    ]
    other = search.nearest(others) if len(others) > len(alternatives) else None
    if other is not None and not room.missing(other.cost):
        advice = f": --fit-may {','.join(ALL_MAY)} allows one that does"
    elif not search.terms.given.isdisjoint(SIZES) and search.spec.batch_size > 1:
        advice = ": --global-batch-size in place of --batch-size and --grad-accumulation leaves the micro-batch open"
    return f"--fit: no setting fits: the nearest, {nearest.flags}, needs {' and '.join(needs)}{advice}"
