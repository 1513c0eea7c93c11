"""The functions on arrays: finite differences of every pair, kinds of arrays, mistakes, PyTorch."""

import subprocess
import sys
from dataclasses import replace
from weakref import ref

import numpy as np
import pytest

from llmq import ops
from llmq.errors import UsageError
from llmq.model.config import RopeConfig
from llmq.model.rope import rope_table
from llmq.ops import exchange
from llmq.tensor import DTYPES

from .build import check_gradient

RNG = np.random.default_rng(0)
B, T, C, F, V, HQ, HKV, HD = 2, 5, 8, 6, 11, 4, 2, 6
HEADS = {"num_heads": HQ, "num_kv_heads": HKV}
TABLE = rope_table(RopeConfig(), HD, T + 2, np.float64)
POSITIONS = RNG.integers(0, T + 2, (B, T)).astype(np.int32)
ANGLES = [np.tile(part, 2)[None] for part in np.split(TABLE[:T], 2, axis=1)]
TARGETS = RNG.integers(0, V, (B, T)).astype(np.int32)
TARGETS[0, 1] = -100
BORDERS = np.array([[0, 2, T], [0, T, T]], np.int32)


def normal(*shape):
    return RNG.standard_normal(shape)


def attention(borders=None, **more):
    def backward(d, qkv):
        return [ops.attention_backward(d, qkv, *ops.attention(qkv, borders, **HEADS, **more), borders, **HEADS, **more)]

    return lambda qkv: ops.attention(qkv, borders, **HEADS, **more)[0], backward, QKV


def rope_heads_backward(d, q, k):
    return ops.rope_heads_backward(*np.split(d, [HQ], axis=2), *ANGLES)  # of views, as those of transformers are


def linear_backward(d, x, weight, bias, residual):
    return [*ops.linear_backward(d, x, weight, needs=("x", "weight", "bias")), d]


def head(x, weight):
    return ops.linear_cross_entropy(x, weight, TARGETS, chunk=3, z_loss=0.01, vocab_size=V)


