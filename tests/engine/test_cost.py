"""Costs by plans of a few layers, beside those of the whole plan."""

from dataclasses import replace

import pytest
from tiny_engines import BF16, FP8, spec_of, tiny

from llmq.backends.opening import open_backend
from llmq.engine.cost import Costs
from llmq.engine.predict import step_seconds, sustained
from llmq.hardware import cards
from llmq.plan.levels import at_level
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.stores.sharding import Sharding

BLOCK = {"flags": ("recompute_block",), "offload": ("residual",)}
MEMORIES = {
    "kept": Memory(),
    "tiles": Memory(("recompute_ffn",), seq_tiles=2, head_chunks=2),
    "block": Memory(**BLOCK),
    "moments": Memory(host=("m", "v")),
    "in place": Memory(host=("m", "v"), zero_copy=True),
    "gradients": Memory(**BLOCK, host=("m", "v", "grad")),
    "streamed": Memory(**BLOCK, host=("master", "m", "v", "grad", "weight")),
}
NONE = replace(BF16, master="none")
SCRATCH = open_backend("planned", deterministic=True).scratch_bytes
RATES = sustained(cards.named("RTX 4090"))


def wide(layers):
    """Widths at which activations and weights count."""
    return tiny(num_layers=layers, hidden_size=256, head_dim=64, intermediate_size=512, vocab_size=512)


CASES = [
    pytest.param(precision, name, None, id=f"{key}-{name}")
    for key, precision in {"bf16": BF16, "e4m3": FP8["e4m3", "current"], "none": NONE}.items()
    for name in MEMORIES
    if precision is not NONE or name != "streamed"
]
OF_RANKS = [(BF16, name, level) for name in ("gradients", "streamed") for level in range(4)]


@pytest.mark.quick("e4m3-tiles", "none-block")
@pytest.mark.sample("sweep")
@pytest.mark.parametrize(("precision", "name", "level"), CASES + OF_RANKS)
def test_few_layers_say_what_all_take(precision, name, level):
    """Of a run of one rank, and of each of two at a level of sharing."""
    more = {"m": "fp32"} if level is None else {}
    sharding = Sharding() if level is None else at_level(Sharding(0, 2), level)
    sizes = {"batch_size": 4, "seq_len": 256, "sharding": sharding}
    spec = spec_of(replace(precision, **more), MEMORIES[name], wide(14), **sizes)
    about, plan = Costs(SCRATCH, SCRATCH, RATES).of(spec, 4), make_plan(spec, SCRATCH)
    assert about.num_bytes == pytest.approx(plan.total_bytes, rel=0.04)
    assert about.host_bytes == pytest.approx(plan.host_bytes, rel=0.02)
    assert about.seconds == pytest.approx(step_seconds(plan, RATES, 4), rel=0.02)


@pytest.mark.slow
def test_a_plan_of_the_whole_is_counted_from_then_on():
    spec, costs = spec_of(BF16, MEMORIES["streamed"], wide(10)), Costs(SCRATCH, SCRATCH, RATES)
    plan = costs.plan(spec)
    cost = costs.of(spec, 1)
    assert (cost.num_bytes, cost.host_bytes) == (plan.total_bytes, plan.host_bytes)
    assert costs.plan(spec) is plan
