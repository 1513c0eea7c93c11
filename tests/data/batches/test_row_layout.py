"""Which layout the rows of a run have, why, and that a checkpoint of another one is not continued."""

import pytest

from llmq.data.batches.row_layout import PACKED, PADDED, WINDOWS, RowLayout, choose_row_layout
from llmq.errors import UsageError

WHY_NOT = "packed rows in bf16 need a GPU of compute capability 9.0 or later, and A100 has 8.0"


@pytest.mark.parametrize(
    ("packing", "has_rows", "cannot_pack", "kind", "why"),
    [
        (None, True, None, PACKED, "the data is rows, which stay whole; --packing=windows cuts them"),
        (None, True, WHY_NOT, PADDED, f"the data is rows, which stay whole, and {WHY_NOT}"),
        (None, False, None, WINDOWS, "text and token files run on across documents; --packing keeps these whole"),
        (None, False, WHY_NOT, WINDOWS, "text and token files run on across documents; --packing keeps these whole"),
        (True, False, None, PACKED, "by --packing"),
        (False, True, WHY_NOT, PADDED, "by --no-packing"),
        ("windows", True, None, WINDOWS, "by --packing=windows"),
    ],
)
def test_the_data_decides_what_the_options_leave_open(packing, has_rows, cannot_pack, kind, why):
    assert choose_row_layout(packing, None, has_rows=has_rows, cannot_pack=cannot_pack) == RowLayout(kind, why)


def test_packing_that_was_asked_for_is_never_replaced():
    with pytest.raises(UsageError, match=r"--packing: packed rows .* A100 has 8.0: use --no-packing, .*--model-dtype"):
        choose_row_layout(True, None, has_rows=True, cannot_pack=WHY_NOT)
    with pytest.raises(UsageError, match="--max-docs 3 is for packed rows: leave it out"):
        choose_row_layout(None, 3, has_rows=True, cannot_pack=WHY_NOT)
    with pytest.raises(UsageError, match="--max-docs 3 is for packed rows: add --packing, or leave it out"):
        choose_row_layout(None, 3, has_rows=False)
    assert choose_row_layout(None, 3, has_rows=True).kind == PACKED


@pytest.mark.parametrize(
    ("state", "kind", "fix"),
    [
        ({"row_layout": PACKED, "options": {"packing": None}}, PACKED, None),
        ({"row_layout": PADDED, "options": {"packing": None}}, PACKED, "--no-packing"),
        ({"row_layout": WINDOWS, "options": {"packing": "windows"}}, PADDED, "--packing=windows"),
        ({"options": {"packing": None}}, WINDOWS, None),
        ({"options": {"packing": None}}, PACKED, "--packing=windows"),
        ({"options": {"packing": True}}, WINDOWS, "--packing"),
        ({"options": {"packing": False}}, PADDED, None),
        ({"options": {}}, PADDED, "--packing=windows"),
    ],
)
def test_a_checkpoint_of_another_layout_is_refused_with_the_option_that_continues_it(state, kind, fix):
    """Also one of a version that stored no layout, where --packing was left open for windows."""
    if fix is None:
        RowLayout(kind, "by default").refuse_other(state)
        return
    with pytest.raises(UsageError, match=f"would train on {kind} .by default.: add {fix} to continue it"):
        RowLayout(kind, "by default").refuse_other(state)