QKV = [(B, T, (HQ + 2 * HKV) * HD)]
TURN = (TABLE, POSITIONS)
# forward, its gradients by that of the result (for the loss, of its sum), shapes of the inputs
PAIRS = {
    "rmsnorm": (
        lambda x, w: ops.rmsnorm(x, w, eps=1e-2)[0],
        lambda d, x, w: ops.rmsnorm_backward(d, x, w, ops.rmsnorm(x, w, eps=1e-2)[1]),
        [(B, T, C), (C,)],
    ),
    "rmsnorm of 1 + w": (
        lambda x, w: ops.rmsnorm(x, w, eps=1e-2, offset=1.0)[0],
        lambda d, x, w: ops.rmsnorm_backward(d, x, w, ops.rmsnorm(x, w, eps=1e-2)[1], offset=1.0),
        [(B, T, C), (C,)],
    ),
    "rope": (lambda x: ops.rope(x, *TURN, **HEADS), lambda d, x: [ops.rope_backward(d, *TURN, **HEADS)], QKV),
    "rope_heads": (
        lambda q, k: np.concatenate(ops.rope_heads(q, k, *ANGLES), axis=2),
        rope_heads_backward,
        [(B, T, HQ, HD), (B, T, HKV, HD)],
    ),
    "swiglu": (ops.swiglu, lambda d, x: [ops.swiglu_backward(d, x)], [(B, T, 2 * F)]),
    "swiglu_apart": (ops.swiglu, ops.swiglu_backward, [(B, T, F), (B, T, F)]),
    "attention": attention(),
    "attention_of_documents": attention(BORDERS, window=2, scale=0.3),
    "linear": (ops.linear, linear_backward, [(B, T, C), (F, C), (F,), (B, T, F)]),
    "linear_cross_entropy": (lambda *x: head(*x)[0], lambda d, *x: head(*x)[1:], [(B, T, C), (V + 2, C)]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_by_finite_differences(name):
    forward, backward, shapes = PAIRS[name]
    inputs = [normal(*shape) for shape in shapes]
    shape = forward(*inputs).shape
    d = np.ones(shape) if name == "linear_cross_entropy" else normal(*shape)
    check_gradient(lambda *x: np.sum(forward(*x) * d), inputs, backward(d, *inputs), 100 * np.abs(d).sum())


def test_chunks_and_needs_change_no_gradient():
    x, weight = normal(B, T, C), normal(V, C)
    loss, d_x, d_weight = ops.linear_cross_entropy(x, weight, TARGETS)
    for chunk in (1, 4, 99):
        found = ops.linear_cross_entropy(x, weight, TARGETS, chunk=chunk)
        for got, right in zip(found, (loss, d_x, d_weight), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-12)
    assert loss[0, 1] == 0 and not d_x[0, 1].any()
    alone = ops.linear_cross_entropy(x, weight, TARGETS, needs=("weight",))
    assert alone[1] is None and np.array_equal(alone[2], d_weight)
    assert ops.linear_cross_entropy(x, weight, TARGETS, needs=())[1:] == (None, None)
    d_y = normal(B, T, V)
    both = ops.linear_backward(d_y, x, weight)
    assert np.array_equal(ops.linear_backward(d_y, None, weight, needs=("x",))[0], both[0])
    assert np.array_equal(ops.linear_backward(d_y, x, None, needs=["weight"])[1], both[1])
    np.testing.assert_allclose(ops.linear_backward(d_y, None, None, needs={"bias"})[2], d_y.sum((0, 1)), rtol=1e-12)
    assert ops.linear_backward(ops.quantize(d_y), x, weight, needs=()) == (None,) * 3


def test_results_are_written_where_the_caller_says():
    gate, up, d = (normal(B, T, F).astype(np.float32) for _ in range(3))
    right = ops.swiglu_backward(d, gate, up)
    found = ops.swiglu_backward(d, gate, up, out=(gate, up))
    assert found == (gate, up) and all(map(np.array_equal, found, right))
    q, k = normal(B, HQ, T, HD).transpose(0, 2, 1, 3), normal(B, T, HKV, HD)
    right = ops.rope_heads(q, k, *ANGLES)
    ops.rope_heads(q, k, *ANGLES, out=(q, None))
    assert np.array_equal(q, right[0])
    x, weight = (normal(4, C).astype(DTYPES["bf16"]) for _ in range(2))
    d_weight = np.empty((4, C), np.float32)
    assert ops.linear_backward(ops.linear(x, weight), x, weight, out=(None, d_weight, None))[1] is d_weight
    loss, d_x, d_weight = ops.linear_cross_entropy(x, weight, np.arange(4, dtype=np.int32))
    assert (loss.dtype, d_x.dtype, d_weight.dtype) == (np.float32, DTYPES["bf16"], DTYPES["bf16"])


@pytest.mark.parametrize("scaling", ["current", "rowwise", "blockwise"])
def test_products_in_fp8_are_those_of_copies(scaling):
    x, weight, bias = (normal(*shape).astype(DTYPES["bf16"]) for shape in ((3, 5, 256), (130, 256), (130,)))
    y = ops.linear(x, weight, bias)
    of_weight = "tilewise" if scaling == "blockwise" else scaling
    copies = [ops.quantize(v, scaling=by, layout="both") for v, by in ((x, scaling), (weight, of_weight))]
    in_fp8 = ops.linear(x, weight, bias, dtype="e4m3", scaling=scaling)
    assert np.array_equal(ops.linear(*copies, bias), in_fp8) and not np.array_equal(y, in_fp8)
    read = [ops.dequantize(copy, "fp32") for copy in copies]
    exact = ops.linear(*read, bias.astype(np.float32))
    np.testing.assert_allclose(in_fp8.astype(np.float32), exact, rtol=2**-8, atol=1e-4)
    if scaling != "rowwise":  # whose columns have one scale: wgrad sums over rows
        d_y = ops.quantize(y, scaling=scaling, layout="both")
        found = ops.linear_backward(y, x, weight, dtype="e4m3", scaling=scaling)
        assert all(map(np.array_equal, ops.linear_backward(d_y, *copies)[:2], found[:2]))
    again = ops.quantize(x, scaling=scaling, layout="both", out=copies[0])
    assert again.rows is copies[0].rows and again.columns_scale is copies[0].columns_scale
    in_bytes = replace(again, rows=np.empty(x.shape, np.uint8))  # as libraries without fp8 have it
    ops.quantize(x, scaling=scaling, layout="both", out=in_bytes)
    assert np.array_equal(ops.linear(in_bytes, copies[1], bias), in_fp8)


def test_a_copy_is_the_value_over_its_scale():
    x = normal(3, 40)
    for format, largest in (("e4m3", 448.0), ("e5m2", 57344.0)):
        copy = ops.quantize(x, format=format)
        assert copy.columns is None and copy.rows_scale[0] == np.float32(np.abs(x.astype(np.float32)).max() / largest)
        assert np.abs(copy.rows.astype(np.float64)).max() == largest
        error = np.abs(ops.dequantize(copy, "fp64") - x)
        assert np.all(error <= np.abs(x) * (2**-4 if format == "e4m3" else 2**-3) + copy.rows_scale)


MISTAKES = {
    "fp16": (lambda: ops.swiglu(normal(2, 4).astype(np.float16)), "gate_up is in fp16: use bf16, fp32, fp64"),
    "text": (lambda: ops.swiglu("no"), "gate_up is a str, not an array"),
    "shape": (lambda: ops.rmsnorm(normal(2, C), normal(C + 1), eps=0.1), r"weight \(9,\).* does not fit res \(2, 8\)"),
    "axes": (lambda: ops.rmsnorm(normal(C), normal(2, C), eps=0.1), r"weight \(2, 8\) is not \(C,\)"),
    "dtype": (lambda: ops.swiglu(normal(2, F), normal(2, F).astype(np.float32)), "up is in fp32, not fp64"),
    "order": (lambda: ops.rmsnorm(normal(C, 2).T, normal(C), eps=0.1), r"res \(2, 8\) is not contiguous: copy it"),
    "odd": (lambda: ops.swiglu(normal(2, 7)), r"gate_up is \(2, 7\), and 6 would fit"),
    "empty": (lambda: ops.swiglu(normal(0, 6)), r"\(0, 6\) has no elements"),
    "heads": (
        lambda: ops.attention(normal(1, 2, 10), num_heads=3, num_kv_heads=2),
        "3 query heads are no multiple of 2",
    ),
    "window": (lambda: ops.attention(normal(*QKV[0]), **HEADS, window=0), "a window of 0 keys"),
    "packed": (lambda: ops.rope(normal(B, T, 10), *TURN, **HEADS), "48 would fit"),
    "positions": (lambda: ops.rope(normal(*QKV[0]), TABLE, POSITIONS.astype(np.int64), **HEADS), "int64"),
    "position": (lambda: ops.rope(normal(*QKV[0]), TABLE, POSITIONS + T, **HEADS), r"positions have .* rows 0 to 6"),
    "borders": (
        lambda: ops.attention(normal(1, T, QKV[0][2]), np.array([[0, 3, 2]], np.int32), **HEADS),
        r"borders have \[0 3 2\], not ascending from 0 to 5",
    ),
    "no axes": (lambda: ops.attention(normal(), **HEADS), r"qkv \(\) is not \(B, T, Q\)"),
    "none": (lambda: ops.linear_backward(normal(2, F), None, normal(F, C)), "x is a NoneType, not an array"),
    "target": (
        lambda: ops.linear_cross_entropy(normal(T, C), normal(4, C), TARGETS[1] + 4),
        "outside the vocabulary of 4",
    ),
    "chunk": (lambda: ops.linear_cross_entropy(normal(T, C), normal(V, C), TARGETS[1], chunk=0), "a chunk of 0 tokens"),
    "vocab": (
        lambda: ops.linear_cross_entropy(normal(T, C), normal(4, C), TARGETS[1], vocab_size=5),
        "weight has 4 rows",
    ),
    "needs": (lambda: ops.linear_backward(normal(2, F), None, None, needs=("y",)), "needs has y: use x, weight, bias"),
    "precision": (
        lambda: ops.linear(normal(2, C), normal(F, C), dtype="bf16"),
        "dtype 'bf16'.* use dtype e4m3 or None",
    ),
    "layout": (lambda: ops.quantize(normal(2, C), layout="rows"), "layout 'rows' is none of row, col, both"),
    "absent": (
        lambda: ops.linear_backward(normal(2, F), None, ops.quantize(normal(F, C)), needs=("x",)),
        "without col",
    ),
    "copy": (
        lambda: ops.dequantize(replace(ops.quantize(normal(2, C)), format="e5m2")),
        r"a copy of \(2, 8\), is \(2, 8\) in e4m3 with scales \(1,\) in fp32, not \(2, 8\) in e5m2",
    ),
    "copy of another shape": (
        lambda: ops.dequantize(replace(ops.quantize(normal(2, C)), shape=(3, C))),
        r"not \(3, 8\)",
    ),
    "scales": (
        lambda: ops.dequantize(replace(ops.quantize(normal(2, C)), rows_scale=np.ones(1))),
        "in fp64, not .* with scales .1,. in fp32",
    ),
    "name of a dtype": (lambda: ops.swiglu(ops.DeviceArray(0, (2, 4), "float32", 0, (16, 4))), "gate_up is in float32"),
    "scales apart": (
        lambda: ops.dequantize(
            replace(ops.quantize(normal(2, C), scaling="rowwise"), rows_scale=np.ones(4, "f4")[::2])
        ),
        "the scale of copy .* is not contiguous",
    ),
    "out": (
        lambda: ops.swiglu(normal(2, 4), out=np.empty((2, 2), np.float32)),
        r"\(2, 2\) in fp32, not \(2, 2\) in fp64",
    ),
    "read-only": (lambda: ops.swiglu(normal(2, 4), out=np.frombuffer(bytes(32)).reshape(2, 2)), "out is read-only"),
    "too few": (
        lambda: ops.rmsnorm(normal(2, C), normal(C), eps=0.1, out=normal(2, C)),
        "out has 1 arrays, not 2: x, rstd",
    ),
    "two devices": (
        lambda: ops.swiglu(normal(2, F), ops.DeviceArray(256, (2, F), "fp64")),
        "gate on the CPU and up on GPU 0: move them to one device",
    ),
}


def test_an_unknown_keyword_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'output'"):
        ops.swiglu(normal(2, 4), output=normal(2, 2))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_fix(mistake):
    run, message = MISTAKES[mistake]
    with pytest.raises(UsageError, match=message):
        run()


def test_the_package_imports_no_arrays_before_a_function_is_used():
    code = "import sys, llmq.ops; sys.exit(bool({'numpy', 'torch', 'cupy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert {"rmsnorm", "linear_cross_entropy"} <= {*dir(ops)}
    with pytest.raises(AttributeError, match="no attribute 'layernorm'"):
        _ = ops.layernorm


def test_no_array_of_a_call_is_kept():
    arrays = [normal(3, C), normal(C)]
    kept = [ref(x) for x in (*arrays, *ops.rmsnorm(*arrays, eps=0.25))]
    del arrays
    assert not any(x() is not None for x in kept)


class OfGpu:
    """An array whose capsule says that it lies on GPU 3, with these strides in numbers."""

    def __init__(self, array, strides):
        self.array, self.strides = array, strides

    def __dlpack_device__(self):
        return 2, 3

    def __dlpack__(self, *, stream):
        assert stream == 1
        capsule = self.array.__dlpack__()
        about = exchange._Tensor.from_address(exchange._pointer(capsule, b"dltensor"))
        about.device_type, about.device = 2, 3
        for axis, step in enumerate(self.strides):
            about.strides[axis] = step
        return capsule


def test_a_capsule_says_where_an_array_of_a_gpu_lies(monkeypatch):
    monkeypatch.setattr(exchange, "_stream", lambda: 1)
    array = np.zeros((1, 4, 6), np.float32)
    for strides, seen in (((5, 6, 1), None), ((24, 12, 2), (96, 48, 8))):
        found = exchange.operand(OfGpu(array, strides), "x")
        assert found == (array.ctypes.data, (1, 4, 6), "fp32", 3, seen)
    with pytest.raises(UsageError, match="x has the dtype int64, which llmq lacks"):
        exchange.operand(OfGpu(array.astype(np.int64), (24, 6, 1)), "x")


@pytest.mark.judge
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_tensors_are_read_and_written_in_place(dtype):
    torch = pytest.importorskip("torch")
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    x, weight = (torch.randn(shape, dtype=kind) for shape in ((3, C), (C,)))
    seen = ops.as_array(x)
    assert seen.dtype == DTYPES[dtype] and seen.ctypes.data == x.data_ptr()
    y, rstd = torch.empty_like(x), torch.empty(3)
    assert ops.rmsnorm(x, weight, eps=1e-5, out=(y, rstd))[0] is y
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (C,), weight, 1e-5))
    with pytest.raises(UsageError, match=r"res does not give its memory away.*detach"):
        ops.rmsnorm(x.requires_grad_(), weight, eps=1e-5)


@pytest.mark.judge
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    from torch.nn import functional

    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((B, T, C), (V, C)))
    right = functional.cross_entropy(
        (x @ weight.T).flatten(0, 1), torch.tensor(TARGETS).long().flatten(), reduction="none"
    )
    right.sum().backward()
    loss, *gradients = ops.linear_cross_entropy(x.detach(), weight.detach(), TARGETS, chunk=4)
    np.testing.assert_allclose(loss.flatten(), right.detach(), atol=1e-12)
    for got, tensor in zip(gradients, (x, weight), strict=True):
        np.testing.assert_allclose(got, tensor.grad, atol=1e-12)
    qkv = torch.randn(*QKV[0], dtype=torch.float64)
    q, k, v = (part.view(B, T, -1, HD).transpose(1, 2) for part in qkv.split([HQ * HD, HKV * HD, HKV * HD], dim=-1))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    np.testing.assert_allclose(ops.attention(qkv, **HEADS)[0], attended.transpose(1, 2).flatten(2), atol=1e-12)
