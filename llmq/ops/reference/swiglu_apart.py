"""SwiGLU (swiglu.py) of a gate and an up that are two tensors, as transformers has them."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.swiglu import gradients, product
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise


@op(family="swiglu", temporaries=elementwise("act", 2, "gate", "up"))
def swiglu_apart_forward(act: Output, /, gate: Tensor, up: Tensor) -> None:
    """act (...,F) <- gate, up like act: `swiglu_forward` of two tensors."""
    act.write(product(gate.read(), up.read(), "silu"))


@op(family="swiglu", temporaries=elementwise("d_up", 3, "gate", "up", "d_act", held=1))
def swiglu_apart_backward(d_gate: Output, d_up: Output, /, d_act: Tensor, gate: Tensor, up: Tensor) -> None:
    """d_gate, d_up (...,F) <- d_act, gate, up like d_gate; they may be the memory of gate and up."""
    g, u, d = gate.read(), up.read(), d_act.read()
    d_g, d_u = np.empty_like(g), np.empty_like(g)
    gradients(d_g, d_u, d, g, u, "silu")
    d_gate.write(d_g)
    d_up.write(d_u)
