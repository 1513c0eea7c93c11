"""The CUDA sources without a GPU: every launch fits its kernel, every kernel compiles for the cards its header names.

Launchers run on arrays that have an address and no memory, at the sizes of Qwen2.5-0.5B and 7B, and their launches are
noted; each noted kernel is then compiled by NVRTC, held to recorded numbers of registers, and never spills.
"""

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmq.errors import UsageError
from llmq.model.presets import PRESETS
from llmq.operands import Output, Tensor
from llmq.ops import cuda
from llmq.ops.cuda import launch
from llmq.ops.cuda.activation import NUMBERS as ACTIVATIONS
from llmq.ops.cuda.compile import cuda_folder
from llmq.optimizers.adamw import M, V
from llmq.scaling import SCALINGS, Nested
from llmq.stores.fetched_weights import MASTER_FORM
from llmq.tensor import COLSUM, DTYPES, Form, num_norm_tiles, scale_shape, stored_shape

from .build import arguments_of
from .cuda_build import Resources, compiled

ROW8, COL8 = Form("e4m3", "row", "delayed"), Form("e4m3", "col", "delayed")
CURRENT = tuple(Form("e4m3", layout, "current") for layout in ("row", "col"))
HELD = [Form("int8", "row", "rowwise"), Form("nf4", "row", "nested256"), Form("mxfp4", "row", "exponents")]
ABSMAX = Form("nf4", "row", "absmax")
CAPABILITIES = [80, 86, 89, 90, 100, 120]
OWN = {
    name: [Form("e4m3", layout, name) for layout in ("row", "col")]
    for name, scaling in SCALINGS.items()
    if scaling.owns_scales and not scaling.is_of_states
}
# most registers of any variant on any card; a kernel that needs more has changed its occupancy
REGISTERS = {
    entry: number
    for number, entries in {
        16: "count",
        24: "whole_scale",
        32: (
            "apply_if_below apply_if_finite column_scale dequantize embedding_noise grad_scale last_norm_scale "
            "output_gain_backward penalize repeat scale_update virtual_tokens"
        ),
        40: (
            "absmax_mean add amax amax_scale bias_backward cache_write error_total importance low_rank_sums pack "
            "rope_heads scale_columns_sum softcap_forward square sum_weight swiglu_apart_backward swiglu_apart_forward "
            "virtual_tokens_sum"
        ),
        48: (
            "dropout embedding_forward fold importance_of_columns importance_of_rows qk_norm_forward scale "
            "softcap_backward sum_pieces wide_qk_norm_forward"
        ),
        56: "held_amax transpose unpack",
        64: (
            "column_amax embedding_add embedding_group embedding_write error_parts finish nest orthogonality "
            "output_gain quantize_rows sample scale_columns_forward sum_weights "
            "wide_qk_norm_backward"
        ),
        80: "cross_entropy",
        96: "cast post_norm_forward layernorm_forward rmsnorm_forward token_linear",
        112: "activation_backward activation_forward sgd",
        128: "adamw attend qk_norm_backward quantize_tiles rope scale_columns_backward swiglu_backward swiglu_forward",
        208: "layernorm_backward rmsnorm_backward",
        219: "swiglu_low_rank_backward",  # of rank 32; 128 of rank 16
        242: "low_rank_backward",  # of rank 32; 128 of rank 16
    }.items()
    for entry in entries.split()
}
# bytes; cuBLASLt has no product of what quantize_tiles makes for 10.0
SPILLS = {("quantize_tiles", 100): 16, ("rope", 120): 8}
SPILLS |= {("swiglu_low_rank_backward", card): 44 for card in CAPABILITIES}  # of 128 registers, two blocks
WORDS = {"int": np.int32, "float": np.float32, "double": np.float64, "u32": np.uint32, "i64": np.int64}


def static(entry: str, constants: dict[str, Any], dynamic: int) -> int:
    """Shared bytes that a kernel declares itself, where its launcher gives it more: few do both."""
    if dynamic and entry == "token_linear":
        return 32 * (1 + constants["GATED"]) * constants["M"]
    of_amax = 128 * bool(constants.get("FORMS", 0) & launch.AMAX)
    if dynamic and entry == "swiglu_low_rank_backward":
        return of_amax
    if not dynamic or not entry.startswith(("rmsnorm", "post_norm", "layernorm")):
        return 0
    groups, group = constants["GROUPS"], constants["GROUP"]
    return 8 * groups * group * (group > 1) + of_amax


