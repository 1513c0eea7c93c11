"""The functions on arrays of a GPU against the same on the CPU; on bare memory, so that kernels are emulated too."""

import numpy as np
import pytest
from dlpack import Shared

from llmq import ops
from llmq.errors import UsageError
from llmq.ops import on_cuda, routines
from llmq.ops.exchange import NAMES
from llmq.tensor import DTYPES

from .numpy_gemms import NumpyGemms

B, T, C, F, HQ, HKV, HD = 2, 37, 88, 40, 4, 2, 16
HEADS = {"num_heads": HQ, "num_kv_heads": HKV}
QKV = (B, T, (HQ + 2 * HKV) * HD)
# function, shapes of inputs, numbers; what is not a value is made below
CALLS = {
    "rmsnorm": (["btc", "c"], {"eps": 1e-5}),
    "rmsnorm_backward": (["btc", "btc", "c", "stat", "btc"], {}),
    "rope": (["qkv", "table", "positions"], HEADS),
    "rope_backward": (["qkv", "table", "positions"], HEADS),
    "rope_heads": (["q", "k", "angles", "angles"], {}),
    "rope_heads_backward": (["q", "k", "angles", "angles"], {}),
    "swiglu": (["gate_up"], {}),
    "swiglu apart": (["act", "act"], {}),
    "swiglu_backward": (["act", "gate_up"], {}),
    "swiglu_backward apart": (["act", "act", "act"], {}),
}
SHAPES = {"btc": (B, T, C), "c": (C,), "qkv": QKV, "q": (B, T, HQ, HD), "k": (B, T, HKV, HD), "angles": (B, T, HD)}
SHAPES |= {"act": (B, T, F), "gate_up": (B, T, 2 * F)}
IN_LINE = {"bf16": 2**-7, "fp32": 2**-18}  # of results, whose roundings the tests of the ops count


def made(kind, dtype, rng):
    """An input of the CPU."""
    if kind == "positions":
        return rng.integers(0, T, (B, T)).astype(np.int32)
    if kind in ("stat", "table"):
        return rng.uniform(0.5, 1, (B, T) if kind == "stat" else (T, HD)).astype(np.float32)
    return rng.standard_normal(SHAPES[kind]).astype(DTYPES[dtype])


def on_gpu(array):
    """A copy, as bare memory."""
    import cupy

    raw = cupy.asarray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return ops.DeviceArray(raw.data.ptr, array.shape, NAMES[array.dtype], owner=raw)


def on_host(x):
    """What bare memory holds."""
    return x.owner.get().view(np.uint8).view(DTYPES[x.dtype]).reshape(x.shape)


def scratch(num_bytes):
    return on_gpu(np.full(num_bytes, 0xFF, np.uint8))


def run(name, inputs, numbers, out=None):
    """On the CPU and, into poisoned memory, on the GPU: arrays of both."""
    function = getattr(ops, name.split()[0])
    right = function(*inputs, **numbers)
    right = right if isinstance(right, tuple) else (right,)
    given = [on_gpu(x) for x in inputs]
    poisoned = [on_gpu(np.full(x.shape, np.nan).astype(x.dtype)) for x in right]
    out = tuple(poisoned) if out is None else tuple(given[i] for i in out)
    found = function(*given, **numbers, out=out, allocate=scratch)
    assert found == (out if len(out) > 1 else out[0])
    return right, [on_host(x) for x in out]


@pytest.mark.gpu(emulated="apart-bf16")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", CALLS)
def test_a_function_gives_what_it_gives_on_the_cpu(name, dtype):
    kinds, numbers = CALLS[name]
    for seed in range(2):  # the second runs what the first has bound, on other memory
        rng = np.random.default_rng(seed)
        close(dtype, *run(name, [made(kind, dtype, rng) for kind in kinds], numbers))


