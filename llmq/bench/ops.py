"""How fast the ops of the CUDA backend are: GB/s of the bytes that each must move, beside a copy of as many bytes.

Calls are captured in a CUDA graph over several sets of buffers, larger together than the L2 cache, and the median of
several replays is taken: what an op costs inside a training step. `llmq-bench op` prints the table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from llmq.ops import cuda
from llmq.ops.cuda.launch import Kernel
from llmq.ops.cuda.timing import fill_random
from llmq.ops.seam import Arguments, arguments_of, record
from llmq.tensor import COLSUM, DTYPES, Form, Output, Tensor, num_norm_tiles, scale_shape, stored_shape

L2_BYTES = 2**28  # more than any card's L2 cache
REPLAYS = 15
ROW8, COL8 = Form("e4m3", "row", "delayed"), Form("e4m3", "col", "delayed")


@dataclass(frozen=True)
class Sizes:
    """A model and its micro-batch; letters as in the op's docstrings."""

    name: str
    b: int
    t: int
    c: int
    hq: int
    hkv: int
    hd: int
    f: int
    v: int


MODELS = (
    Sizes("0.5B", 32, 1024, 896, 14, 2, 64, 4864, 151936),
    Sizes("7B", 16, 1024, 3584, 28, 4, 128, 18944, 152064),
)


@dataclass(frozen=True)
class OpTiming:
    """An op at a size: bytes it must move, its time, and that of a copy that moves as many bytes."""

    name: str
    num_bytes: int
    time_us: float
    copy_us: float

    @property
    def bytes_per_s(self) -> float:
        """What the op achieves."""
        return self.num_bytes / self.time_us * 1e6

    def row(self) -> str:
        """A line of the table."""
        share = 100 * self.copy_us / self.time_us
        size, rate = self.num_bytes / 2**20, self.bytes_per_s / 1e9
        return f"| {self.name} | {size:.0f} | {self.time_us:.1f} | {rate:.0f} | {share:.0f}% |"


class Arrays:
    """Random arrays of the GPU as handles, and the bytes that were made."""

    def __init__(self) -> None:
        import cupy

        self.cupy, self.num_bytes = cupy, 0

    def tensor(self, shape: tuple[int, ...], dtype: str = "bf16", form: Form | None = None, high: int = 0) -> Tensor:
        """Normal numbers, or integers below `high`."""
        kind = form.dtype if form else dtype
        stored = stored_shape(shape, form)
        if kind == "int32":
            array = self.cupy.asarray(np.random.default_rng(1).integers(0, high or 1, stored, dtype=np.int32))
        else:
            array = self.cupy.empty(stored, np.uint8 if kind in ("e4m3", "e5m2") else DTYPES[kind])
            fill_random(array.data.ptr, array.nbytes, kind, self.cupy.cuda.get_current_stream().ptr)
        self.num_bytes += array.nbytes
        scale = self.cupy.full(scale_shape(shape, form), 0.01, np.float32) if form and form.scaling else None
        return Tensor("x", array, shape, form, scale)

    def scratch(self, num_bytes: int) -> Any:
        """Memory that calls use in turn."""
        return self.cupy.empty(max(num_bytes, 1), np.uint8)

    def output(self, shape: tuple[int, ...], dtype: str = "bf16", forms: tuple[Form | None, ...] = (None,)) -> Output:
        """An output in these forms, with statistics if one is quantized."""
        amax = {"e4m3": self.cupy.zeros(1, np.float32)} if ROW8 in forms else {}
        return Output("y", shape, dtype, tuple(self.tensor(shape, dtype, form) for form in forms), amax=amax)


Call = Callable[[], None]


@dataclass(frozen=True)
class Invocation:
    """An op and its handles in the order of its signature. `different_tokens` are those of a batch, if it has any."""

    op: str
    handles: tuple[Any, ...]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    different_tokens: float | None = None

    @property
    def arguments(self) -> Arguments:
        """What FLOPs, bytes and scratch follow from."""
        found = arguments_of(self.op, *self.handles, **self.numbers)
        return replace(found, different_tokens=self.different_tokens)

    def bound(self, kernel: Kernel, scratch: Any) -> Call:
        """The call, with nothing left to give; `scratch` is a CuPy array that others use, too."""
        given = {"scratch": scratch} if kernel.needed(self.arguments) else {}
        return partial(kernel.launch, *self.handles, **self.numbers, **given)


Maker = Callable[[Arrays, Sizes], Invocation]


def cases(wanted: str | None = None) -> Iterator[tuple[str, Maker]]:
    """The variants of an op, one variant, or everything; forms beside the value are named after a plus."""
    for name, maker in CASES.items():
        if wanted in (None, name, base(name)):
            yield name, maker


def base(name: str) -> str:
    """The op of a variant: `adamw` for `adamw fp32, bf16 moments+fp8`."""
    return re.split("[+ ]", name)[0]