class Address:
    """An array of the GPU as launchers see it: shape, dtype and an address."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, ptr: int) -> None:
        self.shape, self.dtype, self.size = shape, np.dtype(dtype), int(np.prod(shape))
        self.nbytes = self.size * self.dtype.itemsize
        self.strides = tuple(self.dtype.itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        self.data = SimpleNamespace(ptr=ptr)


@dataclass(frozen=True)
class Variant:
    """A source with constants."""

    name: str
    items: tuple[tuple[str, Any], ...]

    def compiled(self, capability: int, entries: Iterable[str]) -> dict[str, Resources]:
        """What ptxas says of these kernels of it, of which nothing else is said."""
        found, log = compiled(self.name, capability, dict(self.items))
        assert found.keys() >= set(entries) and "warning" not in log, log
        return {entry: found[entry] for entry in entries}


@dataclass
class Launches:
    """Notes launches instead of making them."""

    capability: int = 90
    found: list[tuple[str, str, dict[str, Any], tuple[Any, ...]]] = field(default_factory=list)
    used: int = 0
    shared: dict[tuple[Any, ...], int] = field(default_factory=dict)  # dynamic bytes by source, entry and constants

    def variants(self) -> dict[Variant, set[str]]:
        """What is compiled for the launches, and the kernels of it that were launched."""
        found = defaultdict(set)
        for name, entry, constants, _ in self.found:
            found[Variant(name, tuple(sorted(constants.items())))].add(entry)
        return dict(found)

    def kernel(self, name: str, entry: str, constants: dict[str, Any]) -> Any:
        def call(grid: tuple[int, ...], block: tuple[int], arguments: tuple[Any, ...], *, shared_mem: int) -> None:
            assert all(0 < size < 65536 for size in grid[1:]) and 0 < grid[0] < 2**31
            assert 0 < block[0] <= 1024
            most = {80: 163, 90: 227, 100: 227}.get(self.capability, 99) * 1024
            if not call.max_dynamic_shared_size_bytes:  # type: ignore[attr-defined]
                most = 48 * 1024 - static(entry, constants, shared_mem)
            assert shared_mem <= most, f"{entry} has {shared_mem} bytes, and may have {most}"
            assert call.max_dynamic_shared_size_bytes in (0, shared_mem)  # type: ignore[attr-defined]
            self.found.append((name, entry, dict(constants), arguments))
            self.shared[name, entry, tuple(sorted(constants.items()))] = shared_mem

        call.max_dynamic_shared_size_bytes = 0  # type: ignore[attr-defined]
        return call

    def launch_early(
        self, function: Any, grid: tuple[int, ...], threads: int, arguments: tuple[Any, ...], shared_bytes: int
    ) -> None:
        function(grid, (threads,), arguments, shared_mem=shared_bytes)

    def address(self, shape: tuple[int, ...], dtype: str) -> Any:
        self.used += 1
        return Address(shape, np.uint8 if dtype in ("e4m3", "e5m2") else DTYPES[dtype], self.used << 32)

    def tensor(self, shape: tuple[int, ...], dtype: str, form: Form | None = None) -> Tensor:
        stored = self.address(stored_shape(shape, form), form.dtype if form else dtype)
        scale = self.address(scale_shape(shape, form), form.scales.dtype) if form and form.scaling else None
        return Tensor("x", stored, shape, form, scale)

    def output(self, shape: tuple[int, ...], dtype: str, *forms: Form | None) -> Output:
        amax = {"e4m3": self.address((1,), "fp32")} if ROW8 in forms else {}
        return Output("y", shape, dtype, tuple(self.tensor(shape, dtype, form) for form in forms), amax=amax)


SCRATCH = Address((2**34,), np.dtype(np.uint8), 1 << 60)


def bound(kernels: Mapping[str, launch.Kernel]) -> Any:
    """The ops as attributes, refused as by a plan; those that need scratch get some."""

    def given(op: str) -> Callable[..., None]:
        def call(*handles: Any, **numbers: Any) -> None:
            kernel, given = kernels[op], arguments_of(op, *handles, **numbers)
            if kernel.refuse is not None:
                kernel.refuse(given, launch.capability())
            needs = kernel.needed(given)
            kernel.launch(*handles, **numbers, **({"scratch": SCRATCH} if needs else {}))

        return call

    return SimpleNamespace(**{op: given(op) for op in kernels})


OPS = bound(cuda.KERNELS)


@pytest.fixture
def launches(monkeypatch):
    """Launchers of the backend write into this instead of to a GPU."""
    return noting(monkeypatch)


def noting(monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> Launches:
    """What launchers of the backend write into instead of to a GPU of this capability."""
    noted = Launches(capability)
    runtime = SimpleNamespace(getDevice=lambda: 0, memsetAsync=lambda *arguments: None)
    stream = SimpleNamespace(ptr=0)
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(launch, "kernel", noted.kernel)
    monkeypatch.setattr(launch, "launch_early", noted.launch_early)
    monkeypatch.setattr(launch, "device_facts", lambda _: (noted.capability, 132))
    return noted


def model_launches(noted: Launches, b: int, t: int, c: int, hq: int, hkv: int, hd: int, f: int, v: int) -> None:
    """Every op as a training step in bf16 calls it, plain and with the forms of fp8, and in fp32."""
    heads, width = {"num_heads": hq, "num_kv_heads": hkv}, (hq + 2 * hkv) * hd
    x, qkv, up, out = (b, t, c), (b, t, width), (b, t, 2 * f), noted.output
    tokens, table = noted.tensor((b, t), "int32"), noted.tensor((t, hd), "fp32")
    cell, count, ops = noted.tensor((1,), "fp32"), noted.tensor((1,), "int32"), OPS
    for dtype in ("bf16", "fp32"):

        def read(shape: tuple[int, ...], dtype: str = dtype) -> Tensor:
            return noted.tensor(shape, dtype)

        one = out((1,), "fp32", None)
        ops.embedding_forward(out(x, dtype, None), tokens, read((v, c)))
        noise = {"alpha": 5.0, "seed": 2**40, "stream": 2**31}
        for cap in (30.0, math.inf):
            ops.softcap_forward(out(x, dtype, None), read(x), cap=cap)
            for forms in ((None,), (ROW8,), (None, ROW8)):
                ops.softcap_backward(out(x, dtype, *forms), read(x), read(x) if cap == 30 else None, cap=cap)
        ops.embedding_noise(out(x, dtype, None), read(x), noted.tensor((b,), "int32"), **noise)
        for residual in (None, read(x)):
            place = {"rate": 0.1, "seed": 2**40, "stream": 2**31, "first": 3, "length": t}
            ops.dropout(out(x, dtype, None), read(x), noted.tensor((b,), "int32"), residual, **place)
            gains = noted.tensor((c,), "fp32")
            ops.scale_columns_forward(out(x, dtype, None), read(x), gains, residual and read((c,)), residual)
            for forms in ((None,), (ROW8,), (None, ROW8)):
                ops.scale(out(x, dtype, *forms), read(x), residual, factor=0.5)
        for rank in (4, 16, 64):
            low, gram = noted.tensor((2 * f, rank), "fp32"), noted.tensor((rank, rank), "fp32")
            about = (read((2 * f, c)), low, gram, read((2 * f, rank)), noted.tensor((2 * f,), "fp32"))
            ops.output_gain(out((2 * f,), "fp32", None), out((2 * f,), "fp32", None), *about, scale=2.0, first=0)
        for rank in (16, 32) if dtype == "bf16" else ():
            pair, wide = (out((b, t, rank), dtype, None), out((f, rank), "fp32", None)), read((b, t, f))
            ops.low_rank_backward(*pair, wide, read((b, t, rank)), read((f, rank)), alpha=2.0)
            halves = [
                out(shape, kind, None) for shape, kind in (((b, t, rank), dtype), ((f, rank), "fp32")) for _ in "gu"
            ]
            factors = [read(shape) for shape in ((b, t, rank), (f, rank)) for _ in "gu"]
            for forms in ((None,), (ROW8,), (None, ROW8)):
                about = {"gate_alpha": 2.0, "up_alpha": 1.0}
                ops.swiglu_low_rank_backward(out(up, dtype, *forms), *halves, wide, read(up), *factors, **about)
            about["activation"] = "gelu"
            ops.swiglu_low_rank_backward(out(up, dtype, *forms), *halves, wide, read(up), *factors, **about)
        ops.output_gain(out((f,), "fp32", None), out((f,), "fp32"), None, None, None, None, None, scale=1.0, first=0)
        ops.output_gain_backward(out((f,), dtype, None), noted.tensor((f,), "fp32"), noted.tensor((f,), "fp32"))
        for wide, channels in ((x, c), (qkv, 2 * hkv * hd)):
            vectors = {"num_virtual": 20, "channels": channels}
            ops.virtual_tokens_forward(out(wide, dtype, None), read(wide), read((20, channels)), tokens, **vectors)
            d_vectors = out((20, channels), dtype, None)
            ops.virtual_tokens_backward(out(wide, dtype, None), d_vectors, read(wide), tokens, **vectors)
            there = read(wide)
            ops.virtual_tokens_backward(Output("d_x", wide, dtype, (there,)), d_vectors, there, tokens, **vectors)
        turn, gram = out((16, 48), dtype, None), noted.tensor((48, 48), "fp32")
        ops.orthogonality(turn, gram, tokens, weight=0.5, first=16, present=16)
        scores = tuple(noted.tensor((f, c), "fp32") for _ in range(2))
        smoothed = tuple(out((f, c), "fp32", None) for _ in range(2))
        ops.importance(*smoothed, *scores, read((f, c)), read((f, c)), cell, cell, beta_1=0.85, beta_2=0.85)
        ops.importance_sums(out((num_norm_tiles((f, c)), c), "fp32", None), *scores, of_columns=True)
        ops.importance_sums(out((f,), "fp32", None), *scores, of_columns=False)
        added = out((v, c), dtype, None)
        ops.embedding_backward(added, read(x), tokens)
        added.accumulate = True
        ops.embedding_backward(added, read(x), tokens)
        many = (8, 2**16)  # tokens, whose votes shared memory does not hold
        ops.embedding_backward(added, read((*many, c)), noted.tensor(many, "int32"))
        ops.sum_pieces(out(x, dtype, None), read(x), read((3, *x)), rank=1)
        sent = noted.tensor((3, -(-b * t // 128) * 128, c), dtype, Form("e4m3", "row", "tilewise"))
        ops.sum_pieces(out((b * t, c), dtype, None), read((b * t, c)), sent, rank=1)
        launch.launch("count", "count", 1, 1, (0,), {})
        normed = (read(qkv), read((hd,)), read((hd,)))
        rstd = out((b, t, hq + hkv), "fp32", None)
        for offset in (0.0, 1.0):
            ops.qk_norm_forward(out(qkv, dtype, None), rstd, *normed, **heads, eps=1e-6, offset=offset)
        wide, parts = [read((count * hd,)) for count in (hq, hkv)], noted.tensor((b, t, 2), "fp32")
        ops.wide_qk_norm_forward(
            out(qkv, dtype, None), out((b, t, 2), "fp32", None), read(qkv), *wide, **heads, eps=1e-6
        )
        sums = [out((count * hd,), dtype, None) for count in (hq, hkv)]
        ops.wide_qk_norm_backward(out(qkv, dtype, None), *sums, read(qkv), read(qkv), *wide, parts, **heads)
        weights = (out((hd,), dtype, None), out((hd,), dtype, None))
        stat = noted.tensor((b, t, hq + hkv), "fp32")
        ops.bias_backward(out((width,), dtype, None), noted.tensor(qkv, "fp32", COLSUM))
        logits, targets = read((b * t // 4, v)), noted.tensor((b * t // 4,), "int32")
        eighths = (out(logits.shape, dtype, ROW8), out(logits.shape, dtype, None, ROW8))
        for gradient in (out(logits.shape, dtype, None), out(logits.shape, dtype), *eighths):
            loss, hits = out(targets.shape, "fp32", None), out(targets.shape, "int32", None)
            for counted in (hits, out(targets.shape, "int32")):
                ops.cross_entropy(gradient, loss, counted, logits, targets, vocab_size=v, z_loss=0.0)
        cache, last, one_row = (8, 4096, 2 * hkv * hd), noted.tensor((8, 1), "int32"), read((8, 1, width))
        ops.cache_write(out(cache, dtype, None), read(qkv), tokens, tokens, **heads)
        numbers = {**heads, "window": 1000, "softmax_scale": 0.1}
        held = read(cache)
        written = Output("y", cache, dtype, (held,))
        for capped in ({}, {"softcap": 50.0}):
            att = out((8, 1, hq * hd), dtype, None)
            ops.attention_cached(att, written, one_row, held, table, last, **numbers, **capped)
        for few in (1, 4):
            res, act, norm_weight = read((few, 1, c)), read((few, 1, f)), read((c,))
            qkv_weight, bias = read((width, c)), read((width,))
            alone = {"eps": 1e-6, "gated": False}
            ops.token_linear(out((few, 1, width), dtype, None), res, norm_weight, qkv_weight, bias, None, **alone)
            up_weight, down_weight, head_weight = read((2 * f, c)), read((c, f)), read((v, c))
            gated = {"eps": 1e-6, "gated": True}
            for other in ({}, {"activation": "gelu"})[: 5 - few]:
                handles = (out((few, 1, f), dtype, None), res, norm_weight, up_weight, None, None)
                ops.token_linear(*handles, **gated, **other)
            ops.token_linear(out((few, 1, c), dtype, None), act, None, down_weight, None, res, **alone)
            ops.token_linear(out((few, 1, v), dtype, None), res, norm_weight, head_weight, None, None, **alone)
        seen, next_token = noted.tensor((8, v), "int32"), out((8, 1), "int32", None)
        penalized, marks = out((8, 1, v), "fp32", None), out((8, v), "int32", None)
        ops.penalize(penalized, marks, read((8, 1, v)), seen, last, penalty=1.1)
        for temperature in (0.0, 0.7):
            cuts = {"temperature": temperature, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "seed": 2**40}
            drawn = (read((8, 1, v)), last, noted.tensor((8,), "int32"))
            ops.sample(next_token, next_token, *drawn, vocab_size=v - 1, **cuts)
        counted = out((1,), "int32", None)
        sums, many = (one, counted, counted), noted.tensor((2**20,), "int32")
        ops.loss_sum(*sums, noted.tensor((b, t), "fp32"), tokens, tokens)
        ops.loss_sum(*sums, noted.tensor((2**20,), "fp32"), many, many)
        for shape in ((2 * f, c), (c,)):
            ops.sum_squares(out((num_norm_tiles(shape),), "fp32", None), read(shape))
        ops.grad_scale(one, one, one, noted.tensor((290,), "fp32"), cell, count, grad_clip=1.0)
        ops.last_norm_scale(one, one, one, cell, cell, cell, count, grad_clip=1.0)
        ops.apply_if_below(one, cell, cell, count, cell)
        ops.apply_if_finite(one, noted.tensor((290,), "fp32"), cell)
        ops.amax_scale(one, read(x), limit=448.0)
        ops.amax(one, read(x), in_bf16=True)
        weight, unwanted = (2 * f, c), out((1,), "fp32")
        for held in HELD:
            ops.amax(one, noted.tensor(weight, dtype, held), in_bf16=True)
        for form in (HELD[0], ABSMAX, HELD[2], MASTER_FORM):
            for source in (dtype, "fp32"):
                ops.quantize(out(weight, dtype, form), unwanted, noted.tensor(weight, source), limit=448.0)
        blocks = 2 * f * c // 64
        for group in (256, 32):
            numbers, borders = Nested(group).shape(2 * f, c), (blocks // 2, blocks)
            ops.nest(out(numbers, "uint8", None), noted.tensor((blocks,), "fp32"), group=group, borders=borders)
        ops.repeat(out(weight, dtype, None), noted.tensor((2**20,), "fp32"), first=3 * c)
        for shape in (x, (b, t, f), up):
            ops.quantize(out(shape, dtype, OWN["rowwise"][0]), one, read(shape), limit=448.0)
            ops.quantize(out(shape, dtype, *OWN["blockwise"]), out((1,), "fp32"), read(shape), limit=448.0)
            ops.quantize(out(shape, dtype, OWN["blockwise"][0]), out((1,), "fp32"), read(shape), limit=448.0)
        for recipe in ("rowwise", "tilewise"):
            for source in (dtype, "fp32"):
                copies, shape = out((2 * f, c), dtype, *OWN[recipe]), (2 * f, c)
                ops.quantize(copies, out((1,), "fp32"), noted.tensor(shape, source), limit=448.0)
        vector, history = noted.tensor((99,), "fp32"), noted.tensor((16, 99), "fp32")
        new = (out((99,), "fp32", None), out((16, 99), "fp32", None), out((99,), "fp32", None))
        ops.scale_update(*new, vector, history, vector, vector, cell)
        six = noted.tensor((6,), "fp32")
        for form in (ROW8, *(forms[0] for forms in OWN.values())):
            ops.quantization_error(out((6,), "fp32", None), six, read(x), noted.tensor(x, dtype, form))
        beside_1 = (out(x, dtype, None), out((c,), dtype, None), read(x), read(x), read(x), read((c,)))
        ops.rmsnorm_forward(out(x, dtype, None), out((b, t), "fp32", None), read(x), read((c,)), eps=1e-6, offset=1.0)
        ops.rmsnorm_backward(*beside_1, noted.tensor((b, t), "fp32"), offset=1.0)
        activations(noted, dtype, (b, t, f))
        for forms in ((None,), (ROW8, COL8), (None, ROW8, COL8)):
            norm = (read(x), read((c,)))
            ops.rmsnorm_forward(out(x, dtype, *forms), out((b, t), "fp32", None), *norm, eps=1e-6)
            grad = (out(x, dtype, *forms), out((c,), dtype, None))
            ops.rmsnorm_backward(*grad, read(x), read(x), *norm, noted.tensor((b, t), "fp32"))
            ops.post_norm_forward(out(x, dtype, *forms), out((b, t), "fp32", None), *norm, read(x), eps=1e-6)
            stats = [out((b, t), "fp32", None) for _ in "ms"]
            kept = [noted.tensor((b, t), "fp32") for _ in "ms"]
            for bias in (None, read((c,))):
                ops.layernorm_forward(out(x, dtype, *forms), *stats, *norm, bias, eps=1e-6)
                d_bias = out((c,), dtype, *([] if bias is None else [None]))
                ops.layernorm_backward(*grad, d_bias, read(x), read(x), *norm, *kept)
            ops.swiglu_forward(out((b, t, f), dtype, *forms), read(up))
            ops.swiglu_backward(out(up, dtype, *forms), read((b, t, f)), read(up))
            d_gain = (out((c,), "fp32", None), read(x), read(x), noted.tensor((c,), "fp32"))
            ops.scale_columns_backward(out(x, dtype, *forms), *d_gain)
            ops.scale_columns_backward(out(x, dtype, *forms, COLSUM), *d_gain)
            act, halves = (b, t, f), [read((b, t, f)) for _ in range(3)]
            ops.swiglu_apart_forward(out(act, dtype, None), *halves[:2])
            ops.swiglu_apart_backward(out(act, dtype, None), out(act, dtype, None), *halves)
            q, k, angles = (b, t, hq, hd), (b, t, hkv, hd), [read((1, t, hd)) for _ in "cs"]
            ops.rope_heads_forward(out(q, dtype, None), out(k, dtype, None), read(q), read(k), *angles)
            ops.rope_heads_backward(out(q, dtype, None), out(k, dtype, None), read(q), read(k), *angles)
            ops.rope_forward(out(qkv, dtype, None), read(qkv), table, tokens, **heads)
            ops.rope_backward(out(qkv, dtype, *forms, COLSUM), read(qkv), table, tokens, **heads)
            ops.qk_norm_backward(out(qkv, dtype, *forms), *weights, read(qkv), *normed, stat, **heads)
            ops.qk_norm_backward(out(qkv, dtype, *forms, COLSUM), *weights, read(qkv), *normed, stat, **heads)
            ops.cast(out(x, dtype, *forms, COLSUM), read(x))
            ops.cast(out(x, dtype, COL8), noted.tensor(x, dtype, ROW8))
            for held in (ROW8, OWN["tilewise"][0], MASTER_FORM):
                ops.cast(out((2 * f, c), dtype, None), noted.tensor((2 * f, c), dtype, held))
            for held in HELD:
                for copies in ((None,), (CURRENT[0],), (CURRENT[1],), CURRENT):
                    ops.cast(out((2 * f, c), dtype, *copies), noted.tensor((2 * f, c), dtype, held))
            ops.cast(out((2 * f, c), dtype, OWN["tilewise"][1]), noted.tensor((2 * f, c), dtype, OWN["tilewise"][0]))
            ops.cast(out((2 * f, c), "bf16", *forms), noted.tensor((2 * f, c), "fp32"))
            descent = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.1, "seed": 1, "stream": 2}
            update = {"beta_1": 0.9, "beta_2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "seed": 1, "stream": 2}
            for master in ("bf16", "fp32"):
                state = [noted.tensor((2 * f, c), kind) for kind in (master, dtype, "bf16", dtype)]
                written = [out((2 * f, c), kind, None) for kind in (master, dtype, "bf16")]
                weight = out((2 * f, c), dtype, *forms)
                ops.adamw(*written, weight, *state, cell, cell, cell, count, **update)
                plain = (*written[:2], weight), (*state[:2], state[3], cell, cell, cell, count)
                ops.sgd(*plain[0], *plain[1], **descent)
                ops.sgd(*plain[0], *plain[1], **{**descent, "nesterov": True})
                ops.sgd(written[0], out((2 * f, c), dtype), weight, state[0], None, *plain[1][2:], **descent)
                for kind, forms_of_v in (("e4m3", V.form("int8")), ("int8", V.form("e4m3"))):
                    state[1:3] = (noted.tensor((2 * f, c), "fp32", x) for x in (M.form(kind), forms_of_v))
                    written[1:] = (Output("y", x.shape, "fp32", (x,)) for x in state[1:3])
                    ops.adamw(*written, weight, *state, cell, cell, cell, count, **update)
                    ops.sgd(*written[:2], weight, *state[:2], state[3], cell, cell, cell, count, **descent)
                    held = noted.tensor((2 * f, c), dtype, MASTER_FORM)
                    alone = (Output("y", held.shape, dtype, (held,)), *written[1:], out((2 * f, c), dtype))
                    ops.adamw(*alone, held, *state[1:], cell, cell, cell, count, **update)
                    ops.sgd(*alone[:2], alone[3], held, *state[1:2], state[3], cell, cell, cell, count, **descent)


def activations(noted: Launches, dtype: str, shape: tuple[int, ...]) -> None:
    """The value of each, and one with every form."""
    x, both = noted.tensor(shape, dtype), noted.tensor((*shape[:2], 2 * shape[2]), dtype)
    for activation in ACTIVATIONS:
        for forms in ((None,), (None, ROW8, COL8, COLSUM))[: 1 + (activation == "gelu")]:
            OPS.activation_forward(noted.output(shape, dtype, *forms), x, activation=activation)
            OPS.activation_backward(noted.output(shape, dtype, *forms), x, x, activation=activation)
    for forms in ((None,), (None, ROW8, COL8)):
        OPS.swiglu_forward(noted.output(shape, dtype, *forms), both, activation="gelu")
        OPS.swiglu_backward(noted.output(both.shape, dtype, *forms), x, both, activation="gelu")


QWEN_0_5B = {"b": 32, "t": 1024, "c": 896, "hq": 14, "hkv": 2, "hd": 64, "f": 4864, "v": 151936}
QWEN_7B = {"b": 16, "t": 1024, "c": 3584, "hq": 28, "hkv": 4, "hd": 128, "f": 18944, "v": 152064}


def parameters(name: str, entry: str) -> list[str]:
    """The types of a kernel's parameters: `ptr` or a number's name."""
    text = (cuda_folder() / f"{name}.cu").read_text("utf-8")
    assert f" {entry}(" in text, f"{name}.cu has no kernel {entry}"
    start = text.index("(", text.index(f" {entry}(", text.index('extern "C"'))) + 1
    depth, end = 1, start
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    listed = re.sub(r"OUTPUT_PARAMETERS\(.*?\)", ", ".join(["u8* p"] * 7), text[start : end - 1])
    return ["ptr" if "*" in one else one.split()[-2] for one in listed.split(",")]


def check_arguments(launches: Launches) -> None:
    """Each launch has as many arguments as its kernel has parameters, and each is of its parameter's type."""
    for name, entry, _, arguments in launches.found:
        declared = parameters(name, entry)
        assert len(declared) == len(arguments), entry
        for kind, value in zip(declared, arguments, strict=True):
            assert isinstance(value, int) if kind == "ptr" else type(value) is WORDS[kind], (entry, kind, value)


