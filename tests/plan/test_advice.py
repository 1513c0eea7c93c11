"""A plan without room: what is missing, and the mildest option that helps, with the scratch that it needs itself."""

import pytest
from tiny_engines import BF16, plan_of, tiny

from llmq.errors import MemoryLimitError
from llmq.plan.advice import refuse_if_too_large

SCRATCH = 1 << 20


def scratch_bytes(step):
    """As attention's workspaces: the more sequences, the more."""
    return SCRATCH * step.inputs[0].ref.shape[0] if step.op == "attention_backward" else 0


def test_a_plan_that_fits_is_let_through():
    plan = plan_of(BF16, config=tiny())
    refuse_if_too_large(plan, plan.total_bytes)
    with pytest.raises(MemoryLimitError, match="missing"):
        refuse_if_too_large(plan, plan.total_bytes - 1)


def test_advice_counts_the_scratch_of_the_smaller_run():
    """Every remedy but fewer sequences leaves the workspace of 8 MiB as it is."""
    plan = plan_of(BF16, config=tiny(), batch_size=8, scratch_bytes=scratch_bytes)
    assert plan.total_bytes > 8 * SCRATCH
    with pytest.raises(MemoryLimitError, match="missing: --batch-size 1"):
        refuse_if_too_large(plan, 8 * SCRATCH, scratch_bytes)
    with pytest.raises(MemoryLimitError, match="no memory option"):
        refuse_if_too_large(plan, SCRATCH, scratch_bytes)
