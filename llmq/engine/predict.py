"""A prediction of how long a plan's programs take on a card: a model, which nothing is measured for.

Every call takes what its FLOPs take at the card's peak rate, or its bytes at the rate of its memory, whichever is
longer; a copy between homes takes its bytes at the rate of the link to the host, a collective at that of the link to
another rank. Calls run in order on each lane, and wait for others as planned. Launches, and how far kernels stay below
the peaks, are not counted: it is a time that no run goes below.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmq.backends import arguments
from llmq.ops.record import Call
from llmq.ops.seam import record
from llmq.plan.passes.place import Program
from llmq.plan.plan import Plan


@dataclass(frozen=True)
class Rates:
    """FLOP/s by dtype, and bytes/s of the card's memory and of its link to the host and to other ranks."""

    flops: Mapping[str, float]
    memory: float
    link: float


def step_seconds(plan: Plan, rates: Rates, micro_steps: int) -> float:
    """Seconds of an optimizer step of so many micro-steps."""
    names = ["only"] if micro_steps == 1 else ["first", *["middle"] * (micro_steps - 2), "last"]
    tokens = plan.spec.batch_size * plan.spec.seq_len
    seconds = {name: program_seconds(plan.programs[name], rates, tokens) for name in {*names, "update"}}
    return sum(seconds[name] for name in (*names, "update"))


def program_seconds(program: Program, rates: Rates, tokens: int) -> float:
    """Seconds of one program, whose micro-batch has so many tokens."""
    ends: list[float] = []
    free: dict[str, float] = defaultdict(float)  # by lane, when its last call ends
    for call in program.calls:
        start = max([free[call.lane], *(ends[index] for index in call.waits)])
        ends.append(start + call_seconds(call, rates, tokens))
        free[call.lane] = ends[-1]
    return max(ends, default=0.0)


def call_seconds(call: Call, rates: Rates, tokens: int) -> float:
    """Seconds of a call by itself; of an embedding's rows no more than `tokens` are read or written."""
    op, given = record(call.op), replace(arguments(call), different_tokens=float(tokens))
    num_bytes = op.num_bytes(given)
    if (op.copies and call.lane == "copy") or op.is_collective:
        return num_bytes / 2 / rates.link  # each byte is read and written
    return max(op.flops(given) / rates.flops[op.rate_dtype(given)], num_bytes / rates.memory)