@pytest.mark.parametrize("sizes", [QWEN_0_5B, QWEN_7B], ids=["0.5B", "7B"])
def test_every_launch_gives_its_kernel_what_it_declares(launches, sizes):
    model_launches(launches, **sizes)
    assert {entry for _, entry, _, _ in launches.found} == set(REGISTERS)
    check_arguments(launches)


@pytest.mark.parametrize(("dtype", "cap"), [("fp32", None), ("bf16", 50.0)], ids=["", "capped"])
@pytest.mark.parametrize("max_docs", [None, 8], ids=["dense", "packed"])
def test_every_launch_of_attention_gives_its_kernel_what_it_declares(launches, max_docs, dtype, cap):
    """Of our kernels; and what finds the documents for cuDNN."""
    from llmq.ops.cuda import attention

    b, t, hq, hkv, hd = 4, 256, 14, 2, 64
    longest = None if max_docs is None else 100
    numbers = {"num_heads": hq, "num_kv_heads": hkv, "window": None, "longest": longest, "softmax_scale": 0.125}
    numbers["softcap"] = cap
    lse = (b, hq, t) if max_docs is None else (b, t, hq)
    borders = None if max_docs is None else launches.tensor((b, max_docs + 1), "int32")
    shapes = {"att": (b, t, hq * hd), "qkv": (b, t, (hq + 2 * hkv) * hd), "lse": lse}
    kinds = {"att": dtype, "qkv": dtype, "lse": "fp32"}
    read = {name: launches.tensor(shape, kinds[name]) for name, shape in shapes.items()}
    written = {name: launches.output(shape, kinds[name], None) for name, shape in shapes.items()}
    ops = bound(attention.attention_kernels(None))
    ops.attention_forward(written["att"], written["lse"], read["qkv"], borders, **numbers)
    ops.attention_backward(written["qkv"], read["att"], read["qkv"], read["att"], read["lse"], borders, **numbers)
    shape = attention._shape(shapes["qkv"], borders and borders.shape, **numbers)
    places = attention._find_documents(shape, borders, 1 << 60)
    assert len(places) == len(launches.found) - 3 + 3 * bool(max_docs)
    check_arguments(launches)


