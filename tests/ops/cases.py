"""Random arguments for every op, in an odd and in a larger shape: what the laws of all ops are tested on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace

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


def cells(rng: np.random.Generator, *names: str) -> dict[str, np.ndarray]:
    """Positive cells (1,)."""
    return {name: rng.uniform(0.5, 2, 1) for name in names}


def make(op: str, s: Sizes, seed: int = 0) -> Case:
    """The case of an op at the sizes `s`."""
    case = CASES[op](s, np.random.default_rng([seed, s.t]))
    contract = seam.record(op)
    assert (tuple(case.outputs), tuple(case.inputs)) == (contract.outputs, contract.inputs), op
    parameters = inspect.signature(OPS[op]).parameters
    assert {n for n in contract.numbers if parameters[n].default is inspect.Parameter.empty} <= set(case.numbers), op
    assert set(case.numbers) <= set(contract.numbers), op
    case.op = op
    return case


def _embedding(s: Sizes, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    tokens = rng.integers(0, s.v, (s.b, s.t)).astype(np.int32)
    tokens[0, : s.t // 2] = tokens[0, 0]  # a token that occurs often
    return tokens, rng.standard_normal((s.vp, s.c))


def embedding_forward(s: Sizes, rng: np.random.Generator) -> Case:
    tokens, weight = _embedding(s, rng)
    return Case("", {"res": (s.b, s.t, s.c)}, {"tokens": tokens, "weight": weight})


def embedding_backward(s: Sizes, rng: np.random.Generator) -> Case:
    tokens, weight = _embedding(s, rng)
    return Case("", {"d_weight": weight.shape}, {"d_res": rng.standard_normal((s.b, s.t, s.c)), "tokens": tokens})


def embedding_noise(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {"res": rng.standard_normal((s.b, s.t, s.c)), "samples": np.arange(-1, s.b - 1, dtype=np.int32)}
    return Case("", {"out": (s.b, s.t, s.c)}, inputs, {"alpha": 5.0, "seed": 3 + 2**40, "stream": 0xF1234567})


def _virtual(s: Sizes, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Packed heads, of which keys and values are replaced at the first 3 positions of documents."""
    positions = document_positions(borders(rng, s.b, s.t, 4), s.t)
    inputs = {"x": rng.standard_normal((s.b, s.t, s.q)), "positions": positions}
    return inputs, {"num_virtual": 3, "channels": 2 * s.hkv * s.hd}


def virtual_tokens_forward(s: Sizes, rng: np.random.Generator) -> Case:
    inputs, numbers = _virtual(s, rng)
    read = {"x": inputs["x"], "virtual": rng.standard_normal((3, 2 * s.hkv * s.hd)), "positions": inputs["positions"]}
    return Case("", {"out": inputs["x"].shape}, read, numbers)


def virtual_tokens_backward(s: Sizes, rng: np.random.Generator) -> Case:
    inputs, numbers = _virtual(s, rng)
    outputs = {"d_x": inputs["x"].shape, "d_virtual": (3, 2 * s.hkv * s.hd)}
    return Case("", outputs, {"d_out": inputs["x"], "positions": inputs["positions"]}, numbers)


def _columns(s: Sizes, rng: np.random.Generator) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    shape = (s.b, s.t, s.c)
    return shape, {"x": rng.standard_normal(shape), "gain": rng.uniform(0.5, 2, s.c)}


def scale_columns_forward(s: Sizes, rng: np.random.Generator) -> Case:
    shape, inputs = _columns(s, rng)
    inputs |= {"bias": rng.standard_normal(s.c), "residual": rng.standard_normal(shape)}
    return Case("", {"y": shape}, inputs, {}, frozenset({"gain"}))


def scale_columns_backward(s: Sizes, rng: np.random.Generator) -> Case:
    shape, inputs = _columns(s, rng)
    inputs = {"d_y": rng.standard_normal(shape), **inputs}
    return Case("", {"d_x": shape, "d_gain": (s.c,)}, inputs, {}, frozenset({"gain", "d_gain"}))


