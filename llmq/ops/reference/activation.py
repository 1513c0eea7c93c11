"""What lies between the two maps of an MLP without a gate, number by number: silu (swiglu.py), or those of gelu.py."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.gelu import forward_temporaries
from llmq.ops.reference.swiglu import formulas
from llmq.ops.seam import op
from llmq.ops.temporaries import Temporaries


@op(family="swiglu", forms={"act"}, temporaries=forward_temporaries("x"))
def activation_forward(act: Output, /, x: Tensor, *, activation: str) -> None:
    """act (...,F) <- x (...,F): the activation of that name."""
    value, _ = formulas(activation)
    act.write(value(x.read()))


def _temporaries(a: Temporaries) -> int:
    """Value and slope, beside what makes them, what they are multiplied by, and what is written."""
    own = 2 * a.size("d_x")
    return a.copies("x") + own + max(own, a.copies("d_act"), a.writing("d_x"))


@op(family="swiglu", forms={"d_x"}, temporaries=_temporaries)
def activation_backward(d_x: Output, /, d_act: Tensor, x: Tensor, *, activation: str) -> None:
    """d_x (...,F) <- d_act (...,F), x (...,F): d_act times the activation's slope."""
    given, (_, both) = x.read(), formulas(activation)
    value, slope = np.empty_like(given), np.empty_like(given)
    both(value, slope, given)
    slope *= d_act.read()
    d_x.write(slope)
