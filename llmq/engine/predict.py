"""A prediction of how long a plan's programs take on a card: a model, which measures nothing.

Every call takes what its FLOPs take at the rate that the card sustains, or its bytes at that of its memory, whichever
is longer, and the time from one node of a graph to the next; a copy between homes takes its bytes at the rate of the
link to the host, which moves both directions at once, as does what another call reads or writes there; a collective at
that of the link to other ranks. Calls run in order on each lane, and wait for others as planned.

Sustained rates are those of an H200 at its power limit of 700 W (docs/results.md, "Where the time of a micro-batch
goes"): 689 to 745 TFLOP/s in bf16 and 1,259 to 1,314 in e4m3, of peaks of 989.4 and 1,978.9, and 4.1 TB/s of 4.8 in a
copy. Families of ops below that are counted by their share of it, from the same table. Other cards are taken to sustain
the same shares of their peaks. tests/engine/test_measured.py holds all this to what was measured.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmq.errors import UsageError
from llmq.hardware import cards
from llmq.hardware.cards import Card
from llmq.hardware.device import Device
from llmq.ops.record import Call
from llmq.ops.seam import Arguments, record
from llmq.plan.levels import micro_programs, sent_by
from llmq.plan.passes.lanes import TO_DEVICE, TO_HOST
from llmq.plan.passes.place import Program
from llmq.plan.plan import Plan
from llmq.tensor import changed, stored_bytes

# Of the peaks of its papers, what an H200 sustains: 695 and 1,290 TFLOP/s; ordinary cores are bound by memory.
SUSTAINED = {"bf16": 0.702, "fp32": 0.702, "e4m3": 0.652}
SUSTAINED_MEMORY = 0.854
# Of NVLink's rate in one direction, NCCL's bus bandwidth between two H200: 245 GB/s in a reduce-scatter, 258 in an
# all-gather. Over PCI Express, a copy's.
SUSTAINED_PEERS = 0.56
# Of the link's rate in one direction, each of both at once: 55.5 and 50.6 GB/s between an H200 and its host.
BOTH_WAYS = 0.91
OPPOSITE = {TO_HOST: TO_DEVICE, TO_DEVICE: TO_HOST}
# Of a copy's rate, by family: 1.5B and 7B, bf16 and e4m3.
FAMILIES = {"norms": 0.75, "cross-entropy": 0.79, "rope": 0.81, "quantize": 0.82, "optimizer": 0.7, "embedding": 0.7}
# Replaying a graph of small kernels takes 1.9 us a node.
NODE_S = 1.9e-6
# Attention takes (a + b / T) (1 + TAIL / waves) times what its products would at the rate of large ones, in waves of
# one block for each 128 queries of a head on every multiprocessor. At T = 1024, 27 waves, 1.96 (forward) and 2.73
# (backward); 1.38 at 8192 and 31 waves, 1.93 in two chunks of 15.5; with heads 128 wide, and 1.37 times that with heads
# of 64. Two waves more for each call: backward in 2, 4, 8 and 16 chunks of 27 waves takes 7, 21, 49 and 87% longer
# (docs/kernels/attention.md), and would by this take 7, 21, 48 and 103%.
ATTENTION = {"attention forward": (1.22, 619.0), "attention backward": (1.59, 975.0)}
ATTENTION_ROWS, TAIL, USUAL_WAVES = 128, 2.0, 27.0
HEAD_WIDTH, NARROW = 128, 0.45
# A product with fewer tiles than the card has multiprocessors leaves some idle. Tiles are 128 x 128, and a deep sum may
# be cut: 0.5B's 896 x 896 gradients, sums over 32,768 tokens, run as fast as others, which takes three pieces or more.
TILE, DEEP = 128, 4096
# Of the rate with a scale for each tensor, that with one for each row, or for 128 numbers: of forward and dgrad, and of
# weight gradients. Means of the table "e4m3 by scales" of docs/kernels/matmul.md.
SCALED = {"rowwise": (0.94, 0.97), "blockwise": (0.82, 0.74), "blocks": (0.82, 0.74)}


@dataclass(frozen=True)
class Rates:
    """FLOP/s by dtype, and bytes/s of the card's memory, of its link to the host and of that to other ranks.

    Ops of `families` move bytes at a share of the memory's rate; those of `attention` take longer by (a + b / T). Each
    call takes `node` seconds more; products are spread over `num_sms`, where that is known.
    """

    flops: Mapping[str, float]
    memory: float
    link: float
    peers: float = 0.0
    families: Mapping[str, float] = field(default_factory=dict)
    attention: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    node: float = 0.0
    num_sms: int = 0


def sustained(card: Card) -> Rates | None:
    """What a card keeps up under load; None if the rate of its memory is not known."""
    if card.memory_rate is None:
        return None
    flops = {dtype: rate * SUSTAINED[dtype] for dtype, rate in card.peaks.items()}
    peers = card.link_rate if card.peer_rate is None else SUSTAINED_PEERS * card.peer_rate
    memory = SUSTAINED_MEMORY * card.memory_rate
    return Rates(flops, memory, card.link_rate, peers, FAMILIES, ATTENTION, NODE_S, card.num_sms)


def step_seconds(plan: Plan, rates: Rates, micro_steps: int) -> float:
    """Seconds of an optimizer step with `micro_steps`."""
    names = [*micro_programs(micro_steps), "update"]
    tokens = plan.spec.batch_size * plan.spec.seq_len
    seconds = {name: program_seconds(plan.programs[name], rates, tokens) for name in set(names)}
    return sum(seconds[name] for name in names)


def predicted_rate(plan: Plan, card: Card | None, tokens_per_step: int) -> float | None:
    """Tokens/s of all ranks in steps of `tokens_per_step`; None for the CPU and a card of unknown rates."""
    rates = sustained(card) if card else None
    if rates is None:
        return None
    spec = plan.spec
    micro_steps = max(tokens_per_step // (spec.batch_size * spec.seq_len * spec.sharding.size), 1)
    return tokens_per_step / step_seconds(plan, rates, micro_steps)


def program_seconds(program: Program, rates: Rates, tokens: int) -> float:
    """Seconds of one program, whose micro-batch has `tokens`."""
    ends: list[float] = []
    free: dict[str, float] = defaultdict(float)  # by lane, when its last call ends
    for call in program.calls:
        start = max([free[call.lane], *(ends[index] for index in call.waits)])
        shared = call.lane in OPPOSITE and free[OPPOSITE[call.lane]] > start
        ends.append(start + call_seconds(call, rates, tokens) / (BOTH_WAYS if shared else 1.0))
        free[call.lane] = ends[-1]
    return max(ends, default=0.0)


def call_seconds(call: Call, rates: Rates, tokens: int) -> float:
    """Seconds of a call by itself; of an embedding's rows no more than `tokens` are read or written."""
    op, given = record(call.op), changed(Arguments.of(call), different_tokens=float(tokens))
    if op.is_collective:
        ranks = len(given.numbers.get("bounds", ())) - 1
        return rates.node + sent_by(call, max(ranks, 2)) / rates.peers
    num_bytes = op.num_bytes(given)
    if call.lane in OPPOSITE:
        return rates.node + num_bytes / 2 / rates.link  # each byte is read and written
    multiplying = op.flops(given) / rates.flops[op.rate_dtype(given)]
    if op.is_linear:
        multiplying /= _scaled_share(given) * _filled(given, op.multiply_adds(given), rates.num_sms)
    if op.family in rates.attention:
        multiplying *= _slower(given, *rates.attention[op.family], rates.num_sms)
    read, written = (
        sum(stored_bytes(ref) for ref in refs if ref is not None and ref.home == "host")
        for refs in (call.inputs, call.written)
    )
    moving = max(num_bytes - read - written, 0) / rates.memory / rates.families.get(op.family, 1.0)
    linked = max(read, written) / rates.link / (BOTH_WAYS if read and written else 1.0)
    return rates.node + max(multiplying, moving, linked)