def output_gain(s: Sizes, rng: np.random.Generator) -> Case:
    """P and G of the weight and of A, so that they are those of norms; 12 of 19 rows of A are the adapter's."""
    rank, rows = 19, s.f
    weight, a, up = rng.standard_normal((rows, s.c)), rng.standard_normal((rank, s.c)), rng.standard_normal((rows, 12))
    inputs = {"weight": weight, "through": weight @ a.T, "gram": a @ a.T, "up": up / s.c}
    stat = frozenset({"gain", "norm", "through", "gram", "magnitude"})
    inputs["magnitude"] = rng.uniform(1, 2, rows)
    return Case("", {"gain": (rows,), "norm": (rows,)}, inputs, {"scale": 1.7, "first": 5}, stat)


def output_gain_backward(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {"d_gain": rng.standard_normal(s.f), "norm": rng.uniform(1, 2, s.f)}
    return Case("", {"d_magnitude": (s.f,)}, inputs, {}, frozenset({"d_gain", "norm"}))


def orthogonality(s: Sizes, rng: np.random.Generator) -> Case:
    """The second of three adapters whose A are one, with one row that is not there."""
    rank = 6
    a = rng.standard_normal((3 * rank, s.c)) / np.sqrt(s.c)
    a[2 * rank - 1] = 0
    targets = rng.integers(0, s.v, (s.b, s.t)).astype(np.int32)
    targets[0, : s.t // 2] = -100
    numbers = {"weight": 0.07, "first": rank, "present": rank - 1}
    inputs = {"gram": a @ a.T, "targets": targets}
    return Case("", {"coefficient": (rank, 3 * rank)}, inputs, numbers, frozenset({"gram"}))


def importance(s: Sizes, rng: np.random.Generator) -> Case:
    shape = (s.f, s.c)
    inputs = {name: rng.uniform(0, 1, shape) for name in ("sensitivity", "uncertainty")}
    inputs |= {name: rng.standard_normal(shape) for name in ("weight", "grad")}
    inputs |= cells(rng, "scale", "apply")
    outputs = {f"new_{name}": shape for name in ("sensitivity", "uncertainty")}
    stat = frozenset({*outputs, "sensitivity", "uncertainty", "scale", "apply"})
    return Case("", outputs, inputs, {"beta_1": 0.85, "beta_2": 0.8}, stat)


def importance_sums(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {name: rng.uniform(0, 1, (3 * s.f, s.c)) for name in ("sensitivity", "uncertainty")}
    shape, stat = (num_norm_tiles((3 * s.f, s.c)), s.c), frozenset({"sums", *inputs})
    return Case("", {"sums": shape}, inputs, {"of_columns": True}, stat)


def dropout(s: Sizes, rng: np.random.Generator) -> Case:
    """A piece of the batch that begins within a row of tokens and ends within another."""
    count = s.b * s.t - 5
    inputs = {
        "x": rng.standard_normal((count, s.c)),
        "samples": np.arange(-1, s.b - 1, dtype=np.int32),
        "residual": rng.standard_normal((count, s.c)),
    }
    numbers = {"rate": 0.3, "seed": 3 + 2**40, "stream": 0xF1234567, "first": 3, "length": s.t}
    return Case("", {"out": (count, s.c)}, inputs, numbers)


def rmsnorm_forward(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {"res": rng.standard_normal((s.b, s.t, s.c)), "weight": rng.standard_normal(s.c)}
    return Case("", {"x": (s.b, s.t, s.c), "rstd": (s.b, s.t)}, inputs, {"eps": 1e-5}, frozenset({"rstd"}))


def rmsnorm_backward(s: Sizes, rng: np.random.Generator) -> Case:
    res = rng.standard_normal((s.b, s.t, s.c))
    d_x, d_res = rng.standard_normal((2, *res.shape))
    inputs = {
        "d_x": d_x,
        "d_res": d_res,
        "res": res,
        "weight": rng.standard_normal(s.c),
        "rstd": 1 / np.sqrt(np.mean(res * res, axis=-1)),
    }
    return Case("", {"d_out": res.shape, "d_weight": (s.c,)}, inputs, {}, frozenset({"rstd"}))


def qk_norm_forward(s: Sizes, rng: np.random.Generator) -> Case:
    qkv = rng.standard_normal((s.b, s.t, s.q))
    inputs = {"qkv": qkv, "q_weight": rng.standard_normal(s.hd), "k_weight": rng.standard_normal(s.hd)}
    outputs = {"out": qkv.shape, "rstd": (s.b, s.t, s.hq + s.hkv)}
    return Case("", outputs, inputs, {**_heads(s), "eps": 1e-6}, frozenset({"rstd"}))


def qk_norm_backward(s: Sizes, rng: np.random.Generator) -> Case:
    forward = qk_norm_forward(s, rng)
    qkv = forward.inputs["qkv"]
    assert qkv is not None
    heads = qkv.reshape(s.b, s.t, -1, s.hd)[:, :, : s.hq + s.hkv]
    inputs = {
        "d_out": rng.standard_normal(qkv.shape),
        **forward.inputs,
        "rstd": 1 / np.sqrt(np.mean(heads * heads, axis=-1)),
    }
    outputs = {"d_qkv": qkv.shape, "d_q_weight": (s.hd,), "d_k_weight": (s.hd,)}
    return Case("", outputs, inputs, _heads(s), frozenset({"rstd"}))


def _heads(s: Sizes) -> dict[str, object]:
    return {"num_heads": s.hq, "num_kv_heads": s.hkv}


def _rope(output_name: str, input_name: str) -> Callable[[Sizes, np.random.Generator], Case]:
    def make(s: Sizes, rng: np.random.Generator) -> Case:
        inputs = {
            input_name: rng.standard_normal((s.b, s.t, s.q)),
            "table": rope_table(RopeConfig(), s.hd, s.t + 3, np.float64),
            "positions": rng.integers(0, s.t + 3, (s.b, s.t)).astype(np.int32),
        }
        return Case("", {output_name: (s.b, s.t, s.q)}, inputs, _heads(s), frozenset({"table"}))

    return make


def attention_forward(s: Sizes, rng: np.random.Generator) -> Case:
    numbers = {**_heads(s), "window": s.t // 4, "longest": 2 * s.t // 3, "softmax_scale": s.hd**-0.5}
    outputs = {"att": (s.b, s.t, s.hq * s.hd), "lse": (s.b, s.t, s.hq)}
    inputs = {"qkv": rng.standard_normal((s.b, s.t, s.q)), "borders": borders(rng, s.b, s.t, 4)}
    return Case("", outputs, inputs, numbers, frozenset({"lse"}))


def borders(rng: np.random.Generator, b: int, t: int, max_docs: int) -> np.ndarray:
    """(b, max_docs + 1) int32: rows of as many documents as there may be, of fewer, and of one, in turn."""
    found = np.full((b, max_docs + 1), t, np.int32)
    for row in range(b):
        count = (max_docs, 1, max_docs - 1)[row % 3]
        found[row, :count] = [0, *sorted(1 + rng.choice(t - 1, count - 1, replace=False))]
    return found


def attention_backward(s: Sizes, rng: np.random.Generator) -> Case:
    forward = attention_forward(s, rng)
    att, lse = run("attention_forward", [*forward.outputs.values()], *forward.inputs.values(), **forward.numbers)  # type: ignore[arg-type]
    qkv, marks = forward.inputs["qkv"], forward.inputs["borders"]
    inputs = {"d_att": rng.standard_normal(att.shape), "qkv": qkv, "att": att, "lse": lse, "borders": marks}
    return Case("", {"d_qkv": (s.b, s.t, s.q)}, inputs, forward.numbers, frozenset({"lse"}))


def swiglu_forward(s: Sizes, rng: np.random.Generator) -> Case:
    return Case("", {"act": (s.b, s.t, s.f)}, {"gate_up": rng.standard_normal((s.b, s.t, 2 * s.f))})


def swiglu_backward(s: Sizes, rng: np.random.Generator) -> Case:
    shape = (s.b, s.t, 2 * s.f)
    inputs = {"d_act": rng.standard_normal((s.b, s.t, s.f)), "gate_up": rng.standard_normal(shape)}
    return Case("", {"d_gate_up": shape}, inputs)


def linear_forward(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {
        "x": rng.standard_normal((s.b, s.t, s.c)),
        "weight": rng.standard_normal((s.f, s.c)),
        "bias": rng.standard_normal(s.f),
        "residual": rng.standard_normal((s.b, s.t, s.f)),
    }
    return Case("", {"y": (s.b, s.t, s.f)}, inputs)


def linear_dgrad(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {
        "d_y": rng.standard_normal((s.b, s.t, s.f)),
        "weight": rng.standard_normal((s.f, s.c)),
        "residual": rng.standard_normal((s.b, s.t, s.c)),
    }
    return Case("", {"d_x": (s.b, s.t, s.c)}, inputs)


def linear_wgrad(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {"d_y": rng.standard_normal((s.b, s.t, s.f)), "x": rng.standard_normal((s.b, s.t, s.c))}
    return Case("", {"d_weight": (s.f, s.c)}, inputs)


def low_rank_backward(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {
        "d_y": rng.standard_normal((s.b, s.t, s.f)),
        "low": rng.standard_normal((s.b, s.t, 16)),
        "up": rng.standard_normal((s.f, 16)),
    }
    return Case("", {"d_low": (s.b, s.t, 16), "d_up": (s.f, 16)}, inputs, {"alpha": 0.5})


def swiglu_low_rank_backward(s: Sizes, rng: np.random.Generator) -> Case:
    halves = dict.fromkeys(("gate_low", "up_low"), (s.b, s.t, 16)) | dict.fromkeys(("gate_b", "up_b"), (s.f, 16))
    shapes = {"d_act": (s.b, s.t, s.f), "gate_up": (s.b, s.t, 2 * s.f), **halves}
    outputs = {"d_gate_up": shapes["gate_up"], **{f"d_{name}": shape for name, shape in halves.items()}}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return Case("", outputs, inputs, {"gate_alpha": 0.5, "up_alpha": 2.0})


def bias_backward(s: Sizes, rng: np.random.Generator) -> Case:
    d_y = rng.standard_normal((s.b, s.t, s.f))
    return Case("", {"d_bias": (s.f,)}, {"d_y": d_y}, colsum=frozenset({"d_y"}))


def cross_entropy(s: Sizes, rng: np.random.Generator) -> Case:
    m = s.b * s.t
    targets = rng.integers(0, s.v, m).astype(np.int32)
    targets[::4] = -100
    outputs = {"d_logits": (m, s.vp), "loss": (m,)}
    inputs = {"logits": 2 * rng.standard_normal((m, s.vp)), "targets": targets}
    return Case("", outputs, inputs, {"vocab_size": s.v, "z_loss": 1e-2}, frozenset({"loss"}))


def loss_sum(s: Sizes, rng: np.random.Generator) -> Case:
    targets = rng.integers(0, s.v, (s.b, s.t)).astype(np.int32)
    targets[0, 0] = -100
    names = frozenset({"loss_total", "num_tokens", "loss"})
    inputs = {"loss": np.where(targets == -100, 0, rng.uniform(0, 9, targets.shape)), "targets": targets}
    return Case("", {"loss_total": (1,), "num_tokens": (1,)}, inputs, {}, names)


def cache_write(s: Sizes, rng: np.random.Generator) -> Case:
    """Every place of the cache is written, by a row of another number and in another order."""
    order = np.stack([rng.permutation(s.t) for _ in range(s.b)]).astype(np.int32)
    rows = np.broadcast_to(np.arange(s.b, dtype=np.int32)[::-1, None], (s.b, s.t)).copy()
    inputs = {"rot": rng.standard_normal((s.b, s.t, s.q)), "positions": order, "sequences": rows}
    return Case("", {"cache": (s.b, s.t, 2 * s.hkv * s.hd)}, inputs, _heads(s))


def attention_cached(s: Sizes, rng: np.random.Generator) -> Case:
    """Sequences of one token, as many as there may be, and numbers between.

    Keys turn by quarters, which rounds nothing: the reference in f64 keeps them as they are, a cache in bf16 does not.
    """
    positions = rng.integers(0, s.t, (s.b, 1)).astype(np.int32)
    positions[:2, 0] = [0, s.t - 1]
    cache = rng.standard_normal((s.b, s.t, 2 * s.hkv * s.hd))
    quarters = (np.arange(s.t)[:, None] + np.arange(s.hd // 2)) % 4
    table = np.concatenate([np.array([1.0, 0, -1, 0])[quarters], np.array([0.0, 1, 0, -1])[quarters]], axis=1)
    inputs = {"qkv": rng.standard_normal((s.b, 1, s.q)), "cache": cache, "table": table, "positions": positions}
    numbers = {**_heads(s), "window": 2 * s.t // 3, "softmax_scale": s.hd**-0.5}
    outputs = {"att": (s.b, 1, s.hq * s.hd), "new_cache": cache.shape}
    return Case("", outputs, inputs, numbers, frozenset({"table"}))


def token_linear(s: Sizes, rng: np.random.Generator) -> Case:
    """Of a row whose norm is 1, so that nothing is rounded between the norm and the product."""
    inputs = {
        "x": rng.choice([-0.5, 0.5], (s.b, 1, s.c)),
        "norm": rng.standard_normal(s.c),
        "weight": rng.standard_normal((s.f, s.c)),
        "bias": rng.standard_normal(s.f),
        "residual": rng.standard_normal((s.b, 1, s.f)),
    }
    return Case("", {"y": (s.b, 1, s.f)}, inputs, {"eps": 0.75, "gated": False})


def penalize(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {
        "logits": rng.standard_normal((s.b, 1, s.vp)),
        "seen": rng.integers(0, 2, (s.b, s.vp)).astype(np.int32),
        "tokens": rng.integers(0, s.v, (s.b, 1)).astype(np.int32),
    }
    outputs = {"out": (s.b, 1, s.vp), "new_seen": (s.b, s.vp)}
    return Case("", outputs, inputs, {"penalty": 1.3}, frozenset(outputs))


def sample(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {
        "logits": 2 * rng.standard_normal((s.b, 1, s.vp)),
        "positions": rng.integers(0, 99, (s.b, 1)).astype(np.int32),
        "samples": np.arange(7, 7 + s.b, dtype=np.int32),
    }
    numbers = {"vocab_size": s.v, "temperature": 0.7, "top_k": s.v // 2, "top_p": 0.9, "min_p": 0.01, "seed": 3 + 2**40}
    outputs = {"next_tokens": (s.b, 1), "next_positions": (s.b, 1)}
    return Case("", outputs, inputs, numbers, frozenset(outputs))


def sum_squares(s: Sizes, rng: np.random.Generator) -> Case:
    grad = rng.standard_normal((s.vp, s.c))
    return Case("", {"partials": (num_norm_tiles(grad.shape),)}, {"grad": grad}, {}, frozenset({"partials"}))


def grad_scale(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {"partials": rng.uniform(0, 9, s.c), **cells(rng, "loss_total"), "num_tokens": np.array([5.0])}
    outputs = {"norm": (1,), "scale": (1,), "apply": (1,)}
    return Case("", outputs, inputs, {"grad_clip": 0.5}, frozenset({*inputs, *outputs}))


def last_norm_scale(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {**cells(rng, "norm", "last_norm", "loss_total"), "num_tokens": np.array([5.0])}
    outputs = {"new_last_norm": (1,), "scale": (1,), "apply": (1,)}
    return Case("", outputs, inputs, {"grad_clip": 0.5}, frozenset({*inputs, *outputs}))


def apply_if_finite(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {"partials": rng.uniform(0, 9, s.vp), **cells(rng, "apply")}
    return Case("", {"out": (1,)}, inputs, {}, frozenset({*inputs, "out"}))


def adamw(s: Sizes, rng: np.random.Generator) -> Case:
    shape = (s.vp, s.c)
    master, m, grad = rng.standard_normal((3, *shape))
    inputs = {"master": master, "m": m, "v": rng.uniform(0, 1, shape), "grad": grad}
    inputs |= cells(rng, "scale", "apply", "learning_rate")
    inputs["step"] = np.array([3], np.int32)
    numbers = {"beta_1": 0.9, "beta_2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "seed": 5, "stream": 2}
    numbers["rate"] = 1.3
    stat = frozenset({"scale", "apply", "learning_rate"})
    return Case("", dict.fromkeys(("new_master", "new_m", "new_v", "weight"), shape), inputs, numbers, stat)


def sgd(s: Sizes, rng: np.random.Generator) -> Case:
    case = adamw(s, rng)
    del case.inputs["v"], case.outputs["new_v"]
    numbers = {name: case.numbers[name] for name in ("weight_decay", "seed", "stream", "rate")}
    return replace(case, numbers={"momentum": 0.9, "nesterov": True, **numbers})


def cast(s: Sizes, rng: np.random.Generator) -> Case:
    return Case("", {"out": (s.b, s.t, s.c)}, {"x": rng.standard_normal((s.b, s.t, s.c))})


def copy_to_host(s: Sizes, rng: np.random.Generator) -> Case:
    return cast(s, rng)


def copy_to_device(s: Sizes, rng: np.random.Generator) -> Case:
    return cast(s, rng)


def _rows(s: Sizes, rng: np.random.Generator, out: str) -> Case:
    x = rng.standard_normal((s.b * s.t, s.c))
    return Case("", {out: x.shape}, {"x": x}, {"bounds": (0, len(x))})


def all_gather(s: Sizes, rng: np.random.Generator) -> Case:
    return _rows(s, rng, "out")


def reduce_scatter(s: Sizes, rng: np.random.Generator) -> Case:
    return _rows(s, rng, "out")


def all_to_all(s: Sizes, rng: np.random.Generator) -> Case:
    case = _rows(s, rng, "pieces")
    case.outputs["pieces"] = (0, *case.outputs["pieces"])  # alone, there are no others
    return case


def all_reduce(s: Sizes, rng: np.random.Generator) -> Case:
    return Case("", {"out": (s.c,)}, {"x": rng.standard_normal(s.c)})


def sum_pieces(s: Sizes, rng: np.random.Generator) -> Case:
    own, pieces = rng.standard_normal((s.t, s.c)), rng.standard_normal((3, s.t, s.c))
    return Case("", {"out": own.shape}, {"own": own, "pieces": pieces}, {"rank": 1})


def amax_scale(s: Sizes, rng: np.random.Generator) -> Case:
    x = rng.standard_normal((s.b, s.t, s.c))
    return Case("", {"scale": (1,)}, {"x": x}, {"limit": 448.0}, frozenset({"scale"}))


def quantization_error(s: Sizes, rng: np.random.Generator) -> Case:
    x = rng.standard_normal((s.b, s.t, s.c))
    x[0, 0], x[0, 1, 0] = 0, 1e-6
    inputs = {"error": np.ones(6), "x": x, "copy": x}
    copies = {"copy": (Form("e4m3", "row", "delayed"), 2.0**-8)}  # largest: 1.75
    return Case("", {"new_error": (6,)}, inputs, {}, frozenset({"new_error", "error"}), forms=copies)


def quantize(s: Sizes, rng: np.random.Generator) -> Case:
    x = rng.standard_normal((s.b, s.t, s.c))
    return Case("", {"out": x.shape, "scale": (1,)}, {"x": x}, {"limit": 448.0}, frozenset({"scale"}))


def amax(s: Sizes, rng: np.random.Generator) -> Case:
    x = rng.standard_normal((s.b, s.t, s.c))
    return Case("", {"out": (1,)}, {"x": x}, {"in_bf16": False}, frozenset({"out"}))


def nest(s: Sizes, rng: np.random.Generator) -> Case:
    """Scales of two tensors, the first of which ends in the middle of 256."""
    absmax = rng.uniform(0.5, 2, 320 + s.b * s.t)
    shape, numbers = Nested(64).shape(len(absmax), 64), {"group": 64, "borders": (320, len(absmax))}
    return Case("", {"out": shape}, {"absmax": absmax}, numbers, frozenset({"out", "absmax"}))


def repeat(s: Sizes, rng: np.random.Generator) -> Case:
    return Case("", {"out": (s.b, s.t, s.c)}, {"block": rng.standard_normal(37)}, {"first": 41})


def scale_update(s: Sizes, rng: np.random.Generator) -> Case:
    inputs = {
        "scale": rng.uniform(0.1, 1, s.c),
        "history": rng.uniform(0, 9, (4, s.c)),
        "amax": rng.uniform(0, 9, s.c),
        "limits": np.full(s.c, 448.0),
        "apply": np.ones(1),
    }
    outputs = {"new_scale": (s.c,), "new_history": (4, s.c), "new_amax": (s.c,)}
    return Case("", outputs, inputs, {}, frozenset({*inputs, *outputs}))


CASES: dict[str, Callable[[Sizes, np.random.Generator], Case]] = {
    **{op: globals()[op] for op in OPS if not op.startswith("rope")},
    "rope_forward": _rope("out", "qkv"),
    "rope_backward": _rope("d_qkv", "d_out"),
}
