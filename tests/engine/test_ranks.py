"""Many ranks: the bits of a run do not depend on what each of them holds, and its numbers not on how many there are."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from in_process import run_ranks
from ranks import CONFIG, LEVELS, Run, on_ranks, rank_batch, same, whole_batch
from tiny_engines import BF16, FP32, FP64, PRECISIONS, engine_of, plan_of

from llmq.adapters.adalora import AdaLora, with_triplets
from llmq.adapters.ia3 import Gains, scaled
from llmq.adapters.importance import Budget
from llmq.adapters.lora import Lora
from llmq.adapters.part import PartOfModel
from llmq.adapters.targets import chosen, targets
from llmq.adapters.virtual_tokens import Prefix, Prompt
from llmq.backends.host import HostBackend
from llmq.blocks.packed import Packing
from llmq.ops.record import together
from llmq.plan.memory import ROLES, Memory
from llmq.plan.names import storage_name
from llmq.stores.sharding import Sharding, Shards
from llmq.tensor import Form


def ranks(run, size):
    """What each rank of an in-process world returns; they agree on every step's result."""
    found = on_ranks(run, size)
    agreed = [[replace(result, sent_error=None) for result in results] for results, _ in found]
    assert all(results == agreed[0] for results in agreed)
    assert found[0][0][0].request == size - 1
    for _, values in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(values[1:], found[0][1][1:], strict=True))
    return found[0]


COMPRESSED = {"all_to_all": True, "compressed": Form("e4m3", "row", "tilewise")}
_TARGETS = targets(chosen("all,lm_head", CONFIG), 4, 8.0, rslora=False)
_SOME = targets(chosen("q_proj,v_proj,mlp", CONFIG), 4, 8.0, rslora=False)
_TRIPLETS = AdaLora(4, 8.0, with_triplets(_TARGETS), schedule=Budget(2, warmup=1, final=1, interval=1, total=4))
_GAINS = scaled(chosen("k_proj,v_proj,down_proj", CONFIG))
RUNS = {
    "adapters": Run(more={"adapters": Lora(4, 8.0, _TARGETS, bias="all")}),
    "adapters-e4m3": Run(
        replace(BF16, master="fp32", grad="fp32"), more={"adapters": Lora(4, 8.0, _TARGETS, base="e4m3")}
    ),
    "magnitudes": Run(more={"adapters": Lora(4, 8.0, _SOME, dora=True, also=frozenset({"embed.weight"}), plus=4.0)}),
    "magnitudes-fp32": Run(
        replace(BF16, master="fp32", grad="fp32"), more={"adapters": Lora(4, 8.0, _SOME, base="e4m3", dora=True)}
    ),
    "triplets": Run(FP32, steps=4, more={"adapters": _TRIPLETS}),
    "triplets-bf16": Run(steps=4, more={"adapters": _TRIPLETS}),
    "gains": Run(more={"adapters": Gains(_GAINS)}),
    "prefix": Run(more={"adapters": Prefix(3)}),
    "prompt": Run(memory=Memory(flags=frozenset({"recompute_block"})), more={"adapters": Prompt(3, base="e4m3")}),
    "bf16": Run(),
    "fp8": Run(PRECISIONS["fp8-head"]),
    "fp8-current": Run(PRECISIONS["fp8-e5m2-current"]),
    "fp8-blockwise": Run(PRECISIONS["fp8-e4m3-blockwise"]),
    "fp32-master": Run(replace(BF16, master="fp32", grad="fp32")),
    "recompute": Run(memory=Memory(flags=frozenset(ROLES) & {"recompute_block"})),
    "packed": Run(more={"packing": Packing(5, 16)}),
    "exchanged": Run(how={"all_to_all": True}),
    "wire": Run(replace(BF16, grad="fp32"), how={"reduce_dtype": "bf16"}),
    "wire-exchanged": Run(replace(BF16, grad="fp32"), how={"reduce_dtype": "bf16", "all_to_all": True}),
    "compressed": Run(how=COMPRESSED),
    "compressed-fp32": Run(
        replace(BF16, grad="fp32"), how=COMPRESSED, memory=Memory(flags=frozenset({"recompute_block"}))
    ),
}
SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep
MIXED = ("adapters-e4m3", "magnitudes-fp32", "triplets-bf16", "recompute", "wire-exchanged", "compressed-fp32")
SOME_LEVELS = pytest.mark.parametrize(
    "level", [level if level % 2 else pytest.param(level, marks=SLOW) for level in LEVELS]
)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("fp32-master", 3),
        pytest.param("prompt", 3, marks=SLOW),
        *(
            pytest.param(name, size, marks=SLOW if size == 2 and name not in MIXED else SWEEP)
            for name, size in product(RUNS, (1, 2, 3, 4, 8))
            if (name, size) not in (("fp32-master", 3), ("prompt", 3))
        ),
    ],
)
def test_every_level_has_the_bits_of_the_others(name, size):
    """What is MIXED of two others is in the sweep."""
    first, *others = (ranks(replace(RUNS[name], level=level), size) for level in LEVELS)
    assert all(same(first, other) for other in others)


