"""The CUDA backend: kernels of `cuda/` behind the names and signatures of the reference. Imports without CuPy or a GPU.

Matrix products and attention come from cuBLASLt and cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmq.ops.cuda.bias import bias_backward
from llmq.ops.cuda.cast import amax_scale, cast, scale_update
from llmq.ops.cuda.cross_entropy import cross_entropy, loss_sum, loss_sum_scratch
from llmq.ops.cuda.embedding import embedding_backward, embedding_backward_scratch, embedding_forward
from llmq.ops.cuda.embedding_noise import embedding_noise
from llmq.ops.cuda.gather import gather_rows
from llmq.ops.cuda.optimizer import adamw, grad_scale, sum_squares, sum_squares_scratch
from llmq.ops.cuda.qk_norm import qk_norm_backward, qk_norm_backward_scratch, qk_norm_forward
from llmq.ops.cuda.quantization_error import quantization_error, quantization_error_scratch
from llmq.ops.cuda.quantize import quantize, quantize_scratch
from llmq.ops.cuda.rmsnorm import rmsnorm_backward, rmsnorm_backward_scratch, rmsnorm_forward
from llmq.ops.cuda.rope import rope_backward, rope_forward
from llmq.ops.cuda.swiglu import swiglu_backward, swiglu_forward

__all__ = [
    "adamw",
    "amax_scale",
    "bias_backward",
    "cast",
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
    "embedding_backward": lambda s: embedding_backward_scratch(s["d_weight"], s["d_res"]),
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
