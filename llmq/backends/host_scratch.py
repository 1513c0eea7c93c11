"""What a reference op takes beside its arguments: NumPy's temporaries, so that a plan on the CPU counts them.

Each op's rule says what lives at its fullest line, in arrays as large as one of its operands. A narrow or scaled
operand is read into a copy of its own, and counts as one more. What ops and `Output.write` do in slices of rows costs
the same few slices whatever the sizes. tests/backends/test_host_scratch.py holds all of this against what NumPy asks
for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmq.ops.reference.attention import QUERY_BLOCK
from llmq.ops.seam import record
from llmq.plan.arena import stored_dtype
from llmq.tensor import SLICE, Ref, in_rows

if TYPE_CHECKING:
    from llmq.ops.record import Call, Result

SLICES = 12  # that the optimizer holds at once, the most of all; random bits are among them
SLICES_OF_CODES = 15  # with moments in 8 bits
# What is freed of arrays below 32 MiB, malloc keeps beside larger ones, which go back to the system at once: 4 MiB in
# most runs, 31 MiB in the worst of those that were measured.
KEPT_FREE = 8 << 20


@dataclass(frozen=True)
class Temporaries:
    """The bytes of what NumPy makes of a call's arguments, which are here by name, absent ones left out."""

    outputs: Mapping[str, Result]
    inputs: Mapping[str, Ref]
    numbers: Mapping[str, Any]

    @property
    def width(self) -> int:
        """Bytes of a number as ops compute with it: f64 in runs that are wholly in it, else f32."""
        refs = [*(result.ref for result in self.outputs.values()), *self.inputs.values()]
        return 8 if any(ref.dtype == "fp64" for ref in refs) else 4

    def size(self, name: str) -> int:
        """Bytes of an operand as ops compute with it; 0 for one that is absent."""
        ref = self.outputs[name].ref if name in self.outputs else self.inputs.get(name)
        return 0 if ref is None else self.width * math.prod(ref.shape)

    def copies(self, *names: str) -> int:
        """Bytes of the copies that reading makes; what is stored as ops compute with it is read in place."""
        return sum(self.size(name) for name in names if name in self.inputs and _is_copied(self.inputs[name]))

    def reading(self, *names: str) -> int:
        """Most bytes while these are read, one after the other: beside a scaled copy lies that of the bare numbers."""
        held = most = 0
        for name in names:
            held += self.copies(name)
            form = self.inputs[name].form if name in self.inputs else None
            if form is not None and form.scaling is not None:
                spread = form.scales.is_repeated  # then their scales, number by number, are there too
                most = max(most, held + self.size(name) * (2 if spread else 1))
        return max(most, held)

    def in_rows(self, name: str) -> bool:
        """Whether an operand can be read in slices of rows."""
        return in_rows(self.inputs[name].form)

    def writing(self, name: str) -> int:
        """Bytes that `Output.write` takes beside the value, where it cannot write in slices."""
        result = self.outputs.get(name)
        if result is None or all(map(in_rows, result.forms)):
            return 0
        # The value in the slot's dtype, the same in f32, and a scaled copy before and after it is clipped.
        narrow = 6 if stored_dtype(replace(result.ref, form=None)).itemsize < 4 else 0
        scaled = 8 if any(form is not None and form.scaling is not None for form in result.forms) else 0
        return math.prod(result.ref.shape) * (narrow + scaled)


def _is_copied(ref: Ref) -> bool:
    dtype, is_scaled = stored_dtype(ref), ref.form is not None and ref.form.scaling is not None
    return is_scaled or (dtype.kind not in "iu" and dtype.itemsize < 4)


Rule = Callable[[Temporaries], int]


def _product(value: str, *factors: str) -> Rule:
    """A matrix product: its factors are read, then there is the value, then what is added to it and what is written."""
    return lambda a: max(
        a.reading(*factors), a.size(value) + max(a.copies(*factors), a.reading("residual"), a.writing(value))
    )


def _elementwise(value: str, arrays: float, *reads: str, held: float = 0.0) -> Rule:
    """`arrays` of the value's size at most, then the value and `held` more while it is written."""
    return lambda a: (
        a.copies(*reads) + max(int(arrays * a.size(value)), int((1 + held) * a.size(value)) + a.writing(value))
    )


def _turn(value: str, read: str) -> Rule:
    """Products with cos and sin beside the turned heads; what was read is gone when the value is written."""
    return lambda a: max(a.copies(read) + 2 * a.size(value), a.size(value) + a.writing(value))


def _attention(value: str, arrays: int) -> Rule:
    """Whole tensors read, the value, and `arrays` of the scores of one block of queries of a key head's group."""

    def rule(a: Temporaries) -> int:
        length = a.inputs["qkv"].shape[1]
        keys = min(length, a.numbers["longest"] or length, (a.numbers["window"] or length) + QUERY_BLOCK)
        group = a.numbers["num_heads"] // a.numbers["num_kv_heads"]
        scores = a.width * min(QUERY_BLOCK, length) * keys * group
        return a.copies("qkv", "att", "d_att") + a.size(value) + max(arrays * scores, a.writing(value))

    return rule


def _if_whole(value: str, rule: Rule) -> Rule:
    """`rule` where the value cannot be made in slices."""
    return lambda a: rule(a) if a.writing(value) else 0


