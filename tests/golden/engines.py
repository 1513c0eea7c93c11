"""llmq's side of a comparison: an engine for a config.json dict and named weights, its results by Hugging Face name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from llmq.backends import Backend
from llmq.backends.host import HostBackend
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.model.config import read_config
from llmq.model.optimizer import Hyperparameters
from llmq.plan.memory import Memory
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec
from llmq.row import Row

FP64 = Precision(*["fp64"] * 2, m="fp64", v="fp64", master="fp64", grad="fp64")
FP32 = Precision()
BF16 = Precision("bf16", "bf16", master="bf16", grad="bf16")


SCALINGS = ("delayed", "current", "rowwise", "blockwise")


def fp8(gradient: str, scaling: str) -> Precision:
    """The blocks' matmuls in e4m3, gradients in `gradient`, everything else in bf16."""
    return replace(BF16, matmul="e4m3", gradient=gradient, scaling=scaling)


def default_backend(precision: Precision) -> Backend:
    """Where comparisons run: the CPU. tests/backends/test_cuda_golden.py replaces this."""
    return HostBackend()


def values_of(plan: Plan, weights: dict[str, np.ndarray]) -> list[tuple[Row, np.ndarray]]:
    """Every row of a plan with its value, from weights by their names in files."""
    return [(row, value_of(row, weights)) for row in plan.rows]


def value_of(row: Row, weights: dict[str, np.ndarray]) -> np.ndarray:
    """A row's value, from weights by their names in files."""
    value = np.zeros(row.shape)
    for part in row.parts:
        part.put(value.reshape(row.part_axes), weights[part.name])
    return value


def engine_of(
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    precision: Precision,
    batch_size: int,
    seq_len: int,
    hyper: Hyperparameters | None = None,
    backend: Backend | None = None,
    **more: Any,
) -> Engine:
    """An engine holding `weights`, by their names in files: every one of them used, and every parameter given."""
    backend = backend or default_backend(precision)
    about = (read_config(config), precision, Memory(), hyper or Hyperparameters(), batch_size, seq_len)
    plan = make_plan(Spec(*about, **more), backend.scratch_bytes)
    assert {part.name for row in plan.rows for part in row.parts} == set(weights)
    engine = Engine(plan, backend)
    engine.load(values_of(plan, weights))
    return engine


def by_name(engine: Engine, read: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Name in files -> f64 array of what is trained, from `read(row name)`; what pads a parameter must be zero."""
    named = {}
    for row in engine.plan.rows:
        if row.trainable:
            values = read(row.name).astype(np.float64)
            assert not values[row.parts[-1].stop :].any(), f"{row.name}: padding is not zero"
            values = values.reshape(row.part_axes)
            named.update({part.name: part.take(values) for part in row.parts})
    return named


def gradients(engine: Engine, tokens: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of the mean loss over trained tokens."""
    engine.micro_step(Batch(tokens, targets))
    count = np.count_nonzero(targets != -100)
    return {name: array / count for name, array in by_name(engine, engine.gradient).items()}


def parameters(engine: Engine) -> dict[str, np.ndarray]:
    """Master parameters."""
    return by_name(engine, engine.parameter)


def relative_errors(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> dict[str, float]:
    """Norm of each tensor's difference over the right tensor's norm."""
    assert found.keys() == right.keys()
    return {name: float(np.linalg.norm(found[name] - right[name]) / np.linalg.norm(right[name])) for name in right}


def cosine(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """Of the angle between two whole gradients."""
    assert found.keys() == right.keys()
    a, b = (np.concatenate([named[name].ravel() for name in right]) for named in (found, right))
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
