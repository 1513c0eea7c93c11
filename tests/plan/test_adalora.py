"""Adapters whose ranks are chosen (AdaLoRA): gradients with the regulariser, what only moves work, choice and mask."""

from dataclasses import replace

import numpy as np
import pytest
from in_process import run_ranks
from ranks import LEVELS, Run, rank_batch
from tiny_engines import BF16, FP32, FP64, PRECISIONS, batch, engine_of, parameters, plan_of, tiny

from llmq.adapters.adalora import AdaLora, Budget, kept, with_triplets
from llmq.adapters.targets import chosen, targets
from llmq.backends.host import HostBackend
from llmq.backends.planned import PlannedBackend
from llmq.engine.engine import Engine
from llmq.errors import UsageError
from llmq.model.optimizer import Hyperparameters
from llmq.plan.memory import Memory
from llmq.stores.sharding import Sharding

RANK = 4
BUDGET = Budget(2, warmup=1, final=1, interval=1, total=4)
OFTEN = (("fp32", None), ("bf16", "nf4"), ("fp8-e5m2-delayed", "e4m3"), ("fp8-e4m3-rowwise", None))
PLACES = np.array([2**33 + 5, 17])
UNCLIPPED = {"hyper": Hyperparameters(grad_clip=0.0)}


def adapters(text="all", config=None, budget=BUDGET, **about):
    every = with_triplets(targets(chosen(text, config or tiny()), RANK, 6.0, rslora=False))
    return AdaLora(RANK, 6.0, every, schedule=budget, **about)


def placed(index=1):
    return replace(batch(index), places=PLACES + 2 * index)


def engine(plan, backend=None):
    """An engine with values of E, and settled scales."""
    found = Engine(plan, backend or HostBackend(), poison=True)
    found.load(parameters(plan))
    found.warm_up(placed())
    return found


def run_of(found, count=4, batches=None, parts=2):
    """Losses of steps of some micro-steps, with the choice of ranks."""
    tracked, losses = found.plan.tracked, []
    for step in range(1, count + 1):
        found.start_step(step, 1e-2)
        tracked.before_step(found, step)
        for part in range(parts):
            one = placed(10 * step + part) if batches is None else batches(step, part)
            found.micro_step(one, first=part == 0, last=part == parts - 1)
        losses.append(found.update(step, 1e-2).loss)
        tracked.after_update(found, step)
    return losses


def apart(p):
    """How far the rows of a matrix are from orthonormal."""
    return np.linalg.norm(p @ p.T - np.eye(len(p)))


def regulariser(values, about):
    """Its value, of parameters by name."""
    total = 0.0
    for site, its in about.by_site.items():
        for index, target in enumerate(its):
            total += apart(values[f"{site}.lora_a"][index * RANK : (index + 1) * RANK])
            total += apart(values[f"{site}.lora_b.{target.module.key}"].T)
    return about.schedule.orth_reg * total / (2 * len(about.targets))


