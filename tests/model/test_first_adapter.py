"""First values of adapters: what is taken out of a weight is the part of it that the methods name."""

import numpy as np
import pytest

from llmq.adapters import lora
from llmq.adapters.lora import first_pair

SCALE = 2.5


def matrix(rows, columns, seed=0):
    """Singular values that fall by the root of their number, as those of weights do."""
    rng, count = np.random.default_rng(seed), min(rows, columns)
    u, v = (np.linalg.qr(rng.standard_normal((n, count)))[0] for n in (rows, columns))
    return ((u / np.sqrt(np.arange(1, count + 1))) @ v.T).astype(np.float32)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_pissa_begins_with_the_best_approximation_of_the_weight(shape):
    w = matrix(*shape)
    a, b = first_pair("pissa", w, 5, SCALE)
    u, s, vt = np.linalg.svd(w)
    np.testing.assert_allclose(SCALE * b @ a, (u[:, :5] * s[:5]) @ vt[:5], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0), rtol=1e-5)


def test_olora_begins_with_the_first_columns_of_a_qr_decomposition():
    w = matrix(40, 24)
    a, b = first_pair("olora", w, 5, SCALE)
    q, r = np.linalg.qr(w)
    np.testing.assert_allclose(b @ a, q[:, :5] @ r[:5], atol=1e-6)
    np.testing.assert_allclose(b.T @ b, np.eye(5), atol=1e-6)


def test_of_a_large_matrix_a_few_products_find_it(monkeypatch):
    """Within a hundredth of what is to be found, and the same in every run."""
    w = matrix(500, 700)
    exact = first_pair("pissa", w, 4, SCALE)
    monkeypatch.setattr(lora, "WHOLE", 16)
    found, again = (first_pair("pissa", w, 4, SCALE) for _ in range(2))
    assert not np.array_equal(found[0], exact[0])
    assert all(np.array_equal(*one) for one in zip(found, again, strict=True))
    one, other = (SCALE * b @ a for a, b in (found, exact))
    assert np.linalg.norm(one - other) < 1e-2 * np.linalg.norm(other)
