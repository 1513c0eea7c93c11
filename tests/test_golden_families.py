"""Families beyond Llama's against what transformers makes of the same tiny models, without transformers."""

from pathlib import Path

import numpy as np
import pytest
from golden import families
from golden.engines import FP64, engine_of, gradients
from more_families import MORE, MORE_LENGTH, ROPES
from safetensors.numpy import load_file
from tiny_engines import next_logits

from llmq.data.batches.batch import Batch
from llmq.model.config import read_config
from llmq.model.parameters import parameter_rows

GOLDEN = Path(__file__).parent / "golden/more_families.safetensors"


@pytest.mark.parametrize("name", MORE | ROPES)
def test_loss_logits_and_gradients(name):
    config = (MORE | ROPES)[name]
    shapes = {part.name: part.shape(row.part_axes) for row in parameter_rows(read_config(config)) for part in row.parts}
    held = load_file(GOLDEN)
    right = {key.removeprefix(f"{name}/"): value for key, value in held.items() if key.startswith(f"{name}/")}
    assert {key for key in right if key.startswith("grad/")} == {f"grad/{tensor}" for tensor in shapes}
    tokens, targets = families.batch(config["vocab_size"], 1, length=MORE_LENGTH)
    engine = engine_of(config, families.weights(config, shapes=shapes), FP64, families.BATCH, MORE_LENGTH)
    assert engine.evaluate(Batch(tokens, targets)).mean_loss == pytest.approx(right["loss"][0], rel=1e-9)
    for row, wanted in enumerate(right["logits"]):
        np.testing.assert_allclose(next_logits(engine, tokens[row]), wanted, rtol=1e-5, atol=1e-6)
    for tensor, value in gradients(engine, tokens, targets).items():
        found, wanted = families.sketch(tensor, value), right[f"grad/{tensor}"]
        assert np.linalg.norm(found - wanted) < 1e-6 * np.linalg.norm(wanted), tensor
