"""Backends behind one seam: modules of the same functions by name (`seam` says what a signature means).

The functions of `arrays` are here by name, such as `llmq.ops.rmsnorm`; that module is imported when one is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmq.ops.arrays import DeviceArray as DeviceArray
    from llmq.ops.arrays import Quantized as Quantized
    from llmq.ops.arrays import as_array as as_array
    from llmq.ops.arrays import attention as attention
    from llmq.ops.arrays import attention_backward as attention_backward
    from llmq.ops.arrays import dequantize as dequantize
    from llmq.ops.arrays import linear as linear
    from llmq.ops.arrays import linear_backward as linear_backward
    from llmq.ops.arrays import linear_cross_entropy as linear_cross_entropy
    from llmq.ops.arrays import quantize as quantize
    from llmq.ops.arrays import rmsnorm as rmsnorm
    from llmq.ops.arrays import rmsnorm_backward as rmsnorm_backward
    from llmq.ops.arrays import rope as rope
    from llmq.ops.arrays import rope_backward as rope_backward
    from llmq.ops.arrays import rope_heads as rope_heads
    from llmq.ops.arrays import rope_heads_backward as rope_heads_backward
    from llmq.ops.arrays import swiglu as swiglu
    from llmq.ops.arrays import swiglu_backward as swiglu_backward

# NumPy is not imported before it is used.
__all__ = [
    "DeviceArray",
    "Quantized",
    "as_array",
    "attention",
    "attention_backward",
    "dequantize",
    "linear",
    "linear_backward",
    "linear_cross_entropy",
    "quantize",
    "rmsnorm",
    "rmsnorm_backward",
    "rope",
    "rope_backward",
    "rope_heads",
    "rope_heads_backward",
    "swiglu",
    "swiglu_backward",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'llmq.ops' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module("llmq.ops.arrays"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
