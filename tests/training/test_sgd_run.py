"""Runs by SGD: options, checkpoints, and what does not go with it."""

import re

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
    ("options", "says"),
    [
        ({"optimizer": "sgd", "beta_1": 0.9}, "--beta-1 0.9 is for --optimizer adamw, but it is sgd"),
        (
            {"momentum": 0.9, "nesterov": True},
            "--momentum 0.9 is for --optimizer sgd, .*--nesterov is for --optimizer sgd",
        ),
        ({**SGD, "nesterov": True}, "--nesterov looks ahead along the momentum, which is 0: add --momentum 0.9"),
        ({**MOMENTUM, "opt_v_dtype": "bf16"}, "--opt-v-dtype bf16 is of no use, as the optimizer keeps m .Momentum."),
        ({**SGD, "opt_m_dtype": "int8"}, "--opt-m-dtype int8 is of no use, .* keeps nothing but the master weights"),
        ({**MOMENTUM, "offload_opt_v": True}, "--offload-opt-v frees no memory, as the optimizer keeps m .Momentum."),
        ({**SGD, "offload_opt_m": True}, "--offload-opt-m frees no memory, .* keeps nothing but the master weights"),
        ({**SGD, "offload_optimizer": True}, "--offload-optimizer frees no memory, as the optimizer keeps nothing"),
    ],
)
def test_what_sgd_has_no_use_for_is_refused(given, options, says):
    with pytest.raises(UsageError) as error:
        llmq.train(**{**given, **options, "dry_run": True})
    assert re.search(says, str(error.value), re.DOTALL)


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
