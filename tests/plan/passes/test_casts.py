"""Casts: after a call come the copies that it cannot write, each with the scale that it needs."""

from dataclasses import replace

from hand_made import COL, ROW, formed, slot, wanting, weight

from llmq.plan.passes.casts import casts
from llmq.tensor import COLSUM, Form, Origin, Ref

X, ATT, RES = slot("0/0.x", 0), slot("0/0.att", 0), slot("res", 0)
LIMIT = {"limit": 448.0}


def scaled(scaling, dtype="e4m3"):
    """Row and column form of a scaling."""
    return Form(dtype, "row", scaling), Form(dtype, "col", scaling)


def of_slot(name, dtype="e4m3"):
    """The slot of a current scale."""
    return Ref(f"{name}@scale/{dtype}", "activation", (1,), "fp32", 0)


def norm(*forms):
    return formed("rmsnorm_forward", (wanting(X, *forms), wanting(slot("rstd"), None)), (RES, weight("norm")))


def made(op, outputs, source, phase="forward", **numbers):
    return replace(formed(op, outputs, (source,), phase), numbers=numbers)


def test_what_producers_write_themselves_is_left_to_them():
    calls = [norm(None, COL, ROW), formed("swiglu_forward", (wanting(X, COL, ROW, COLSUM),), (RES,)), norm()]
    assert casts(calls) == calls


def test_column_sums_of_what_a_norm_writes_are_made_of_its_value():
    assert casts([norm(COL, ROW, COLSUM)]) == [norm(None, COL, ROW), made("cast", (wanting(X, COLSUM),), X)]


def test_a_producer_that_writes_no_fp8_writes_the_value_of_which_copies_are_cast():
    attention = ((slot("lse"),), (X,))
    (call,) = [formed("attention_forward", (wanting(ATT, COL, ROW), *attention[0]), attention[1])]
    assert casts([call]) == [
        formed("attention_forward", (wanting(ATT, None), *attention[0]), attention[1]),
        made("cast", (wanting(ATT, COL, ROW),), ATT),
    ]


def test_a_current_scale_is_measured_before_the_cast_and_once():
    row, col = scaled("current")
    assert casts([norm(col, row)]) == [
        norm(None),
        made("amax_scale", (wanting(of_slot("0/0.x"), None),), X, **LIMIT),
        made("cast", (wanting(X, col, row),), X),
    ]


def test_each_format_has_a_scale_of_its_own_and_one_cast_makes_all_copies():
    (row, _), (wide, _) = scaled("current"), scaled("current", "e5m2")
    assert casts([norm(row, wide)]) == [
        norm(None),
        made("amax_scale", (wanting(of_slot("0/0.x"), None),), X, **LIMIT),
        made("amax_scale", (wanting(of_slot("0/0.x", "e5m2"), None),), X, limit=57344.0),
        made("cast", (wanting(X, row, wide),), X),
    ]


def test_copies_that_own_their_scales_are_quantized():
    row, col = scaled("blockwise")
    assert casts([norm(None, col, row)]) == [norm(None), made("quantize", (wanting(X, col, row), None), X, **LIMIT)]


def test_quantize_measures_the_current_scale_of_another_copy_in_passing():
    (row, _), (_, col) = scaled("rowwise"), scaled("current")
    assert casts([norm(col, row)]) == [
        norm(None),
        made("quantize", (wanting(X, row), wanting(of_slot("0/0.x"), None)), X, **LIMIT),
        made("cast", (wanting(X, col),), X),
    ]


def test_columns_are_turned_from_the_rows_that_a_producer_writes():
    """As the gradient of the logits: the value itself is not written at all."""
    d_logits, inputs = slot("d.logits"), (slot("logits"), slot("targets"))
    (call,) = [formed("cross_entropy", (wanting(d_logits, COL, ROW), slot("loss")), inputs, "backward")]
    assert casts([call]) == [
        formed("cross_entropy", (wanting(d_logits, ROW), slot("loss")), inputs, "backward"),
        made("cast", (wanting(d_logits, COL),), replace(d_logits, form=ROW), "backward"),
    ]


