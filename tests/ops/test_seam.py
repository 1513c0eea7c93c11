"""The contract: every op has a record, which names what exists."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

import pytest

from llmq.operands import Output, Tensor
from llmq.ops import seam
from llmq.ops.reference import OPS
from llmq.tensor import Form, Ref

from .cases import OWN_SCALES

FUNCTION = Callable[..., tuple[Any, Any]]


NUMBERS = (int, float, bool, str, int | None, float | None, tuple[int, ...], FUNCTION)


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_typed_and_described_and_its_record_names_what_exists(op):
    found, hints = seam.record(op), get_type_hints(OPS[op])
    assert found.outputs and all(hints[name] is Output for name in found.outputs)
    assert found.inputs and all(hints[name] in (Tensor, Tensor | None) for name in found.inputs)
    assert all(hints[name] in NUMBERS for name in found.numbers)
    assert "<-" in (inspect.getdoc(OPS[op]) or "")
    assert found.name == op and found is vars(OPS[op])["record"]
    assert (found.outputs, found.inputs, found.numbers) == seam.parse(OPS[op])
    assert found.shares.keys() | found.cast_from.keys() <= set(found.outputs)
    assert set(found.shares.values()) <= set(found.inputs)
    assert set(found.cast_from.values()) <= {*found.inputs, *found.outputs}
    assert found.forms | found.rows <= set(found.outputs)
    assert found.lane in seam.LANES and found.family
    assert bool(found.products) == (found.takes_columns or found.family.startswith("attention"))
    assert found.takes_columns or not found.is_linear


def test_the_facts_that_others_look_up():
    """Of one op each: a table that is lost would cost memory, time or a site, and no bit."""
    assert seam.record("rmsnorm_backward").shares == {"d_out": "d_res"}
    assert (seam.record("copy_to_host").lane, seam.record("copy_to_device").lane) == ("to_host", "to_device")
    assert {op for op in OPS if seam.record(op).is_linear} == {"linear_forward", "linear_dgrad", "linear_wgrad"}
    assert {op: seam.record(op).cast_from for op in OPS if seam.record(op).cast_from} == {
        "adamw": {"weight": "new_master"},
        "cast": {"out": "x"},
        "quantize": {"out": "x"},
        "sgd": {"weight": "new_master"},
    }


def test_which_forms_an_op_writes_in_its_own_pass():
    row, col = (Form("e4m3", layout, "delayed") for layout in ("row", "col"))
    norm, loss, map_ = seam.record("rmsnorm_forward"), seam.record("cross_entropy"), seam.record("linear_forward")
    assert norm.writes("x", row) and norm.writes("x", col) and not norm.writes("rstd", row)
    assert loss.writes("d_logits", row) and not loss.writes("d_logits", col) and not loss.writes("loss", row)
    assert map_.writes("y", None) and not map_.writes("y", row)
    for scaling in ("current", *OWN_SCALES):
        assert not norm.writes("x", Form("e4m3", "row", scaling))


def arguments(op, reads, writes=None, added=(), **numbers):
    """The arguments of a call in bf16 from shapes."""
    refs = {name: Ref(name, "activation", shape, "bf16") for name, shape in reads.items()}
    written = {name: (Ref(name, "activation", shape, "bf16"),) for name, shape in (writes or {}).items()}
    return seam.Arguments(refs, written, numbers, frozenset(added))


def test_work_of_calls_by_hand():
    linear = arguments("linear_wgrad", {"d_y": (2, 8, 48), "x": (2, 8, 32)}, {"d_weight": (48, 32)}, ["d_weight"])
    wgrad = seam.record("linear_wgrad")
    assert (wgrad.rate_dtype(linear), wgrad.flops(linear)) == ("bf16", 2 * 16 * 48 * 32)
    assert wgrad.num_bytes(linear) == 2 * (16 * 48 + 16 * 32 + 2 * 48 * 32)
    once = arguments("rmsnorm_backward", {"d_x": (2, 8, 32)})
    twice = replace(once, reads={**once.reads, "d_res": once.reads["d_x"]})
    assert seam.record("rmsnorm_backward").num_bytes(twice) == 2 * 16 * 32, "one operand is read once"
    assert (seam.record("cast").flops(once), seam.record("cast").rate_dtype(once)) == (0, "fp32")
