"""Runs by SGD: options, checkpoints, and what does not go with it."""

import pytest

import llmq
from llmq.errors import UsageError

SGD = {"optimizer": "sgd", "learning_rate": 0.1}
MOMENTUM = {**SGD, "momentum": 0.9, "nesterov": True, "opt_m_dtype": "bf16", "offload_opt_m": True}


def test_the_table_of_memory_names_momentum_if_there_is_any(given):
    for options, is_there in ((SGD, False), (MOMENTUM, True)):
        llmq.train(**{**given, **options, "dry_run": True})
        table = given["console"].getvalue().rsplit("[Allocator State]")[-1]
        assert ("Momentum" in table) == is_there and "Adam" not in table


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ({}, "--optimizer: sgd with momentum in the checkpoint, not set now"),
        (SGD, "--optimizer: sgd with momentum in the checkpoint, sgd without momentum now"),
    ],
)
def test_a_run_resumes_by_the_rule_that_it_began_with(given, then, says):
    llmq.train(**{**given, **SGD, "momentum": 0.9, "steps": 2})
    with pytest.raises(UsageError, match=says):
        llmq.train(**{**given, **then, "steps": 4, "continue": True})