def test_compressed_gradients_are_off_by_what_is_logged():
    """A number of e4m3 is off by 2^-4 of itself at most, or where it is subnormal by 2^-10 of its tile's scale:
    together less than 2^-4 of the norm. A vector is sent unchanged, and what a rank has made itself is not rounded."""

    def work(world, how):
        plan = plan_of(FP32, None, CONFIG, sharding=Sharding(world.rank, world.size, **LEVELS[2], **how))
        engine = engine_of(plan, backend=HostBackend(world=world))
        engine.micro_step(rank_batch(Run(), 1, 0, world.rank))
        gradients = {row.name: engine.gradient(row.name) for row in plan.rows}
        return engine.update(1, 1e-2), gradients

    plain = run_ranks(3, lambda world: work(world, {"all_to_all": True}))
    compressed = run_ranks(3, lambda world: work(world, COMPRESSED))
    assert all(result.sent_error is None for result, _ in plain)
    assert all(0.005 < result.sent_error < 2**-4 for result, _ in compressed)
    assert len({result.sent_error for result, _ in compressed}) == 3
    for name, gradient in plain[0][1].items():
        off = np.linalg.norm(compressed[0][1][name] - gradient) / np.linalg.norm(gradient)
        assert off < 2**-4 and (off == 0) == (gradient.ndim == 1), f"{name}: {off}"


@pytest.mark.slow
@pytest.mark.sample("sweep")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "fp8", "exchanged"])
def test_sums_over_micro_steps_depend_only_on_when_ranks_add_theirs(name, size):
    """Levels 0 and 1 add over ranks once a step, 2 and 3 in every micro-step."""
    found = [ranks(replace(RUNS[name], level=level, micro_steps=3), size) for level in LEVELS]
    assert same(found[0], found[1]) and same(found[2], found[3])
    losses = [[result.loss for result in results] for results, _ in found]
    assert np.allclose(losses[0], losses[2], rtol=1e-2)


@SOME_LEVELS
def test_ranks_train_as_one_that_has_all_their_batches(level):
    """In f64: the sums have another order, and nothing else is different."""
    run = Run(FP64, level, steps=3)
    results, values = ranks(run, 2)
    one = engine_of(plan_of(FP64, None, CONFIG, batch_size=4))
    for step, result in enumerate(results, 1):
        one.micro_step(whole_batch(run, step, 0))
        expected = one.update(step, 1e-2)
        assert np.allclose((result.loss, result.norm), (expected.loss, expected.norm), rtol=1e-12)
        assert result.num_tokens == expected.num_tokens
    for value, row in zip(values[1:], one.plan.rows, strict=True):
        np.testing.assert_allclose(value, one.parameter(row.name), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(level):
    def work(world):
        plan = plan_of(BF16, None, CONFIG, sharding=Sharding(world.rank, world.size, **LEVELS[level]))
        engine = engine_of(plan, backend=HostBackend(world=world))
        before = [engine.parameter(row.name) for row in plan.rows]
        engine.micro_step(rank_batch(Run(), 1, 0, world.rank))
        if world.rank == 1:
            engine._fill(engine._cells.loss, np.nan)
        result = engine.update(1, 1e-2)
        return result.applied, all(
            np.array_equal(a, engine.parameter(row.name)) for a, row in zip(before, plan.rows, strict=True)
        )

    assert run_ranks(2, work) == [(False, True)] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64])
