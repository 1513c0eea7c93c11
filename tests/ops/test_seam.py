"""The contract: every op parses, and the tables name what exists."""

import inspect
from typing import get_type_hints

import pytest

from llmq.ops import seam
from llmq.ops.reference import OPS
from llmq.tensor import Output, Tensor

NUMBERS = (int, float, int | None)


@pytest.mark.parametrize("op", OPS)
def test_every_op_parses_and_is_typed_and_described(op):
    contract = seam.signature(op)
    hints = get_type_hints(OPS[op])
    assert contract.outputs
    assert contract.inputs
    assert all(hints[name] is Output for name in contract.outputs)
    assert all(hints[name] in (Tensor, Tensor | None) for name in contract.inputs)
    assert all(hints[name] in NUMBERS for name in contract.numbers)
    assert "<-" in (inspect.getdoc(OPS[op]) or "")


def test_an_unknown_op_is_a_key_error():
    with pytest.raises(KeyError):
        seam.signature("softmax")


def test_shared_memory_is_allowed_between_an_output_and_an_input_that_exist():
    for op, pairs in seam.MAY_SHARE.items():
        contract = seam.signature(op)
        assert pairs
        assert set(pairs) <= set(contract.outputs)
        assert set(pairs.values()) <= set(contract.inputs)


def test_forms_are_written_by_outputs_that_exist():
    for op, outputs in seam.WRITES_FORMS.items():
        assert outputs
        assert outputs <= set(seam.signature(op).outputs)
