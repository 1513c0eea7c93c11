"""The rotary embedding as a product of complex numbers, finite differences, and transformers."""

import numpy as np
import pytest

from llmq.model.config import RopeConfig
from llmq.model.rope import frequencies

from .build import check_gradient, run
from .cases import LARGE, ODD, make


@pytest.mark.parametrize("size", [ODD, LARGE])
def test_channel_pairs_turn_by_position_times_frequency(size):
    case = make("rope_forward", size)
    qkv, _, positions = case.inputs.values()
    out = case.values("fp64")["out"].reshape(size.b, size.t, -1, size.hd)
    x = qkv.reshape(out.shape)
    half = size.hd // 2
    turn = np.exp(1j * positions[..., None] * frequencies(RopeConfig(), size.hd, 1))
    turned = (x[..., :half] + 1j * x[..., half:]) * turn[:, :, None]
    turned = np.concatenate([turned.real, turned.imag], axis=-1)
    num_turned = size.hq + size.hkv
    np.testing.assert_allclose(out[:, :, :num_turned], turned[:, :, :num_turned], atol=1e-12)
    np.testing.assert_array_equal(out[:, :, num_turned:], x[:, :, num_turned:])


def test_gradient_by_finite_differences():
    case = make("rope_backward", ODD)
    d_out, table, positions = case.inputs.values()
    qkv = np.random.default_rng(0).standard_normal(d_out.shape)

    def loss(qkv):
        return np.sum(run("rope_forward", [qkv.shape], qkv, table, positions, **case.numbers)[0] * d_out)

    check_gradient(loss, [qkv], [case.values("fp64")["d_qkv"]], 10 * np.abs(d_out).sum())


@pytest.mark.judge
def test_transformers_agrees():
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    case = make("rope_forward", LARGE)
    qkv, table, positions = case.inputs.values()
    rows = torch.tensor(table[positions])
    cos, sin = (torch.cat([half, half], dim=-1) for half in rows.chunk(2, dim=-1))
    heads = torch.tensor(qkv).reshape(LARGE.b, LARGE.t, -1, LARGE.hd).transpose(1, 2)
    q, k, v = heads.split([LARGE.hq, LARGE.hkv, LARGE.hkv], dim=1)
    q, k = llama.apply_rotary_pos_emb(q, k, cos, sin)
    expected = torch.cat([q, k, v], dim=1).transpose(1, 2).reshape(qkv.shape)
    np.testing.assert_allclose(case.values("fp64")["out"], expected, atol=1e-13)
