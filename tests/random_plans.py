"""Random settings that only move or repeat work, which change no bit, on the CPU and on a GPU, and random orders."""

import random
from dataclasses import replace

from tiny_engines import BF16, FP8, FP8_HEAD

from llmq.backends import Launch, groups
from llmq.backends.host import HostBackend
from llmq.comm.world import ALONE
from llmq.plan.memory import RESIDUAL, Memory
from llmq.plan.precision import Precision

STATES = ("master", "m", "v")
PRECISIONS = (
    BF16,
    replace(BF16, master="fp32", m="fp32"),
    replace(BF16, master="fp32", m="int8", v="e4m3"),
    *FP8.values(),
    FP8_HEAD,
)
SOME = ("recompute_swiglu", "recompute_norm", "recompute_ffn", "recompute_att")


def drawn(seed: int) -> tuple[Precision, Memory, Memory]:
    """Dtypes, chunks and tiles alone, and with them what is made again and what lives on the host."""
    draw = random.Random(seed)
    precision = draw.choice(PRECISIONS)
    # With tiles the order of sums is another, and with scales of blocks they are not known.
    tiles = 1 if precision.scaling == "blockwise" else draw.choice([1, 1, 2])
    plain = Memory(head_chunks=draw.choice([1, 2, 4]), seq_tiles=tiles)
    flags = draw.choice([tuple(draw.sample(SOME, draw.randint(0, 2))), ("recompute_block",)])
    host = {space for space in STATES if draw.random() < 0.5}
    host |= {"grad"} if draw.random() < 0.4 else set()
    host |= draw.choice([set(), {"weight", "master"}, {"quant"} if precision.matmul == "e4m3" else set()])
    hosted = replace(
        plain,
        flags=flags,
        attention_chunks=draw.choice([1, 2]),
        offload=draw.choice([(), (RESIDUAL,)]),
        host=tuple(sorted(host)),
        piece_bytes=draw.choice([1, 2**17, 2**26]),
        zero_copy=draw.random() < 0.3,
        write_combined=draw.random() < 0.3,
        persistent_quants="quant" in host or draw.random() < 0.7,
    )
    return precision, plain, hosted


class AnyOrder(HostBackend):
    """Runs launches in a random order that lanes and waits allow, and collectives that may be made as one from the last
    to the first."""

    def __init__(self, seed, world=ALONE):
        super().__init__(world=world)
        self.random = random.Random(seed)

    def program(self, launches):
        as_recorded = super().program

        def run():
            order, done, queues = [], set(), {}
            for group in groups(launches):
                queues.setdefault(launches[group.indices[0]].lane, []).append(group)
            while any(queues.values()):
                ready = [lane for lane, queue in queues.items() if queue and done.issuperset(waits(queue[0]))]
                group = queues[self.random.choice(ready)].pop(0)
                done.update(group.indices)
                order += [*group.before, *reversed(group.runs), *group.after]
            as_recorded([Launch(each) for each in order])()

        def waits(group):
            return {other for index in group.indices for other in launches[index].waits}

        return run