def _scaled_share(product: Arguments) -> float:
    """Of the rate of products with a scale for each tensor, that of one with these scales."""
    form = next(iter(product.reads.values())).form
    forward, gradient = SCALED.get((form and form.scaling) or "", (1.0, 1.0))
    return gradient if "d_weight" in product.writes else forward


def _filled(product: Arguments, multiply_adds: int, num_sms: int) -> float:
    """The share of the multiprocessors that have a tile of a product to make."""
    shape = next(ref.shape for refs in product.writes.values() for ref in refs)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    pieces = max(multiply_adds // (rows * columns) // DEEP, 1)
    return min(-(-rows // TILE) * -(-columns // TILE) * pieces / num_sms, 1.0) if num_sms else 1.0


def _slower(attention: Arguments, a: float, b: float, num_sms: int) -> float:
    """How much longer attention takes than large products of as many FLOPs."""
    sequences, length, width = attention.reads["qkv"].shape
    numbers = attention.numbers
    head = width / (numbers["num_heads"] + 2 * numbers["num_kv_heads"])
    blocks = sequences * numbers["num_heads"] * -(-length // ATTENTION_ROWS)
    waves = blocks / num_sms if num_sms else USUAL_WAVES
    return (a + b / length) * (1 + TAIL / waves) * max(HEAD_WIDTH / head, 1.0) ** NARROW


def rates_of(where: Device) -> Rates:
    """What the device sustains, or is taken to. UsageError on the CPU and a GPU that is in no table."""
    rates = sustained(cards.rated(where.card)) if where.card else None
    if rates is not None:
        return rates
    name = "the CPU" if where.kind == "cpu" else "this GPU"
    raise UsageError(
        f"--fit compares predicted steps, and llmq's table of cards has no rates of {name}: name the card to plan "
        "for with --gpu, or choose settings yourself (a run that does not fit says which would)"
    )


def assumed(where: Device) -> str:
    """Which card's rates are assumed, in words; empty where the device's own are known."""
    if where.card is None or (rated := cards.rated(where.card)) is where.card:
        return ""
    return f", with the rates of the {rated.name}, as those of {where.card.name} are not known"
