"""Damaged and made-up files config.json: estimate and load take each of them or refuse it with one error of ours, soon,
and without the memory of what it asks for."""

import json
import random
import time

import pytest
from mutants import change, damaged
from tiny_runs import chat_model, folder, write_weights

import llmq
from llmq.disk import GIB
from llmq.errors import LlmqError
from llmq.hardware.host_memory import peak_resident_bytes
from llmq.options.parse import Options
from llmq.training.estimate import estimate

SWEEP = [pytest.param(seed, 500, marks=pytest.mark.sweep) for seed in range(40)]  # 20,000 mutants
SIZES = [1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 97, 128, 1000, 10**5, 10**7, 10**9, 10**12, 2**31 - 1, 2**31]
WORDS = ["llama3", "linear", "yarn", "silu", "gelu", "bfloat16", "float64", ["full_attention"], ["sliding_attention"]]
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGEST_S = 30.0  # of one, on a busy machine


@pytest.fixture
def model(tmp_path):
    """A model's folder with its weights."""
    source = folder(tmp_path / "source", vocab_size=420, max_position=64)
    return write_weights(source, tmp_path / "m", tokenizer=chat_model(tmp_path / "tokenizer")) or tmp_path / "m"


def mutant(chance, config):
    """A config with some values replaced, moved or dropped, or bytes damaged."""
    config = json.loads(json.dumps(config))
    if chance.random() < 0.5:
        config["rope_scaling"] = {**SCALED, "original_max_position_embeddings": 32}
        config.pop("rope_parameters", None)
    change(chance, config, SIZES + WORDS)
    text = json.dumps(config).encode("ascii")
    return damaged(chance, text) if chance.random() < 0.1 else text


@pytest.mark.parametrize(("seed", "count"), [("sample", 20), *SWEEP])
def test_a_config_is_taken_or_refused(seed, count, model):
    chance, whole, taken = random.Random(seed), json.loads((model / "config.json").read_text("utf-8")), 0
    asked = {"model": str(model), "gpu": "H100", "train_file": "none", "from_scratch": True, "dry_run": True}
    uses = (
        lambda: list(estimate(Options.parse({**asked, "batch_size": 1, "seq_len": 16}))),
        lambda: llmq.load(str(model), device="cpu", batch_size=1, seq_len=16),
    )
    before = peak_resident_bytes()
    for _ in range(count):
        content = mutant(chance, whole)
        (model / "config.json").write_bytes(content)
        for use in uses:
            began = time.monotonic()
            try:
                use()
                taken += 1
            except LlmqError as error:
                assert str(error)
            except Exception as error:
                raise AssertionError(f"{content!r}") from error
            assert time.monotonic() - began < LONGEST_S, content
    assert 0.03 * count < taken < count
    assert peak_resident_bytes() - before < GIB
