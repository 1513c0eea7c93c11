"""Attention on the GPU against the reference, in bf16 (cuDNN) and f32 (our kernels), with groups and windows."""

from dataclasses import replace

import numpy as np
import pytest

from llmq.errors import UsageError
from llmq.ops import seam
from llmq.ops.cuda import attention
from llmq.ops.cuda.cudnn import AttentionShape
from llmq.ops.reference import OPS

from .build import output, tensor
from .cases import Sizes

OPS_HERE = ("attention_forward", "attention_backward")
WINDOWS = pytest.mark.parametrize("window", [None, 1, 3, 64, 65, 1000])
SMALL = Sizes(b=2, t=133, c=4, hq=6, hkv=2, hd=64, f=4, v=4, vp=4)
# batch x length, query / key heads, head_dim: grouped, plain, one key head, odd lengths, every width of common models
SHAPES = {
    "grouped": SMALL,
    "plain": replace(SMALL, hq=3, hkv=3, hd=32, t=200),
    "multi-query": replace(SMALL, hq=8, hkv=1, hd=128, t=96),
    "one block": replace(SMALL, b=1, t=7, hd=16),
    "wide": replace(SMALL, b=1, t=300, hd=128, hq=14, hkv=2),
}
CASES = pytest.mark.parametrize("size", SHAPES.values(), ids=SHAPES.keys())


def numbers(size, window):
    return {"num_heads": size.hq, "num_kv_heads": size.hkv, "window": window, "softmax_scale": 1.3 * size.hd**-0.5}


def heads(size, array):
    """d_q, d_k and d_v of a packed gradient, apart."""
    array = array.astype(np.float64).reshape(size.b, size.t, -1, size.hd)
    return np.split(array, [size.hq, size.hq + size.hkv], axis=2)


def reference(size, window, dtype):
    """qkv and d_att stored in `dtype`, and what the reference makes of them: att, lse, d_qkv."""
    rng = np.random.default_rng([size.t, size.hd])
    qkv = tensor(rng.standard_normal((size.b, size.t, size.q)), dtype)
    d_att = tensor(rng.standard_normal((size.b, size.t, size.hq * size.hd)), dtype)
    att, lse, d_qkv = outputs(size, dtype)
    OPS["attention_forward"](att, lse, qkv, **numbers(size, window))
    OPS["attention_backward"](d_qkv, d_att, qkv, att.tensors[0], lse.tensors[0], **numbers(size, window))
    return qkv, d_att, att, lse, d_qkv


def outputs(size, dtype):
    shapes = (size.b, size.t, size.hq * size.hd), (size.b, size.hq, size.t), (size.b, size.t, size.q)
    return [output(shape, kind) for shape, kind in zip(shapes, (dtype, "fp32", dtype), strict=True)]


# without a GPU


@pytest.mark.parametrize("op", OPS_HERE)
def test_names_and_signatures_are_the_references(op):
    assert seam.parse(attention.attention_ops(None)[op]) == seam.signature(op)


def test_a_window_that_hides_nothing_is_none():
    for window, expected in ((None, None), (64, None), (100, None), (63, 63)):
        shape = attention._shape((2, 64, 10 * 16), 6, 2, window, 0.25)
        assert shape == AttentionShape(2, 64, 6, 2, 16, expected, 0.25)


def test_the_views_of_the_packed_rows():
    shape = AttentionShape(2, 64, 6, 2, 16, None, 0.25)
    assert shape.packed == 160
    assert shape.offsets() == (0, 96, 128)


def test_scratch_of_the_exact_kernels_is_one_number_per_query_and_head():
    scratch = {
        op: attention.attention_scratch(None, op, (2, 64, 160), "fp32", numbers(replace(SMALL, hd=16), None), wanted)
        for op, wanted in (("attention_forward", (True, True)), ("attention_backward", (True,)))
    }
    assert scratch == {"attention_forward": 0, "attention_backward": 2 * 6 * 64 * 4}


def test_a_head_dim_that_the_exact_kernels_lack_is_named():
    with pytest.raises(UsageError, match="head_dim up to 256, not 264"):
        attention.attention_scratch(
            None, "attention_forward", (2, 64, 10 * 264), "fp32", numbers(replace(SMALL, hd=264), None), (True, True)
        )