def _rmsnorm_forward(forms: tuple[Form | None, ...]) -> Maker:
    def make(a: Arrays, s: Sizes) -> Invocation:
        x, rstd = a.output((s.b, s.t, s.c), forms=forms), a.output((s.b, s.t), "fp32")
        res, weight = a.tensor((s.b, s.t, s.c)), a.tensor((s.c,))
        return Invocation("rmsnorm_forward", (x, rstd, res, weight), {"eps": 1e-6})

    return make


def _rmsnorm_backward(forms: tuple[Form | None, ...]) -> Maker:
    def make(a: Arrays, s: Sizes) -> Invocation:
        d_out, d_weight = a.output((s.b, s.t, s.c), forms=forms), a.output((s.c,))
        d_x, d_res, res = (a.tensor((s.b, s.t, s.c)) for _ in range(3))
        weight, rstd = a.tensor((s.c,)), a.tensor((s.b, s.t), "fp32")
        return Invocation("rmsnorm_backward", (d_out, d_weight, d_x, d_res, res, weight, rstd))

    return make


def _swiglu_forward(forms: tuple[Form | None, ...]) -> Maker:
    def make(a: Arrays, s: Sizes) -> Invocation:
        act, gate_up = a.output((s.b, s.t, s.f), forms=forms), a.tensor((s.b, s.t, 2 * s.f))
        return Invocation("swiglu_forward", (act, gate_up))

    return make


def _swiglu_backward(forms: tuple[Form | None, ...]) -> Maker:
    def make(a: Arrays, s: Sizes) -> Invocation:
        d, gate_up = a.output((s.b, s.t, 2 * s.f), forms=forms), a.tensor((s.b, s.t, 2 * s.f))
        d_act = a.tensor((s.b, s.t, s.f))
        return Invocation("swiglu_backward", (d, d_act, gate_up))

    return make


def _rope(op: str, forms: tuple[Form | None, ...], in_place: bool = False) -> Maker:
    def make(a: Arrays, s: Sizes) -> Invocation:
        shape = (s.b, s.t, (s.hq + 2 * s.hkv) * s.hd)
        x = a.tensor(shape)
        out = Output("out", shape, "bf16", (x,)) if in_place else a.output(shape, forms=forms)
        table = a.tensor((s.t, s.hd), "fp32")
        positions = a.tensor((s.b, s.t), "int32")
        positions.array[...] = a.cupy.arange(s.t, dtype=np.int32)
        return Invocation(op, (out, x, table, positions), {"num_heads": s.hq, "num_kv_heads": s.hkv})

    return make


def _qk_norm_forward(a: Arrays, s: Sizes) -> Invocation:
    shape, heads = (s.b, s.t, (s.hq + 2 * s.hkv) * s.hd), {"num_heads": s.hq, "num_kv_heads": s.hkv}
    out, rstd = a.output(shape), a.output((s.b, s.t, s.hq + s.hkv), "fp32")
    read = (a.tensor(shape), a.tensor((s.hd,)), a.tensor((s.hd,)))
    return Invocation("qk_norm_forward", (out, rstd, *read), {**heads, "eps": 1e-6})


def _qk_norm_backward(forms: tuple[Form | None, ...]) -> Maker:
    def make(a: Arrays, s: Sizes) -> Invocation:
        shape, heads = (s.b, s.t, (s.hq + 2 * s.hkv) * s.hd), {"num_heads": s.hq, "num_kv_heads": s.hkv}
        out = (a.output(shape, forms=forms), a.output((s.hd,)), a.output((s.hd,)))
        read = (a.tensor(shape), a.tensor(shape), a.tensor((s.hd,)), a.tensor((s.hd,)))
        rstd = a.tensor((s.b, s.t, s.hq + s.hkv), "fp32")
        return Invocation("qk_norm_backward", (*out, *read, rstd), heads)

    return make


def _zipf(a: Arrays, s: Sizes) -> tuple[Tensor, int]:
    """Tokens of which few are frequent, and how many there are."""
    ids = np.random.default_rng(1).zipf(1.1, (s.b, s.t)) % s.v
    return Tensor("tokens", a.cupy.asarray(ids.astype(np.int32)), (s.b, s.t)), len(np.unique(ids))


def _embedding_forward(a: Arrays, s: Sizes) -> Invocation:
    res, weight, (tokens, rows) = a.output((s.b, s.t, s.c)), a.tensor((s.v, s.c)), _zipf(a, s)
    return Invocation("embedding_forward", (res, tokens, weight), different_tokens=rows)


def _embedding_noise(a: Arrays, s: Sizes) -> Invocation:
    shape = (s.b, s.t, s.c)
    out, res, samples = a.output(shape), a.tensor(shape), a.tensor((s.b,), "int32", high=s.b)
    return Invocation("embedding_noise", (out, res, samples), {"alpha": 5.0, "seed": 1, "stream": 2})