def architectures(name: str) -> list[int]:
    """The compute capabilities that a source's header names."""
    match = re.search(r"^// Architectures: ([\d ]+)$", (cuda_folder() / f"{name}.cu").read_text("utf-8"), re.MULTILINE)
    assert match, f"{name}.cu does not say which cards it is for"
    return [int(number) for number in match.group(1).split()]


def test_every_source_names_the_supported_cards():
    assert all(architectures(path.stem) == CAPABILITIES for path in cuda_folder().glob("*.cu"))


NORM_WIDTHS = sorted({config.hidden_size for config in PRESETS.values()} | set(range(64, 4096, 64)) | {32768})


@pytest.mark.sample
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_norms_of_every_width_have_the_shared_memory_that_they_ask_for(launches, capability, dtype):
    """A block gets 48 KiB unasked, the kernel's own arrays among them; with asking, what the card has."""
    launches.capability = capability
    for width in NORM_WIDTHS:
        if (dtype, width) != ("fp32", 32768):
            norms(launches, dtype, width, (None,))
        try:
            norms(launches, dtype, width, (ROW8, COL8))
        except UsageError:
            assert launch.shared_bytes_limit() < 16 * width + launch.STATIC_BYTES
    assert any(shared == 48 * 1024 for shared in launches.shared.values())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_gradient_of_an_embedding_has_the_shared_memory_that_it_asks_for(launches, capability):
    """Of every size of a vocabulary, with the most votes that are kept and with none."""
    launches.capability = capability
    for bits in range(1, 21):
        for count in (1, 2**16, 2**16 + 1):
            d_res, tokens = launches.tensor((1, count, 64), "bf16"), launches.tensor((1, count), "int32")
            OPS.embedding_backward(launches.output((2**bits, 64), "bf16", None), d_res, tokens)
    asked = [shared for (_, entry, _), shared in launches.shared.items() if entry == "embedding_group"]
    assert 48 * 1024 < max(asked) <= launch.shared_bytes_limit(capability)


