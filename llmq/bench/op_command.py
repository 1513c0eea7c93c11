"""`llmq-bench op`: one op of the CUDA backend, or all, over shapes and forms, as Markdown.

Ops that move bytes are timed beside a copy of as many (`llmq.bench.ops`). Matrix products (cuBLASLt, as a model's
linear maps pose them) and attention (cuDNN, causal) are stated in TFLOP/s and as a share of the card's dense peak.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from llmq.bench import ops as op_bench
from llmq.bench.ops import L2_BYTES, MODELS, Arrays, Invocation, Sizes, replayed
from llmq.errors import UsageError
from llmq.hardware import device as devices
from llmq.hardware.cards import TERA
from llmq.model.presets import preset
from llmq.ops.cuda.launch import Kernel
from llmq.ops.seam import Arguments, record
from llmq.tensor import Form, Ref

LINEAR = ("linear_forward", "linear_dgrad", "linear_wgrad")
ATTENTION = ("attention_forward", "attention_backward")
HEAD_ROWS = 2**13  # tokens in a chunk of the head
ROW8, COL8 = Form("e4m3", "row", "delayed"), Form("e4m3", "col", "delayed")
FORMS = {  # of the two operands in e4m3: both have the summed axis innermost
    "linear_forward": (ROW8, ROW8),
    "linear_dgrad": (ROW8, COL8),
    "linear_wgrad": (COL8, COL8),
}


@dataclass(frozen=True)
class Product:
    """An op of matrix products at a size; `make` gives one over fresh arrays."""

    name: str
    dtype: str
    flops: int
    make: Callable[[Arrays], Invocation]

    def row(self, microseconds: float, peak: float) -> str:
        """A line of the table."""
        rate = self.flops / microseconds * 1e6
        cells = (self.name, f"{self.flops / 1e9:.0f}", f"{microseconds:.1f}", f"{rate / TERA:.0f}")
        return f"| {' | '.join(cells)} | {100 * rate / peak:.0f}% |"


def listing() -> str:
    """Every op, with the variants that are timed."""
    variants: dict[str, list[str]] = {}
    for name in op_bench.CASES:
        variants.setdefault(op_bench.base(name), []).append(name)
    lines = [f"{op}: {', '.join(names)}" if names != [op] else op for op, names in variants.items()]
    lines += [f"{op}: bf16, e4m3 (qkv, o, gate+up, down, head)" for op in LINEAR]
    return "\n".join([*lines, *(f"{op}: bf16, causal" for op in ATTENTION)])


def run(name: str | None, shapes: Sequence[str]) -> int:
    """Prints the tables of an op, or of all. UsageError for what does not exist, or without a GPU."""
    known = dict.fromkeys([op_bench.base(case) for case in op_bench.CASES] + [*LINEAR, *ATTENTION])
    problems = []
    if name is not None and name not in known and name not in op_bench.CASES:
        problems.append(f"there is no op {name!r} to time: known are {', '.join(known)}")
    sizes = []
    for shape in shapes:
        try:
            sizes.append(sizes_of(shape))
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n  ".join(problems))
    if problem := devices.cuda_backend_problem():
        raise UsageError(f"llmq-bench op times ops on a GPU: {problem}")
    peaks = devices.peaks(devices.pick("cuda"))
    chosen = tuple(sizes) or MODELS
    op_bench.table(name, chosen)
    wanted = [(op, size) for op in (*LINEAR, *ATTENTION) if name in (None, op) for size in chosen]
    if wanted:
        print("\n| op | GFLOP | us | TFLOP/s | share of the peak |\n|---|---|---|---|---|")
    for op, size in wanted:
        for product in products(op, size):
            if product.dtype in peaks:
                print(product.row(_microseconds(product), peaks[product.dtype]), flush=True)
    if any(op in LINEAR for op, _ in wanted):
        _gemms().algorithms.save()
    return 0


def sizes_of(text: str) -> Sizes:
    """The sizes of `Qwen2.5-1.5B:32x1024`; UsageError for anything else."""
    model, _, micro = text.rpartition(":")
    found = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", micro)
    if not model or not found:
        raise UsageError(f"--shape {text} is not MODEL:BxT, such as Qwen2.5-0.5B:32x1024")
    c = preset(model)
    heads = (c.num_heads, c.num_kv_heads, c.head_dim)
    b, t = (int(number) for number in found.groups())
    return Sizes(f"{model} {b}x{t}", b, t, c.hidden_size, *heads, c.intermediate_size, c.vocab_size)


def products(op: str, s: Sizes) -> Iterator[Product]:
    """The problems of an op in a model: its linear maps in bf16 and e4m3, or its attention."""
    if op in ATTENTION:
        qkv = Ref("qkv", "activation", (s.b, s.t, (s.hq + 2 * s.hkv) * s.hd), "bf16")
        flops = record(op).flops(Arguments({"qkv": qkv}, {}, _attention_numbers(s)))
        yield Product(f"{op}, {s.name}", "bf16", flops, partial(_attention, op, s))
        return
    width, tokens = s.hq * s.hd, s.b * s.t
    maps = {  # tokens, outputs, inputs
        "qkv": (tokens, width + 2 * s.hkv * s.hd, s.c),
        "o": (tokens, s.c, width),
        "gate+up": (tokens, 2 * s.f, s.c),
        "down": (tokens, s.c, s.f),
        "head": (min(HEAD_ROWS, tokens), -(-s.v // 16) * 16, s.c),
    }
    for dtype in ("bf16", "e4m3"):
        for name, (m, n, k) in maps.items():
            operands = zip(record(op).inputs, _shapes(op, m, n, k)[:2], strict=False)
            reads = {operand: Ref(operand, "activation", shape, dtype) for operand, shape in operands}
            flops = record(op).flops(Arguments(reads, {}, {}))
            yield Product(f"{op} {dtype} {name}, {s.name}", dtype, flops, partial(_linear, op, dtype, m, n, k))


def _shapes(op: str, m: int, n: int, k: int) -> tuple[tuple[int, int], ...]:
    """Shapes of both operands and of the result."""
    x, weight, y = (m, k), (n, k), (m, n)
    return {
        "linear_forward": (x, weight, y),
        "linear_dgrad": (y, weight, x),
        "linear_wgrad": (y, x, weight),
    }[op]


def _linear(op: str, dtype: str, m: int, n: int, k: int, arrays: Arrays) -> Invocation:
    """x (m,k), weight (n,k), y (m,n): the call as training makes it; a weight's gradient is added to."""
    first, second, result = _shapes(op, m, n, k)
    forms = FORMS[op] if dtype == "e4m3" else (None, None)
    read = [arrays.tensor(shape, form=form) for shape, form in zip((first, second), forms, strict=True)]
    out = replace(arrays.output(result), accumulate=op == "linear_wgrad")
    absent = (None,) * (len(record(op).inputs) - 2)
    return Invocation(op, (out, *read, *absent))


