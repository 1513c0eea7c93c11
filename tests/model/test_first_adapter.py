"""First values of adapters: what is taken out of a weight is the part of it that the methods name."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from adapter_cases import adapter_of
from tiny_engines import FP32, parameters, plan_of, tiny

from llmq.adapters import lora
from llmq.adapters.lora import Lora, first_pair
from llmq.adapters.targets import chosen, targets
from llmq.disk import MIB

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


@pytest.mark.parametrize("init", ["kaiming", "pissa", "olora"])
def test_the_room_that_an_export_asks_for_is_that_of_the_converted_file(tmp_path, init):
    """Where A and B are taken out of the model it has twice the rank, but not of what is trained beside them."""
    about = {"bias": "all", "init": init, "also": frozenset({"head.norm"})}
    plan = plan_of(FP32, adapters=Lora(4, 6.0, targets(chosen("all", tiny()), 4, 6.0, rslora=False), **about))
    values = {row.name: value for row, value in parameters(plan)}
    model = partial(map, lambda row: (row, values[row.name]))
    found = plan.spec.adapters.file(plan.rows, tiny(), model)
    export = found.export("base", None)(tmp_path / "out", tiny(), found.rows, "bf16")
    export.write(lambda row: values[row.name])
    written = sum(value.nbytes for value in adapter_of(tmp_path / "out").values())
    assert replace(export, overwrite=True).check() == written + MIB