def _embedding_backward(a: Arrays, s: Sizes) -> Invocation:
    d_weight, d_res, (tokens, rows) = a.output((s.v, s.c)), a.tensor((s.b, s.t, s.c)), _zipf(a, s)
    d_weight.accumulate = True
    return Invocation("embedding_backward", (d_weight, d_res, tokens), different_tokens=rows)


def _cross_entropy(a: Arrays, s: Sizes) -> Invocation:
    rows = 2**13
    logits, targets = a.tensor((rows, s.v)), a.tensor((rows,), "int32", high=s.v)
    d_logits, loss = Output("d", logits.shape, "bf16", (logits,)), a.output((rows,), "fp32")
    return Invocation("cross_entropy", (d_logits, loss, logits, targets), {"vocab_size": s.v, "z_loss": 0.0})


def _adamw(master: str, m: str, v: str, grad: str, forms: tuple[Form | None, ...]) -> Maker:
    def make(a: Arrays, s: Sizes) -> Invocation:
        shape, kinds = (2 * s.f, s.c), (master, m, v)
        state = [a.tensor(shape, kind) for kind in kinds]
        new = [Output("new", shape, kind, (t,)) for kind, t in zip(kinds, state, strict=True)]
        weight, gradient = a.output(shape, forms=forms), a.tensor(shape, grad)
        cells = [Tensor("cell", a.cupy.full(1, value, np.float32), (1,)) for value in (1, 1, 1e-4)]
        step = Tensor("step", a.cupy.full(1, 100, np.int32), (1,))
        state[2].array.view(np.uint16 if v == "bf16" else np.uint32)[...] &= 0x7FFF if v == "bf16" else 0x7FFFFFFF
        numbers: dict[str, Any] = {
            "beta_1": 0.9,
            "beta_2": 0.95,
            "epsilon": 1e-8,
            "weight_decay": 0.1,
            "seed": 1,
            "stream": 2,
        }
        return Invocation("adamw", (*new, weight, *state, gradient, *cells, step), numbers)

    return make


def _cast(dtype: str, forms: tuple[Form | None, ...], source: str) -> Maker:
    def make(a: Arrays, s: Sizes) -> Invocation:
        out, x = a.output((2 * s.f, s.c), dtype, forms), a.tensor((2 * s.f, s.c), source)
        return Invocation("cast", (out, x))

    return make


def _amax_scale(a: Arrays, s: Sizes) -> Invocation:
    scale, x = a.output((1,), "fp32"), a.tensor((s.b, s.t, s.c))
    return Invocation("amax_scale", (scale, x), {"limit": 448.0})


def _quantize(forms: tuple[Form, ...], measures: bool = False, is_weight: bool = False) -> Maker:
    def make(a: Arrays, s: Sizes) -> Invocation:
        shape = (2 * s.f, s.c) if is_weight else (s.b, s.t, s.f)
        out, scale = a.output(shape, forms=forms), a.output((1,), "fp32", (None,) if measures else ())
        x = a.tensor(shape)
        return Invocation("quantize", (out, scale, x), {"limit": 448.0})

    return make


def _sum_squares(a: Arrays, s: Sizes) -> Invocation:
    partials, grad = a.output((num_norm_tiles((s.v, s.c)),), "fp32"), a.tensor((s.v, s.c))
    return Invocation("sum_squares", (partials, grad))


def _loss_sum(a: Arrays, s: Sizes) -> Invocation:
    out = (a.output((1,), "fp32"), a.output((1,), "int32"))
    loss, targets = a.tensor((s.b, s.t), "fp32"), a.tensor((s.b, s.t), "int32", high=s.v)
    return Invocation("loss_sum", (*out, loss, targets))


def _bias_backward(a: Arrays, s: Sizes) -> Invocation:
    width = (s.hq + 2 * s.hkv) * s.hd
    d_bias, d_y = a.output((width,)), a.tensor((s.b, s.t, width), "fp32", COLSUM)
    return Invocation("bias_backward", (d_bias, d_y))


