"""The linear map on the GPU: the column-major problems that it poses, computed in NumPy; and cuBLASLt's answers.

Bounds: products of bf16 and of fp8 numbers are exact in f32; tensor cores add 16 of them at a time, rounding by less
than 2^-22 of the running sum each time, and the value is then rounded to its dtype once.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import cublaslt, linear
from llmq.ops.cuda.algorithms import Algorithms
from llmq.ops.cuda.cublaslt import Gemm, Gemms, Matrix, refusal
from llmq.ops.reference import OPS
from llmq.sites.fp8 import Fp8Linear
from llmq.tensor import Form, Ref, View

from .build import output, tensor
from .cases import LARGE, ODD, Sizes, make
from .numpy_gemms import NumpyGemms

LINEAR = ("linear_forward", "linear_dgrad", "linear_wgrad")
EVEN = Sizes(b=2, t=96, c=128, hq=2, hkv=1, hd=32, f=176, v=32, vp=32)  # widths and tokens in multiples of 16, for fp8
MANY_BLOCKS = Sizes(b=2, t=136, c=272, hq=2, hkv=1, hd=32, f=656, v=32, vp=32)  # 3, 3 and 6 blocks of 128, all ragged
FORMS = {"plain": (None, None), "row": (Form("bf16"), Form("bf16")), "col": (Form("bf16", "col"), Form("bf16", "col"))}
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8}  # of a number, relative
E4M3 = Form("e4m3", "row", "delayed")


class Scratch:
    """An address that nothing is read or written at."""

    nbytes, data = cublaslt.WORKSPACE_BYTES, SimpleNamespace(ptr=0)


def call(gemms, op, scratch=Scratch):
    """An op on these products, with scratch."""
    return partial(linear.linear_kernels(gemms)[op].launch, scratch=scratch)


class HostArray:
    """A NumPy array with what launchers ask of a CuPy one."""

    def __init__(self, array):
        self.array = array.view(np.uint8) if array.dtype.itemsize == 1 else array
        self.shape, self.strides, self.ndim, self.size = array.shape, array.strides, array.ndim, array.size
        self.dtype, self.itemsize, self.nbytes = self.array.dtype, array.itemsize, array.nbytes
        self.data = SimpleNamespace(ptr=array.ctypes.data)


def as_host(handle):
    """The same handle over HostArrays; the bytes stay where they are."""
    if isinstance(handle, Output):
        return replace(handle, tensors=tuple(as_host(t) for t in handle.tensors))
    if handle is None:
        return None
    scale = None if handle.scale is None else HostArray(handle.scale)
    return replace(handle, array=HostArray(handle.array), scale=scale)


def arguments(op, size, dtype, form=None, d_form=None, scale=0.5):
    """A case and its inputs: plain, or matrices in `form` (d_y in `d_form`)."""
    case = make(op, size)
    inputs = {}
    for name, value in case.inputs.items():
        chosen = None if name in ("bias", "residual") else d_form if name == "d_y" else form
        quantized = chosen is not None and chosen.scaling is not None
        inputs[name] = tensor(value, None if chosen else dtype, chosen, scale if quantized else None)
    return case, inputs


def written(case, dtype, start=None):
    (shape,) = case.outputs.values()
    return output(shape, dtype, start=start)


def start_for(case, accumulate):
    (shape,) = case.outputs.values()
    return np.random.default_rng(5).standard_normal(shape) if accumulate else None


def values(op, case, inputs, dtype, start=None, **numbers):
    """What the reference computes, and what NumPy does with the problem, which comes with it."""
    expected, got, gemms = written(case, dtype, start), written(case, dtype, start), NumpyGemms()
    OPS[op](expected, *inputs.values(), **numbers)
    call(gemms, op)(as_host(got), *map(as_host, inputs.values()), **numbers)
    (problem,) = gemms.problems
    return expected.tensors[0].array, got.tensors[0].array, problem


# the problems, without a GPU


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [ODD, LARGE], ids=["odd", "large"])
@pytest.mark.parametrize("op", LINEAR)
def test_a_problem_describes_the_reference(op, size, form, accumulate):
    case, inputs = arguments(op, size, "fp32", *FORMS[form])
    if accumulate:
        inputs |= {"residual": None} if "residual" in inputs else {}
    expected, got, _ = values(op, case, inputs, "fp32", start_for(case, accumulate))
    bound = 2 * 2**-24 * max(size.c, size.f, size.b * size.t) * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, atol=bound, rtol=0)


def recipe_arguments(op, size, scaling, d_dtype):
    """A case and its inputs as a site of that scaling reads them."""
    site = Fp8Linear("layers.0.mlp.up", d_dtype, scaling)
    forms = {
        "linear_forward": {"x": site.x.row, "weight": site.weight.row},
        "linear_dgrad": {"d_y": site.d_y.row, "weight": site.weight.col},
        "linear_wgrad": {"d_y": site.d_y.col, "x": site.x.col},
    }[op]
    case = make(op, size)
    inputs = {}
    for name, value in case.inputs.items():
        uneven = value * 2.0 ** np.random.default_rng(7).integers(-9, 9, (*value.shape[:-1], 1))  # for scales to matter
        shared = name in forms and not forms[name].owns_scales
        inputs[name] = tensor(uneven if name in forms else value, None, forms.get(name), 0.02 if shared else None)
    return case, inputs


@pytest.mark.parametrize("op", LINEAR)
@pytest.mark.parametrize("scaling", ["delayed", "rowwise", "blockwise"])
def test_quantized_operands_are_read_with_their_scales_as_cublaslt_lays_them_out(op, scaling):
    """Each op given the copies with the summed axis innermost, as fp8 must have them; extents beyond 128 that are no
    multiples of it, and one whose scales are padded."""
    case, inputs = recipe_arguments(op, MANY_BLOCKS, scaling, "e5m2")
    inputs |= {name: tensor(case.inputs[name], "fp32") for name in ("bias", "residual") if name in inputs}
    expected, got, problem = values(op, case, inputs, "fp32")
    kinds = {"delayed": ("tensor", "tensor"), "rowwise": ("row", "row"), "blockwise": ("tile", "block")}[scaling]
    if op == "linear_wgrad":
        kinds = {"rowwise": ("tensor", "tensor"), "blockwise": ("block", "block")}.get(scaling, kinds)
    assert (problem.a.transposed, problem.b.transposed) == (True, False)
    assert (problem.a.scale, problem.b.scale) == kinds
    assert problem.fast == (scaling != "blockwise" and op != "linear_wgrad")
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("layout", ["row", "col"])
def test_a_chunk_of_tokens_is_a_problem_of_its_own(layout):
    """Rows 16 to 48 of x and d_y, which in col form are columns of a wider matrix."""
    form = Form("bf16", layout)
    case, inputs = arguments("linear_wgrad", EVEN, "fp32", form, form)
    pieces = [x.chunk(16, 32) for x in inputs.values()]
    expected, got, gemms = written(case, "fp32"), written(case, "fp32"), NumpyGemms()
    OPS["linear_wgrad"](expected, *pieces)
    call(gemms, "linear_wgrad")(as_host(got), *map(as_host, pieces))
    np.testing.assert_allclose(got.tensors[0].array, expected.tensors[0].array, rtol=1e-5, atol=1e-4)
    (problem,) = gemms.problems
    assert problem.k == 32
    assert problem.a.ld == (EVEN.c if layout == "row" else EVEN.b * EVEN.t)
    addresses = [handle.array.data.ptr for handle in map(as_host, (*pieces, got.tensors[0]))]
    assert all(address % problem.alignment == 0 for address in addresses)
    assert problem.alignment == 256 or any(address % (2 * problem.alignment) for address in addresses)


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("op", LINEAR)
def test_the_problem_is_known_from_the_plan(op, layout):
    """What `prepare` gets is what the call then asks for, given storages aligned to 256 bytes."""
    form = Form("e4m3", layout, "delayed")
    case, inputs = arguments(op, EVEN, "bf16", form, form)
    out = written(case, "bf16")
    gemms = NumpyGemms()
    gemms.run = lambda *_: None
    host = {name: as_host(x) for name, x in {"out": out, **inputs}.items()}
    for i, handle in enumerate(host.values()):
        for t in handle.tensors if isinstance(handle, Output) else (handle,):
            t.array.data.ptr = 512 * (i + 1)
    call(gemms, op)(*host.values())
    refs = [Ref(n, "activation", x.shape, "bf16", form=x.form) for n, x in inputs.items()]
    (shape,) = case.outputs.values()
    planned = linear.planned_problem(op, Ref("out", "activation", shape, "bf16"), False, refs)
    assert [planned] == gemms.problems
    chunk = Ref("x", "activation", (4, 6), "bf16", view=View((8, 6), 24, 24))
    weight, bias = Ref("w", "weight", (8, 6), "bf16"), None
    y = Ref("y", "activation", (4, 8), "bf16")
    part = linear.planned_problem("linear_forward", y, False, [chunk, weight, bias, None])
    assert part.alignment == 16, "the chunk starts 48 bytes in"


@pytest.mark.parametrize("op", LINEAR)
def test_alpha_is_no_part_of_the_problem_but_another_call(op):
    case, inputs = arguments(op, LARGE, "fp32")
    found = [values(op, case, inputs, "fp32", alpha=alpha) for alpha in (1.0, 0.25)]
    for expected, got, _ in found:
        bound = 2 * 2**-24 * max(LARGE.c, LARGE.f, LARGE.b * LARGE.t) * np.abs(expected).max()
        np.testing.assert_allclose(got, expected, atol=bound, rtol=0)
    (_, _, one), (_, _, quarter) = found
    assert replace(one, alignment=quarter.alignment) == quarter
    out, gemms, handles, results = (
        as_host(written(case, "fp32")),
        NumpyGemms(),
        [as_host(x) for x in inputs.values()],
        [],
    )
    for alpha in (1.0, 0.25):  # with the same handles
        call(gemms, op)(out, *handles, alpha=alpha)
        results.append(out.tensors[0].array.array.copy())
    assert not np.array_equal(*results)


@pytest.mark.parametrize("op", ["linear_forward", "linear_dgrad"])
def test_a_residual_in_the_memory_of_the_output_is_added_to_in_place(op):
    case, inputs = arguments(op, EVEN, "bf16")
    expected, got, gemms = written(case, "bf16"), written(case, "bf16"), NumpyGemms()
    OPS[op](expected, *inputs.values())
    got.tensors[0].array[...] = inputs["residual"].array
    given = {name: as_host(x) for name, x in inputs.items()} | {"residual": as_host(got.tensors[0])}
    call(gemms, op)(as_host(got), *given.values())
    (problem,) = gemms.problems
    assert problem.c == "same"
    np.testing.assert_allclose(
        got.tensors[0].array.astype(np.float32), expected.tensors[0].array.astype(np.float32), rtol=2**-6, atol=0.1
    )
    refs = {n: None if x is None else Ref(n, "activation", x.shape, "bf16") for n, x in inputs.items()}
    (shape,) = case.outputs.values()
    out = Ref("out", "activation", shape, "bf16")
    own, apart = (
        linear.planned_problem(op, out, False, [*{**refs, "residual": residual}.values()])
        for residual in (out, refs["residual"])
    )
    assert (own.c, apart.c) == ("same", "other") and replace(own, alignment=problem.alignment) == problem


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("op", LINEAR)
def test_columns_of_a_wider_matrix_have_its_width_as_leading_dimension(op, layout):
    """Columns 48 on of matrices 1024 wide, in and out: as computed, and as planned from the Refs of such columns."""
    form = Form("bf16", layout)
    case, inputs = arguments(op, EVEN, "fp32", form, form)
    wide = {n: x for n, x in inputs.items() if n not in ("bias", "weight") and x is not None}
    expected, gemms = written(case, "fp32"), NumpyGemms()
    OPS[op](expected, *inputs.values())
    cut = {n: cut_of(x, 48, 1024) for n, x in wide.items()}
    target = cut_of(expected.tensors[0], 48, 1024)
    before = target.array.base.copy()
    out = Output("out", target.shape, "fp32", (target,))
    call(gemms, op)(as_host(out), *map(as_host, {**inputs, **cut}.values()))
    rows = expected.tensors[0].array.reshape(target.shape)
    np.testing.assert_allclose(target.array, rows, rtol=1e-4, atol=1e-3)
    assert target.array.base[:, :48].tobytes() == before[:, :48].tobytes(), "nothing beside the columns is written"
    (problem,) = gemms.problems
    assert problem.d.ld == 1024

    def ref(name, shape, form=None, dtype="fp32"):
        return Ref(name, "activation", shape, dtype, form=form)

    def columns(name, x):
        return ref(name, (x.shape[0], 1024), x.form).columns(48, x.shape[1])

    refs = [columns(n, cut[n]) if n in cut else x and ref(n, x.shape, x.form) for n, x in inputs.items()]
    planned = linear.planned_problem(op, columns("out", target), False, refs)
    assert replace(planned, alignment=problem.alignment) == problem
    assert planned.alignment == (32 if layout == "row" else 64), "48 numbers of bf16 in; of fp32 out"


def cut_of(x, start, width):
    """A tensor as columns of a matrix `width` wide, in its form."""
    rows, count = int(np.prod(x.shape[:-1])), x.shape[-1]
    is_col = x.form is not None and x.form.layout == "col"
    whole = np.zeros((width, rows) if is_col else (rows, width), x.array.dtype)
    view = whole[start : start + count] if is_col else whole[:, start : start + count]
    view[...] = x.array.reshape(view.shape)
    return replace(x, array=view, shape=(rows, count))


def test_a_dtype_without_products_is_refused():
    case, inputs = arguments("linear_dgrad", ODD, "fp64")
    with pytest.raises(UsageError, match=r"float64.*--device cpu"):
        call(NumpyGemms(), "linear_dgrad")(as_host(written(case, "fp64")), *map(as_host, inputs.values()))


BF16 = Gemm(64, 32, 16, Matrix("bf16", 16, True), Matrix("bf16", 16), Matrix("bf16", 64))
FP8 = replace(BF16, a=Matrix("e4m3", 16, True, "tensor"), b=Matrix("e5m2", 16, False, "tensor"))


def test_every_fact_of_a_problem_is_in_its_key():
    changes = {"m": [65], "n": [33], "k": [17], "d": [Matrix("fp32", 64)], "alignment": [16]}
    changes |= {"a": [Matrix("bf16", 16, False), Matrix("bf16", 24, True)], "b": [Matrix("bf16", 16, True)]}
    changes |= {"bias": ["bf16", "fp32"], "c": ["same", "other"]}
    others = [replace(BF16, **{name: value}) for name, values in changes.items() for value in values]
    scales = [Matrix("e4m3", 16, True, scale) for scale in ("row", "block", "tile")]
    others += [FP8, replace(FP8, fast=True), *(replace(FP8, a=scaled) for scaled in scales)]
    assert len({p.key for p in (BF16, *others)}) == 1 + len(others)
    assert BF16.key == "64x32x16 bf16T16 bf16N16 -> bf16N64"


def test_the_keys_of_training_stay():
    """A table of algorithms that an older run has stored is found: with no residual, in bf16 and in fp8."""
    row = Form("e4m3", "row", "delayed")
    x, w, y = (
        Ref(n, "activation", shape, "bf16") for n, shape in (("x", (32, 896)), ("w", (48, 896)), ("y", (32, 48)))
    )
    keys = [
        linear.planned_problem("linear_forward", y, False, [x, w, Ref("b", "weight", (48,), "bf16"), None]).key,
        linear.planned_problem("linear_forward", y, False, [x, w, None, replace(y, name="res")]).key,
        linear.planned_problem("linear_dgrad", x, False, [y, w, None]).key,
        linear.planned_problem("linear_wgrad", w, True, [y, x]).key,
        linear.planned_problem("linear_forward", y, False, [x.as_form(row), w.as_form(row), None, None]).key,
    ]
    assert keys == [
        "48x32x896 bf16T896 bf16N896 -> bf16N48 bias=bf16",
        "48x32x896 bf16T896 bf16N896 -> bf16N48 c=other",
        "896x32x48 bf16N896 bf16N48 -> bf16N896",
        "896x48x32 bf16N896 bf16T48 -> bf16N896 c=same",
        "48x32x896 e4m3T896*tensor e4m3N896*tensor -> bf16N48 fast",
    ]


def test_the_bytes_of_a_problem():
    problem = replace(FP8, a=Matrix("e4m3", 24, True, "row"), bias="bf16", c="other")
    matrices = {"a": 24 * 64, "b": 16 * 32, "d": 2 * 64 * 32, "c": 2 * 64 * 32}
    assert problem.sizes() == {**matrices, "bias": 128, "scale_a": 256, "scale_b": 4}
    blocks = replace(FP8, m=200, k=1300, a=Matrix("e4m3", 1300, True, "tile"), b=Matrix("e4m3", 1300, False, "block"))
    sizes = blocks.sizes()  # 11 blocks of 128 in k, 12 with what pads them to a multiple of 4; 2 of them in m
    assert (sizes["scale_a"], sizes["scale_b"]) == (4 * 12 * 2, 4 * 11 * 32)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (replace(FP8, a=Matrix("e4m3", 64, False, "tensor")), "summed axis innermost"),
        (replace(FP8, a=Matrix("e5m2", 16, True, "tensor")), "e5m2 times e5m2"),
        (replace(FP8, m=65, k=10), "multiples of 16, not m 65, k 10: use --matmul-dtype bf16"),
        (replace(FP8, alignment=4), "aligned to 16 bytes, not 4: columns of a wider matrix begin at a multiple of 16"),
        (replace(FP8, d=Matrix("bf16", 72)), "multiples of 16, not ld of D 72"),
        (replace(FP8, bias="fp32"), "bias in bf16 only"),
        (replace(FP8, n=1, b=Matrix("e5m2", 16, False, "block")), "need multiples of 4, not m 64, n 1: use other"),
        (replace(FP8, a=Matrix("e4m3", 16, True, "row")), "on compute capability 9.0, from cuBLAS 12.9 on"),
        (replace(BF16, b=Matrix("fp32", 16)), "bf16 times fp32 into bf16 does not exist"),
        (replace(BF16, a=Matrix("fp32", 16), b=Matrix("fp32", 16)), "fp32 times fp32 into bf16 does not exist"),
        (BF16, "this GPU or this version of the library lacks it"),
    ],
)
def test_a_refusal_names_the_shape_and_the_reason(problem, text):
    message = refusal(problem)
    assert text in message
    assert problem.key in message


# on the GPU


@pytest.fixture(scope="module")
def gemms(tmp_path_factory):
    cupy = pytest.importorskip("cupy")
    found = Gemms(Algorithms(cublaslt.device_key(), folder=tmp_path_factory.mktemp("gemm")))
    found.scratch = cupy.empty(cublaslt.WORKSPACE_BYTES, cupy.uint8)
    yield found
    found.close()


@pytest.fixture
def device():
    from .cuda_build import Device

    return Device()


def on_gpu(gemms, device, op, out, inputs):
    import cupy

    call(gemms, op, gemms.scratch)(device.output(out), *(device.tensor(x) for x in inputs.values()))
    cupy.cuda.get_current_stream().synchronize()
    return device.host(out.tensors[0].array)


def both(gemms, device, op, case, inputs, out, start=None):
    """What the reference computes, and the GPU."""
    expected, got = written(case, out, start), written(case, out, start)
    OPS[op](expected, *inputs.values())
    return expected.tensors[0].array, on_gpu(gemms, device, op, got, inputs)


def check_norm(result, expected):
    """Both sides round to bf16, by half of 2^-8 of a number on average over its binade."""
    result, expected = result.astype(np.float64), expected.astype(np.float64)
    assert np.linalg.norm(result - expected) <= (2.0**-8 + 2.0**-11) * np.linalg.norm(expected)


def size_of_terms(op, inputs, start):
    """The sum of the magnitudes of what each number of the result is the sum of."""
    plain = {n: Tensor(n, np.abs(x.read()), x.shape) for n, x in inputs.items() if x is not None}
    first = next(iter(plain.values()))
    handles = [plain.get(n) for n in inputs]
    shape = {
        "linear_forward": lambda: (*first.shape[:-1], plain["weight"].shape[0]),
        "linear_dgrad": lambda: (*first.shape[:-1], plain["weight"].shape[1]),
        "linear_wgrad": lambda: (first.shape[-1], plain["x"].shape[-1]),
    }[op]()
    total = output(shape, "fp32")
    OPS[op](total, *handles)
    return total.tensors[0].array + (0 if start is None else np.abs(start))


def check(got, expected, added, terms, count, dtype):
    """`added` is the size of what joins the product: some algorithms round to bf16 before the bias, and before C."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    error, size = np.abs(got - expected), np.abs(expected)
    bound = ROUNDING[dtype] * (2 * size + 2 * (added != 0) * (size + added))
    bound += (count / 16 + 16) * 2.0**-22 * terms
    assert np.isfinite(got).all()
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"


