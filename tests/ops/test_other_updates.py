"""SGD against scalar arithmetic and torch."""

import numpy as np
import pytest

from .build import output, run


def descent(state, grad, *, dtype="fp64", lr=1e-2, scale=1.0, apply=1.0, **numbers):
    """One update of state = [master, m], or of [master] alone, by SGD; returns the new state and the weight."""
    cells = [np.array([a]) for a in (scale, apply, lr)] + [np.array([3], np.int32)]
    state = [*state, None][:2]
    outputs = [grad.shape, grad.shape if state[1] is not None else output((1,), "fp32", ()), grad.shape]
    return run("sgd", outputs, *state, grad, *cells, dtype=dtype, **{"seed": 5, "stream": 2, **numbers})


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_its_formula(nesterov):
    master, m, grad = np.random.default_rng(0).standard_normal((3, 4, 5))
    numbers = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1, "rate": 2.0}
    new_master, new_m, weight = descent([master, m], grad, scale=0.5, **numbers)
    for i in np.ndindex(4, 5):
        g = 0.5 * grad[i] + 0.1 * master[i]
        buffer = 0.9 * m[i] + g
        assert new_m[i] == pytest.approx(buffer, rel=1e-13)
        assert new_master[i] == pytest.approx(master[i] - 2e-2 * (g + 0.9 * buffer if nesterov else buffer), rel=1e-12)
    np.testing.assert_array_equal(weight, new_master)


def test_sgd_without_momentum_keeps_nothing():
    master, grad = np.random.default_rng(0).standard_normal((2, 4, 5))
    new_master, *_ = descent([master], grad, momentum=0.0, nesterov=False, weight_decay=0.0)
    np.testing.assert_array_equal(new_master, master - 1e-2 * grad)


@pytest.mark.judge
@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-12), ("fp32", 1e-5)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_torch_agrees_with_sgd_over_20_steps(momentum, nesterov, decay, dtype, bound):
    """Change of the parameters, norm-wise."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    start = rng.standard_normal((64, 48))
    parameter = torch.nn.Parameter(torch.tensor(start))
    judge = torch.optim.SGD([parameter], lr=1e-2, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    state, numbers = [start, np.zeros_like(start)], {"nesterov": nesterov, "weight_decay": decay}
    for _ in range(20):
        grad = rng.standard_normal(start.shape)
        parameter.grad = torch.tensor(grad)
        judge.step()
        state = descent(state if momentum else state[:1], grad, dtype=dtype, momentum=momentum, **numbers)[:2]
    change = parameter.detach().numpy() - start
    assert np.linalg.norm(state[0] - start - change) <= bound * np.linalg.norm(change)
