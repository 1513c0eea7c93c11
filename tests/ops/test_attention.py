"""Attention against the whole score matrix, with groups and windows; finite differences; torch."""

from itertools import pairwise

import numpy as np
import pytest

from llmq.ops.reference import attention

from .build import check_gradient, run, tensor
from .cases import LARGE, ODD, Sizes, make

WINDOWS = pytest.mark.parametrize("window", [None, 1, 3, 64, 65, 1000])
BLOCKS = Sizes(b=2, t=2 * attention.QUERY_BLOCK + 5, c=4, hq=4, hkv=2, hd=4, f=4, v=4, vp=4)


CAPS = pytest.mark.parametrize("cap", [None, 0.7], ids=["", "capped"])


def numbers(size, window, longest=None, cap=None):
    heads = {"num_heads": size.hq, "num_kv_heads": size.hkv}
    return {**heads, "window": window, "longest": longest, "softmax_scale": 0.37, "softcap": cap}


def forward(size, qkv, window, cap=None):
    shapes = [(*qkv.shape[:2], size.hq * size.hd), (qkv.shape[0], size.hq, qkv.shape[1])]
    return run("attention_forward", shapes, qkv, None, **numbers(size, window, cap=cap))


def whole_matrix(size, qkv, window, cap=None):
    """att and lse, head by head, each from one (T,T) matrix of scores."""
    b, t = qkv.shape[:2]
    heads = qkv.reshape(b, t, -1, size.hd)
    att, lse = np.empty((b, t, size.hq, size.hd)), np.empty((b, size.hq, t))
    for n, h in np.ndindex(b, size.hq):
        group = h // (size.hq // size.hkv)
        q, k, v = heads[n, :, h], heads[n, :, size.hq + group], heads[n, :, size.hq + size.hkv + group]
        scores = 0.37 * q @ k.T
        weights = np.exp(scores if cap is None else cap * np.tanh(scores / cap))
        for i, j in np.ndindex(t, t):
            if j > i or (window is not None and j <= i - window):
                weights[i, j] = 0
        total = weights.sum(axis=1)
        att[n, :, h], lse[n, h] = weights @ v / total[:, None], np.log(total)
    return att.reshape(b, t, -1), lse


@CAPS
@WINDOWS
@pytest.mark.parametrize("size", [ODD, BLOCKS], ids=["odd", "blocks"])
def test_whole_score_matrix_agrees(size, window, cap):
    qkv = np.random.default_rng(0).standard_normal((size.b, size.t, size.q))
    for got, expected in zip(forward(size, qkv, window, cap), whole_matrix(size, qkv, window, cap), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)


@WINDOWS
@CAPS
@pytest.mark.parametrize("groups", [(6, 2), (3, 3), (4, 1)], ids=str)
def test_gradient_by_finite_differences(groups, window, cap):
    size = Sizes(b=2, t=70, c=4, hq=groups[0], hkv=groups[1], hd=4, f=4, v=4, vp=4)
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((size.b, size.t, size.q))
    att, lse = forward(size, qkv, window, cap)
    d_att = rng.standard_normal(att.shape)
    gradient = run("attention_backward", [qkv.shape], d_att, qkv, att, lse, None, **numbers(size, window, cap=cap))

    def loss(qkv):
        return np.sum(forward(size, qkv, window, cap)[0] * d_att)

    check_gradient(loss, [qkv], gradient, np.abs(d_att).sum() * np.abs(qkv).max())


def test_large_scores_do_not_overflow():
    qkv = 100 * np.random.default_rng(0).standard_normal((ODD.b, ODD.t, ODD.q))
    expected = whole_matrix(ODD, qkv / 100, None)[0]  # only for its shape: scores of 1e4 have no exp in f32
    read = tensor(qkv, "fp32")
    shapes = [expected.shape, (ODD.b, ODD.hq, ODD.t)]
    att, lse = run("attention_forward", shapes, read, None, dtype="fp32", **numbers(ODD, None))
    d_qkv = run("attention_backward", [qkv.shape], att, read, att, lse, None, dtype="fp32", **numbers(ODD, None))
    assert all(np.isfinite(a).all() for a in (att, lse, *d_qkv))
    assert np.abs(lse).max() > 1000


