"""`llmq-estimate --longest`: the longest sequence with which a run fits, in the settings that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from llmq.disk import shown
from llmq.engine.cost import Costs
from llmq.engine.search import Available
from llmq.errors import MemoryLimitError, UsageError
from llmq.options.parse import Options, minimal
from llmq.plan.plan import uncollected
from llmq.plan.remedies import typed
from llmq.plan.spec import Spec

UNIT = 8192  # tokens that lengths are multiples of, and of a tile: products of so many are as fast as those of more
HEAD_UNIT = 4096  # of a chunk of logits
MOST = 2**24  # tokens that are tried


def with_longest(
    options: Options, spec_of: Callable[[Options], Spec], costs: Mapping[bool, Costs], room: Available
) -> tuple[Options, str]:
    """The options with the longest sequence whose plan fits, and that in words.

    Where there are `costs` of a run that need not repeat its bits (True), the words say what that would have, if it is
    longer. Tiles of the MLP and chunks of the logits, where they are not given, are as many as the length has units.
    UsageError beside --seq-len and --fit, MemoryLimitError if one unit does not fit.
    """
    told = minimal(options)
    if refused := [f"--{key.replace('_', '-')}" for key in ("seq_len", "fit") if key in told]:
        raise UsageError(
            f"--longest looks for the length in the settings that are given: leave out {', '.join(refused)}"
        )
    one = {"batch_size": 1, **({} if "global_batch_size" in told else {"grad_accumulation": 1})}

    def settings(units: int) -> dict[str, int]:
        tiles = {"seq_tiles": units, "lmhead_chunks": units * UNIT // HEAD_UNIT}
        return {"seq_len": units * UNIT, **{key: count for key, count in tiles.items() if key not in told}}

    def parsed(units: int) -> Options:
        return Options.parse({**one, **told, **settings(units)})

    shortest = spec_of(parsed(1))

    def spec_at(units: int) -> Spec:
        found = settings(units)
        memory = shortest.memory
        chunks = found.get("lmhead_chunks", memory.head_chunks)
        tiled = replace(memory, seq_tiles=found.get("seq_tiles", memory.seq_tiles), head_chunks=chunks)
        return replace(shortest, seq_len=found["seq_len"], memory=tiled)

    with uncollected():
        most = {relaxed: _longest(of, spec_at, room) for relaxed, of in costs.items()}
    longest, more = most[False], most.get(True, 0)
    hint = f"--no-deterministic allows {UNIT * more:,}" if more > longest else ""
    if not longest:
        hint = hint or "add --recompute-block, --offload-residual or --base-dtype nf4"
        raise MemoryLimitError(
            f"--longest: not even {UNIT:,} tokens fit in {shown(room.free_bytes)} with these settings: {hint}"
        )
    found = typed(settings(longest))
    line = f"The longest sequence in {shown(room.free_bytes)}, in steps of {UNIT:,} tokens: {found}"
    return parsed(longest), f"{line}; {hint} tokens" if hint else line


def _longest(costs: Costs, spec_at: Callable[[int], Spec], room: Available) -> int:
    """The most units that fit, by the plan of the whole in the end."""

    def fits(units: int) -> bool:
        return not room.missing(costs.of(spec_at(units), 1))

    found = _most(fits, MOST // UNIT)
    while found:
        costs.plan(spec_at(found))  # of all layers, with which `fits` counts from then on
        if fits(found):
            break
        found -= 1
    return found


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to a limit that fits, where all smaller ones do; 0 if none does."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
