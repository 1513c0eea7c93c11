"""SwiGLU of two tensors against that of one."""

import numpy as np

from .build import run
from .cases import ODD, make


def test_halves_apart_are_those_that_lie_together():
    d_act, gate_up = make("swiglu_backward", ODD).inputs.values()
    apart = np.split(gate_up, 2, axis=-1)
    (act,) = run("swiglu_apart_forward", [d_act.shape], *apart)
    gradients = run("swiglu_apart_backward", [d_act.shape] * 2, d_act, *apart)
    np.testing.assert_array_equal(act, run("swiglu_forward", [d_act.shape], gate_up)[0])
    right = run("swiglu_backward", [gate_up.shape], d_act, gate_up)[0]
    np.testing.assert_array_equal(np.concatenate(gradients, axis=-1), right)
