"""Random arguments for every op, in an odd and in a larger shape: what the laws of all ops are tested on."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmq.model.config import RopeConfig
from llmq.model.rope import document_positions, rope_table
from llmq.operands import Output, Tensor
from llmq.ops import seam
from llmq.ops.reference import OPS
from llmq.scaling import SCALINGS, Nested
from llmq.tensor import Form, num_norm_tiles

from .build import output, run, tensor

OWN_SCALES = tuple(name for name, scaling in SCALINGS.items() if scaling.owns_scales and not scaling.is_of_states)
Axes = str | tuple[int, ...]
STAT = {"fp64": "fp64", "fp32": "fp32", "bf16": "fp32"}  # dtype of statistics and cells in a model of that dtype


@dataclass(frozen=True)
class Sizes:
    """Extents of the axes; see the names in the ops' docstrings."""

    b: int
    t: int
    c: int
    hq: int
    hkv: int
    hd: int
    f: int
    v: int
    vp: int

    @property
    def q(self) -> int:
        """Width of the fused query, key and value heads."""
        return (self.hq + 2 * self.hkv) * self.hd

    @property
    def heads(self) -> dict[str, object]:
        """Their numbers."""
        return {"num_heads": self.hq, "num_kv_heads": self.hkv}

    def shape(self, axes: Axes) -> tuple[int, ...]:
        """Of axes by their letters: p is the padded vocabulary, q the width of the heads, h that of one, 1 one."""
        named = {"p": self.vp, "h": self.hd, "1": 1}
        return tuple(named.get(x) or getattr(self, x) for x in axes) if isinstance(axes, str) else axes


ODD = Sizes(b=2, t=7, c=6, hq=6, hkv=2, hd=4, f=5, v=11, vp=16)
LARGE = Sizes(b=3, t=197, c=136, hq=4, hkv=1, hd=32, f=173, v=1000, vp=1024)


@dataclass
class Case:
    """Shapes of outputs, values of inputs (f64 or int32; None is absent), numbers; `stat` names are never bf16."""

    op: str
    outputs: dict[str, tuple[int, ...]]
    inputs: dict[str, np.ndarray | None]
    numbers: dict[str, object] = field(default_factory=dict)
    stat: frozenset[str] = frozenset()
    colsum: frozenset[str] = frozenset()
    forms: dict[str, tuple[Form, float]] = field(default_factory=dict)  # inputs that are copies, with their scale

    def dtype(self, name: str, dtype: str) -> str:
        """Storage of an argument in a model of `dtype`."""
        return STAT[dtype] if name in self.stat else dtype

    def output(self, name: str, dtype: str, **options: object) -> Output:
        """A poisoned output of this case."""
        return output(self.outputs[name], self.dtype(name, dtype), **options)  # type: ignore[arg-type]

    def input(self, name: str, dtype: str) -> Tensor | None:
        """An input of this case, stored."""
        value = self.inputs[name]
        if value is None:
            return None
        if name in self.forms:
            return tensor(value, None, *self.forms[name])
        if name in self.colsum:
            return tensor(value, None, Form(STAT[dtype], "colsum"))
        return tensor(value, self.dtype(name, dtype))

    def call(self, dtype: str, **given: Output | Tensor) -> dict[str, Output]:
        """Runs the op with fresh memory in a model of `dtype`, but for the arguments given."""
        written = {n: given.get(n) or self.output(n, dtype) for n in self.outputs}
        read = [given[n] if n in given else self.input(n, dtype) for n in self.inputs]
        OPS[self.op](*written.values(), *read, **self.numbers)
        return written  # type: ignore[return-value]

    def values(self, dtype: str, **given: Output | Tensor) -> dict[str, np.ndarray]:
        """What the outputs hold after `call`, each in its first form."""
        return {n: o.tensors[0].array for n, o in self.call(dtype, **given).items() if o.wanted}


