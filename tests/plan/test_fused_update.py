"""Weights that are updated in backward: no gradient is kept, and what needs one is refused."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import BF16, batch, fused_result_of, parameters, plan_of, tiny

from llmq.backends.host import HostBackend
from llmq.engine.engine import Engine
from llmq.model.optimizer import Hyperparameters
from llmq.plan.memory import Memory

HYPER = Hyperparameters(grad_clip=0.5, clips_by_last=True)
CONFIG = tiny(vocab_size=300, intermediate_size=176)


def both(precision, memory=None, config=CONFIG, hyper=HYPER, **more):
    memory = memory or Memory()
    return [plan_of(precision, replace(memory, fused=fused), config, hyper, **more) for fused in (False, True)]


def test_without_a_clip_no_norm_is_needed():
    one, other = (fused_result_of(plan) for plan in both(BF16, hyper=Hyperparameters(grad_clip=0.0)))
    assert one == other


def test_no_gradient_outlives_its_layer():
    """What is alive at a time grows by nothing with the number of layers but activations."""
    config = replace(CONFIG, hidden_size=48, intermediate_size=512)
    kept = {}
    for layers in (2, 6):
        plain, fused = both(BF16, Memory(("recompute_block",)), replace(config, num_layers=layers))
        assert plain.table()["Gradients"] and not fused.table()["Gradients"]
        kept[layers] = fused.table()["Activations"], plain.table()["Activations"] + plain.table()["Gradients"]
    gradients = sum(2 * np.prod(row.shape) for row in fused.rows if row.layer == 1)
    assert kept[6][0] - kept[2][0] < gradients < (kept[6][1] - kept[2][1]) / 3


@pytest.mark.parametrize("memory", [None, Memory(host=("m", "v"), piece_bytes=1)], ids=["device", "host"])
def test_a_row_whose_gradient_is_not_finite_is_left_alone(memory):
    """The others are updated, and the step counts as one that was not applied."""
    plan, broken = both(BF16, memory)[1], "layers.1.mlp.down.weight"

    def breaking(name, op):
        def call(d_weight, *arguments, **numbers):
            op(d_weight, *arguments, **numbers)
            if d_weight.name == f"gradient/{broken}":
                d_weight.tensors[0].array[0, 0] = np.inf

        return call if name == "linear_wgrad" else op

    engine = Engine(plan, HostBackend(), wrap=breaking)
    engine.load(parameters(plan))
    before = {name: array.tobytes() for name, array in engine.state()}
    engine.start_step(1, 1e-2)
    engine.micro_step(batch(1))
    assert not engine.update(1, 1e-2).applied
    changed = {name for name, array in engine.state() if array.tobytes() != before[name]}
    rows = {name for row in plan.moments if row != broken for name in (f"master:{row}", f"m:{row}", f"v:{row}")}
    assert changed - {"cell:norm"} == rows