WIDE = {("bf16", 5120): 28, ("bf16", 8192): 72, ("bf16", 16384): 64, ("bf16", 32768): 832, ("fp32", 16384): 160}


@pytest.mark.slow
@pytest.mark.sample("sweep")
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("norm", WIDE, ids=lambda norm: "-".join(map(str, norm)))
def test_wide_norms_compile_and_spill_no_more_than_recorded(launches, norm, capability):
    """Bytes; what a lane holds of a row in backward is more than 1024 threads, or 512 of bf16, have registers for."""
    launches.capability, (dtype, width) = capability, norm
    norms(launches, dtype, width, (None,))
    if 16 * width + launch.STATIC_BYTES <= launch.shared_bytes_limit():
        norms(launches, dtype, width, (None, ROW8, COL8))
    for variant, entries in launches.variants().items():
        for entry, used in variant.compiled(capability, entries).items():
            assert used.spill_bytes <= WIDE[norm] * (entry == "rmsnorm_backward"), (entry, used, variant)


def heads_by_twos(noted: Launches) -> None:
    """Half of a head is a multiple of 2 and not of 4. Where it is odd, they are in fp32, by twos in qk_norm only."""
    heads, positions = {"num_heads": 4, "num_kv_heads": 2}, noted.tensor((2, 64), "int32")
    for head_dim in (12, 18, 20, 100):
        table = noted.tensor((64, head_dim), "fp32")
        copies = ((None,), (ROW8, COL8), (None, ROW8, COL8, COLSUM)) if head_dim % 4 == 0 else ((None,),)
        for dtype, forms in product(("bf16", "fp32") if head_dim % 4 == 0 else ("fp32",), copies):
            qkv, weight = noted.tensor((2, 64, 8 * head_dim), dtype), noted.tensor((head_dim,), dtype)
            written = noted.output(qkv.shape, dtype, *forms)
            weights = [noted.output((head_dim,), dtype, None) for _ in range(2)]
            stat = noted.tensor((2, 64, 6), "fp32")
            OPS.qk_norm_backward(written, *weights, qkv, qkv, weight, weight, stat, **heads)
            OPS.rope_backward(written, qkv, table, positions, **heads)