class Draw:
    """Random values of shapes by the letters of their axes."""

    def __init__(self, sizes: Sizes, rng: np.random.Generator) -> None:
        self.sizes, self.rng = sizes, rng

    def normal(self, axes: Axes) -> np.ndarray:
        return self.rng.standard_normal(self.sizes.shape(axes))

    def uniform(self, low: float, high: float, axes: Axes) -> np.ndarray:
        return self.rng.uniform(low, high, self.sizes.shape(axes))

    def below(self, high: int, axes: Axes) -> np.ndarray:
        """Integers."""
        return self.rng.integers(0, high, self.sizes.shape(axes)).astype(np.int32)

    def targets(self, axes: Axes, ignored: object) -> np.ndarray:
        """Tokens, of which some are not trained."""
        found = self.below(self.sizes.v, axes)
        found[ignored] = -100
        return found

    def cells(self, *names: str) -> dict[str, np.ndarray]:
        """Positive cells (1,)."""
        return {name: self.uniform(0.5, 2, "1") for name in names}


Made = dict[str, Any]  # outputs, inputs and numbers of a case, and the names of what is apart
Maker = Callable[[Draw, Sizes], Made]


def make(op: str, s: Sizes, seed: int = 0) -> Case:
    """The case of an op at the sizes `s`."""
    made = CASES[op](Draw(s, np.random.default_rng([seed, s.t])), s)
    outputs = {name: s.shape(axes) for name, axes in made.pop("outputs").items()}
    names = {key: frozenset(made.pop(key, "").split()) for key in ("stat", "colsum")}
    case = Case(op, outputs, made.pop("inputs"), made.pop("numbers", {}), **names, **made)
    contract, parameters = seam.record(op), inspect.signature(OPS[op]).parameters
    assert (tuple(case.outputs), tuple(case.inputs)) == (contract.outputs, contract.inputs), op
    assert {n for n in contract.numbers if parameters[n].default is inspect.Parameter.empty} <= set(case.numbers), op
    assert set(case.numbers) <= set(contract.numbers), op
    return case


def borders(rng: np.random.Generator, b: int, t: int, max_docs: int) -> np.ndarray:
    """(b, max_docs + 1) int32: rows of as many documents as there may be, of fewer, and of one, in turn."""
    found = np.full((b, max_docs + 1), t, np.int32)
    for row in range(b):
        count = (max_docs, 1, max_docs - 1)[row % 3]
        found[row, :count] = [0, *sorted(1 + rng.choice(t - 1, count - 1, replace=False))]
    return found