@cache
def _gemms() -> Any:
    from llmq.ops.cuda.algorithms import Algorithms
    from llmq.ops.cuda.cublaslt import Gemms, device_key

    return Gemms(Algorithms(device_key()))


@cache
def _cudnn() -> Any:
    """Deterministic, as training is by default."""
    from llmq.ops.cuda.cudnn import Cudnn

    return Cudnn(deterministic=True)


def _kernel(op: str) -> Kernel:
    from llmq.ops.cuda.attention import attention_kernels
    from llmq.ops.cuda.linear import linear_kernels

    return linear_kernels(_gemms())[op] if op in LINEAR else attention_kernels(_cudnn())[op]


def _attention_numbers(s: Sizes) -> dict[str, Any]:
    """Of causal attention over whole sequences."""
    heads = {"num_heads": s.hq, "num_kv_heads": s.hkv}
    return {**heads, "window": None, "longest": None, "softmax_scale": s.hd**-0.5}


def _attention(op: str, s: Sizes, arrays: Arrays) -> Invocation:
    """Backward reads what forward wrote."""
    shape, numbers = (s.b, s.t, (s.hq + 2 * s.hkv) * s.hd), _attention_numbers(s)
    qkv, att, lse = (
        arrays.tensor(shape),
        arrays.output((s.b, s.t, s.hq * s.hd)),
        arrays.output((s.b, s.hq, s.t), "fp32"),
    )
    forward = Invocation("attention_forward", (att, lse, qkv, None), numbers)
    if op == "attention_forward":
        return forward
    kernel = _kernel("attention_forward")
    forward.bound(kernel, arrays.scratch(kernel.needed(forward.arguments)))()
    d_qkv, d_att = arrays.output(shape), arrays.tensor(att.shape)
    return Invocation(op, (d_qkv, d_att, qkv, *att.tensors, *lse.tensors, None), numbers)


def _microseconds(product: Product) -> float:
    """Time of one call in a graph, with a cold L2 cache."""
    import cupy

    probe = Arrays()
    made = [product.make(probe)]
    while len(made) * probe.num_bytes < L2_BYTES:
        made.append(product.make(Arrays()))
    kernel = _kernel(made[0].op)
    scratch = probe.scratch(kernel.needed(made[0].arguments))
    calls = [one.bound(kernel, scratch) for one in made]
    microseconds = replayed(calls)
    del calls, made, probe, scratch
    cupy.get_default_memory_pool().free_all_blocks()
    return microseconds
