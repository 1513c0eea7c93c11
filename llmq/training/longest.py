"""`llmq-estimate --longest`: the longest sequence with which a run fits, in the settings that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmq.disk import shown
from llmq.engine.cost import Costs
from llmq.errors import MemoryLimitError, UsageError
from llmq.options.parse import Options, minimal
from llmq.plan.plan import uncollected
from llmq.plan.spec import Spec

UNIT = 8192  # tokens that lengths are multiples of, and of a tile: products of so many are as fast as those of more
HEAD_UNIT = 4096  # of a chunk of logits
MOST = 2**24  # tokens that are tried


def with_longest(
    options: Options,
    spec_of: Callable[[Options], Spec],
    costs: Costs,
    free_bytes: int,
    free_host_bytes: int,
    relaxed: Costs | None = None,
) -> tuple[Options, str]:
    """The options with the longest sequence whose plan fits, and that in words.

    Where there are costs of a run that need not repeat its bits (`relaxed`), the words say what that would have, if it
    is longer.

    Tiles of the MLP and chunks of the logits, where they are not given, are as many as the length has units.
    UsageError beside --seq-len and --fit, MemoryLimitError if one unit does not fit.
    """
    told = minimal(options)
    if taken := [f"--{key.replace('_', '-')}" for key in ("seq_len", "fit") if key in told]:
        raise UsageError(f"--longest looks for the length in the settings that are given: leave out {', '.join(taken)}")
    sizes = {"batch_size": 1, **({} if "global_batch_size" in told else {"grad_accumulation": 1})}

    def settings(units: int) -> dict[str, Any]:
        tiles = {"seq_tiles": units, "lmhead_chunks": units * UNIT // HEAD_UNIT}
        return {"seq_len": units * UNIT, **{key: count for key, count in tiles.items() if key not in told}}

    def parsed(units: int) -> Options:
        return Options.parse({**sizes, **told, **settings(units)})

    def most(of: Costs) -> int:
        def fits(units: int) -> bool:
            return not of.of(spec_of(parsed(units)), 1).missing(free_bytes, free_host_bytes)

        found = _most(fits, MOST // UNIT)
        while found:
            of.plan(spec_of(parsed(found)))  # of all layers, with which `fits` counts from then on
            if fits(found):
                break
            found -= 1
        return found

    with uncollected():
        longest = most(costs)
        more = most(relaxed) if relaxed else 0
    hint = f"--no-deterministic allows {UNIT * more:,}" if more > longest else ""
    if not longest:
        hint = hint or "add --recompute-block, --offload-residual or --base-dtype nf4"
        raise MemoryLimitError(
            f"--longest: not even {UNIT:,} tokens fit in {shown(free_bytes)} with these settings: {hint}"
        )
    found = " ".join(f"--{key.replace('_', '-')} {count}" for key, count in settings(longest).items())
    line = f"The longest sequence in {shown(free_bytes)}, in steps of {UNIT:,} tokens: {found}"
    return parsed(longest), f"{line}; {hint} tokens" if hint else line


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