def test_a_dtype_without_attention_is_refused():
    with pytest.raises(UsageError, match="float64: use --device cpu"):
        attention._is_exact(np.dtype(np.float64))


SOME, MORE = [90], [80, 86, 89, 100, 120]
REGISTERS = {32: 104, 64: 112, 80: 128, 128: 128, 256: 160}  # most of any kernel and card, by head_dim


@pytest.mark.parametrize("capability", [*SOME, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_the_exact_kernels_compile_within_their_registers_and_do_not_spill(capability):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    from llmq.ops.cuda import compile as cuda_compile

    for head_dim, most in REGISTERS.items():
        _, log = cuda_compile.compiled("attention", capability, {"HD": head_dim, "GROUP": 7, "KV_HEADS": 2})
        used = cuda_compile.resources(log)
        assert set(used) == {"attention_forward", "attention_backward_q", "attention_backward_kv"}
        assert all(not u.spill_bytes and u.registers <= most for u in used.values()), (head_dim, used)


# on the GPU


class Runner:
    """Both ops on the GPU with scratch of exactly the size asked for, poisoned."""

    def __init__(self, cudnn):
        from .cuda_build import Device

        self.device, self.cudnn, self.scratch = Device(), cudnn, None

    def take(self, num_bytes):
        assert self.scratch is not None and num_bytes <= self.scratch.size
        return self.scratch.data.ptr

    def bound(self, op, written, read, window, size):
        """A call with nothing left to give."""
        import cupy

        context = attention.Attention(self.cudnn, self.take)
        wanted = tuple(o.wanted for o in written)
        dtype = "fp32" if read[0].array.dtype == np.float32 else "bf16"
        bytes_needed = attention.attention_scratch(
            context, op, (size.b, size.t, size.q), dtype, numbers(size, window), wanted
        )
        self.scratch = cupy.full(max(bytes_needed, 1), 0xFF, cupy.uint8)
        handles = [*(self.device.output(o) for o in written), *(self.device.tensor(t) for t in read)]
        return lambda: attention.attention_ops(context)[op](*handles, **numbers(size, window))

    def run(self, op, written, read, window, size):
        import cupy

        self.bound(op, written, read, window, size)()
        cupy.cuda.get_current_stream().synchronize()
        return [self.device.host(o.tensors[0].array) if o.wanted else None for o in written]


@pytest.fixture(scope="module")
def cudnn():
    pytest.importorskip("cudnn")
    from llmq.ops.cuda.cudnn import Cudnn

    found = Cudnn()
    yield found
    found.close()


@pytest.fixture
def runner(cudnn):
    return Runner(cudnn)


@pytest.mark.gpu
@WINDOWS
@CASES
def test_bf16(runner, size, window):
    """att is a mean of v with weights rounded to bf16, by 2^-8 of them at most; both sides round the mean once more.

    Gradients: p and d_s are rounded to bf16 before they are multiplied, att and the results too. Rounding errors are
    2^-8 of a number at most, half of that on average, and independent: a whole tensor errs by a few times 2^-9.
    """
    qkv, d_att, att, lse, d_qkv = reference(size, window, "bf16")
    got_att, got_lse, got_d = outputs(size, "bf16")
    a, s = runner.run("attention_forward", [got_att, got_lse], [qkv], window, size)
    largest = np.abs(heads(size, qkv.read())[2]).max()
    assert np.abs(a.astype(np.float64) - att.tensors[0].array.astype(np.float64)).max() <= 3 * 2.0**-8 * largest
    np.testing.assert_allclose(s, lse.tensors[0].array, atol=2e-5, rtol=2e-5)
    read = [d_att, qkv, att.tensors[0], lse.tensors[0]]
    (d,) = runner.run("attention_backward", [got_d], read, window, size)
    for got, expected in zip(heads(size, d), heads(size, d_qkv.tensors[0].array), strict=True):
        # a lone key has p = 1, so that d_q and d_k vanish but for rounding: compare with the whole gradient then
        scale = max(np.linalg.norm(expected), 0.05 * np.linalg.norm(d_qkv.tensors[0].array.astype(np.float64)))
        assert np.linalg.norm(got - expected) <= 4 * 2.0**-9 * scale


@pytest.mark.gpu
@WINDOWS
@CASES
def test_fp32(runner, size, window):
    """Sums of up to T and Hd terms in f32: either side is right to as many times 2^-24 of their magnitudes."""
    qkv, d_att, att, lse, d_qkv = reference(size, window, "fp32")
    got_att, got_lse, got_d = outputs(size, "fp32")
    a, s = runner.run("attention_forward", [got_att, got_lse], [qkv], window, size)
    bound = 2.0**-24 * (size.t + 2 * size.hd)
    np.testing.assert_allclose(a, att.tensors[0].array, atol=bound * np.abs(qkv.array).max(), rtol=0)
    np.testing.assert_allclose(s, lse.tensors[0].array, atol=bound * 10, rtol=0)
    read = [d_att, qkv, att.tensors[0], lse.tensors[0]]
    (d,) = runner.run("attention_backward", [got_d], read, window, size)
    error = np.linalg.norm(d.astype(np.float64) - d_qkv.tensors[0].array)
    assert error <= bound * np.linalg.norm(d_qkv.tensors[0].array)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("unwanted", ["att", "lse"])
def test_an_unwanted_output_is_not_written(runner, unwanted, dtype):
    qkv = reference(SMALL, None, dtype)[0]
    att, lse, _ = outputs(SMALL, dtype)
    both = runner.run("attention_forward", [att, lse], [qkv], None, SMALL)
    att, lse, _ = outputs(SMALL, dtype)
    alone = [replace(o, tensors=()) if n == unwanted else o for n, o in (("att", att), ("lse", lse))]
    one = runner.run("attention_forward", alone, [qkv], None, SMALL)
    for whole, alone in zip(both, one, strict=True):
        if alone is not None:
            np.testing.assert_array_equal(alone, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("op", OPS_HERE)
def test_two_runs_and_a_graph_give_the_same_bits(runner, op, dtype):
    import cupy

    size = replace(SMALL, b=4, t=512)
    rng = np.random.default_rng(0)
    qkv = tensor(rng.standard_normal((size.b, size.t, size.q)), dtype)
    att, lse, d_qkv = outputs(size, dtype)
    runner.run("attention_forward", [att, lse], [qkv], None, size)
    read, written = [qkv], [att, lse]
    if op == "attention_backward":
        d_att = tensor(rng.standard_normal(att.shape), dtype)
        read, written = [d_att, qkv, att.tensors[0], lse.tensors[0]], [d_qkv]
    call = runner.bound(op, written, read, None, size)
    results = []
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(3):
        call()
        cupy.cuda.get_current_stream().synchronize()
        results.append([runner.device.host(o.tensors[0].array).tobytes() for o in written])
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        for o in written:
            runner.device.array(o.tensors[0].array).fill(0)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
    results.append([runner.device.host(o.tensors[0].array).tobytes() for o in written])
    assert all(result == results[0] for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_sequence_has_the_same_bits_in_any_batch(runner, dtype):
    """Backward in batch-wise chunks relies on it."""
    size = replace(SMALL, b=4)
    qkv, d_att, att, lse, _ = reference(size, None, dtype)
    read = [d_att, qkv, att.tensors[0], lse.tensors[0]]
    (whole,) = runner.run("attention_backward", [outputs(size, dtype)[2]], read, None, size)
    one = replace(size, b=1)
    for b in range(size.b):
        piece = [replace(x, array=np.ascontiguousarray(x.array[b : b + 1]), shape=(1, *x.shape[1:])) for x in read]
        (part,) = runner.run("attention_backward", [outputs(one, dtype)[2]], piece, None, one)
        assert part.tobytes() == whole[b : b + 1].tobytes()


@pytest.mark.gpu
def test_a_head_dim_that_cudnn_lacks_is_named(runner):
    size = replace(SMALL, hd=20)
    qkv = tensor(np.ones((size.b, size.t, size.q)), "bf16")
    with pytest.raises(UsageError, match="head_dim 20"):
        runner.run("attention_forward", outputs(size, "bf16")[:2], [qkv], None, size)
