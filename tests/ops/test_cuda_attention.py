"""Attention on the GPU against the reference, in bf16 (cuDNN) and f32 (our kernels): groups, windows, packed rows."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from llmq.errors import UsageError
from llmq.ops import seam
from llmq.ops.cuda import attention
from llmq.ops.cuda.attention import AttentionShape, Cudnn
from llmq.ops.reference import OPS
from llmq.tensor import Ref

from .build import arguments_of, output, tensor
from .cases import Sizes
from .cases import borders as some_borders
from .cuda_build import compiled

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
PACKED = pytest.mark.parametrize("max_docs", [None, 5], ids=["dense", "packed"])


def numbers(size, window, borders=None, cap=None):
    """Documents of packed rows are cut at half a row."""
    return {
        **({} if cap is None else {"softcap": cap}),
        "num_heads": size.hq,
        "num_kv_heads": size.hkv,
        "window": window,
        "longest": None if borders is None else -(-size.t // 2),
        "softmax_scale": 1.3 * size.hd**-0.5,
    }


def heads(size, array):
    """d_q, d_k and d_v of a packed gradient, apart."""
    array = array.astype(np.float64).reshape(size.b, size.t, -1, size.hd)
    return np.split(array, [size.hq, size.hq + size.hkv], axis=2)


def borders_of(size, max_docs, seed=0):
    """Borders of full rows, of rows with one document and of rows with some, in turn; None for dense rows."""
    if max_docs is None:
        return None
    return tensor(some_borders(np.random.default_rng([size.t, seed]), size.b, size.t, min(max_docs, size.t)))


def reference(size, window, dtype, borders=None, cap=None):
    """qkv and d_att stored in `dtype`, and what the reference makes of them: att, lse, d_qkv."""
    rng = np.random.default_rng([size.t, size.hd])
    qkv = tensor(rng.standard_normal((size.b, size.t, size.q)), dtype)
    d_att = tensor(rng.standard_normal((size.b, size.t, size.hq * size.hd)), dtype)
    att, lse, d_qkv = outputs(size, dtype, borders)
    chosen = numbers(size, window, borders, cap)
    OPS["attention_forward"](att, lse, qkv, borders, **chosen)
    OPS["attention_backward"](d_qkv, d_att, qkv, att.tensors[0], lse.tensors[0], borders, **chosen)
    return qkv, d_att, att, lse, d_qkv


def outputs(size, dtype, borders=None):
    lse = (size.b, size.hq, size.t) if borders is None else (size.b, size.t, size.hq)
    shapes = (size.b, size.t, size.hq * size.hd), lse, (size.b, size.t, size.q)
    return [output(shape, kind) for shape, kind in zip(shapes, (dtype, "fp32", dtype), strict=True)]


# without a GPU


def planned(op, qkv, dtype, **numbers):
    """Scratch of a call that wants everything, without cuDNN."""
    names = seam.record(op).outputs
    written = {name: (Ref(name, "activation", (), dtype),) for name in names}
    call = seam.Arguments({"qkv": Ref("qkv", "activation", qkv, dtype)}, written, numbers)
    kernel = attention.attention_kernels(None)[op]
    kernel.refuse(call, 90)
    return kernel.needed(call)


def test_a_window_that_hides_nothing_is_none():
    for window, expected in ((None, None), (64, None), (100, None), (63, 63)):
        shape = attention._shape((2, 64, 10 * 16), None, 6, 2, window, None, 0.25)
        assert shape == AttentionShape(2, 64, 6, 2, 16, expected, 0.25)


def test_the_documents_of_all_rows_are_one_batch():
    dense = AttentionShape(2, 64, 6, 2, 16, None, 0.25)
    assert (dense.packed, dense.offsets()) == (160, (0, 96, 128))
    shape = attention._shape((2, 64, 10 * 16), (2, 9), 6, 2, 50, 50, 0.25)
    assert shape == AttentionShape(2, 64, 6, 2, 16, None, 0.25, 8, 50)
    assert (shape.places, shape.num_documents) == (9, 18)  # the padding after a document of 50 may be another
    # 19 numbers of 4 and 3 x 8 bytes, each array at a multiple of 256
    assert attention._places_bytes(shape) == 4 * 256 and not attention._places_bytes(replace(shape, max_docs=None))


def test_scratch_of_the_exact_kernels_is_one_number_per_query_and_head():
    chosen = numbers(replace(SMALL, hd=16), None)
    scratch = {op: planned(op, (2, 64, 160), "fp32", **chosen) for op in OPS_HERE}
    assert scratch == {"attention_forward": 0, "attention_backward": 2 * 6 * 64 * 4}
    with pytest.raises(UsageError, match="float64: use --device cpu"):
        planned("attention_forward", (2, 64, 160), "fp64", **chosen)
    with pytest.raises(UsageError, match="head_dim up to 256, not 264: use --model-dtype bf16 or --device cpu"):
        planned("attention_forward", (2, 64, 10 * 264), "fp32", **numbers(replace(SMALL, hd=264), None))


def test_a_soft_cap_takes_our_kernels_in_bf16_too():
    chosen = numbers(replace(SMALL, hd=16), None, cap=50.0)
    for dtype in ("bf16", "fp32"):
        scratch = {op: planned(op, (2, 64, 160), dtype, **chosen) for op in OPS_HERE}
        assert scratch == {"attention_forward": 0, "attention_backward": 2 * 6 * 64 * 4}
    with pytest.raises(
        UsageError, match="with a soft-cap on the GPU takes a head_dim up to 256, not 264: use --device"
    ):
        planned("attention_forward", (2, 64, 10 * 264), "bf16", **numbers(replace(SMALL, hd=264), None, cap=50.0))
    with pytest.raises(UsageError, match="a soft-cap of 0 caps nothing"):
        planned("attention_forward", (2, 64, 160), "bf16", **{**chosen, "softcap": 0.0})


SOME, MORE = [90], [80, 86, 89, 100, 120]
CAPABILITIES = pytest.mark.parametrize("capability", [*SOME, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
REGISTERS = {32: 104, 64: 120, 80: 144, 128: 144, 256: 168}  # most of any kernel and card, by head_dim
CAP = int(np.float32(50).view(np.int32))


@pytest.mark.sample("sweep")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [*SOME, *MORE])
@pytest.mark.parametrize(
    ("packed", "kind", "cap"),
    [(0, "float", 0), (1, "float", 0), (0, "float", CAP), (1, "bf16", CAP)],
    ids=["dense", "packed", "capped", "bf16"],
)
@pytest.mark.parametrize("head_dim", REGISTERS)
def test_our_kernels_compile_within_their_registers_and_do_not_spill(head_dim, capability, packed, kind, cap):
    constants = {"T": kind, "HD": head_dim, "GROUP": 7, "KV_HEADS": 2, "PACKED": packed, "CAP": cap}
    used, _ = compiled("attention", capability, constants)
    assert set(used) == {"attention_forward", "attention_backward_q", "attention_backward_kv"}
    assert all(not u.spill_bytes and u.registers <= REGISTERS[head_dim] for u in used.values()), used


@CAPABILITIES
def test_the_kernel_that_finds_documents_compiles(capability):
    found, log = compiled("documents", capability, {"QKV": 1152, "ATT": 896, "LSE": 14})
    (used,) = found.values()
    assert "warning" not in log and not used.spill_bytes and used.registers <= 48


# on the GPU


class Runner:
    """Both ops on the GPU with scratch of exactly the size asked for, poisoned."""

    def __init__(self, cudnn):
        from .cuda_build import Device

        self.device, self.kernels = Device(), attention.attention_kernels(cudnn)

    def bound(self, op, written, read, window, size, cap=None):
        """A call with nothing left to give; the last of `read` are borders, or None."""
        import cupy

        kernel, chosen = self.kernels[op], numbers(size, window, read[-1], cap)
        needed = kernel.needed(arguments_of(op, *written, *read, **chosen))
        scratch = {"scratch": cupy.full(needed, 0xFF, cupy.uint8)} if needed else {}
        handles = [*(self.device.output(o) for o in written), *(self.device.tensor(t) for t in read)]
        return lambda: kernel.launch(*handles, **chosen, **scratch)

    def run(self, op, written, read, window, size, cap=None):
        import cupy

        self.bound(op, written, read, window, size, cap)()
        cupy.cuda.get_current_stream().synchronize()
        return [self.device.host(o.tensors[0].array) if o.wanted else None for o in written]


@pytest.fixture(scope="module")
def cudnn():
    pytest.importorskip("cudnn")
    return Cudnn()


@pytest.fixture
def runner(cudnn):
    return Runner(cudnn)


def both_ways(runner, size, window, dtype, max_docs, cap=None):
    """qkv, and att, lse and d_qkv of the reference and of the GPU."""
    borders = borders_of(size, max_docs)
    qkv, d_att, *right = reference(size, window, dtype, borders, cap)
    got = outputs(size, dtype, borders)
    att, lse, d_qkv = (o.tensors[0] for o in right)
    a, s = runner.run("attention_forward", got[:2], [qkv, borders], window, size, cap)
    (d,) = runner.run("attention_backward", got[2:], [d_att, qkv, att, lse, borders], window, size, cap)
    return qkv, (att.array, lse.array, d_qkv.array), (a, s, d)


@pytest.mark.gpu
@PACKED
@WINDOWS
@CASES
def test_bf16(runner, size, window, max_docs):
    """att is a mean of v with weights rounded to bf16, by 2^-8 of them at most; both sides round the mean once more.

    Gradients: p and d_s are rounded to bf16 before they are multiplied, att and the results too. Rounding errors are
    2^-8 of a number at most, half of that on average, and independent: a whole tensor errs by a few times 2^-9.
    """
    qkv, (att, lse, d_qkv), (a, s, d) = both_ways(runner, size, window, "bf16", max_docs)
    largest = np.abs(heads(size, qkv.read())[2]).max()
    assert np.abs(a.astype(np.float64) - att.astype(np.float64)).max() <= 3 * 2.0**-8 * largest
    np.testing.assert_allclose(s, lse, atol=2e-5, rtol=2e-5)
    for got, expected in zip(heads(size, d), heads(size, d_qkv), strict=True):
        # a lone key has p = 1, so that d_q and d_k vanish but for rounding: compare with the whole gradient then
        scale = max(np.linalg.norm(expected), 0.05 * np.linalg.norm(d_qkv.astype(np.float64)))
        assert np.linalg.norm(got - expected) <= 4 * 2.0**-9 * scale


@pytest.mark.gpu(emulated="one block-3-")
@PACKED
@WINDOWS
@CASES
def test_fp32(size, window, max_docs):
    """Sums of up to T and Hd terms in f32: either side is right to as many times 2^-24 of their magnitudes."""
    qkv, (att, lse, d_qkv), (a, s, d) = both_ways(Runner(None), size, window, "fp32", max_docs)
    bound = 2.0**-24 * (size.t + 2 * size.hd)
    np.testing.assert_allclose(a, att, atol=bound * np.abs(qkv.array).max(), rtol=0)
    np.testing.assert_allclose(s, lse, atol=bound * 10, rtol=0)
    assert np.linalg.norm(d.astype(np.float64) - d_qkv) <= bound * np.linalg.norm(d_qkv)


@pytest.mark.gpu(emulated="None-bf16")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("window", [None, 64])
@PACKED
def test_scores_with_a_soft_cap(window, dtype, max_docs):
    """By our kernels. In bf16 both sides compute in f32 and round once, to neighbours at most."""
    size = replace(SMALL, t=97, hd=32)
    qkv, *found = both_ways(Runner(None), size, window, dtype, max_docs, cap=1.5)
    (att, lse, d_qkv), (a, s, d) = ([x.astype(np.float64) for x in side] for side in found)
    bound, unit = 2.0**-24 * (size.t + 2 * size.hd), 2.0**-7 if dtype == "bf16" else 0
    assert (np.abs(a - att) <= bound * np.abs(qkv.read()).max() + unit * np.abs(att)).all()
    np.testing.assert_allclose(s, lse, atol=bound * 10, rtol=0)
    assert np.linalg.norm(d - d_qkv) <= (bound + unit) * np.linalg.norm(d_qkv)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("unwanted", ["att", "lse"])
@PACKED
def test_an_unwanted_output_is_not_written(runner, unwanted, dtype, max_docs):
    borders = borders_of(SMALL, max_docs)
    qkv = reference(SMALL, None, dtype, borders)[0]
    att, lse, _ = outputs(SMALL, dtype, borders)
    both = runner.run("attention_forward", [att, lse], [qkv, borders], None, SMALL)
    att, lse, _ = outputs(SMALL, dtype, borders)
    alone = [replace(o, tensors=()) if n == unwanted else o for n, o in (("att", att), ("lse", lse))]
    one = runner.run("attention_forward", alone, [qkv, borders], None, SMALL)
    for whole, alone in zip(both, one, strict=True):
        if alone is not None:
            np.testing.assert_array_equal(alone, whole)


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("max_docs", [1, 5, 32, 33, 100])
def test_documents_are_found(max_docs):
    """Pieces of documents in order, then empty ones, for every row; offsets end with the end of the batch."""
    import cupy

    size, longest = replace(SMALL, b=4, t=257), 40
    borders = borders_of(size, max_docs) if max_docs > 1 else tensor(np.array([[0, size.t]] * size.b, np.int32))
    shape = attention._shape((size.b, size.t, size.q), borders.shape, **numbers(size, None) | {"longest": longest})
    expected, lengths = [], []
    for row, marks in enumerate(borders.array.tolist()):
        starts = [n for a, b in pairwise(marks) for n in range(a, b, longest)]
        lengths += np.minimum(np.diff([*starts, size.t]), longest).tolist() + [0] * (shape.places - len(starts))
        expected += [row * size.t + n for n in starts] + [(row + 1) * size.t] * (shape.places - len(starts))
    expected.append(size.b * size.t)
    scratch = cupy.full(attention._places_bytes(shape), 0xFF, cupy.uint8)
    read = replace(borders, array=cupy.asarray(borders.array))
    found = attention._find_documents(shape, read, scratch.data.ptr)
    host = scratch.get()

    def array(name, dtype, count):
        start = found[name] - scratch.data.ptr
        return host[start : start + count * np.dtype(dtype).itemsize].view(dtype)

    assert array("lengths", np.int32, shape.num_documents).tolist() == lengths
    for name, width in (("qkv", size.q), ("att", size.hq * size.hd), ("lse", size.hq)):
        offsets = array(f"{name}_offsets", np.int64, shape.num_documents + 1)
        assert offsets.tolist() == [width * token for token in expected]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@PACKED
def test_two_runs_and_one_graph_for_every_packing_give_the_same_bits(runner, dtype, max_docs):
    """Captured with one set of borders, launched with another: the bits of eager runs with those."""
    import cupy

    size, device = replace(SMALL, b=4, t=512), runner.device
    first, second = (borders_of(size, max_docs, seed) for seed in (0, 1))
    qkv, d_att, *_ = reference(size, None, dtype, second)

    def bound(borders):
        att, lse, d_qkv = outputs(size, dtype, borders)
        read = [d_att, qkv, att.tensors[0], lse.tensors[0], borders]
        forward = runner.bound("attention_forward", [att, lse], [qkv, borders], None, size)
        backward = runner.bound("attention_backward", [d_qkv], read, None, size)
        return [o.tensors[0].array for o in (att, lse, d_qkv)], lambda: (forward(), backward())

    def bits(arrays):
        cupy.cuda.Device().synchronize()
        return [device.host(array).tobytes() for array in arrays]

    written, run = bound(second)
    expected, again = ((run(), bits(written))[1] for _ in range(2))
    written, run = bound(first)
    run()  # builds plans
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        if first is not None:
            device.array(first.array)[...] = device.array(second.array)
        for array in written:
            device.array(array).fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert expected == again == bits(written)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@PACKED
def test_a_sequence_has_the_same_bits_in_any_batch(runner, dtype, max_docs):
    """Backward in batch-wise chunks relies on it."""
    size = replace(SMALL, b=4)
    borders = borders_of(size, max_docs)
    qkv, d_att, att, lse, _ = reference(size, None, dtype, borders)
    read = [d_att, qkv, att.tensors[0], lse.tensors[0], borders]
    (whole,) = runner.run("attention_backward", [outputs(size, dtype)[2]], read, None, size)
    one = replace(size, b=1)
    for b in range(size.b):
        piece = [x and replace(x, array=x.array[b : b + 1].copy(), shape=(1, *x.shape[1:])) for x in read]
        (part,) = runner.run("attention_backward", [outputs(one, dtype)[2]], piece, None, one)
        assert part.tobytes() == whole[b : b + 1].tobytes()


@pytest.mark.gpu
def test_a_head_dim_that_cudnn_lacks_is_named(runner):
    size = replace(SMALL, hd=20)
    qkv = tensor(np.ones((size.b, size.t, size.q)), "bf16")
    with pytest.raises(UsageError, match="head_dim 20"):
        runner.run("attention_forward", outputs(size, "bf16")[:2], [qkv, None], None, size)