@pytest.mark.parametrize(
    "about",
    [
        pytest.param({}, id="all"),
        pytest.param({"text": "q_proj,o_proj,mlp,lm_head", "dropout": 0.3}, id="dropout", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_finite_differences(about):
    """With the regulariser times the tokens, once, although the head is in pieces and there are two micro-batches."""
    about = adapters(**about)
    found = engine_of(plan_of(FP64, Memory(head_chunks=2), adapters=about))
    values = {row.name: found.parameter(row.name) for row in found.plan.rows}
    rng, step = np.random.default_rng(0), 1e-5

    def loss(name, change):
        now = {key: value + (change if key == name else 0) for key, value in values.items()}
        found.load([(row, now[row.name]) for row in found.plan.rows])
        for part in range(2):
            found.micro_step(placed(part), first=part == 0, last=part == 1)
        gradients = {row.name: found.gradient(row.name) for row in found.plan.rows if row.trainable}
        result = found.update(1, 0.0)
        return result.num_tokens * (result.loss + regulariser(now, about)), gradients

    _, gradients = loss("", 0)
    assert any(name.endswith("lora_e") for name in gradients)
    for name, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)
        slope = (loss(name, step * direction)[0] - loss(name, -step * direction)[0]) / (2 * step)
        assert slope == pytest.approx(float(np.sum(gradient * direction)), rel=2e-6), name


@pytest.mark.parametrize(
    ("precision", "base"),
    [
        pytest.param(precision, base, id=f"{name}-{base}", marks=() if (name, base) in OFTEN else pytest.mark.slow)
        for name, precision in PRECISIONS.items()
        for base in (None, "e4m3", "nf4")
    ],
)
def test_every_precision_and_base_keeps_as_many(precision, base):
    about = adapters(base=base, budget=replace(BUDGET, final=0, total=3))
    config = tiny(hidden_size=64, head_dim=16, intermediate_size=128)
    about = replace(about, targets=adapters(config=config).targets)
    found = engine(plan_of(precision, config=config, adapters=about))
    losses = run_of(found, 3)
    assert np.isfinite(losses).all() and found.plan.tracked.kept(found).sum() == 2 * len(about.targets)
    first = 0
    for row in found.plan.tracked.values:
        value = found.parameter(row.name)
        assert np.array_equal(value != 0, found.plan.tracked.kept(found)[first : first + len(value)])
        first += len(value)


def test_tiles_of_the_mlp_have_the_regulariser_once():
    runs = [engine(plan_of(FP64, Memory(seq_tiles=tiles), adapters=adapters())) for tiles in (1, 4)]
    for run in runs:
        run.micro_step(placed())
    for row in runs[0].plan.rows:
        if row.trainable:
            one, other = (run.gradient(row.name) for run in runs)
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param(FP32, id="fp32"), pytest.param(BF16, id="bf16")])
def test_every_level_of_sharing_keeps_the_same(precision):
    """Of two ranks, with the same bits; the wide maps have several tiles of 128 rows."""
    config = tiny(vocab_size=1000, hidden_size=64, head_dim=16, intermediate_size=320)
    about = adapters("all", config)

    def work(world, level):
        sharding = Sharding(world.rank, world.size, **LEVELS[level])
        found = Engine(plan_of(precision, None, config, adapters=about, sharding=sharding), HostBackend(world=world))
        found.load(parameters(found.plan))
        losses = run_of(found, batches=lambda step, part: rank_batch(Run(), step, part, world.rank), parts=1)
        return (
            losses,
            found.plan.tracked.kept(found).tolist(),
            [found.parameter(row.name).tobytes() for row in found.plan.rows],
        )

    results = {level: run_ranks(2, lambda world, level=level: work(world, level)) for level in LEVELS}
    for level in LEVELS:
        assert results[level][0] == results[level][1]
    assert results[0] == results[1] == results[2] == results[3]
    kept_by = results[0][0][1]
    assert 0 < sum(kept_by) < len(kept_by)


def test_a_triplet_scores_by_its_entry_and_the_means_of_its_vectors():
    about = adapters("v_proj,o_proj")
    found = engine(plan_of(FP64, adapters=about, **UNCLIPPED))
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
    budget = Budget(2, warmup=2, final=3, interval=2, total=13)
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
        replace(BUDGET, **change).check(RANK)


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
    plan = plan_of(BF16, adapters=adapters(), **UNCLIPPED)
    one, other = engine(plan), engine(plan)
    run_of(one, 3)
    state = dict(one.state())
    assert {"cell:kept", "sensitivity:layers.0.mlp.up.lora_a", "uncertainty:layers.0.mlp.up.lora_e"} <= state.keys()
    frozen = [(row, value) for row, value in parameters(plan) if not row.trainable]
    other.restore(lambda name: state[name], frozen)
    again = dict(other.state())
    assert again.keys() == state.keys() and all(np.array_equal(again[name], value) for name, value in state.items())
