"""What the options on sharing become, and the table of levels: estimates from few layers, and what is sent by hand."""

from dataclasses import replace

import pytest
from tiny_engines import BF16, FP8, FP32, spec_of, tiny

from llmq.backends.planned import PlannedBackend
from llmq.comm.world import Copying
from llmq.errors import UsageError
from llmq.options.maths import ShardingOptions
from llmq.plan.levels import LEVELS, at_level, copying, name_of, needs_by_level, refuse_copies, sent_bytes
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.stores.sharding import Sharding

LAYERS = 8
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


scratch = PlannedBackend().scratch_bytes


def plan_at(level, precision=BF16, size=4, **more):
    """A plan of one of some ranks."""
    config = tiny(**{"num_layers": LAYERS, **SHAPE, **more.pop("shape", {})})
    spec = spec_of(precision, config=config, sharding=at_level(Sharding(0, size), level), **more)
    return make_plan(spec, scratch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "more"),
    [
        (BF16, {}),
        (replace(BF16, master="fp32", grad="fp32"), {"memory": Memory(("recompute_block",))}),
        (FP8["e4m3", "delayed"], {}),
        (BF16, {"memory": Memory(("recompute_block",), host=("grad", "weight", "master"))}),
    ],
)
def test_an_estimate_is_the_plan(precision, more):
    found = needs_by_level(plan_at(1, precision, **more), scratch, micro_steps=3)
    assert [needs.level for needs in found] == ["0", "1", "2", "3"]
    assert [needs.is_planned for needs in found] == [False, True, False, False]
    for level, needs in zip(LEVELS, found, strict=True):
        plan = plan_at(level, precision, **more)
        assert needs.total_bytes == pytest.approx(plan.total_bytes, rel=0.02)
        assert needs.sent_bytes == pytest.approx(sent_bytes(plan, 3), rel=0.02)
        assert needs.host_bytes == pytest.approx(plan.host_bytes, rel=0.02)
        for name, size in plan.table().items():
            assert needs.table[name] == pytest.approx(size, rel=0.05, abs=2e4), name


def test_a_model_of_few_layers_is_planned():
    found = needs_by_level(plan_at(3, shape={"num_layers": 2}), scratch, micro_steps=1)
    assert all(needs.is_planned for needs in found)
    totals = [needs.total_bytes for needs in found]
    assert totals[3] < totals[1] < totals[0]


def test_what_is_between_two_levels_is_a_row_of_its_own():
    plan = plan_at(1, shape={"num_layers": 1})
    between = replace(plan.spec.sharding, weights=True)
    found = needs_by_level(make_plan(replace(plan.spec, sharding=between), scratch), scratch, micro_steps=1)
    assert [needs.level for needs in found] == ["0", "1", "1 with weights", "2", "3"]
    assert name_of(at_level(between, 2)) == "2"


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_bytes_sent_by_hand(micro_steps):
    """A model of one layer on four ranks, of which each sends three quarters of everything that travels."""
    shape = {"num_layers": 1, "qkv_bias": False}
    plans = [plan_at(level, FP32, shape=shape) for level in LEVELS]
    numbers = sum(row.shape[0] * (row.shape[1] if row.shape[1:] else 1) for row in plans[0].rows)
    reduce = gather = 4 * numbers * 3 // 4
    tied = 4 * plans[0].rows[0].shape[0] * plans[0].rows[0].shape[1] * 3 // 4  # fetched for the head as well
    # level 3: embedding, layer and head forward, head and layer again backward
    layer = gather - tied - 4 * 256 * 3 // 4  # without the embedding and the last norm
    fetched = gather + tied + layer
    expected = [reduce + gather, reduce + gather, micro_steps * reduce + gather, micro_steps * (reduce + fetched)]
    for plan, bytes_sent in zip(plans, expected, strict=True):
        few = 2000  # the norm's partial sums, loss and tokens
        assert bytes_sent <= sent_bytes(plan, micro_steps) <= bytes_sent + few


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Copying(None, False)),  # nothing is exchanged, so nothing is timed
        ({"all_to_all_reduce": True}, Copying(None, None)),
        ({"gradient_compression": "e4m3", "memcpy_send_recv": False}, Copying(None, False)),
        ({"gradient_compression": "e4m3", "memcpy_send_recv": True}, Copying(None, True)),
        ({"memcpy_all_gather": True}, Copying(True, False)),
        ({"memcpy_all_gather": False, "all_to_all_reduce": True}, Copying(False, None)),
    ],
)
def test_copies_are_as_given_or_as_timed(given, expected):
    assert copying(ShardingOptions(**given)) == expected


def test_a_cpu_is_asked_for_no_copies():
    refuse_copies(ShardingOptions(memcpy_all_gather=False), "cpu")
    refuse_copies(ShardingOptions(memcpy_all_gather=True), "cuda")
    with pytest.raises(UsageError, match="--memcpy-all-gather: copy engines are parts of GPUs"):
        refuse_copies(ShardingOptions(memcpy_all_gather=True), "cpu")