FP8 = (ROW8, COL8)
ROWS, COLUMNS = Form("e4m3", "row", "rowwise"), Form("e4m3", "col", "rowwise")
BLOCKS = (Form("e4m3", "row", "blockwise"), Form("e4m3", "col", "blockwise"))
TILES = (Form("e4m3", "row", "tilewise"), Form("e4m3", "col", "tilewise"))
CASES: dict[str, Maker] = {
    "embedding_forward": _embedding_forward,
    "embedding_noise": _embedding_noise,
    "embedding_backward": _embedding_backward,
    "rmsnorm_forward": _rmsnorm_forward((None,)),
    "rmsnorm_forward+fp8": _rmsnorm_forward(FP8),
    "rmsnorm_backward": _rmsnorm_backward((None,)),
    "rmsnorm_backward+value+fp8": _rmsnorm_backward((None, *FP8)),
    "qk_norm_forward": _qk_norm_forward,
    "qk_norm_backward": _qk_norm_backward((None,)),
    "qk_norm_backward+fp8": _qk_norm_backward(FP8),
    "rope_forward": _rope("rope_forward", (None,)),
    "rope_forward+in place": _rope("rope_forward", (None,), in_place=True),
    "rope_backward+colsum": _rope("rope_backward", (None, COLSUM)),
    "rope_backward+fp8+colsum": _rope("rope_backward", (*FP8, COLSUM)),
    "swiglu_forward": _swiglu_forward((None,)),
    "swiglu_forward+fp8": _swiglu_forward(FP8),
    "swiglu_backward": _swiglu_backward((None,)),
    "swiglu_backward+fp8": _swiglu_backward(FP8),
    "bias_backward": _bias_backward,
    "cross_entropy": _cross_entropy,
    "loss_sum": _loss_sum,
    "sum_squares": _sum_squares,
    "adamw bf16": _adamw("bf16", "bf16", "bf16", "bf16", ()),
    "adamw fp32": _adamw("fp32", "fp32", "fp32", "fp32", (None,)),
    "adamw fp32, bf16 moments": _adamw("fp32", "bf16", "bf16", "bf16", (None,)),
    "adamw fp32, bf16 moments+fp8": _adamw("fp32", "bf16", "bf16", "bf16", FP8),
    "cast fp32 to bf16": _cast("bf16", (None,), "fp32"),
    "cast+fp8": _cast("bf16", FP8, "bf16"),
    "amax_scale": _amax_scale,
    "quantize+rows": _quantize((ROWS,)),
    "quantize+rows, scale of the whole": _quantize((ROWS,), measures=True),
    "quantize+blocks": _quantize(BLOCKS),
    "quantize+blocks in rows": _quantize(BLOCKS[:1]),
    "quantize+rows of a weight": _quantize((ROWS, COLUMNS), is_weight=True),
    "quantize+tiles of a weight": _quantize(TILES, is_weight=True),
}


def measure(name: str, maker: Maker, sizes: Sizes) -> OpTiming:
    """Times one op at one size."""
    import cupy

    made = [maker(Arrays(), sizes)]
    op, call = made[0].op, made[0].arguments
    num_bytes = record(op).num_bytes(call)
    while len(made) * num_bytes < L2_BYTES:
        made.append(maker(Arrays(), sizes))
    kernel = cuda.KERNELS[op]
    scratch = Arrays().scratch(kernel.needed(call))
    calls = [one.bound(kernel, scratch) for one in made]
    timing = OpTiming(f"{name}, {sizes.name}", num_bytes, replayed(calls), copy_us(num_bytes, len(calls)))
    del calls, made, scratch
    cupy.get_default_memory_pool().free_all_blocks()
    return timing


def copy_us(num_bytes: int, count: int) -> float:
    """Time of the faster of two copies of half as many bytes: the driver's, and our own kernel's."""
    import cupy

    elements = max(num_bytes // 4 // 2**16, 1) * 2**16
    pairs = [cupy.zeros((2, elements), DTYPES["bf16"]) for _ in range(count)]

    def driver(pair: Any) -> Call:
        return lambda: pair[0].data.copy_from_device_async(pair[1].data, 2 * elements)

    def own(pair: Any) -> Call:
        shape = (elements,)
        out = Output("copy", shape, "bf16", (Tensor("copy", pair[0], shape),))
        return partial(cuda.OPS["cast"], out, Tensor("x", pair[1], shape))

    best = min(replayed([copy(pair) for pair in pairs]) for copy in (driver, own))
    return best * num_bytes / (4 * elements)


def replayed(calls: list[Call]) -> float:
    """Microseconds of one call, from the median replay of a graph of all of them, several times over."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    repeats = max(1, 8 // len(calls))
    cupy.cuda.runtime.deviceSynchronize()  # buffers are filled on another stream
    with stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(repeats):
            for call in calls:
                call()
        graph = stream.end_capture()
        times = []
        for _ in range(REPLAYS):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop))
    return float(np.median(times)) * 1000 / (repeats * len(calls))


def table(wanted: str | None = None, sizes: Sequence[Sizes] = MODELS) -> None:
    """Prints the table of an op or of all; nothing for an op that moves no bytes to speak of."""
    found = list(cases(wanted))
    if found:
        print("| op | MiB moved | us | GB/s | share of a copy |\n|---|---|---|---|---|")
    for name, maker in found:
        for size in sizes:
            print(measure(name, maker, size).row(), flush=True)


if __name__ == "__main__":
    table(sys.argv[1] if sys.argv[1:] else None)