def close(dtype, right, found):
    for a, b in zip(right, found, strict=True):
        a, b = (x.astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(b, a, rtol=IN_LINE[dtype], atol=IN_LINE[dtype] * np.abs(a).max())


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize(
    ("name", "out"),
    # the gradient of a weight may lie where the weight does, which is read before
    {"rmsnorm_backward": (0, 2), "rope": (0,), "rope_heads": (0, 1), "swiglu_backward apart": (1, 2)}.items(),
)
def test_results_may_take_the_memory_of_inputs(name, out):
    kinds, numbers = CALLS[name]
    inputs = [made(kind, "bf16", np.random.default_rng(0)) for kind in kinds]
    close("bf16", *run(name, inputs, numbers, out))


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_may_be_views_that_share_their_angles(batch, backward):
    """As in transformers: q and k have the axis of heads before that of tokens, and all rows the same positions."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((batch, heads, T, HD)).astype(DTYPES["bf16"]) for heads in (HQ, HKV))
    angles = [rng.standard_normal((1, T, HD)).astype(DTYPES["bf16"]) for _ in "cs"]
    function = ops.rope_heads_backward if backward else ops.rope_heads
    given = [on_gpu(x) for x in (q, k)]
    views = [_turned(x, host) for x, host in zip(given, (q, k), strict=True)]
    function(*views, *map(on_gpu, angles), out=tuple(views))
    right = function(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3), *angles)
    close("bf16", [x.transpose(0, 2, 1, 3) for x in right], list(map(on_host, given)))


def _turned(x, host):
    """The view (B,T,heads,Hd) of memory (B,heads,T,Hd)."""
    turned = host.transpose(0, 2, 1, 3)
    strides = (2, *turned.strides[1:]) if len(host) == 1 else turned.strides  # as torch may have it
    return x._replace(shape=turned.shape, strides=strides)


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("borders", [None, np.array([[0, 5, T], [0, T, T]], np.int32)], ids=["dense", "documents"])
def test_attention_in_fp32(borders):
    rng = np.random.default_rng(0)
    qkv, d_att = (rng.standard_normal(shape).astype(np.float32) for shape in (QKV, (B, T, HQ * HD)))
    given = () if borders is None else (borders,)
    right, found = run("attention", [qkv, *given], {**HEADS, "window": 9})
    close("fp32", right, found)
    close("fp32", *run("attention_backward", [d_att, qkv, *right, *given], {**HEADS, "window": 9}))


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("scaling", ["current", "rowwise", "blockwise", "tilewise"])
def test_copies_in_fp8_have_the_bytes_of_the_cpu(scaling):
    x = np.random.default_rng(0).standard_normal((48, 144)).astype(DTYPES["bf16"])
    right = ops.quantize(x, scaling=scaling, layout="both")
    arrays = [right.rows, right.columns, right.rows_scale, right.columns_scale]
    poisoned = [on_gpu(np.full(array.shape, np.nan).astype(array.dtype)) for array in arrays]
    into = ops.Quantized(*poisoned, right.format, scaling, x.shape, "bf16")
    found = ops.quantize(on_gpu(x), scaling=scaling, layout="both", out=into, allocate=scratch)
    assert found.rows is into.rows and found.shape == x.shape
    for name in ("rows", "columns", "rows_scale", *([] if scaling == "current" else ["columns_scale"])):
        np.testing.assert_array_equal(on_host(getattr(found, name)), getattr(right, name), name)
    if scaling in ("current", "tilewise"):  # what a kernel reads
        value = on_gpu(np.empty(x.shape, np.float32))
        ops.dequantize(found, "fp32", out=value)
        np.testing.assert_array_equal(on_host(value), ops.dequantize(right, "fp32"))


@pytest.mark.gpu(emulated=True)
def test_what_kernels_do_not_take_is_an_error():
    x, weight, rstd = (on_gpu(np.ones(shape, np.float32)) for shape in ((4, C), (C,), (4,)))
    out, wide = (on_gpu(np.ones((4, C), np.float32)), rstd), on_gpu(np.ones((4, C)))
    three = (out[0]._replace(shape=(3, C)), rstd._replace(shape=(3,)))
    wrong = [
        ("no multiple of 16 bytes", x._replace(address=x.address + 4, shape=(3, C)), weight, three),
        ("res .* is not contiguous", x._replace(strides=(8 * C, 4), shape=(2, C)), weight, None),
        ("res on GPU 0 and weight on the CPU", x, np.ones(C, np.float32), None),
        ("res is in fp64, which kernels of the GPU lack", wide, on_gpu(np.ones(C)), (wide, on_gpu(np.ones(4)))),
    ]
    for message, res, scale, into in wrong:
        with pytest.raises(UsageError, match=message):
            ops.rmsnorm(res, scale, eps=0.1, out=into)
    same = x._replace(strides=(4 * C, 4))  # contiguous all the same
    assert ops.rmsnorm(same, weight, eps=0.1, out=out) == out


@pytest.mark.gpu(emulated=True)
def test_scratch_that_does_not_do_is_an_error():
    shape = (48, 144)
    x, rows, scale = map(on_gpu, (np.ones(shape, np.float32), np.ones(shape, np.uint8), np.ones(48, np.float32)))
    into = ops.Quantized(rows, None, scale, None, "e4m3", "rowwise", shape, "fp32")
    for wrong, where in (
        (lambda n: np.empty(n, np.uint8), "the CPU"),
        (lambda n: scratch(n - 1), "0x"),
        (lambda n: scratch(n + 8)._replace(address=scratch(n + 8).address + 8), "0x"),
    ):
        with pytest.raises(UsageError, match=rf"allocate\(\d+\) gave \d+ bytes at {where}"):
            ops.quantize(x, scaling="rowwise", out=into, allocate=wrong)


@pytest.fixture
def products(request, monkeypatch):
    """Without a GPU, products are NumPy's."""
    if request.node.get_closest_marker("emulated"):
        on_cuda._context.cache_clear()
        monkeypatch.setattr(routines, "_plans", {})
        for name, value in (("Gemms", lambda _: NumpyGemms()), ("Algorithms", id), ("device_key", lambda: "")):
            monkeypatch.setattr(on_cuda, name, value)


M, K, N = 96, 256, 301
EVEN = 288  # what fp8 has
LINEAR = {"x": (M, K), "weight": (N, K), "d_y": (M, N)}


def linear_inputs(dtype, width):
    rng = np.random.default_rng(0)
    x, weight, d_y = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in LINEAR.values())
    targets = rng.integers(0, width, M).astype(np.int32)
    targets[3:9] = -100
    return x, weight[:width].copy(), d_y[:, :width].copy(), targets, weight[:width, 0].copy()