def test_a_copy_cast_again_reads_the_scale_that_was_measured_in_forward():
    row, col = scaled("current")
    attention = formed("attention_forward", (wanting(ATT, None, row), slot("lse")), (X,))
    again = made("cast", (wanting(replace(ATT, again=True), col),), ATT, "replay")
    assert casts([attention, again]) == [
        formed("attention_forward", (wanting(ATT, None), slot("lse")), (X,)),
        made("amax_scale", (wanting(of_slot("0/0.att"), None),), ATT, **LIMIT),
        made("cast", (wanting(ATT, row),), ATT),
        again,
    ]


def test_a_copy_that_only_backward_reads_has_its_scale_measured_there():
    _, col = scaled("current")
    again = made("cast", (wanting(replace(ATT, again=True), col),), ATT, "replay")
    assert casts([again]) == [made("amax_scale", (wanting(of_slot("0/0.att"), None),), ATT, "replay", **LIMIT), again]


def test_a_value_made_again_is_cast_with_the_scale_of_forward():
    """Its copies have the bits that they had."""
    row, col = scaled("current")
    second = replace(X, again=True)
    forward, replay = norm(row), formed("swiglu_forward", (wanting(second, col),), (RES,), "replay")
    assert casts([forward, replay])[3:] == [
        formed("swiglu_forward", (wanting(second, None),), (RES,), "replay"),
        made("cast", (wanting(second, col),), second, "replay"),
    ]


def test_weights_are_cast_from_their_masters():
    master, (row, col) = Ref("w", "master", (8, 8), "fp32"), scaled("current")
    delayed = made("cast", (wanting(weight("w"), None, COL, ROW),), master, "update")
    assert casts([delayed]) == [delayed]
    cell = Ref("w@e4m3", "scale", (1,), "fp32")
    assert casts([made("cast", (wanting(weight("w"), col, row),), master, "update")]) == [
        made("amax_scale", (wanting(cell, None),), master, "update", **LIMIT),
        made("cast", (wanting(weight("w"), col, row),), master, "update"),
    ]
    row, col = scaled("tilewise")
    quantized = made("quantize", (wanting(weight("w"), col, row), None), master, "update", **LIMIT)
    assert casts([made("cast", (wanting(weight("w"), col, row),), master, "update")]) == [quantized]


def test_the_copies_of_a_weight_are_cast_from_the_master_that_the_step_writes():
    master, m, v = (Ref("w", space, (8, 8), "fp32") for space in ("master", "m", "v"))
    row, _ = scaled("tilewise")
    inputs = (master, m, v, Ref("w", "grad", (8, 8), "fp32"))
    (step,) = [formed("adamw", (master, m, v, wanting(weight("w"), row)), inputs, "update")]
    assert casts([step]) == [
        formed("adamw", (master, m, v, wanting(weight("w"))), inputs, "update"),
        made("quantize", (wanting(weight("w"), row), None), master, "update", **LIMIT),
    ]


def test_columns_of_a_quantized_weight_are_turned_where_they_have_the_same_scales():
    """Its rows are what is stored; other copies are quantized again, of the value that they mean."""
    for name, turns in (("current", True), ("tilewise", True), ("rowwise", False)):
        row, col = scaled(name)
        held = weight("w", form=row)
        buffer = slot("forward/w", 0, origin=Origin(held=held, cell="w"))
        turned = made("cast", (wanting(buffer, col),), held)
        value = made("cast", (wanting(buffer, None),), held)
        anew = made("quantize", (wanting(buffer, col), None), buffer, **LIMIT)
        assert casts([turned]) == ([turned] if turns else [value, anew])


def test_the_single_scale_of_a_frozen_weight_is_known():
    """Nothing is measured, and one call makes both copies of what is held in few bits."""
    row, col = scaled("current")
    held = weight("w", form=Form("nf4", "row", "nested256"))
    cast = made("cast", (wanting(slot("forward/w", 0, origin=Origin(held=held, cell="w")), col, row),), held)
    assert casts([cast]) == [cast]
