"""A GPU that is not here: plans know its scratch, and nothing runs on it."""

import pytest
from tiny_engines import BF16, FP8, plan_of, tiny

from llmq.backends import open_backend
from llmq.backends.planned import planned_scratch
from llmq.engine import Engine
from llmq.plan.memory import Memory
from llmq.presets import preset

GIB = 2**30


def workspace(config, deterministic=True, **shape):
    """Workspace of a bf16 plan for a GPU."""
    backend = open_backend("planned", deterministic=deterministic)
    return plan_of(BF16, Memory((), 8), config, **shape, scratch_bytes=backend.scratch_bytes).table()["Workspace"]


def test_the_workspace_is_about_what_was_measured():
    """On an H200 with cuDNN 9.19: 252 MiB at 8x1024 of the 0.5B model, 1.0 GiB at 32x1024."""
    config = preset("Qwen2.5-0.5B")
    assert workspace(config, batch_size=8, seq_len=1024) == pytest.approx(252 * 2**20, rel=0.15)
    assert workspace(config, batch_size=32, seq_len=1024) == pytest.approx(GIB, rel=0.15)
    assert workspace(config, False, batch_size=32, seq_len=1024) < 0.3 * GIB


@pytest.mark.parametrize("precision", [BF16, *FP8.values()])
def test_every_step_has_a_size(precision):
    for program in plan_of(precision, config=tiny(hidden_size=64, head_dim=16)).programs.values():
        assert all(planned_scratch(step, True) >= 0 for step in program.steps)


def test_nothing_runs_on_it():
    backend = open_backend("planned")
    with pytest.raises(NotImplementedError, match="planned"):
        Engine(plan_of(BF16), backend)
