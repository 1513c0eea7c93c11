"""Adapters where bytes move: offloading, streaming, updates in backward and tiles change no bit of a run with any of
them, on any base; a packed row is the sum of its documents."""

from itertools import pairwise

import numpy as np
import pytest
from test_adapters import adapters, placed, warm
from tiny_engines import BF16, FP8, FP64, B, T, batch, plan_of, tiny

from llmq.adapters.ia3 import Gains, scaled
from llmq.adapters.targets import chosen
from llmq.blocks.attention import Packing
from llmq.data.batches.batch import Batch
from llmq.model.optimizer import Hyperparameters
from llmq.plan.memory import Memory

METHODS = {
    "lora": lambda config, base: adapters("all", config, dropout=0.2, bias="all", base=base),
    "dora": lambda config, base: adapters("all", config, dora=True, also="embed_tokens", base=base),
    "ia3": lambda config, base: Gains(scaled(chosen("all", config)), base=base),
}
MOVES = {
    "recomputed": Memory(("recompute_block",)),
    "residual": Memory(offload=("residual",)),
    "states": Memory(host=("master", "m", "v")),
    "gradients": Memory(host=("grad",)),
    "streamed": Memory(host=("weight", "master", "m", "v")),
    "fused": Memory(fused=True),
}
CONFIG = tiny(hidden_size=64, head_dim=16, intermediate_size=128)  # nf4 has blocks of 64 numbers
PRECISIONS = {"bf16": BF16, "delayed": FP8["e4m3", "delayed"], "current": FP8["e4m3", "current"]}
OFTEN = (("streamed", "lora", "nf4", "bf16"), ("fused", "dora", None, "bf16"), ("residual", "ia3", "nf4", "bf16"))


@pytest.mark.sample("sweep", by=2)
@pytest.mark.parametrize(
    ("move", "method", "base", "kind"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow)
        for case in ((m, n, b, k) for m in MOVES for n in METHODS for b in (None, "nf4") for k in PRECISIONS)
        if case[::3] != ("fused", "delayed")  # whose scales are known at the end of the step
    ],
)
def test_what_moves_bytes_changes_no_bit(move, method, base, kind):
    about = {"hyper": Hyperparameters(grad_clip=0.0), "adapters": METHODS[method](CONFIG, base), "config": CONFIG}
    found = []
    for memory in (Memory(), MOVES[move]):
        engine, losses = warm(plan_of(PRECISIONS[kind], memory, **about)), []
        for step in (1, 2, 3):
            engine.start_step(step, 1e-1)
            engine.micro_step(placed(step))
            losses.append(engine.update(step, 1e-1).loss)
        found.append((losses, {r.name: engine.parameter(r.name).tobytes() for r in engine.plan.rows if r.trainable}))
    assert found[0] == found[1] and len(set(found[0][0])) == 3


@pytest.mark.parametrize("method", METHODS)
def test_a_pack_is_the_sum_of_its_documents(method):
    one, borders = batch(), np.array([[0, 4, 10, T], [0, 9, T, T]], np.int32)
    targets = one.targets.copy()
    for row, marks in enumerate(borders):
        targets[row, marks[1:] - 1] = -100
    about = {"adapters": METHODS[method](tiny(), None) if method != "lora" else adapters("all")}
    packed, alone = warm(plan_of(FP64, packing=Packing(3, 9), **about)), warm(plan_of(FP64, **about))
    packed.micro_step(Batch(one.tokens, targets, borders))
    number = 0
    for row, marks in enumerate(borders):
        for start, stop in pairwise(marks):
            if start < stop:
                rows, aims = np.zeros((B, T), np.int32), np.full((B, T), -100, np.int32)
                rows[0, : stop - start] = one.tokens[row, start:stop]
                aims[0, : stop - start] = targets[row, start:stop]
                alone.micro_step(Batch(rows, aims), first=number == 0)
                number += 1
    assert number == 5
    for row in alone.plan.rows:
        if row.trainable:
            expected = alone.gradient(row.name)
            apart = np.linalg.norm(packed.gradient(row.name) - expected)
            assert apart <= 1e-12 * np.linalg.norm(expected), row.name
