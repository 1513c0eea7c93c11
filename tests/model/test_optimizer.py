"""The update around AdamW: options to constants, one stream of random bits per parameter, scales that keep up."""

import numpy as np
import pytest
from tiny_engines import BF16, FP8, FP32, batch, engine_of, plan_of, tiny

from llmq.model import optimizer
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import parameter_rows
from llmq.model.presets import preset
from llmq.operands import Output, Tensor
from llmq.ops import reference
from llmq.optimizers.adamw import AdamW
from llmq.options.maths import OptimizerOptions
from llmq.plan.plan import SCALE_STRIDE
from llmq.tensor import num_norm_tiles


def test_every_option_becomes_its_constant():
    values = {"beta_1": 0.5, "beta_2": 0.75, "weight_decay": 0.25}
    resolved = optimizer.resolve(OptimizerOptions(**values, adam_epsilon=0.0625, grad_clip=2.0))
    assert resolved == Hyperparameters(AdamW(**values, epsilon=0.0625), grad_clip=2.0)


@pytest.mark.parametrize("name", ["Qwen2.5-72B", "llama3_405b"])
def test_no_two_parameters_share_random_bits(name):
    rows = parameter_rows(preset(name))
    assert len({optimizer.stream(row) for row in rows}) == len(rows)


def test_each_parameter_is_rounded_with_its_own_stream_and_the_run_s_seed():
    plan = plan_of(BF16, seed=77)
    calls = [call for call in plan.programs["update"].calls if call.op == "adamw"]
    found = {call.inputs[0].name: (call.numbers["stream"], call.numbers["seed"]) for call in calls}
    assert found == {row.name: (optimizer.stream(row), 77) for row in plan.rows}


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_the_norm_of_a_step_is_that_of_any_number_of_ranks(precision):
    """Each holds the gradients of some tiles of 128 rows; their sums of squares, in the order of the parameters."""
    engine = engine_of(plan_of(precision, config=tiny(vocab_size=300, intermediate_size=200)))
    engine.micro_step(batch())
    grads = [engine.gradient(row.name) for row in engine.plan.rows]
    done = engine.update(1, 1e-3)
    for ranks in (1, 2, 3, 4, 8):
        found = []
        for grad in grads:
            rows, tiles = grad.reshape(-1, grad.shape[-1]), num_norm_tiles(grad.shape)
            each = 128 * -(-tiles // ranks)
            for first in range(0, len(rows), each):
                shard = Tensor("shard", rows[first : first + each], rows[first : first + each].shape)
                sums = np.empty(num_norm_tiles(shard.shape), np.float32)
                reference.OPS["sum_squares"](
                    Output("sums", sums.shape, "fp32", (Tensor("sums", sums, sums.shape),)), shard
                )
                found.append(sums)
        assert len(np.concatenate(found)) > len(grads)
        total = np.float32(np.sqrt(np.sum(np.concatenate(found), dtype=np.float64)))
        assert done.norm == total / np.float32(done.num_tokens)


@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
def test_scales_follow_what_the_step_has_seen(gradient):
    """The amax of a step enters the history, whose largest decides the scale: once per step, for every cell."""
    engine = engine_of(plan_of(FP8[gradient, "delayed"]))
    limits = np.array(engine.plan.limits, np.float32)[::SCALE_STRIDE]

    def cells():
        """The scale vectors, where the cells are."""
        return {name: array[..., ::SCALE_STRIDE] for name, array in engine.state() if name.startswith("scale:")}

    names = {row.name for row in engine.plan.rows}
    of_weights = np.array([cell.split("@")[0] in names for cell in engine.plan.scales])
    assert of_weights.any() and not of_weights.all()
    for step in range(1, 4):
        for micro_step in range(2):
            engine.micro_step(batch(10 * step + micro_step), first=micro_step == 0)
        before = cells()
        assert ((before["scale:amax"] > 0) | (of_weights & (step == 1))).all()  # weights are seen as they are written
        assert engine.update(step, 1e-2).applied
        after = cells()
        history = np.concatenate([before["scale:amax"][None], before["scale:history"][:-1]])
        assert np.array_equal(after["scale:history"], history)
        assert np.allclose(after["scale:scales"], history.max(axis=0) / limits, rtol=1e-6, atol=0)
        assert not after["scale:amax"][~of_weights].any(), "the next step starts from nothing"
