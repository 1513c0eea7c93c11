"""Heads of two tensors against those of one."""

import numpy as np
import pytest

from .build import run
from .cases import ODD, make


@pytest.mark.parametrize(
    ("op", "whole"), [("rope_heads_forward", "rope_forward"), ("rope_heads_backward", "rope_backward")]
)
def test_heads_apart_are_those_that_lie_together(op, whole):
    case = make(op, ODD)
    q, k, cos, sin = case.inputs.values()
    table = np.concatenate([angles[0, :, : ODD.hd // 2] for angles in (cos, sin)], axis=-1)
    positions = np.tile(np.arange(ODD.t, dtype=np.int32), (ODD.b, 1))
    qkv = np.concatenate([q, k, np.zeros_like(k)], axis=2).reshape(ODD.b, ODD.t, -1)
    (right,) = run(whole, [qkv.shape], qkv, table, positions, **ODD.heads)
    found = np.concatenate([*run(op, [q.shape, k.shape], q, k, cos, sin), np.zeros_like(k)], axis=2)
    np.testing.assert_array_equal(found.reshape(qkv.shape), right)
