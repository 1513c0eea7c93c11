"""Laws that every op keeps: precision, poisoned outputs, unwanted outputs, accumulation, shared memory, forms."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from llmq.ops import seam
from llmq.ops.reference import OPS
from llmq.tensor import COLSUM, DTYPES, LARGEST, Form, stored_shape

from .build import output
from .cases import CASES, LARGE, ODD, make

SIZES = pytest.mark.parametrize("size", [ODD, LARGE], ids=["odd", "large"])
EVERY_OP = pytest.mark.parametrize("op", OPS)
ACCUMULATED = [(op, "d_weight") for op in ("embedding_backward", "rmsnorm_backward", "linear_wgrad")]
ACCUMULATED += [(op, f"d_{x}_weight") for op in ("qk_norm_backward", "wide_qk_norm_backward") for x in "qk"]
ACCUMULATED += [("layernorm_backward", "d_weight"), ("layernorm_backward", "d_bias"), ("low_rank_backward", "d_up")]
ACCUMULATED += [("bias_backward", "d_bias"), *(("loss_sum", name) for name in ("loss_total", "num_tokens", "num_hits"))]
ACCUMULATED += [("sum_pieces", "out"), ("virtual_tokens_backward", "d_virtual")]
SHARED = [(op, out, given) for op in OPS for out, given in seam.record(op).shares.items()]
SHARED += [("adamw", f"new_{name}", name) for name in ("master", "m", "v")]
SHARED += [("sgd", f"new_{name}", name) for name in ("master", "m")]
SHARED += [("last_norm_scale", "new_last_norm", "last_norm")]
SHARED += [("sum_pieces", "out", "own"), ("linear_forward", "y", "residual"), ("linear_dgrad", "d_x", "residual")]
SHARED += [("scale", "y", "residual")]
SHARED += [("scale_update", f"new_{name}", name) for name in ("scale", "history", "amax")]


def test_every_op_has_a_case():
    assert set(CASES) == set(OPS)


@SIZES
@EVERY_OP
def test_f32_agrees_with_f64(op, size):
    """Norm-wise to gamma_n = n 2^-24, n the longest sum in an op plus 32 for its other operations, twice over.

    Twice: the f32 run also starts from inputs that are rounded to f32, while the f64 run reads them as they are.
    """
    case = make(op, size)
    narrow, wide = case.values("fp32"), case.values("fp64")
    longest = max(x.size if op in ("sum_squares", "loss_sum") else max(x.shape) for x in case.inputs.values())
    longest = max(longest, size.b * size.t)
    for name, expected in wide.items():
        assert np.isfinite(expected).all(), name
        assert narrow[name].dtype == np.float32
        error = np.linalg.norm(narrow[name] - expected)
        assert error <= 2 * (longest + 32) * 2**-24 * np.linalg.norm(expected), name


@SIZES
@pytest.mark.parametrize("op", [op for op in OPS if op not in ("adamw", "sgd", "swiglu_low_rank_backward")])
def test_bf16_is_the_f32_result_rounded_once(op, size):
    """Optimizers round stochastically, and what two ops make in one is rounded between them: tests of their own."""
    case = make(op, size)
    for name, value in case.inputs.items():
        if value is not None and value.dtype.kind == "f" and name not in case.stat | case.colsum:
            case.inputs[name] = value.astype(ml_dtypes.bfloat16).astype(np.float64)
    narrow, wide = case.values("bf16"), case.values("fp32")
    for name, expected in wide.items():
        assert narrow[name].dtype == DTYPES[case.dtype(name, "bf16")]
        np.testing.assert_array_equal(narrow[name], expected.astype(narrow[name].dtype), err_msg=name)


@pytest.mark.parametrize("op", [op for op in OPS if len(seam.record(op).outputs) > 1])  # else the call is not made
def test_an_unwanted_output_is_skipped_and_the_others_are_the_same(op):
    case = make(op, ODD)
    all_wanted = case.values("fp32")
    for name in case.outputs:
        others = case.values("fp32", **{name: case.output(name, "fp32", forms=())})
        assert set(others) == set(all_wanted) - {name}
        for other, value in others.items():
            np.testing.assert_array_equal(value, all_wanted[other])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("op", "name"), ACCUMULATED)
def test_accumulation_adds_in_f32_and_rounds_once(op, name, dtype):
    case = make(op, LARGE)
    case.inputs = {n: case.input(n, dtype).read() if n not in case.colsum else x for n, x in case.inputs.items()}
    stored = DTYPES[case.dtype(name, dtype)]
    start = np.random.default_rng(1).standard_normal(case.outputs[name]).astype(stored)
    added = case.values(dtype, **{name: case.output(name, dtype, start=start)})[name]
    expected = (start.astype(np.float32) + case.values("fp32")[name]).astype(stored)
    np.testing.assert_array_equal(added, expected)
    assert not np.array_equal(added, start)


@pytest.mark.sample
@SIZES
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(("op", "name", "given"), SHARED)
def test_an_output_in_its_inputs_memory_has_the_same_bits(op, name, given, dtype, size):
    case = make(op, size)
    apart = case.values(dtype)
    read, written = case.input(given, dtype), case.output(name, dtype)
    written.tensors[0].array = read.array
    together = case.values(dtype, **{given: read, name: written})
    for other, expected in apart.items():
        assert together[other].tobytes() == expected.tobytes(), other


@EVERY_OP
def test_inputs_are_not_written(op):
    case = make(op, ODD)
    read = {n: case.input(n, "fp32") for n in case.inputs}
    before = {n: x.array.tobytes() for n, x in read.items()}
    case.call("fp32", **read)
    assert {n: x.array.tobytes() for n, x in read.items()} == before


FORMS = [Form(*about) for about in product(("e4m3", "e5m2"), ("row", "col"), ("delayed", "current"))]


@pytest.mark.sample
@SIZES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in sorted(seam.record(op).forms)])
def test_every_form_is_a_function_of_the_rounded_value(op, name, dtype, size):
    """Copies made later from the stored value must have the same bits, so nothing finer may reach a form."""
    case = make(op, size)
    scale = np.float32(0.003)  # 448 * 0.003 = 1.3: e4m3 saturates here, e5m2 does not
    forms = [None, Form("bf16"), *FORMS, *([COLSUM] if seam.record(op).sums else [])]
    written = case.output(name, dtype, forms=forms, scale=scale, amax=0.25)
    case.call(dtype, **{name: written})
    value = written.tensors[0].array.astype(np.float32)
    rows = value.reshape(-1, value.shape[-1])
    saturated = 0
    for target in written.tensors[1:]:
        form = target.form
        assert target.array.shape == stored_shape(value.shape, form)
        if form == COLSUM:
            parts = [rows[i : i + 256].astype(np.float64).sum(axis=0) for i in range(0, len(rows), 256)]
            sizes = np.array([np.abs(rows[i : i + 256]).sum(axis=0) for i in range(0, len(rows), 256)])
            assert (np.abs(target.array - parts) <= 256 * 2**-24 * sizes).all()
        elif form.scaling is None:
            np.testing.assert_array_equal(target.array, value.astype(ml_dtypes.bfloat16))
        else:
            limit = np.float32(LARGEST[form.dtype])
            units = rows * (np.float32(1) / scale)
            expected = np.minimum(np.maximum(units, -limit), limit).astype(DTYPES[form.dtype])
            saturated += np.count_nonzero(np.abs(units) > limit)
            stored = target.array.T if form.layout == "col" else target.array.reshape(rows.shape)
            np.testing.assert_array_equal(stored.view(np.uint8), expected.view(np.uint8))
    assert saturated
    assert written.amax["e4m3"][0] == max(np.abs(value).max(), 0.25)


def test_a_form_alone_is_written_like_a_form_beside_the_value():
    case = make("swiglu_forward", ODD)
    form = Form("e4m3", "col", "delayed")
    alone = output(case.outputs["act"], "bf16", (form,), scale=0.01)
    both = output(case.outputs["act"], "bf16", (None, form), scale=0.01)
    case.call("bf16", act=alone)
    case.call("bf16", act=both)
    np.testing.assert_array_equal(alone.tensors[0].array.view(np.uint8), both.tensors[1].array.view(np.uint8))
