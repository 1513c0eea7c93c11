"""Several adapters at once on the GPU: gradients and losses of the NumPy reference, adapter by adapter."""

from functools import partial

import numpy as np
import pytest
from tiny_engines import BF16, FP8, FP32, bits, placed_batch, plan_of, tiny
from tiny_engines import engine_of as loaded

from llmq.adapters.lora import Lora
from llmq.adapters.several import Member, Several
from llmq.adapters.targets import chosen, targets
from llmq.backends.host import HostBackend
from llmq.model.optimizer import Hyperparameters
from llmq.optimizers.adamw import AdamW
from llmq.plan.memory import Memory

pytestmark = pytest.mark.gpu
CONFIG = tiny(hidden_size=256, head_dim=64, intermediate_size=384, vocab_size=1000)
SIZES = {"batch_size": 4, "seq_len": 128}
PRECISIONS = {"fp32": FP32, "bf16": BF16, **{f"{g}-{s}": p for (g, s), p in FP8.items() if g == "e4m3"}}
# As in test_cuda_adapters. In fp8 each adapter here has one sequence or two, for which rounding differently shows: the
# reference's own gradients of `wide` have a cosine of 0.76 to 0.86 with those in bf16.
FOLLOWS = {"fp32": 0.99999, "bf16": 0.99}
FP8_FOLLOWS = 0.95
placed = partial(placed_batch, b=4, t=128, vocab=1000)
RATES = (1e-2, 3e-3, 5e-3)


def adapters(text, rank, **about):
    every = targets(chosen(text, CONFIG), rank, 2.0 * rank, rslora=False)
    return Lora(rank, 2.0 * rank, every, **about)


LAST = {  # by kind, targets and rank of the third: some of the maps, and no kernel of one pass; or all, and one
    "some": ("q_proj,up_proj,lm_head", 8),
    "all": ("all", 32),
}
KIND = pytest.mark.parametrize("kind", LAST)


def several(base, kind):
    """Ranks 16 and 32, dropout, and the third of a kind."""
    members = (
        Member("narrow", adapters("all", 16), 1, 3),
        Member("wide", adapters("all", 32, dropout=0.2), 2, 5, Hyperparameters(AdamW(weight_decay=0.0), 0.1)),
        Member("last", adapters(*LAST[kind]), 1, 7),
    )
    return Several(tuple(members), base=base)


def engine_of(backend, precision, base, kind="all", memory=None):
    """An engine with settled scales."""
    about = several(base, kind)
    plan = plan_of(precision, memory, CONFIG, scratch_bytes=backend.scratch_bytes, adapters=about, **SIZES)
    return loaded(plan, backend=backend, warm=placed(0))


def steps(engine):
    """Results of three steps of two micro-steps, and what an evaluation finds of each."""
    found = []
    for step in range(1, 4):
        for micro_step in range(2):
            engine.micro_step(placed(2 * step + micro_step), first=micro_step == 0, last=micro_step == 1)
        found.append(engine.update(step, RATES))
    return found, engine.evaluate_groups(placed(99))


@KIND
@pytest.mark.parametrize("base", [None, "nf4"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_each_has_the_gradients_of_the_reference(backend, name, base, kind):
    engines = [engine_of(one, PRECISIONS[name], base, kind) for one in (backend, HostBackend())]
    found = []
    for engine in engines:
        engine.micro_step(placed(1))
        own = {}
        for row in (row for row in engine.plan.rows if row.adapter):
            own.setdefault(row.adapter, []).append(engine.gradient(row.name).astype(np.float64).ravel())
        found.append(({key: np.concatenate(parts) for key, parts in own.items()}, engine.update(1, RATES)))
    (ours, done), (right, wanted) = found
    for key, one, other in zip(right, done.groups, wanted.groups, strict=True):
        cosine = ours[key] @ right[key] / (np.linalg.norm(ours[key]) * np.linalg.norm(right[key]))
        assert cosine > FOLLOWS.get(name, FP8_FOLLOWS), key
        assert one.loss == pytest.approx(other.loss, rel=1e-4 if name == "fp32" else 2e-2)
        assert one.norm == pytest.approx(other.norm, rel=1e-3 if name == "fp32" else 0.1)
        assert (one.num_tokens, one.applied) == (other.num_tokens, True)


@KIND
@pytest.mark.parametrize("base", [None, "nf4"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_recomputing_changes_no_bit(backend, name, base, kind):
    plain, recomputed = (
        engine_of(backend, PRECISIONS[name], base, kind, memory) for memory in (Memory(), Memory(("recompute_block",)))
    )
    assert steps(plain) == steps(recomputed) and bits(plain) == bits(recomputed)


def test_a_run_is_that_of_the_reference(backend):
    ours, right = (steps(engine_of(one, FP32, None)) for one in (backend, HostBackend()))
    for one, other in zip(ours[0], right[0], strict=True):
        assert [each.loss for each in one.groups] == pytest.approx([each.loss for each in other.groups], rel=1e-3)
    for (loss, count), (wanted, number) in zip(ours[1], right[1], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-3) and count == number