def summed(op, size):
    return {"linear_forward": size.c, "linear_dgrad": size.f, "linear_wgrad": size.b * size.t}[op]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("size", [ODD, LARGE, EVEN], ids=["odd", "large", "even"])
@pytest.mark.parametrize("op", LINEAR)
@pytest.mark.parametrize(("dtype", "out"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")])
def test_the_gpu_agrees(gemms, device, op, size, dtype, out, accumulate, form):
    """Values or copies of a dtype; fp32 results of bf16 operands; bias and residual in the result's dtype."""
    forms = FORMS[form] if dtype == "bf16" else tuple(f and replace(f, dtype=dtype) for f in FORMS[form])
    case, inputs = arguments(op, size, dtype, *forms)
    for name in {"bias", "residual"} & set(inputs):
        inputs[name] = None if accumulate and name == "residual" else tensor(case.inputs[name], out)
    start = start_for(case, accumulate)
    expected, result = both(gemms, device, op, case, inputs, out, start)
    added = sum(np.abs(x.read()) for n, x in inputs.items() if n in ("bias", "residual") and x is not None)
    added = added + (0 if start is None else np.abs(start))
    check(result, expected, added, size_of_terms(op, inputs, start), summed(op, size), out)


@pytest.mark.gpu
@pytest.mark.parametrize("absent", [(), ("bias",), ("residual",), ("bias", "residual")], ids=str)
def test_bias_and_residual_are_optional(gemms, device, absent):
    case, inputs = arguments("linear_forward", LARGE, "bf16")
    inputs |= dict.fromkeys(absent)
    expected, result = both(gemms, device, "linear_forward", case, inputs, "bf16")
    added = sum(np.abs(inputs[name].read()) for name in ("bias", "residual") if name not in absent)
    terms = size_of_terms("linear_forward", inputs, None)
    check(result, expected, added, terms, LARGE.c, "bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["alpha", "in place", "columns", "all"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("op", LINEAR)
def test_alpha_a_residual_in_place_and_columns(gemms, device, op, dtype, way):
    """One at a time and together: a branch of an adapter that is added onto columns of a fused projection."""
    case, inputs = arguments(op, EVEN, dtype)
    inputs |= {"bias": None} if "bias" in inputs else {}
    numbers = {"alpha": 0.375} if way in ("alpha", "all") else {}
    expected = written(case, dtype)
    OPS[op](expected, *inputs.values(), **numbers)
    (target,), residual = written(case, dtype).tensors, inputs.get("residual")
    terms = size_of_terms(op, inputs, None)
    added = 0 if residual is None else np.abs(residual.read())
    if way in ("columns", "all"):
        shape = expected.tensors[0].array.shape
        inputs |= {n: cut_of(x, 48, 1024) for n, x in inputs.items() if x is not None and n != "weight"}
        target = cut_of(target, 48, 1024)
    if way in ("in place", "all") and residual is not None:
        target.array[...] = inputs["residual"].array.reshape(target.array.shape)
        inputs["residual"] = target

    def on_device(x):
        if x is None or x.array.flags.c_contiguous:
            return device.tensor(x)
        return replace(x, array=device.array(x.array.base)[:, 48 : 48 + x.shape[1]])

    import cupy

    handles = [on_device(x) for x in inputs.values()]
    out = Output("out", target.shape, dtype, (on_device(target),))
    is_cut = not target.array.flags.c_contiguous
    beside = None if not is_cut else device.host(target.array.base)[:, :48].tobytes()
    call(gemms, op, gemms.scratch)(out, *handles, **numbers)
    cupy.cuda.get_current_stream().synchronize()
    if not is_cut:
        got = device.host(target.array)
    else:
        whole = device.host(target.array.base)
        got = whole[:, 48 : 48 + target.shape[1]].reshape(shape)
        assert whole[:, :48].tobytes() == beside, "nothing beside the columns is written"
    check(got, expected.tensors[0].array, added, terms, summed(op, EVEN), dtype)


WHOLE_BLOCKS = replace(MANY_BLOCKS, t=1024, c=896, f=1152)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "d_dtype"),
    [(MANY_BLOCKS, "e4m3"), (MANY_BLOCKS, "e5m2"), (WHOLE_BLOCKS, "e5m2")],
    ids=["ragged-e4m3", "ragged-e5m2", "whole-e5m2"],
)
@pytest.mark.parametrize(
    ("scaling", "way"),
    [
        *product(("delayed", "rowwise", "blockwise"), ("plain", "joined", "added to", "fp32")),
        ("delayed", "fp32 added to"),
    ],
)
@pytest.mark.parametrize("op", LINEAR)
def test_fp8(gemms, device, op, scaling, d_dtype, way, size):
    """Against the product of the dequantised numbers; with bias and residual, or added to what is there. Fast
    accumulation keeps 13 bits of each partial sum, and what is added to may be rounded once more."""
    case, inputs = recipe_arguments(op, size, scaling, d_dtype)
    rows = np.random.default_rng(8).standard_normal(next(iter(case.outputs.values())))
    for name, value in (("bias", case.inputs.get("bias")), ("residual", rows)):
        inputs |= {name: tensor(value, "bf16") if way == "joined" else None} if name in inputs else {}
    start = rows if "added" in way or (way == "joined" and "residual" not in inputs) else None
    expected, result = both(gemms, device, op, case, inputs, "fp32" if "fp32" in way else "bf16", start)
    check_norm(result, expected)


@pytest.mark.gpu
def test_an_impossible_product_is_refused_with_its_reason(gemms, device):
    case, inputs = arguments("linear_forward", ODD, "bf16", E4M3, E4M3)
    inputs |= dict.fromkeys(("bias", "residual"))
    with pytest.raises(UsageError, match="multiples of 16"):
        on_gpu(gemms, device, "linear_forward", written(case, "bf16"), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("op", LINEAR)
def test_two_runs_a_graph_and_a_stored_table_give_the_same_bits(gemms, device, op, tmp_path):
    import cupy

    size = replace(EVEN, b=8, t=1024, c=256, f=512)
    case, inputs = arguments(op, size, "bf16")
    out = written(case, "bf16")
    first = on_gpu(gemms, device, op, out, inputs)
    again = on_gpu(gemms, device, op, out, inputs)
    handles = [device.output(out), *(device.tensor(x) for x in inputs.values())]
    handles[0].tensors[0].array.fill(0)
    cupy.cuda.get_current_stream().synchronize()  # the other stream does not wait for this one
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call(gemms, op, gemms.scratch)(*handles)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    captured = device.host(out.tensors[0].array)
    table = Algorithms(cublaslt.device_key(), given=gemms.algorithms.facts(), folder=tmp_path)
    other = Gemms(table)
    other.scratch = gemms.scratch
    before = len(table.facts()["algorithms"])
    other_result = on_gpu(other, device, op, out, inputs)
    assert before == 0 and len(table.facts()["algorithms"]) == 1
    assert table.save() is None and not table.path.exists(), "nothing was timed"
    other.close()
    for result in (again, captured, other_result):
        np.testing.assert_array_equal(result.view(np.uint16), first.view(np.uint16))


@pytest.mark.gpu
def test_a_stored_algorithm_that_the_library_refuses_is_chosen_again(gemms, device, tmp_path):
    case, inputs = arguments("linear_dgrad", EVEN, "bf16")
    good = on_gpu(gemms, device, "linear_dgrad", written(case, "bf16"), inputs)
    facts = gemms.algorithms.facts()
    facts["algorithms"] = {p: c | {"algorithm": "ff" * 64} for p, c in facts["algorithms"].items()}
    table = Algorithms(cublaslt.device_key(), given=facts, folder=tmp_path)
    other = Gemms(table)
    other.scratch = gemms.scratch
    got = on_gpu(other, device, "linear_dgrad", written(case, "bf16"), inputs)
    other.close()
    np.testing.assert_allclose(got.astype(np.float32), good.astype(np.float32), rtol=2**-7, atol=1e-2)
    assert all(c["algorithm"] != "ff" * 64 for c in table.facts()["algorithms"].values())