@pytest.mark.gpu(emulated="288-bf16")
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("width", [N, EVEN])
def test_products_are_those_of_the_cpu(dtype, width):
    x, weight, d_y, _, bias = linear_inputs(dtype, width)
    close("bf16", *run("linear", [x, weight], {}))
    if width == EVEN or dtype == "fp32":
        close("bf16", *run("linear", [x, weight, bias, d_y], {}))
        close("bf16", *run("linear", [x, weight, bias, d_y], {}, (3,)))
        close("bf16", *run("linear_backward", [d_y, x, weight], {"needs": ("x", "weight", "bias")}))
    if width == EVEN and dtype == "bf16":
        close("bf16", *run("linear", [x, weight, bias], {"dtype": "e4m3"}))
        close("bf16", *run("linear_backward", [d_y, x, weight], {"dtype": "e4m3", "needs": ("x", "weight", "bias")}))


@pytest.mark.gpu(emulated="40-301")
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("chunk", "width"), [(40, N), (None, EVEN)])
def test_the_head_is_that_of_the_cpu(chunk, width):
    x, weight, _, targets, _ = linear_inputs("bf16", width)
    right, found = run("linear_cross_entropy", [x, weight, targets], {"chunk": chunk})
    close("bf16", right, found)
    assert not found[0][3:9].any() and not found[1][3:9].any()


@pytest.mark.gpu
def test_attention_in_bf16_is_that_of_the_cpu():
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((2, 128, (HQ + 2 * HKV) * 64)).astype(DTYPES["bf16"])
    d_att = rng.standard_normal((2, 128, HQ * 64)).astype(DTYPES["bf16"])
    right = ops.attention(qkv, **HEADS)
    found = ops.attention(ops.as_array(on_gpu(qkv)), **HEADS)
    gradient = ops.attention_backward(*(ops.as_array(on_gpu(x)) for x in (d_att, qkv, *right)), **HEADS)
    for a, b in zip((*right, ops.attention_backward(d_att, qkv, *right, **HEADS)), (*found, gradient), strict=True):
        got = b.view(np.uint8).get().view(a.dtype).reshape(a.shape).astype(np.float64)
        np.testing.assert_allclose(got, a.astype(np.float64), rtol=2**-5, atol=2**-5 * np.abs(a.astype(float)).max())


@pytest.mark.gpu
def test_tensors_of_other_libraries_are_read_where_they_lie():
    """No byte is allocated but for results; what is written is theirs."""
    import cupy

    gate, up, act = (cupy.ones((1024, 1024), cupy.float32) for _ in range(3))
    seen = ops.as_array(Shared(gate))
    assert seen.data.ptr == gate.data.ptr and seen.dtype == gate.dtype
    ops.swiglu(gate, up, out=act)  # binds
    pool = cupy.get_default_memory_pool()
    before = pool.total_bytes(), pool.used_bytes()
    found = ops.swiglu(Shared(gate), Shared(up), out=Shared(act))
    assert isinstance(found, Shared) and (pool.total_bytes(), pool.used_bytes()) == before
    made = ops.swiglu(Shared(gate), Shared(up))
    assert pool.used_bytes() == before[1] + made.nbytes and bool((made == act).all())


@pytest.mark.gpu
@pytest.mark.judge
def test_torch_tensors_of_the_gpu_in_bf16():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no GPU")
    x, weight = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16), torch.ones(128, device="cuda").bfloat16()
    y, rstd = torch.empty_like(x), torch.empty(64, device="cuda")
    assert ops.rmsnorm(x, weight, eps=1e-5, out=(y, rstd))[0] is y
    torch.cuda.synchronize()
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (128,), weight, 1e-5))
