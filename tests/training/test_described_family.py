"""A folder of an architecture that llmq does not know trains by a description as the family that it is."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from more_families import DESCRIPTIONS, MORE, unknown
from safetensors.numpy import load_file, save_file
from tiny_runs import tiny_options, write_weights

import llmq
from llmq.errors import DataError, UsageError


@pytest.fixture
def given(tmp_path, monkeypatch, request):
    """Options of a run on a model of GLM 4; `own` has the same weights under another architecture."""
    monkeypatch.chdir(tmp_path)
    options = tiny_options(tmp_path)
    Path("shape").mkdir()
    Path("shape/config.json").write_text(json.dumps({**MORE["glm4"], "max_position_embeddings": 64}))
    write_weights("shape", Path("known"), 3)
    write_weights("shape", Path("own"), 3)
    Path("own/config.json").write_text(json.dumps(unknown("glm4", dtype="float32")))
    Path("family.yaml").write_text(yaml.safe_dump(DESCRIPTIONS["glm4"]))
    return {**options, "model": "known", "from_scratch": False, "device": "cpu", "steps": 6}


def run(given, **changes):
    return llmq.train(**{**given, **changes})


@pytest.mark.parametrize("more", [{}, {"lora_rank": 4}], ids=["in full", "lora"])
def test_the_bits_are_those_of_the_known_family(given, more):
    known = run(given, name="known", **more)
    own = run(given, name="own", model="own", family="family.yaml", **more)
    one, other = (load_file(next(Path(found.model_path).glob("*.safetensors"))) for found in (known, own))
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    assert known.history["loss"].tolist() == own.history["loss"].tolist()


def test_what_is_exported_needs_no_file(given):
    found = run(given, model="own", family="family.yaml")
    config = json.loads((found.model_path / "config.json").read_text())
    assert config["architectures"] == ["OwnForCausalLM"] and config["llmq_family"] == DESCRIPTIONS["glm4"]
    (answer,) = llmq.load(str(found.model_path), device="cpu", seq_len=16).generate([[5, 6, 7]], max_tokens=4)
    assert len(answer.tokens) == 4 or answer.finish_reason == "stop"
    again = run(given, model=str(found.model_path), name="again")
    assert again.model_path.is_dir()


def test_a_run_goes_on_without_the_file(given):
    about = {"model": "own", "family": "family.yaml", "ckpt_interval": 3}
    whole = run(given, name="whole", **about)
    run(given, name="part", **{**about, "steps": 3})
    Path("family.yaml").unlink()
    rest = run(given, name="part", **{**about, "family": None}, **{"continue": "newest"})
    one, other = (load_file(found.model_path / "model.safetensors") for found in (whole, rest))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    Path("family.yaml").write_text(yaml.safe_dump({**DESCRIPTIONS["glm4"], "rope": {"partial": 0.5}}))
    with pytest.raises(UsageError, match="model"):
        run(given, name="part", **about, **{"continue": "newest"})


def test_tensors_are_checked_by_name_and_shape(given):
    weights = load_file("own/model.safetensors")
    first = "model.layers.0."
    weights["model.layers.0.mlp.router.weight"] = np.zeros((4, 32), np.float32)
    del weights[f"{first}mlp.gate_up_proj.weight"]
    weights[f"{first}self_attn.o_proj.weight"] = np.zeros((32, 7), np.float32)
    save_file(weights, "own/model.safetensors")
    with pytest.raises(DataError) as error:
        run(given, model="own", family="family.yaml")
    for said in (
        f"missing: {first}mlp.gate_up_proj.weight",
        f"not part of this architecture: {first}mlp.router.weight",
        f"{first}self_attn.o_proj.weight has shape [32, 7], config.json asks for [32, 48]",
    ):
        assert said in str(error.value)


def test_what_needs_no_description_is_refused_with_one(given):
    with pytest.raises(DataError, match="llmq knows Glm4ForCausalLM: leave the description out"):
        run(given, family="family.yaml")
    with pytest.raises(UsageError, match=r"--family describes a model's folder, but .* is a preset"):
        run(given, model="Qwen2.5-0.5B", from_scratch=True, family="family.yaml")
    with pytest.raises(DataError, match="OwnForCausalLM"):
        run(given, model="own")