def test_shares_are_whole_tiles_and_about_as_large(size):
    config = replace(CONFIG, num_layers=6, intermediate_size=1920, vocab_size=5000)
    plan = plan_of(BF16, None, config)
    shards = [Shards(plan.rows, size, rank) for rank in range(size)]
    held = [sum(one.count(row.name) * row.shape[-1] for row in plan.rows) for one in shards]
    assert sum(held) == sum(np.prod(row.shape) for row in plan.rows)
    assert max(held) - min(held) <= 128 * 1920, "no more than a tile of the widest row"
    for row in plan.rows:
        bounds = shards[0].bounds[row.name]
        assert bounds[0] == 0 and bounds[-1] == np.prod(row.shape[:-1], dtype=int) and list(bounds) == sorted(bounds)
        assert all(stop % 128 == 0 or stop == bounds[-1] for stop in bounds)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("precision", "memory"),
    [
        ("fp8-e4m3-delayed", Memory()),
        pytest.param("fp8-e4m3-rowwise", Memory(), marks=SLOW),
        ("fp8-head", Memory(("recompute_block",), offload=("residual",), host=("grad", "weight", "master", "m", "v"))),
    ],
)
def test_all_ranks_make_the_same_calls(level, precision, memory):
    """Else one would group collectives that another makes one by one, and NCCL would wait for ever."""

    def calls(rank):
        plan = plan_of(PRECISIONS[precision], memory, CONFIG, sharding=Sharding(rank, 5, **LEVELS[level]))
        return {
            name: [(call.op, call.lane, call.waits) for call in program.calls]
            for name, program in plan.programs.items()
        }

    assert calls(0) == calls(4)


@pytest.mark.sample
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["bf16", "exchanged", "wire", "compressed"])
def test_collectives_that_are_made_as_one_do_not_read_what_the_others_write(name, level):
    run = RUNS[name]
    plan = plan_of(run.precision, None, CONFIG, sharding=Sharding(0, 2, **LEVELS[level], **run.how))
    for program in plan.programs.values():
        calls = program.calls
        for group in together(calls):
            reads = [{storage_name(ref) for ref in calls[index].inputs if ref is not None} for index in group]
            writes = [{storage_name(ref) for ref in calls[index].written} for index in group]
            assert not any(read & written for i, read in enumerate(reads) for written in writes[:i]), program.name


def test_weights_are_gathered_once_in_a_step_beside_its_first_forward_pass():
    plan = plan_of(PRECISIONS["fp8-e4m3-delayed"], None, CONFIG, sharding=Sharding(0, 2, **LEVELS[1]))
    gathered = {name: sum(call.op == "all_gather" for call in program.calls) for name, program in plan.programs.items()}
    whole = gathered["gather"]
    assert whole == gathered["only"] == gathered["first"] == len(plan.rows)
    assert gathered["update"] == 1, "of partial sums of squares"
    assert not any(gathered[name] for name in ("middle", "last", "evaluate", "publish"))
    calls = plan.programs["first"].calls
    before = [index for index, call in enumerate(calls) if call.op == "all_gather" and call.outputs[0].ref.layer == 1]
    reads = [index for index, call in enumerate(calls) if call.lane == "main" and any(w in before for w in call.waits)]
    layer_0 = [index for index, call in enumerate(calls) if call.lane == "main" and call.phase == "forward"]
    assert max(before) < min(reads) and sum(max(before) < index < min(reads) for index in layer_0) >= 8


def observed(level, precision, **about):
    """Errors of copies by name, as each of two ranks finds them, or one alone (None)."""

    def work(world):
        sharding = Sharding() if level is None else Sharding(world.rank, world.size, **LEVELS[level])
        plan = plan_of(precision, None, CONFIG, sharding=sharding, observe=True, **about)
        engine = engine_of(plan, backend=HostBackend(world=world))
        return dict(zip(plan.observed, engine.observe(rank_batch(Run(), 1, 0, world.rank)).tolist(), strict=True))

    return run_ranks(1 if level is None else 2, work)


@pytest.mark.parametrize("level", [3, *(pytest.param(level, marks=SLOW) for level in (0, 1, 2))])
@pytest.mark.parametrize("master", ["fp32", pytest.param("bf16", marks=SLOW)])
def test_errors_of_copies_are_measured_at_every_level(level, master):
    """Of a rank's own share of the weights; those of activations are the same whatever it holds."""
    for found in observed(level, replace(PRECISIONS["fp8-head"], master=master)):
        largest, power, noise, *_, count = found["layers.0.mlp.up.weight@e4m3"]
        assert found["0.mlp.act@e4m3"][5] == 2 * 16 * 320 and 0 < count <= 640 * 64
        assert largest > 0 and 0 < noise < power / 500


def test_errors_of_copies_of_frozen_weights_are_those_of_the_whole():
    """No rank has a share of a weight that is not trained."""
    name = "layers.0.mlp.up.weight"
    part = PartOfModel(name, frozenset({name}))
    (whole,), ranks = (observed(level, PRECISIONS["fp8-head"], adapters=part) for level in (None, 1))
    assert [found[f"{name}@e4m3"] for found in ranks] == [whole[f"{name}@e4m3"]] * 2
