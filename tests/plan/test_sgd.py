"""SGD: what it keeps, which is shared out without a changed bit, and what it may be held in."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from tiny_engines import FP32, FP64, batch, engine_of, plan_of, tiny, train_steps

from llmq.engine.engine import Engine
from llmq.model.optimizer import Hyperparameters
from llmq.optimizers.sgd import Sgd
from llmq.plan.remedies import Terms, alternatives, axes, changes, last_alternatives

CONFIG = tiny(vocab_size=300, intermediate_size=176)
HYPER = Hyperparameters(Sgd(momentum=0.9, nesterov=True, weight_decay=0.1), grad_clip=0.5)
PLAIN = Hyperparameters(Sgd())
BYTES = {"fp32": 4, "bf16": 2}


def momentum_bytes(plan):
    return plan.table()["Momentum"]


def test_without_momentum_there_is_no_state_but_the_masters():
    plan, kept = (plan_of(FP32, None, CONFIG, hyper) for hyper in (PLAIN, HYPER))
    assert plan.moment_names == frozenset() and "Momentum" not in plan.table()
    assert {ref.space for ref in plan.persistent.values()} == {ref.space for ref in kept.persistent.values()} - {"m"}
    assert kept.total_bytes - plan.total_bytes == momentum_bytes(kept)


@pytest.mark.parametrize("dtype", BYTES)
def test_momentum_takes_its_dtype_for_each_number_and_nothing_else_is_kept(dtype):
    plan = plan_of(replace(FP32, m=dtype), None, CONFIG, HYPER)
    stored = [ref for ref in plan.persistent.values() if ref.space == "m"]
    assert sum(np.prod(ref.shape) for ref in stored) == sum(np.prod(row.shape) for row in plan.rows)
    assert {ref.dtype for ref in stored} == {dtype} and not any(ref.space == "v" for ref in plan.persistent.values())
    adam = plan_of(replace(FP32, m=dtype), None, CONFIG)
    assert momentum_bytes(plan) == adam.table()["Adam M"] and not {"Adam M", "Adam V"} & plan.table().keys()


@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
def test_momentum_in_8_bits_follows_that_in_fp32(dtype):
    plan, wide = (plan_of(replace(FP32, m=m), None, CONFIG, HYPER) for m in (dtype, "fp32"))
    assert momentum_bytes(plan) < momentum_bytes(wide) / 3.5
    moved = []
    for each in (plan, wide):
        engine = engine_of(each)
        before = dict(engine.state())
        train_steps(engine)
        after = dict(engine.state())
        moved.append(np.concatenate([(after[n] - before[n]).ravel() for n in before if n.startswith("master:")]))
    assert 0 < np.linalg.norm(moved[0] - moved[1]) < 0.05 * np.linalg.norm(moved[1])


@pytest.mark.parametrize(
    ("hyper", "wanted"), [(HYPER, {"opt_m_dtype", "offload_optimizer"}), (PLAIN, set())], ids=["momentum", "plain"]
)
def test_remedies_are_of_what_it_keeps(hyper, wanted):
    spec = plan_of(FP32, None, CONFIG, hyper).spec
    terms = Terms(spec.batch_size, (spec.batch_size,))
    every = [one.of for one in (*alternatives(spec, may_relax=False), *last_alternatives(spec, terms))] + [
        *chain(*axes(spec, terms))
    ]
    named = {key for remedy in every for key in changes(spec, remedy(spec), terms)}
    assert {key for key in named if key.startswith(("opt_", "offload_opt"))} == wanted


def test_a_step_with_a_gradient_of_zero_only_decays_and_carries_on():
    """What no clip and no gradient leave: g = decay w, and m = momentum m + g."""
    hyper = Hyperparameters(Sgd(momentum=0.5, weight_decay=0.25), grad_clip=0.0)
    engine: Engine = engine_of(plan_of(FP64, None, tiny(), hyper))
    start = dict(engine.state())
    masked = replace(batch(), targets=np.full_like(batch().targets, -100))
    for step in (1, 2):
        engine.micro_step(masked)
        engine.update(step, 0.1)
    after = dict(engine.state())
    for row in engine.plan.rows:
        w, m = start[f"master:{row.name}"], 0.0
        for _ in range(2):
            m = 0.5 * m + (0.25 * w if row.decay else 0.0)
            w = w - 0.1 * m
        np.testing.assert_allclose(after[f"master:{row.name}"], w, rtol=1e-14)
