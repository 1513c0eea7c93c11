"""A prediction of how long a plan's programs take on a card: a model, which measures nothing.

Every call takes what its FLOPs take at the rate that the card sustains, or its bytes at that of its memory, whichever
is longer; a copy between homes takes its bytes at the rate of the link to the host, a collective at that of the link to
another rank. Calls run in order on each lane, and wait for others as planned.

Sustained rates are those of an H200 at its power limit of 700 W (docs/results.md, "Where the time of a micro-batch
goes"): 689 to 745 TFLOP/s in bf16 and 1,259 to 1,314 in e4m3, of peaks of 989.4 and 1,978.9, and 4.1 TB/s of 4.8 in a
copy. Families of ops below that are counted by their share of it, from the same table. Other cards are taken to sustain
the same shares of their peaks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmq.backends import arguments
from llmq.changed import changed
from llmq.hardware.cards import Card
from llmq.ops.record import Call
from llmq.ops.seam import Arguments, record
from llmq.plan.passes.place import Program
from llmq.plan.plan import Plan

# Of the peaks of its papers, what an H200 sustains: 695 and 1,290 TFLOP/s; ordinary cores are bound by memory.
SUSTAINED = {"bf16": 0.702, "fp32": 0.702, "e4m3": 0.652}
SUSTAINED_MEMORY = 0.854
# Of a copy's rate, by family: 1.5B and 7B, bf16 and e4m3.
FAMILIES = {"norms": 0.75, "cross-entropy": 0.79, "rope": 0.81, "quantize": 0.82, "optimizer": 0.7, "embedding": 0.7}
# Attention takes (a + b / T) times what its products would at the rate of large ones: 1.96 (forward) and 2.73
# (backward) at T = 1024, 1.38 and 1.93 at 8192, with heads 128 wide; 1.37 times that with heads of 64.
ATTENTION = {"attention forward": (1.30, 679.0), "attention backward": (1.82, 940.0)}
HEAD_WIDTH, NARROW = 128, 0.45


@dataclass(frozen=True)
class Rates:
    """FLOP/s by dtype, and bytes/s of the card's memory and of its link to the host and to other ranks.

    Ops of `families` move bytes at a share of the memory's rate; those of `attention` take longer by (a + b / T).
    """

    flops: Mapping[str, float]
    memory: float
    link: float
    families: Mapping[str, float] = field(default_factory=dict)
    attention: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def sustained(card: Card) -> Rates | None:
    """What a card keeps up under load; None if the rate of its memory is not known."""
    if card.memory_rate is None:
        return None
    flops = {dtype: rate * SUSTAINED[dtype] for dtype, rate in card.peaks.items()}
    return Rates(flops, SUSTAINED_MEMORY * card.memory_rate, card.link_rate, FAMILIES, ATTENTION)


def micro_programs(micro_steps: int) -> list[str]:
    """The programs of so many micro-steps, in order."""
    return ["only"] if micro_steps == 1 else ["first", *["middle"] * (micro_steps - 2), "last"]


def step_seconds(plan: Plan, rates: Rates, micro_steps: int) -> float:
    """Seconds of an optimizer step of so many micro-steps."""
    names = [*micro_programs(micro_steps), "update"]
    tokens = plan.spec.batch_size * plan.spec.seq_len
    seconds = {name: program_seconds(plan.programs[name], rates, tokens) for name in set(names)}
    return sum(seconds[name] for name in names)


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
    op, given = record(call.op), changed(arguments(call), different_tokens=float(tokens))
    num_bytes = op.num_bytes(given)
    if (op.copies and call.lane == "copy") or op.is_collective:
        return num_bytes / 2 / rates.link  # each byte is read and written
    multiplying = op.flops(given) / rates.flops[op.rate_dtype(given)]
    if op.family in rates.attention:
        multiplying *= _slower(given, *rates.attention[op.family])
    return max(multiplying, num_bytes / rates.memory / rates.families.get(op.family, 1.0))


def _slower(attention: Arguments, a: float, b: float) -> float:
    """How much longer attention takes than large products of as many FLOPs."""
    _, length, width = attention.reads["qkv"].shape
    numbers = attention.numbers
    head = width / (numbers["num_heads"] + 2 * numbers["num_kv_heads"])
    return (a + b / length) * max(HEAD_WIDTH / head, 1.0) ** NARROW
