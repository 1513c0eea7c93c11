"""The CUDA backend: kernels of `cuda/` behind the names and signatures of the reference. Imports without CuPy or a GPU.

Matrix products and attention come from cuBLASLt and cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmq.ops.cuda.bias import bias_backward
from llmq.ops.cuda.cast import amax_scale, cast, scale_update
from llmq.ops.cuda.copy import copy_to_device, copy_to_host
from llmq.ops.cuda.cross_entropy import cross_entropy, loss_sum, loss_sum_scratch
from llmq.ops.cuda.embedding import embedding_backward, embedding_backward_scratch, embedding_forward, refuse_tokens
from llmq.ops.cuda.embedding_noise import embedding_noise, refuse_rows
from llmq.ops.cuda.gather import gather_rows
from llmq.ops.cuda.launch import kind_of, rows_of, shared_bytes_limit
from llmq.ops.cuda.optimizer import adamw, grad_scale, sum_squares, sum_squares_scratch
from llmq.ops.cuda.qk_norm import qk_norm_backward, qk_norm_backward_scratch, qk_norm_forward, refuse_heads
from llmq.ops.cuda.quantization_error import quantization_error, quantization_error_scratch
from llmq.ops.cuda.quantize import quantize, quantize_scratch
from llmq.ops.cuda.rmsnorm import refuse_norm, rmsnorm_backward, rmsnorm_backward_scratch, rmsnorm_forward
from llmq.ops.cuda.rope import refuse_halves, rope_backward, rope_forward
from llmq.ops.cuda.swiglu import swiglu_backward, swiglu_forward
from llmq.tensor import Ref

__all__ = [
    "adamw",
    "amax_scale",
    "bias_backward",
    "cast",
    "copy_to_device",
    "copy_to_host",
    "cross_entropy",
    "embedding_backward",
    "embedding_forward",
    "embedding_noise",
    "gather_rows",
    "grad_scale",
    "loss_sum",
    "qk_norm_backward",
    "qk_norm_forward",
    "quantization_error",
    "quantize",
    "rmsnorm_backward",
    "rmsnorm_forward",
    "rope_backward",
    "rope_forward",
    "scale_update",
    "sum_squares",
    "swiglu_backward",
    "swiglu_forward",
]

OPS: dict[str, Callable[..., None]] = {name: globals()[name] for name in __all__}

Shape = tuple[int, ...]
_SCRATCH: dict[str, Callable[[Mapping[str, Shape]], int]] = {
    "embedding_backward": lambda s: embedding_backward_scratch(s["d_res"]),
    "loss_sum": lambda s: loss_sum_scratch(s["loss"]),
    "qk_norm_backward": lambda s: qk_norm_backward_scratch(s["qkv"], s["q_weight"]),
    "quantization_error": lambda _: quantization_error_scratch(),
    "quantize": lambda _: quantize_scratch(),
    "rmsnorm_backward": lambda s: rmsnorm_backward_scratch(s["res"]),
    "sum_squares": lambda s: sum_squares_scratch(s["grad"]),
}


def scratch_bytes(op: str, shapes: Mapping[str, Shape]) -> int:
    """Bytes of scratch that a call needs, by the shapes of its arguments (names as in the signature)."""
    return _SCRATCH[op](shapes) if op in _SCRATCH else 0


def refuse(op: str, refs: Mapping[str, Ref], *, transposed: bool, capability: int) -> None:
    """UsageError for a call that its kernel cannot make on a card of this capability (90 is 9.0).

    `refs` are its arguments by name; `transposed` says whether its output is wanted as fp8 columns.
    """
    if op in _REFUSALS:
        _REFUSALS[op](refs, transposed, capability)


def _norm(refs: Mapping[str, Ref], transposed: bool, capability: int) -> None:
    res, room = refs["res"], shared_bytes_limit(capability)
    refuse_norm(kind_of(res.dtype, res.name), res.shape[-1], transposed=transposed, shared_bytes=room)


def _heads(refs: Mapping[str, Ref], transposed: bool, capability: int) -> None:
    qkv, head_dim = refs["qkv"], refs["q_weight"].shape[-1]
    refuse_heads(kind_of(qkv.dtype, qkv.name), head_dim)


def _halves(refs: Mapping[str, Ref], transposed: bool, capability: int) -> None:
    heads, head_dim = refs.get("d_out") or refs["qkv"], refs["table"].shape[-1]
    refuse_halves(kind_of(heads.dtype, heads.name), head_dim, transposed=transposed)


_REFUSALS: dict[str, Callable[[Mapping[str, Ref], bool, int], None]] = {
    "embedding_backward": lambda refs, *_: refuse_tokens(rows_of(refs["d_res"].shape)),
    "embedding_noise": lambda refs, *_: refuse_rows(refs["res"].shape[0]),
    "qk_norm_backward": _heads,
    "qk_norm_forward": _heads,
    "rmsnorm_backward": _norm,
    "rmsnorm_forward": _norm,
    "rope_backward": _halves,
    "rope_forward": _halves,
}
