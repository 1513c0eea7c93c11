"""Join: SwiGLU's gradient and what the adapters of gate and up make of it are one call, if nothing is between."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hand_made import recorded, weight

from llmq.ops.record import Call, Result
from llmq.plan.passes.join import join
from llmq.tensor import Form, Ref

ROWS = Form("e4m3", "row", "delayed")


def slot(name: str, width: int) -> Ref:
    return Ref(name, "activation", (2, 3, width), "bf16")


D_ACT, GATE_UP, D_GATE_UP, LOW, D_LOW = (
    slot("d_act", 8),
    slot("gate_up", 16),
    slot("d_gate_up", 16),
    *(slot(name, 32) for name in ("low", "d_low")),
)


def wanted(call: Call, *forms: Form | None) -> Call:
    return replace(call, outputs=tuple(result and replace(result, forms=forms) for result in call.outputs))


def half(n: int, alpha: float = 2.0, rank: int = 16) -> Call:
    """Both gradients of the adapter of gate (0) or up (1)."""
    name, low = ("gate", "up")[n], (16 * n, rank)
    up = Ref(f"b_{name}", "weight", (8, rank), "bf16")
    d_up = Ref(f"b_{name}", "grad", (8, rank), "fp32")
    read = (D_GATE_UP.columns(8 * n, 8), LOW.columns(*low), up)
    return wanted(
        replace(recorded("low_rank_backward", (D_LOW.columns(*low), d_up), read), numbers={"alpha": alpha}), None
    )


MAKER = recorded("swiglu_backward", (D_GATE_UP,), (D_ACT, GATE_UP))
DGRAD = wanted(recorded("linear_dgrad", (slot("d_x", 8),), (D_GATE_UP.as_form(ROWS), weight("up"), None)), None)
BF16_DGRAD = wanted(recorded("linear_dgrad", (slot("d_x", 8),), (D_GATE_UP, weight("up"), None)), None)


def ops(calls: Sequence[Call]) -> list[str]:
    return [call.op for call in calls]


def test_the_value_is_left_out_where_only_the_adapters_read_it():
    made = join([wanted(MAKER, None, ROWS), half(0, 2.0), half(1, 3.0), DGRAD])
    assert ops(made) == ["swiglu_low_rank_backward", "linear_dgrad"]
    call = made[0]
    assert [result.ref for result in call.outputs] == [
        D_GATE_UP,
        D_LOW.columns(0, 16),
        D_LOW.columns(16, 16),
        Ref("b_gate", "grad", (8, 16), "fp32"),
        Ref("b_up", "grad", (8, 16), "fp32"),
    ]
    assert call.outputs[0].forms == (ROWS,)
    assert call.inputs == (
        D_ACT,
        GATE_UP,
        LOW.columns(0, 16),
        LOW.columns(16, 16),
        half(0).inputs[2],
        half(1).inputs[2],
    )
    assert call.numbers == {"gate_alpha": 2.0, "up_alpha": 3.0}
    other, _ = join([wanted(replace(MAKER, numbers={"activation": "gelu"}), ROWS), half(0, 2.0), half(1, 3.0), DGRAD])
    assert other == replace(call, numbers={**call.numbers, "activation": "gelu"})


def test_the_order_of_the_halves_does_not_matter():
    made = join([wanted(MAKER, None), half(1, 3.0), half(0, 2.0), BF16_DGRAD])
    assert ops(made) == ["swiglu_low_rank_backward", "linear_dgrad"]
    assert made[0].numbers == {"gate_alpha": 2.0, "up_alpha": 3.0} and made[0].outputs[0].forms == (None,)


@pytest.mark.parametrize("form", [replace(ROWS, layout="col"), replace(ROWS, scaling="tilewise")], ids=str)
def test_other_forms_are_made_as_they_were(form):
    calls = [wanted(MAKER, None, form), half(0), half(1), DGRAD]
    assert join(calls) == calls


def test_both_halves_are_needed_and_one_rank():
    for calls in ([half(0)], [half(0), replace(half(0))], [half(0), half(1, rank=8)]):
        calls = [wanted(MAKER, None, ROWS), *calls, DGRAD]
        assert join(calls) == calls


@pytest.mark.parametrize(
    "between",
    [
        recorded("linear_forward", (LOW,), (slot("x", 8), weight("a"), None, None)),
        recorded("linear_forward", (slot("x", 8),), (D_LOW, weight("a"), None, None)),
        recorded("linear_forward", (D_LOW,), (slot("x", 8), weight("a"), None, None)),
    ],
    ids=["writes what is read", "reads what is written", "writes what is written"],
)
def test_nothing_moves_across_what_it_depends_on(between):
    calls = [wanted(MAKER, None, ROWS), half(0), wanted(between, None), half(1), DGRAD]
    assert join(calls) == calls
    apart = wanted(recorded("linear_forward", (slot("y", 8),), (slot("x", 8), weight("a"), None, None)), None)
    moved = join([wanted(MAKER, None, ROWS), half(0), apart, half(1), DGRAD])
    assert ops(moved) == ["swiglu_low_rank_backward", "linear_forward", "linear_dgrad"]


def test_sums_keep_what_they_are_added_to():
    adds = [
        replace(call, outputs=(call.outputs[0], replace(call.outputs[1], accumulate=True)))
        for call in (half(0), half(1))
    ]
    (call,) = join([wanted(MAKER, None), *adds])
    assert [isinstance(x, Result) and x.accumulate for x in call.outputs] == [False, False, False, True, True]


def test_an_adapter_of_some_tokens_keeps_its_own_calls():
    def some(ref: Ref) -> Ref:
        if ref.space != "activation":
            return ref
        _, columns = ref.window
        return ref.entire.chunk(0, 2).columns(columns.start, columns.stop - columns.start)

    own = [replace(call, inputs=tuple(map(some, call.inputs))) for call in (half(0), half(1))]
    calls = [wanted(MAKER, None, ROWS), *own, DGRAD]
    assert join(calls) == calls