def norms(noted: Launches, dtype: str, width: int, forms: tuple[Form | None, ...]) -> None:
    """Both directions of a norm over 1024 rows."""
    x, weight = (noted.tensor(shape, dtype) for shape in ((1, 1024, width), (width,)))
    stat = noted.tensor((1, 1024), "fp32")
    written = (noted.output(x.shape, dtype, *forms), noted.output((1, 1024), "fp32", None))
    OPS.rmsnorm_forward(*written, x, weight, eps=1e-6)
    written = (noted.output(x.shape, dtype, *forms), noted.output((width,), dtype, None))
    OPS.rmsnorm_backward(*written, x, x, x, weight, stat)


def in_turn(of_cards: Mapping[int, Launches]) -> dict[int, dict[Variant, set[str]]]:
    """Of what the cards launch as much as has each value of each constant of each kernel, on the cards in turn; and for
    each card something of each source."""
    launched = {card: noted.variants() for card, noted in of_cards.items()}
    chosen: dict[int, dict[Variant, set[str]]] = {card: {} for card in of_cards}
    num_chosen, shown = Counter[tuple[int, str]](), set()

    def choose(card: int, variant: Variant) -> None:
        chosen[card][variant] = launched[card][variant]
        num_chosen[card, variant.name] += 1

    for variant in dict.fromkeys(variant for each in launched.values() for variant in each):
        cards = [card for card in launched if variant in launched[card]]
        card = min(cards, key=lambda card: num_chosen[card, variant.name])
        values = {*product(launched[card][variant], (variant.name, *variant.items))}
        if not values <= shown:
            choose(card, variant)
            shown |= values
    for card, variants in launched.items():
        for variant in variants:
            if not num_chosen[card, variant.name]:
                choose(card, variant)
    return chosen