def test_a_sequence_has_the_same_bits_in_any_batch():
    """Backward in batch-wise chunks relies on it."""
    case = make("attention_backward", LARGE)
    whole = case.values("fp32")["d_qkv"]
    case.outputs = {n: (1, *shape[1:]) for n, shape in case.outputs.items()}
    inputs = case.inputs
    for b in range(LARGE.b):
        case.inputs = {n: x[b : b + 1] for n, x in inputs.items()}
        np.testing.assert_array_equal(case.values("fp32")["d_qkv"][0], whole[b])


@WINDOWS
@pytest.mark.parametrize(("dtype", "longest"), [("fp32", None), ("fp64", 1000), ("fp32", 66)])
def test_packed_documents_have_the_bits_that_they_have_alone(dtype, window, longest):
    """Borders at the ends of blocks and beside them, a document of one token, one that is not there, a whole row; cut
    into pieces where they are longer than `longest`."""
    size, block = BLOCKS, attention.QUERY_BLOCK
    rows = [[0, 1, block, 2 * block, size.t], [0, block + 1, 2 * block + 1, size.t, size.t], [0, *[size.t] * 4]]
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((len(rows), size.t, size.q))
    shapes = [(len(rows), size.t, size.hq * size.hd), (len(rows), size.t, size.hq)]
    borders = np.array(rows, np.int32)
    att, lse = run("attention_forward", shapes, qkv, borders, dtype=dtype, **numbers(size, window, longest))
    d_att = rng.standard_normal(att.shape)
    read = (d_att, qkv, att, lse)
    (d_qkv,) = run("attention_backward", [qkv.shape], *read, borders, dtype=dtype, **numbers(size, window, longest))
    for row, marks in enumerate(rows):
        cut = [n for a, b in pairwise(marks) for n in range(a, b, longest or size.t)]
        for start, stop in pairwise([*cut, size.t]):
            piece = (slice(row, row + 1), slice(start, stop))
            alone = [(1, stop - start, size.hq * size.hd), (1, size.hq, stop - start)]
            one = run("attention_forward", alone, qkv[piece], None, dtype=dtype, **numbers(size, window))
            np.testing.assert_array_equal(one[0], att[piece])
            np.testing.assert_array_equal(one[1].transpose(0, 2, 1), lse[piece])
            read = (d_att[piece], qkv[piece], *one)
            (d_one,) = run("attention_backward", [qkv[piece].shape], *read, None, dtype=dtype, **numbers(size, window))
            np.testing.assert_array_equal(d_one, d_qkv[piece])


@pytest.mark.judge
@CAPS
@WINDOWS
def test_torch_agrees(window, cap):
    torch = pytest.importorskip("torch")
    s = LARGE
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((s.b, s.t, s.q))
    x = torch.tensor(qkv, requires_grad=True)
    heads = x.reshape(s.b, s.t, -1, s.hd).transpose(1, 2)
    i, j = torch.arange(s.t)[:, None], torch.arange(s.t)
    mask = (j <= i) & (j > i - (window or s.t))
    q, k, v = heads.split([s.hq, s.hkv, s.hkv], dim=1)
    if cap is None:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.37, enable_gqa=True)
    else:
        scores = 0.37 * q @ k.repeat_interleave(s.hq // s.hkv, dim=1).transpose(2, 3)
        weights = (cap * torch.tanh(scores / cap)).masked_fill(~mask, -torch.inf).softmax(dim=-1)
        y = weights @ v.repeat_interleave(s.hq // s.hkv, dim=1)
    y = y.transpose(1, 2).reshape(s.b, s.t, -1)
    d_att = rng.standard_normal(y.shape)
    (y * torch.tensor(d_att)).sum().backward()
    att, lse = forward(s, qkv, window, cap)
    (d_qkv,) = run("attention_backward", [qkv.shape], d_att, qkv, att, lse, None, **numbers(s, window, cap=cap))
    np.testing.assert_allclose(att, y.detach(), atol=1e-12)
    np.testing.assert_allclose(d_qkv, x.grad, atol=1e-10)
