"""The reference backend: every op in NumPy, complete and readable; the CPU backend and the oracle of the tests."""

from collections.abc import Callable

from llmq.ops.reference.attention import attention_backward, attention_forward
from llmq.ops.reference.cast import amax_scale, cast, scale_update
from llmq.ops.reference.copy import copy_to_device, copy_to_host
from llmq.ops.reference.cross_entropy import cross_entropy, loss_sum
from llmq.ops.reference.embedding import embedding_backward, embedding_forward
from llmq.ops.reference.embedding_noise import embedding_noise
from llmq.ops.reference.gather import gather_rows
from llmq.ops.reference.linear import bias_backward, linear_dgrad, linear_forward, linear_wgrad
from llmq.ops.reference.optimizer import adamw, grad_scale, sum_squares
from llmq.ops.reference.qk_norm import qk_norm_backward, qk_norm_forward
from llmq.ops.reference.quantization_error import quantization_error
from llmq.ops.reference.quantize import quantize
from llmq.ops.reference.rmsnorm import rmsnorm_backward, rmsnorm_forward
from llmq.ops.reference.rope import rope_backward, rope_forward
from llmq.ops.reference.swiglu import swiglu_backward, swiglu_forward

__all__ = [
    "adamw",
    "amax_scale",
    "attention_backward",
    "attention_forward",
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
    "linear_dgrad",
    "linear_forward",
    "linear_wgrad",
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
