"""The golden tests on the GPU: the same functions and bounds, with every engine but the f64 ones on CUDA."""

import pytest
from golden import engines
from test_golden import (  # noqa: F401 (collected here, too)
    test_adamw_run_in_f32,
    test_bf16_gradients,
    test_direction_of_the_gradient_at_initialisation,
    test_f32_gradients_and_loss,
    test_four_micro_steps_of_two_equal_one_of_eight,
    test_fp8_gradients,
    test_logits,
    test_step_without_trained_tokens,
    test_z_loss,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch, backend):
    """Sends engines to the GPU, which has no f64."""
    on_the_cpu = engines.default_backend
    choose = lambda precision: on_the_cpu(precision) if precision.model == "fp64" else backend  # noqa: E731
    monkeypatch.setattr(engines, "default_backend", choose)
