"""Gradients in fp8 on the GPU are as good as those of the NumPy reference of the same recipe."""

from dataclasses import replace

import numpy as np
import pytest
from golden import families
from golden.engines import FP64, cosine, engine_of, fp8, gradients, relative_errors
from test_golden import initial_weights

from llmq.data.batches.batch import Batch

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "vocab_size": 500}
RECIPES = {
    "delayed": fp8("e4m3", "delayed"),
    "e5m2": fp8("e5m2", "delayed"),
    "current": fp8("e4m3", "current"),
    "rowwise": fp8("e4m3", "rowwise"),
    "blockwise": fp8("e4m3", "blockwise"),
    "head": replace(fp8("e4m3", "delayed"), head="e4m3"),
}
BATCHES = 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_at_initialisation_are_those_of_the_reference(recipe):
    """At the start of training from scratch: the whole gradient's cosine to f64, and each tensor's error (a root mean
    square over a few batches, as that of a small tensor has much of chance) at most 1.2 times the reference's."""
    from llmq.backends.cuda import CudaBackend

    config = {**families.FAMILIES["llama3"], **SHAPE}
    weights, shape = initial_weights(config), families.batch(500, 1)[0].shape
    exact, *runs = (
        engine_of(config, weights, precision, *shape, backend=backend)
        for precision, backend in ((FP64, None), (RECIPES[recipe], None), (RECIPES[recipe], CudaBackend()))
    )
    squares: list[dict[str, float]] = [{}, {}]
    for index in range(1, BATCHES + 1):
        batch = families.batch(500, index)
        right = gradients(exact, *batch)
        for run, sums in zip(runs, squares, strict=True):
            if index == 1:
                run.warm_up(Batch(*batch))
            found = gradients(run, *batch)
            assert cosine(found, right) >= 0.96
            for name, error in relative_errors(found, right).items():
                sums[name] = sums.get(name, 0.0) + error**2
    reference, ours = squares
    ratios = {name: np.sqrt(ours[name] / reference[name]) for name in reference}
    assert max(ratios.values()) <= 1.2, ratios