def often(d: Draw, s: Sizes) -> np.ndarray:
    """Tokens, one of which occurs often."""
    tokens = d.below(s.v, "bt")
    tokens[0, : s.t // 2] = tokens[0, 0]
    return tokens


def virtual_tokens(d: Draw, s: Sizes, outputs: dict[str, Axes], backward: bool) -> Made:
    """Packed heads, of which keys and values are replaced at 3 positions of documents from the second on."""
    positions = document_positions(borders(d.rng, s.b, s.t, 4), s.t)
    x, width = d.normal("btq"), 2 * s.hkv * s.hd
    inputs = {"d_out": x} if backward else {"x": x, "virtual": d.normal((3, width))}
    numbers = {"num_virtual": 3, "channels": width, "start": 1}
    return {"outputs": outputs, "inputs": {**inputs, "positions": positions}, "numbers": numbers}


def output_gain(d: Draw, s: Sizes) -> Made:
    """P and G of the weight and of A, so that they are those of norms; 12 of 19 rows of A are the adapter's."""
    weight, a, up = d.normal("fc"), d.normal((19, s.c)), d.normal((s.f, 12))
    inputs = {"weight": weight, "through": weight @ a.T, "gram": a @ a.T, "up": up / s.c}
    inputs["magnitude"] = d.uniform(1, 2, "f")
    numbers, stat = {"scale": 1.7, "first": 5}, "gain norm through gram magnitude"
    return {"outputs": {"gain": "f", "norm": "f"}, "inputs": inputs, "numbers": numbers, "stat": stat}


def orthogonality(d: Draw, s: Sizes) -> Made:
    """The second of three adapters whose A are one, with one row that is not there."""
    rank = 6
    a = d.normal((3 * rank, s.c)) / np.sqrt(s.c)
    a[2 * rank - 1] = 0
    inputs = {"gram": a @ a.T, "targets": d.targets("bt", np.s_[0, : s.t // 2])}
    numbers = {"weight": 0.07, "first": rank, "present": rank - 1}
    return {"outputs": {"coefficient": (rank, 3 * rank)}, "inputs": inputs, "numbers": numbers, "stat": "gram"}


def importance(d: Draw, s: Sizes) -> Made:
    inputs = {name: d.uniform(0, 1, "fc") for name in ("sensitivity", "uncertainty")}
    inputs |= {name: d.normal("fc") for name in ("weight", "grad")} | d.cells("scale", "apply")
    outputs = {f"new_{name}": "fc" for name in ("sensitivity", "uncertainty")}
    stat = f"{' '.join(outputs)} sensitivity uncertainty scale apply"
    return {"outputs": outputs, "inputs": inputs, "numbers": {"beta_1": 0.85, "beta_2": 0.8}, "stat": stat}


def dropout(d: Draw, s: Sizes) -> Made:
    """A piece of the batch that begins within a row of tokens and ends within another."""
    shape = (s.b * s.t - 5, s.c)
    inputs = {"x": d.normal(shape), "samples": samples(d, s), "residual": d.normal(shape)}
    numbers = {"rate": 0.3, "seed": 3 + 2**40, "stream": 0xF1234567, "first": 3, "length": s.t}
    return {"outputs": {"out": shape}, "inputs": inputs, "numbers": numbers}


def rmsnorm_backward(d: Draw, s: Sizes) -> Made:
    res = d.normal("btc")
    d_x, d_res = d.normal((2, *res.shape))
    rstd = 1 / np.sqrt(np.mean(res * res, axis=-1))
    inputs = {"d_x": d_x, "d_res": d_res, "res": res, "weight": d.normal("c"), "rstd": rstd}
    return {"outputs": {"d_out": "btc", "d_weight": "c"}, "inputs": inputs, "stat": "rstd"}


def layernorm_backward(d: Draw, s: Sizes) -> Made:
    res = d.normal("btc")
    d_x, d_res = d.normal((2, *res.shape))
    stats = {"mean": res.mean(axis=-1), "rstd": 1 / res.std(axis=-1)}
    inputs = {"d_x": d_x, "d_res": d_res, "res": res, "weight": d.normal("c"), **stats}
    return {"outputs": {"d_out": "btc", "d_weight": "c", "d_bias": "c"}, "inputs": inputs, "stat": "mean rstd"}


def wide_qk_norm_forward(d: Draw, s: Sizes) -> Made:
    inputs = {"qkv": d.normal("btq"), "q_weight": d.normal((s.hq * s.hd,)), "k_weight": d.normal((s.hkv * s.hd,))}
    outputs = {"out": "btq", "rstd": (s.b, s.t, 2)}
    return {"outputs": outputs, "inputs": inputs, "numbers": {**s.heads, "eps": 1e-6}, "stat": "rstd"}


def wide_qk_norm_backward(d: Draw, s: Sizes) -> Made:
    read = wide_qk_norm_forward(d, s)["inputs"]
    parts = np.split(read["qkv"], [s.hq * s.hd, (s.hq + s.hkv) * s.hd], axis=-1)[:2]
    rstd = np.stack([1 / np.sqrt(np.mean(part * part, axis=-1)) for part in parts], axis=-1)
    outputs = {"d_qkv": "btq", "d_q_weight": (s.hq * s.hd,), "d_k_weight": (s.hkv * s.hd,)}
    inputs = {"d_out": d.normal("btq"), **read, "rstd": rstd}
    return {"outputs": outputs, "inputs": inputs, "numbers": s.heads, "stat": "rstd"}


def qk_norm_forward(d: Draw, s: Sizes) -> Made:
    inputs = {"qkv": d.normal("btq"), "q_weight": d.normal("h"), "k_weight": d.normal("h")}
    outputs = {"out": "btq", "rstd": (s.b, s.t, s.hq + s.hkv)}
    return {"outputs": outputs, "inputs": inputs, "numbers": {**s.heads, "eps": 1e-6}, "stat": "rstd"}


def qk_norm_backward(d: Draw, s: Sizes) -> Made:
    read = qk_norm_forward(d, s)["inputs"]
    heads = read["qkv"].reshape(s.b, s.t, -1, s.hd)[:, :, : s.hq + s.hkv]
    inputs = {"d_out": d.normal("btq"), **read, "rstd": 1 / np.sqrt(np.mean(heads * heads, axis=-1))}
    outputs = {"d_qkv": "btq", "d_q_weight": "h", "d_k_weight": "h"}
    return {"outputs": outputs, "inputs": inputs, "numbers": s.heads, "stat": "rstd"}


def rope(d: Draw, s: Sizes, written: str, read: str) -> Made:
    inputs = {read: d.normal("btq"), "table": rope_table(RopeConfig(), s.hd, s.t + 3, np.float64)}
    inputs["positions"] = d.below(s.t + 3, "bt")
    return {"outputs": {written: "btq"}, "inputs": inputs, "numbers": s.heads, "stat": "table"}


def rope_heads(d: Draw, s: Sizes, written: tuple[str, str], read: tuple[str, str]) -> Made:
    """Heads apart, and one table of angles for all rows."""
    shapes = [(s.b, s.t, heads, s.hd) for heads in (s.hq, s.hkv)]
    table = rope_table(RopeConfig(), s.hd, s.t, np.float64)[None]
    angles = {name: np.tile(half, 2) for name, half in zip(("cos", "sin"), np.split(table, 2, axis=-1), strict=True)}
    inputs = dict(zip(read, map(d.normal, shapes), strict=True)) | angles
    return {"outputs": dict(zip(written, shapes, strict=True)), "inputs": inputs}


def attention_forward(d: Draw, s: Sizes) -> Made:
    numbers = {**s.heads, "window": s.t // 4, "longest": 2 * s.t // 3, "softmax_scale": s.hd**-0.5}
    outputs = {"att": (s.b, s.t, s.hq * s.hd), "lse": (s.b, s.t, s.hq)}
    inputs = {"qkv": d.normal("btq"), "borders": borders(d.rng, s.b, s.t, 4)}
    return {"outputs": outputs, "inputs": inputs, "numbers": numbers, "stat": "lse"}


def attention_backward(d: Draw, s: Sizes) -> Made:
    forward = attention_forward(d, s)
    read, numbers = forward["inputs"], forward["numbers"]
    att, lse = run("attention_forward", [*forward["outputs"].values()], *read.values(), **numbers)
    inputs = {"d_att": d.normal(att.shape), "qkv": read["qkv"], "att": att, "lse": lse, "borders": read["borders"]}
    return {"outputs": {"d_qkv": "btq"}, "inputs": inputs, "numbers": numbers, "stat": "lse"}


def swiglu_low_rank_backward(d: Draw, s: Sizes) -> Made:
    halves = dict.fromkeys(("gate_low", "up_low"), (s.b, s.t, 16)) | dict.fromkeys(("gate_b", "up_b"), (s.f, 16))
    shapes = {"d_act": (s.b, s.t, s.f), "gate_up": (s.b, s.t, 2 * s.f), **halves}
    outputs = {"d_gate_up": shapes["gate_up"], **{f"d_{name}": shape for name, shape in halves.items()}}
    inputs = {name: d.normal(shape) for name, shape in shapes.items()}
    return {"outputs": outputs, "inputs": inputs, "numbers": {"gate_alpha": 0.5, "up_alpha": 2.0}}


def cross_entropy(d: Draw, s: Sizes) -> Made:
    m = s.b * s.t
    targets = d.targets((m,), np.s_[::4])
    inputs = {"logits": 2 * d.normal((m, s.vp)), "targets": targets}
    numbers = {"vocab_size": s.v, "z_loss": 1e-2}
    outputs = {"d_logits": (m, s.vp), "loss": (m,), "hits": (m,)}
    return {"outputs": outputs, "inputs": inputs, "numbers": numbers, "stat": "loss hits"}


def own_loss(d: Draw, s: Sizes) -> Made:
    made = cross_entropy(d, s)
    del made["outputs"]["hits"]
    return {**made, "numbers": {"function": squares, "vocab_size": s.v}, "stat": "logits d_logits loss"}


def squares(xp: Any, logits: Any, targets: Any) -> tuple[Any, Any]:
    """A loss of one's own: half the squares of trained tokens' logits."""
    d_logits = xp.where((targets >= 0)[:, None], logits, 0)
    return (d_logits * d_logits).sum(axis=1) / 2, d_logits


def loss_sum(d: Draw, s: Sizes) -> Made:
    targets = d.targets("bt", np.s_[0, 0])
    hits = (targets % 3 == 0).astype(np.int32)
    inputs = {"loss": np.where(targets == -100, 0, d.uniform(0, 9, "bt")), "targets": targets, "hits": hits}
    outputs = dict.fromkeys(("loss_total", "num_tokens", "num_hits"), "1")
    return {"outputs": outputs, "inputs": inputs, "stat": f"{' '.join(outputs)} loss"}


def cache_write(d: Draw, s: Sizes) -> Made:
    """Every place of the cache is written, by a row of another number and in another order."""
    order = np.stack([d.rng.permutation(s.t) for _ in range(s.b)]).astype(np.int32)
    rows = np.broadcast_to(np.arange(s.b, dtype=np.int32)[::-1, None], (s.b, s.t)).copy()
    inputs = {"rot": d.normal("btq"), "positions": order, "sequences": rows}
    return {"outputs": {"cache": (s.b, s.t, 2 * s.hkv * s.hd)}, "inputs": inputs, "numbers": s.heads}


def attention_cached(d: Draw, s: Sizes) -> Made:
    """Sequences of one token, as many as there may be, and numbers between.

    Keys turn by quarters, which rounds nothing: the reference in f64 keeps them as they are, a cache in bf16 does not.
    """
    positions = d.below(s.t, "b1")
    positions[:2, 0] = [0, s.t - 1]
    cache = d.normal((s.b, s.t, 2 * s.hkv * s.hd))
    quarters = (np.arange(s.t)[:, None] + np.arange(s.hd // 2)) % 4
    table = np.concatenate([np.array([1.0, 0, -1, 0])[quarters], np.array([0.0, 1, 0, -1])[quarters]], axis=1)
    inputs = {"qkv": d.normal("b1q"), "cache": cache, "table": table, "positions": positions}
    numbers = {**s.heads, "window": 2 * s.t // 3, "softmax_scale": s.hd**-0.5}
    outputs = {"att": (s.b, 1, s.hq * s.hd), "new_cache": cache.shape}
    return {"outputs": outputs, "inputs": inputs, "numbers": numbers, "stat": "table"}


def token_linear(d: Draw, s: Sizes) -> Made:
    """Of a row whose norm is 1, so that nothing is rounded between the norm and the product."""
    inputs = {"x": d.rng.choice([-0.5, 0.5], (s.b, 1, s.c)), "norm": d.normal("c"), "weight": d.normal("fc")}
    inputs |= {"bias": d.normal("f"), "residual": d.normal("b1f")}
    return {"outputs": {"y": "b1f"}, "inputs": inputs, "numbers": {"eps": 0.75, "gated": False}}


def sample(d: Draw, s: Sizes) -> Made:
    inputs = {"logits": 2 * d.normal("b1p"), "positions": d.below(99, "b1")}
    inputs["samples"] = np.arange(7, 7 + s.b, dtype=np.int32)
    numbers = {"vocab_size": s.v, "temperature": 0.7, "top_k": s.v // 2, "top_p": 0.9, "min_p": 0.01, "seed": 3 + 2**40}
    outputs = {"next_tokens": "b1", "next_positions": "b1"}
    return {"outputs": outputs, "inputs": inputs, "numbers": numbers, "stat": " ".join(outputs)}


def scale_of_step(d: Draw, inputs: dict[str, np.ndarray], norm: str) -> Made:
    """What makes the scale of a step's gradients, and whether it is applied."""
    inputs = {**inputs, "num_tokens": np.array([5.0])}
    outputs = {norm: "1", "scale": "1", "apply": "1"}
    return {"outputs": outputs, "inputs": inputs, "numbers": {"grad_clip": 0.5}, "stat": " ".join((*inputs, *outputs))}


def adamw(d: Draw, s: Sizes) -> Made:
    master, m, grad = d.normal((3, s.vp, s.c))
    inputs = {"master": master, "m": m, "v": d.uniform(0, 1, "pc"), "grad": grad}
    inputs |= d.cells("scale", "apply", "learning_rate") | {"step": np.array([3], np.int32)}
    numbers = {"beta_1": 0.9, "beta_2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "seed": 5, "stream": 2, "rate": 1.3}
    outputs = dict.fromkeys(("new_master", "new_m", "new_v", "weight"), "pc")
    return {"outputs": outputs, "inputs": inputs, "numbers": numbers, "stat": "scale apply learning_rate"}


def sgd(d: Draw, s: Sizes) -> Made:
    made = adamw(d, s)
    del made["inputs"]["v"], made["outputs"]["new_v"]
    numbers = {name: made["numbers"][name] for name in ("weight_decay", "seed", "stream", "rate")}
    return {**made, "numbers": {"momentum": 0.9, "nesterov": True, **numbers}}


def rows_of_one_rank(d: Draw, s: Sizes, out: str, *leading: int) -> Made:
    x = d.normal((s.b * s.t, s.c))
    return {"outputs": {out: (*leading, *x.shape)}, "inputs": {"x": x}, "numbers": {"bounds": (0, len(x))}}


def quantization_error(d: Draw, s: Sizes) -> Made:
    x = d.normal("btc")
    x[0, 0], x[0, 1, 0] = 0, 1e-6
    forms = {"copy": (Form("e4m3", "row", "delayed"), 2.0**-8)}  # largest: 1.75
    inputs = {"error": np.ones(6), "x": x, "copy": x}
    return {"outputs": {"new_error": (6,)}, "inputs": inputs, "stat": "new_error error", "forms": forms}


def nest(d: Draw, s: Sizes) -> Made:
    """Scales of two tensors, the first of which ends in the middle of 256."""
    absmax = d.uniform(0.5, 2, (320 + s.b * s.t,))
    outputs, numbers = {"out": Nested(64).shape(len(absmax), 64)}, {"group": 64, "borders": (320, len(absmax))}
    return {"outputs": outputs, "inputs": {"absmax": absmax}, "numbers": numbers, "stat": "out absmax"}


def scale_update(d: Draw, s: Sizes) -> Made:
    inputs = {"scale": d.uniform(0.1, 1, "c"), "history": d.uniform(0, 9, (4, s.c)), "amax": d.uniform(0, 9, "c")}
    inputs |= {"limits": np.full(s.c, 448.0), "apply": np.ones(1)}
    outputs = {"new_scale": "c", "new_history": (4, s.c), "new_amax": "c"}
    return {"outputs": outputs, "inputs": inputs, "stat": " ".join((*inputs, *outputs))}


Given = Axes | Callable[[Draw, Sizes], np.ndarray]  # axes of normal numbers, or what draws them


def plain(
    outputs: dict[str, Axes], inputs: dict[str, Given], stat: str = "", colsum: str = "", **numbers: Any
) -> Maker:
    """The case of an op whose inputs are drawn one by one."""

    def made(d: Draw, s: Sizes) -> Made:
        values = {name: given(d, s) if callable(given) else d.normal(given) for name, given in inputs.items()}
        shapes = {name: axes(s) if callable(axes) else axes for name, axes in outputs.items()}
        return {"outputs": shapes, "inputs": values, "numbers": dict(numbers), "stat": stat, "colsum": colsum}

    return made


def uniform(low: float, high: float, axes: Given) -> Given:
    """Numbers between two."""
    return lambda d, s: d.uniform(low, high, axes(s) if callable(axes) else axes)


def samples(d: Draw, s: Sizes) -> np.ndarray:
    """Places of rows in a run, one of them 2^32 - 1."""
    return np.arange(-1, s.b - 1, dtype=np.int32)


def wide(s: Sizes) -> tuple[int, ...]:
    """Of gate and up."""
    return s.b, s.t, 2 * s.f


SCALES, CELL = uniform(0.5, 2, "c"), uniform(0.5, 2, "1")
# Of each op: the axes of outputs, the values of inputs, numbers; the names of what is never bf16, and of column sums.
CASES: dict[str, Maker] = {
    **{op: globals()[op] for op in OPS if op in globals()},
    "embedding_forward": plain({"res": "btc"}, {"tokens": often, "weight": "pc"}),
    "embedding_backward": plain({"d_weight": "pc"}, {"d_res": "btc", "tokens": often}),
    "embedding_noise": plain(
        {"out": "btc"}, {"res": "btc", "samples": samples}, alpha=5.0, seed=3 + 2**40, stream=0xF1234567
    ),
    "virtual_tokens_forward": lambda d, s: virtual_tokens(d, s, {"out": "btq"}, False),
    "virtual_tokens_backward": lambda d, s: virtual_tokens(
        d, s, {"d_x": "btq", "d_virtual": (3, 2 * s.hkv * s.hd)}, True
    ),
    "scale_columns_forward": plain({"y": "btc"}, {"x": "btc", "gain": SCALES, "bias": "c", "residual": "btc"}, "gain"),
    "scale_columns_backward": plain(
        {"d_x": "btc", "d_gain": "c"}, {"d_y": "btc", "x": "btc", "gain": SCALES}, "gain d_gain"
    ),
    "output_gain_backward": plain({"d_magnitude": "f"}, {"d_gain": "f", "norm": uniform(1, 2, "f")}, "d_gain norm"),
    "importance_sums": plain(
        {"sums": lambda s: (num_norm_tiles((3 * s.f, s.c)), s.c)},
        dict.fromkeys(("sensitivity", "uncertainty"), uniform(0, 1, lambda s: (3 * s.f, s.c))),
        "sums sensitivity uncertainty",
        of_columns=True,
    ),
    "scale": plain({"y": "btc"}, {"x": "btc", "residual": "btc"}, factor=0.3),
    "softcap_forward": plain({"y": "btc"}, {"x": "btc"}, cap=2.0, factor=1.5),
    "softcap_backward": plain({"d_x": "btc"}, {"d_y": "btc", "y": uniform(-1, 1, "btc")}, cap=2.0, factor=1.5),
    "rmsnorm_forward": plain({"x": "btc", "rstd": "bt"}, {"res": "btc", "weight": "c"}, "rstd", eps=1e-5),
    "post_norm_forward": plain(
        {"out": "btc", "rstd": "bt"}, {"x": "btc", "weight": "c", "residual": "btc"}, "rstd", eps=1e-5
    ),
    "layernorm_forward": plain(
        {"x": "btc", "mean": "bt", "rstd": "bt"}, {"res": "btc", "weight": "c", "bias": "c"}, "mean rstd", eps=1e-5
    ),
    "rope_forward": lambda d, s: rope(d, s, "out", "qkv"),
    "rope_backward": lambda d, s: rope(d, s, "d_qkv", "d_out"),
    "rope_heads_forward": lambda d, s: rope_heads(d, s, ("out_q", "out_k"), ("q", "k")),
    "rope_heads_backward": lambda d, s: rope_heads(d, s, ("d_q", "d_k"), ("d_out_q", "d_out_k")),
    "swiglu_apart_forward": plain({"act": "btf"}, dict.fromkeys(("gate", "up"), "btf")),
    "swiglu_apart_backward": plain(
        dict.fromkeys(("d_gate", "d_up"), "btf"), dict.fromkeys(("d_act", "gate", "up"), "btf")
    ),
    "swiglu_forward": plain({"act": "btf"}, {"gate_up": lambda d, s: d.normal(wide(s))}),
    "swiglu_backward": plain({"d_gate_up": wide}, {"d_act": "btf", "gate_up": lambda d, s: d.normal(wide(s))}),
    "activation_forward": plain({"act": "btf"}, {"x": "btf"}, activation="gelu"),
    "activation_backward": plain({"d_x": "btf"}, dict.fromkeys(("d_act", "x"), "btf"), activation="gelu"),
    "linear_forward": plain({"y": "btf"}, {"x": "btc", "weight": "fc", "bias": "f", "residual": "btf"}),
    "linear_dgrad": plain({"d_x": "btc"}, {"d_y": "btf", "weight": "fc", "residual": "btc"}),
    "linear_wgrad": plain({"d_weight": "fc"}, {"d_y": "btf", "x": "btc"}),
    "low_rank_backward": lambda d, s: {
        "outputs": {"d_low": (s.b, s.t, 16), "d_up": (s.f, 16)},
        "inputs": {"d_y": d.normal("btf"), "low": d.normal((s.b, s.t, 16)), "up": d.normal((s.f, 16))},
        "numbers": {"alpha": 0.5},
    },
    "bias_backward": plain({"d_bias": "f"}, {"d_y": "btf"}, colsum="d_y"),
    "penalize": plain(
        {"out": "b1p", "new_seen": "bp"},
        {"logits": "b1p", "seen": lambda d, s: d.below(2, "bp"), "tokens": lambda d, s: d.below(s.v, "b1")},
        "out new_seen",
        penalty=1.3,
    ),
    "sum_squares": plain({"partials": lambda s: (num_norm_tiles((s.vp, s.c)),)}, {"grad": "pc"}, "partials"),
    "grad_scale": lambda d, s: scale_of_step(d, {"partials": d.uniform(0, 9, "c"), **d.cells("loss_total")}, "norm"),
    "last_norm_scale": lambda d, s: scale_of_step(d, d.cells("norm", "last_norm", "loss_total"), "new_last_norm"),
    "apply_if_below": lambda d, s: {
        "outputs": {"new_apply": "1"},
        "inputs": {**d.cells("apply", "loss_total"), "num_tokens": np.array([1.0]), **d.cells("limit")},
        "stat": "new_apply apply loss_total num_tokens limit",
    },
    "apply_if_finite": plain({"out": "1"}, {"partials": uniform(0, 9, "p"), "apply": CELL}, "out partials apply"),
    **dict.fromkeys(("cast", "copy_to_host", "copy_to_device"), plain({"out": "btc"}, {"x": "btc"})),
    "all_gather": lambda d, s: rows_of_one_rank(d, s, "out"),
    "reduce_scatter": lambda d, s: rows_of_one_rank(d, s, "out"),
    "all_to_all": lambda d, s: rows_of_one_rank(d, s, "pieces", 0),  # alone, there are no others
    "all_reduce": plain({"out": "c"}, {"x": "c"}),
    "sum_pieces": plain({"out": "tc"}, {"own": "tc", "pieces": lambda d, s: d.normal((3, s.t, s.c))}, rank=1),
    "amax_scale": plain({"scale": "1"}, {"x": "btc"}, "scale", limit=448.0),
    "quantize": plain({"out": "btc", "scale": "1"}, {"x": "btc"}, "scale", limit=448.0),
    "amax": plain({"out": "1"}, {"x": "btc"}, "out", in_bf16=False),
    "repeat": plain({"out": "btc"}, {"block": (37,)}, first=41),
}
