"""SwiGLU on the GPU; see cuda/swiglu.cu."""

from llmq.operands import Output, Tensor
from llmq.ops.cuda.activation import launch_tiles


def swiglu_forward(act: Output, /, gate_up: Tensor, *, activation: str = "silu") -> None:
    """act (B,T,F) <- gate_up (B,T,2F)."""
    launch_tiles("swiglu", "swiglu_forward", act, gate_up.shape[-1] // 2, (gate_up,), activation)


def swiglu_backward(d_gate_up: Output, /, d_act: Tensor, gate_up: Tensor, *, activation: str = "silu") -> None:
    """d_gate_up (B,T,2F) <- d_act (B,T,F), gate_up (B,T,2F)."""
    launch_tiles("swiglu", "swiglu_backward", d_gate_up, gate_up.shape[-1] // 2, (d_act, gate_up), activation)