RULES: Mapping[str, Rule] = {
    "amax_scale": lambda a: max(a.reading("x"), a.copies("x") + a.size("x")),
    "attention_backward": _attention("d_qkv", 3),
    "attention_forward": _attention("att", 2),
    # The cache as ops compute with it, and the keys and scores of one sequence.
    "attention_cached": lambda a: (
        a.copies("qkv", "cache") + 4 * a.size("qkv") + 2 * a.size("cache") // a.inputs["cache"].shape[0]
    ),
    "cache_write": lambda a: a.copies("rot") + a.size("rot"),
    "cast": lambda a: (
        max(a.reading("x"), a.copies("x") + a.writing("out")) if a.writing("out") or not a.in_rows("x") else 0
    ),
    "cross_entropy": _if_whole("d_logits", _elementwise("d_logits", 1, "logits")),
    # The mask, and the random words of one row of tokens.
    "dropout": lambda a: a.copies("x", "residual") + 4 * a.size("x"),
    # The weight is read in slices.
    "output_gain": lambda a: a.copies("up") + 3 * a.size("up"),
    "importance": lambda a: a.copies("weight", "grad") + 4 * a.size("sensitivity"),
    "importance_sums": lambda a: 2 * a.size("sensitivity"),
    "orthogonality": lambda a: 4 * a.size("coefficient") + a.inputs["targets"].shape[0] * a.inputs["targets"].shape[1],
    # Sorted by token, and summed over the positions of a token.
    "embedding_backward": lambda a: a.copies("d_res") + 2 * a.size("d_res"),
    "embedding_forward": lambda a: a.size("res") + a.copies("weight") * a.size("res") // (2 * a.size("weight")),
    "embedding_noise": lambda a: a.copies("res") + 5 * a.size("res"),
    "linear_dgrad": _product("d_x", "d_y", "weight"),
    "linear_forward": _product("y", "x", "weight"),
    "linear_wgrad": _product("d_weight", "d_y", "x"),
    "low_rank_backward": lambda a: max(_product("d_low", "d_y", "up")(a), _product("d_up", "d_y", "low")(a)),
    "penalize": lambda a: a.copies("logits") + 4 * a.size("out"),
    "qk_norm_backward": _elementwise("d_qkv", 5, "qkv", "d_out", held=3),
    "qk_norm_forward": _elementwise("out", 2, "qkv", held=1),
    "quantization_error": lambda a: a.copies("x", "copy") + 15 * a.size("x") // 2,
    "quantize": lambda a: a.copies("x") + max(a.size("x"), a.writing("out")),
    "rmsnorm_backward": _elementwise("d_out", 4, "d_x", held=3),
    "rmsnorm_forward": _elementwise("x", 2, "res"),
    "rope_backward": _turn("d_qkv", "d_out"),
    "rope_forward": _turn("out", "qkv"),
    "sample": lambda a: a.copies("logits") + 12 * a.size("logits") // a.inputs["logits"].shape[0],
    "scale_columns_backward": lambda a: a.copies("d_y", "x") + a.size("x") + a.writing("d_x"),
    "scale_columns_forward": lambda a: a.copies("x", "residual") + a.size("y"),
    "swiglu_backward": _elementwise("d_gate_up", 2, "gate_up", "d_act", held=0.5),
    "swiglu_forward": _elementwise("act", 2, "gate_up"),
    # The gradient beside its value as rounded, then the products of a half.
    "swiglu_low_rank_backward": lambda a: (
        a.copies("gate_up", "d_act")
        + 2 * a.size("gate_up")
        + max(_product(f"d_{half}_b", "d_act", f"{half}_low")(a) for half in ("gate", "up"))
    ),
    # The linear map, and what lies before and after it.
    "token_linear": lambda a: _product("y", "x", "weight")(a) + 4 * a.size("x") + 6 * a.size("y"),
}


def _update(a: Temporaries) -> int:
    """An optimizer's update, if a state beside the master is held in 8 bits."""
    before = list(a.inputs)[1 : list(a.inputs).index("grad")]
    has_codes = any(a.inputs[name].form is not None for name in before)
    return SLICES_OF_CODES * a.width * max(a.inputs["grad"].shape[-1], SLICE) if has_codes else 0


def temporary_bytes(call: Call) -> int:
    """Most bytes of NumPy's temporaries while a call runs."""
    names = record(call.op)
    outputs = {name: result for name, result in zip(names.outputs, call.outputs, strict=True) if result is not None}
    inputs = {name: ref for name, ref in zip(names.inputs, call.inputs, strict=True) if ref is not None}
    a = Temporaries(outputs, inputs, call.numbers)
    shapes = [*(result.ref.shape for result in outputs.values()), *(ref.shape for ref in inputs.values())]
    slices = SLICES * a.width * max(max(shape[-1], min(math.prod(shape), SLICE)) for shape in shapes if shape)
    rule = _update if names.held else RULES.get(call.op)
    return max(rule(a) if rule else 0, slices)


def host_scratch(call: Call) -> int:
    """Bytes that a call needs beside its arguments: its temporaries, and what is kept of those of other calls."""
    size = temporary_bytes(call)
    return size + min(size, KEPT_FREE)
