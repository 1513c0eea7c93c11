"""Where a micro-batch's time goes, family by family of ops, and what each would take at the measured ceilings.

The work of a call is read off its step of the plan. FLOPs are those of matrix products and of attention's products over
the keys that a query sees; bytes are every operand once, an output that is added to twice. A call's roofline is the
larger of its FLOPs at the rate of the card's own large matrix product and its bytes at the rate of its own large copy,
so the distance from it is what a better kernel or another order of calls could win.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmq.ops.seam import MAY_SHARE, signature
from llmq.plan.plan import Plan
from llmq.plan.program import Operand, Placement, Step, stored_bytes
from llmq.report.bench import Timed
from llmq.report.bench_ceilings import Ceilings
from llmq.tensor import DTYPES, scale_shape

# (op, part of what it writes) -> family; the first that fits counts
FAMILIES = (
    ("linear_", ".head.", "head"),
    ("linear_", "head.logits", "head"),
    ("linear_wgrad", "embed.weight", "head"),
    ("linear_wgrad", "head.weight", "head"),
    ("linear_forward", "", "linears forward"),
    ("linear_dgrad", "", "linears dgrad"),
    ("linear_wgrad", "", "linears wgrad"),
    ("bias_backward", "", "linears wgrad"),
    ("attention_forward", "", "attention forward"),
    ("attention_backward", "", "attention backward"),
    ("rmsnorm", "", "norms"),
    ("qk_norm", "", "norms"),
    ("rope", "", "rope"),
    ("swiglu", "", "swiglu"),
    ("cast", "", "quantize"),
    ("amax_scale", "", "quantize"),
    ("quantize", "", "quantize"),
    ("cross_entropy", "", "cross-entropy"),
    ("loss_sum", "", "cross-entropy"),
    ("embedding", "", "embedding"),
)
PRODUCTS = {
    "attention_forward": 2,
    "attention_backward": 5,
}  # of matrices as large as all scores; backward makes p anew


@dataclass(frozen=True)
class Work:
    """What a call has to do: FLOPs of products in `dtype`, and bytes to move at least."""

    dtype: str
    flops: int
    num_bytes: int


@dataclass(frozen=True)
class Rung:
    """A family: milliseconds of a micro-batch, measured and at the ceilings, and its work in the same unit."""

    family: str
    calls: int  # in one micro-step or update
    ms: float
    roofline_ms: float
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class Ladder:
    """All families, the longest first, of a micro-batch that takes `micro_batch_ms` in training."""

    rungs: tuple[Rung, ...]
    micro_batch_ms: float

    @property
    def gaps_ms(self) -> float:
        """What training takes beyond its ops run one by one; negative where they overlap."""
        return self.micro_batch_ms - sum(rung.ms for rung in self.rungs)

    @property
    def share(self) -> float:
        """Share of the ceilings: the rooflines of all calls over the time that training takes."""
        return sum(rung.roofline_ms for rung in self.rungs) / self.micro_batch_ms


def family(op: str, written: str) -> str:
    """The family that a call is counted in, by its op and the name of what it writes first."""
    return next((name for start, part, name in FAMILIES if op.startswith(start) and part in written), "optimizer")


def ladder(
    plan: Plan, calls: Iterable[Timed], ceilings: Ceilings, *, micro_batch_ms: float, tokens_per_step: int, used: float
) -> Ladder:
    """The ladder of timed calls. `used` is how many different tokens a micro-batch has."""
    share_of_update = plan.batch_size * plan.seq_len / tokens_per_step
    rungs: dict[str, Rung] = {}
    for call in calls:
        program = plan.programs[call.program]
        step = program.steps[call.index]
        work = work_of(step, program.places, used)
        times = share_of_update if call.program == "update" else 1.0
        name = family(step.op, written(step))
        old = rungs.get(name, Rung(name, 0, 0.0, 0.0, 0.0, 0.0))
        rungs[name] = Rung(
            name,
            old.calls + 1,
            old.ms + times * call.ms,
            old.roofline_ms + times * 1e3 * roofline_s(work, ceilings),
            old.flops + times * work.flops,
            old.num_bytes + times * work.num_bytes,
        )
    return Ladder(tuple(sorted(rungs.values(), key=lambda rung: -rung.ms)), micro_batch_ms)


def written(step: Step) -> str:
    """The name of what a step writes first."""
    return next(result.ref.name for result in step.outputs if result is not None)


def roofline_s(work: Work, ceilings: Ceilings) -> float:
    """Least seconds of a call at the ceilings."""
    multiplying = work.flops / ceilings.flops[work.dtype] if work.flops else 0.0
    return max(multiplying, work.num_bytes / ceilings.bytes_per_s)


def work_of(step: Step, places: Mapping[str, Placement], used: float) -> Work:
    """The work of a step. `places` tell what is computed in place; `used` rows of an embedding table are touched."""
    inputs = dict(zip(signature(step.op).inputs, step.inputs, strict=True))
    dtype, flops = _products(step, inputs)
    return Work(dtype, flops, _bytes(step, inputs, places, used))


def _products(step: Step, inputs: Mapping[str, Operand | None]) -> tuple[str, int]:
    """Dtype and FLOPs of the matrix products of a step."""
    if step.op.startswith("linear_"):
        left, right = (operand for operand in step.inputs[:2] if operand is not None)
        # x (M,K) weight (N,K); d_y (M,N) weight (N,K); d_y (M,N) x (M,K): what `left` lacks of M, N and K
        other = right.ref.shape[0] if step.op == "linear_forward" else right.ref.shape[-1]
        return _rate(left), 2 * math.prod(left.ref.shape) * other
    if step.op in PRODUCTS:
        qkv = inputs["qkv"]
        assert qkv is not None
        b, t, width = qkv.ref.shape
        heads, window = step.numbers["num_heads"], min(step.numbers["window"] or t, t)
        head_dim = width // (heads + 2 * step.numbers["num_kv_heads"])
        seen = window * (window + 1) // 2 + (t - window) * window  # keys, summed over the queries of a sequence
        return _rate(qkv), PRODUCTS[step.op] * 2 * b * heads * head_dim * seen
    return "fp32", 0


def _rate(operand: Operand) -> str:
    """The dtype whose rate counts: e5m2 multiplies as fast as e4m3."""
    dtype = operand.ref.form.dtype if operand.ref.form else operand.ref.dtype
    return "e4m3" if dtype == "e5m2" else dtype


def _bytes(step: Step, inputs: Mapping[str, Operand | None], places: Mapping[str, Placement], used: float) -> int:
    read = {(operand.storage, operand.ref.span): operand for operand in step.inputs if operand is not None}
    total = sum(_stored(operand) for operand in read.values())
    for result in step.outputs:
        for operand in result.operands if result else ():
            total += _stored(operand) * (2 if result and result.accumulate else 1)
    return total - _untouched(step, inputs, places, used)


def _stored(operand: Operand) -> int:
    """Bytes of an operand, with its scales where it has many."""
    form = operand.ref.form
    scales = math.prod(scale_shape(operand.ref.shape, form)) if form is not None and form.owns_scales else 0
    return stored_bytes(operand.ref) + 4 * scales


def _untouched(step: Step, inputs: Mapping[str, Operand | None], places: Mapping[str, Placement], used: float) -> int:
    """Bytes of a step's operands that it neither reads nor writes."""
    if step.op == "embedding_forward":
        table = inputs["weight"]
        assert table is not None
        return _unused_rows(table, used)
    if step.op == "embedding_backward":
        result = step.outputs[0]
        assert result is not None
        return 2 * _unused_rows(result.operands[0], used) if result.accumulate else 0
    if step.op == "qk_norm_backward":  # value heads are copied from d_out, those of qkv do not matter
        qkv = inputs["qkv"]
        assert qkv is not None
        return _value_heads(step, qkv)
    if step.op.startswith("rope_"):
        result, ((_, source),) = step.outputs[0], MAY_SHARE[step.op].items()
        given = inputs[source]
        assert result is not None and given is not None
        in_place = [o for o in result.operands if o.ref.form is None and _same_place(o, given, places)]
        if in_place:  # value heads are not written, and read only if another form is made of them
            return _value_heads(step, given) * (2 if len(result.operands) == 1 else 1)
    return 0


def _unused_rows(table: Operand, used: float) -> int:
    rows, width = table.ref.shape
    return int(max(rows - used, 0) * width) * DTYPES[table.ref.dtype].itemsize


def _value_heads(step: Step, packed: Operand) -> int:
    """Bytes of the value heads in a packed qkv."""
    heads, kv_heads = step.numbers["num_heads"], step.numbers["num_kv_heads"]
    return stored_bytes(packed.ref) * kv_heads // (heads + 2 * kv_heads)


def _same_place(one: Operand, other: Operand, places: Mapping[str, Placement]) -> bool:
    return one.storage in places and other.storage in places and places[one.storage] == places[other.storage]
