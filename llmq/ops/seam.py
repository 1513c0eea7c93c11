"""The contract of an op, read off its signature: outputs left of `/`, inputs right of it, plain numbers right of `*`.

The reference backend's functions are the definition; other backends have functions of the same names and signatures.
The tables say what a signature cannot: which output may take an input's memory, and which outputs can be written in
several forms at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from llmq.ops import reference

# op -> {output: input whose memory it may take when that input is read for the last time}
MAY_SHARE: dict[str, dict[str, str]] = {
    "embedding_noise": {"out": "res"},
    "rmsnorm_backward": {"d_out": "d_res"},
    "rope_forward": {"out": "qkv"},
    "rope_backward": {"d_qkv": "d_out"},
    "cross_entropy": {"d_logits": "logits"},
}

# op -> outputs that it can write in quantized or column-sum forms in the same pass; all others get a `cast` behind them
# (copies that own their scales a `quantize`)
WRITES_FORMS: dict[str, frozenset[str]] = {
    "rmsnorm_forward": frozenset({"x"}),
    "rmsnorm_backward": frozenset({"d_out"}),
    "qk_norm_backward": frozenset({"d_qkv"}),
    "swiglu_forward": frozenset({"act"}),
    "swiglu_backward": frozenset({"d_gate_up"}),
    "rope_backward": frozenset({"d_qkv"}),
    "adamw": frozenset({"weight"}),
    "cast": frozenset({"out"}),
}

# op -> outputs whose fp8 rows it can write in the same pass, but nothing else: a `cast` of the rows makes columns
WRITES_ROWS: dict[str, frozenset[str]] = {"cross_entropy": frozenset({"d_logits"})}


@dataclass(frozen=True)
class Signature:
    """Names of an op's outputs, inputs and numbers, in order."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    numbers: tuple[str, ...]


def parse(function: Callable[..., None]) -> Signature:
    """Reads the contract off a function."""
    kinds: dict[object, list[str]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kinds.setdefault(parameter.kind, []).append(name)
    p = inspect.Parameter
    return Signature(*(tuple(kinds.get(k, ())) for k in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)))


@cache
def signature(op: str) -> Signature:
    """Contract of the op called `op`; KeyError if there is none."""
    return parse(reference.OPS[op])