@pytest.fixture(scope="module")
def of_cards():
    """What training in bf16 and fp8 launches at 0.5B on each card, on one also that in fp32; and heads that are read by
    twos."""
    found = {}
    for capability in CAPABILITIES:
        with pytest.MonkeyPatch.context() as patch:
            noted = found[capability] = noting(patch, capability)
            model_launches(noted, **QWEN_0_5B)
            if capability != 90:
                noted.found = [one for one in noted.found if one[2].get("T") != "float"]
            heads_by_twos(noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_within_its_registers_and_does_not_spill(of_cards, capability, request):
    """Some variants on each card, or with --sweeps all."""
    launches, wrong = of_cards[capability], []
    every = request.config.getoption("--sweeps")
    for variant, entries in (launches.variants() if every else in_turn(of_cards)[capability]).items():
        assert capability in architectures(variant.name)
        for entry, used in variant.compiled(capability, entries).items():
            dynamic, constants = launches.shared[variant.name, entry, variant.items], dict(variant.items)
            by_twos = constants.get("HD", QWEN_0_5B["hd"]) != QWEN_0_5B["hd"]
            own = static(entry, constants, dynamic)
            assert not dynamic or used.shared_bytes == own <= launch.STATIC_BYTES
            assert dynamic + used.shared_bytes <= launch.shared_bytes_limit(capability)
            if (
                used.spill_bytes > (0 if by_twos else SPILLS.get((entry, capability), 0))
                or used.registers > REGISTERS[entry]
                or used.shared_bytes > 48 * 1024
            ):
                wrong.append(f"{entry} {used} of {variant}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_what_is_compiled_in_turn_is_something_of_all(of_cards):
    """Each kernel, each source on each card, each value of a constant; of all a fifth."""
    chosen = [(card, *one) for card, variants in in_turn(of_cards).items() for one in variants.items()]
    names = {path.stem for path in cuda_folder().glob("*.cu")} - {"attention", "documents"}
    assert {(card, variant.name) for card, variant, _ in chosen} == {*product(CAPABILITIES, names)}
    assert {entry for *_, entries in chosen for entry in entries} == set(REGISTERS)
    every = [variant for noted in of_cards.values() for variant in noted.variants()]
    shown, all_values = (
        {(v.name, item) for v in some for item in v.items} for some in ([v for _, v, _ in chosen], every)
    )
    assert shown == all_values and 5 * len(chosen) < len(every)
