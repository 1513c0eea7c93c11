"""Adapters whose ranks are chosen (AdaLoRA): the choice, what it goes by, and when it is made."""

from dataclasses import replace

import numpy as np
import pytest
from test_adapters import placed, steps, warm
from test_methods import BUDGET, CONFIG, triplets
from tiny_engines import BF16, FP64, PRECISIONS, parameters, plan_of, tiny

from llmq.adapters.adalora import AdaLora, with_triplets
from llmq.adapters.importance import kept
from llmq.adapters.targets import chosen, targets
from llmq.backends.planned import PlannedBackend
from llmq.errors import UsageError
from llmq.model.optimizer import Hyperparameters

UNCLIPPED = {"hyper": Hyperparameters(grad_clip=0.0)}


@pytest.mark.parametrize(
    ("name", "base"), [("fp32", None), ("bf16", "nf4"), ("fp8-e5m2-delayed", "e4m3"), ("fp8-e4m3-rowwise", None)]
)
def test_every_precision_and_base_keeps_as_many(name, base):
    about = triplets(CONFIG, base, budget=replace(BUDGET, final=0, total=3))
    found = warm(plan_of(PRECISIONS[name], config=CONFIG, adapters=about))
    losses, kept = steps(found, 3), found.plan.tracked.kept(found)
    assert np.isfinite(losses).all() and kept.sum() == 2 * len(about.targets)
    values = [found.parameter(row.name) for row in found.plan.tracked.values]
    assert np.array_equal(np.concatenate(values) != 0, kept)


def test_a_triplet_scores_by_its_entry_and_the_means_of_its_vectors():
    about = triplets(tiny(), text="v_proj,o_proj", dropout=0.0)
    found = warm(plan_of(FP64, adapters=about, **UNCLIPPED))
    found.micro_step(placed())
    gradients = {name: found.gradient(name) for name in found.plan.tracked.rows}
    tokens, parts = found.update(1, 1e-2).num_tokens, {}
    for name, gradient in gradients.items():
        now = np.abs(found.parameter(name) * gradient / tokens)
        smoothed = (1 - BUDGET.beta_1) * now
        parts[name] = smoothed * (1 - BUDGET.beta_2) * np.abs(now - smoothed)
    found.run("measure")
    expected = []
    for row in found.plan.tracked.values:
        site, (target,) = row.name.removesuffix(".lora_e"), about.by_site[row.name.removesuffix(".lora_e")]
        vectors = parts[f"{site}.lora_a"].mean(axis=1) + parts[f"{site}.lora_b.{target.module.key}"].mean(axis=0)
        expected.append(parts[row.name] + vectors)
    np.testing.assert_allclose(
        found.plan.tracked.scores(found.read(found.plan.tracked.total)), np.concatenate(expected), rtol=1e-9
    )


def test_the_highest_scores_are_kept():
    assert kept(np.array([3.0, 1.0, 2.0, 5.0]), 2).tolist() == [True, False, False, True]
    assert kept(np.array([1.0, 1.0, 2.0, 1.0]), 2).tolist() == [False, False, True, False]  # ties are left out


def test_the_budget_falls_with_a_cubic():
    budget = replace(BUDGET, warmup=2, final=3, interval=2, total=13)
    assert [step for step in range(1, 14) if budget.chooses(step)] == [4, 6, 8, 10]
    assert [step for step in range(1, 14) if budget.holds(step)] == [11, 12, 13]
    assert [budget.count(step, 40, 10) for step in (4, 6, 10)] == [int(20 * 0.75**3 + 20), int(20 * 0.5**3 + 20), 20]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target_rank": 4}, "--adalora-target-rank 4 is not below --lora-rank 4"),
        ({"warmup": 3}, "--adalora-warmup 3 and --adalora-final 1 leave none of 4 steps"),
        ({"final": 3}, "--adalora-warmup 1 and --adalora-final 3 leave none of 4 steps"),
        ({"warmup": 0, "final": 3}, "leave none of 4 steps"),
    ],
)
def test_a_schedule_without_a_choice_is_refused(change, says):
    with pytest.raises(UsageError, match=says):
        replace(BUDGET, **change).check(4)


def test_ranks_that_a_gpu_cannot_update_are_refused():
    every = with_triplets(targets(chosen("o_proj", tiny(hidden_size=256, head_dim=64)), 6, 6.0, rslora=False))
    about = AdaLora(6, 6.0, every, schedule=BUDGET)
    with pytest.raises(UsageError, match=r"lora_e has 6 numbers, no multiple of 4, as the GPU .* --lora-rank"):
        plan_of(
            BF16,
            config=tiny(hidden_size=256, head_dim=64),
            adapters=about,
            scratch_bytes=PlannedBackend().scratch_bytes,
        )


def test_a_state_that_is_restored_has_the_choice():
    plan = plan_of(BF16, adapters=triplets(tiny()), **UNCLIPPED)
    one, other = warm(plan), warm(plan)
    steps(one, 3)
    state = dict(one.state())
    assert {"cell:kept", "sensitivity:layers.0.mlp.up.lora_a", "uncertainty:layers.0.mlp.up.lora_e"} <= state.keys()
    frozen = [(row, value) for row, value in parameters(plan) if not row.trainable]
    other.restore(lambda name: state[name], frozen)
    again = dict(other.state())
    assert again.keys() == state.keys() and all(np.array_equal(again[name], value) for name, value in state.items())
