"""Forms: being read is what makes a form wanted."""

from hand_made import COL, ROW, formed, grad, recorded, slot, wanting, weight

from llmq.plan.passes.casts import casts
from llmq.plan.passes.forms import forms, reads_of_weights
from llmq.tensor import COLSUM, Origin, Ref

X, Y, RSTD, D_Y = slot("x"), slot("y"), slot("rstd"), slot("d_y")
NORM = ((X, RSTD), (slot("res"), weight("norm")))


def test_a_call_writes_the_forms_that_are_read_in_one_order():
    by_row = recorded("linear_forward", (Y,), (X.as_form(ROW), weight("w")))
    by_column = recorded("linear_wgrad", (grad("w"),), (Y, X.as_form(COL)))
    found = forms([recorded("rmsnorm_forward", *NORM), by_row, by_column], {})
    assert found == [
        formed("rmsnorm_forward", (wanting(X, COL, ROW), wanting(RSTD)), NORM[1]),
        formed("linear_forward", (wanting(Y, None),), by_row.inputs),
        formed("linear_wgrad", (wanting(grad("w"), None),), by_column.inputs),
    ]


def test_a_form_beside_the_value_comes_after_it():
    sums = recorded("bias_backward", (grad("b"),), (X.as_form(COLSUM),))
    value = recorded("linear_wgrad", (grad("w"),), (D_Y, X))
    (norm, *_) = forms([recorded("rmsnorm_forward", *NORM), sums, value], {})
    assert norm.outputs[0].forms == (None, COLSUM)


def test_a_call_that_leaves_nothing_is_not_made():
    """Nor is one before it that only it reads from."""
    calls = [recorded("rmsnorm_forward", *NORM), recorded("swiglu_forward", (Y,), (X,))]
    assert forms(calls, {}) == []


def test_the_lives_of_a_slot_have_their_own_forms():
    lives = [slot("x", again=again) for again in (False, True)]
    calls = [recorded("swiglu_forward", (life,), (Y,)) for life in lives]
    reads = [recorded("linear_wgrad", (grad("w"),), (D_Y, lives[0])), None]
    reads[1] = recorded("linear_wgrad", (grad("w"),), (D_Y, lives[1].as_form(COL)))
    first, second, *_ = forms([*calls, *reads], {})
    assert (first.outputs[0].forms, second.outputs[0].forms) == ((None,), (COL,))


def test_a_weight_is_written_in_the_forms_that_any_program_reads():
    read = {("weight", "w"): frozenset({None, ROW, COL})}
    for value_in, expected in ((None, (None, COL, ROW)), ("master", (COL, ROW))):  # its own master has the value
        call = recorded("cast", (weight("w", origin=Origin(value_in=value_in)),), (Ref("w", "master", (8, 8), "bf16"),))
        (found,) = forms([call], read)
        assert found.outputs[0].forms == expected
    assert forms([recorded("cast", (weight("v"),), (weight("w"),))], read) == [], "nothing reads v"


def test_the_forms_of_weights_that_programs_read():
    one = [recorded("linear_forward", (Y,), (X, weight("w", form=ROW)))]
    two = [
        recorded("linear_dgrad", (Y,), (X, weight("w", form=COL))),
        recorded("linear_forward", (Y,), (X, weight("v"))),
    ]
    found = {("weight", "w"): frozenset({ROW, COL}), ("weight", "v"): frozenset({None})}
    assert reads_of_weights([one, two]) == found


def test_a_copy_becomes_a_call_for_each_form():
    """It makes each form of the same form, so that is read of its source: through a chain of copies, too."""
    here, there = slot("here"), slot("there", home="host")
    fetched = recorded("copy_to_device", (here,), (there,))
    stored = recorded("copy_to_host", (there,), (X,))
    reads = [recorded("linear_wgrad", (grad("w"),), (D_Y, here.as_form(form))) for form in (ROW, COL)]
    found = casts(forms([recorded("rmsnorm_forward", *NORM), stored, fetched, *reads], {}))
    assert found[:5] == [
        formed("rmsnorm_forward", (wanting(X, COL, ROW), wanting(RSTD)), NORM[1]),
        formed("copy_to_host", (wanting(there, COL),), (X.as_form(COL),)),
        formed("copy_to_host", (wanting(there, ROW),), (X.as_form(ROW),)),
        formed("copy_to_device", (wanting(here, COL),), (there.as_form(COL),)),
        formed("copy_to_device", (wanting(here, ROW),), (there.as_form(ROW),)),
    ]


def test_a_fetched_weight_is_read_in_the_forms_that_its_buffer_is():
    fetched = recorded("copy_to_device", (slot("here"),), (weight("w", home="host"),))
    found = forms([fetched, recorded("linear_wgrad", (grad("w"),), (D_Y, slot("here", form=ROW)))], {})
    assert reads_of_weights([found]) == {("weight", "w"): frozenset({ROW})}


def test_what_waits_on_the_host_is_written_though_only_its_second_life_is_read():
    read = recorded("linear_wgrad", (grad("w"),), (D_Y, slot("x", form=COL, again=True)))
    norm, _ = forms([recorded("rmsnorm_forward", *NORM), read], {}, {("x", COL)})
    assert norm.outputs[0].forms == (COL,)
