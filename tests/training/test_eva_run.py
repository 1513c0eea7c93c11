"""`--lora-init eva`: what a run begins with is what its first batches say, once; PEFT finds the same."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from in_process import run_ranks
from safetensors.numpy import load_file
from tiny_runs import on_weights, weights_of

import llmq
from llmq.errors import UsageError
from llmq.files.checkpoint import load
from llmq.options.parse import Options
from llmq.training import prepare, train
from llmq.training.ranks import Ranks
from llmq.training.survey import look

RANK = 3


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a run whose A begin with the inputs."""
    monkeypatch.chdir(tmp_path)
    return {**on_weights(tmp_path, times=5), "lora_rank": RANK, "lora_init": "eva", "steps": 6, "warmup": 0}


def adapter_of(path):
    return load_file(path / "adapter_model.safetensors")


def ranks_of(path):
    return {name.split(".")[-3]: len(value) for name, value in adapter_of(path).items() if "lora_A" in name}


@pytest.mark.slow
def test_a_run_shares_out_its_ranks_and_resumes_without_another_look(given, monkeypatch):
    whole = llmq.train(**given)
    said = given["console"].getvalue()
    ranks = ranks_of(whole.model_path)
    assert sum(ranks.values()) == 7 * RANK and len(set(ranks.values())) > 1 and max(ranks.values()) <= 2 * RANK
    assert "--lora-init eva took" in said and f"Ranks of q_proj: {ranks.get('q_proj', 0)}" in said
    log = whole.log_path.read_text()
    assert f"Ranks of down_proj: {ranks.get('down_proj', 0)}" in log
    config = json.loads((whole.model_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (RANK, 2 * RANK, True)
    alphas = {name.split(".")[-1]: alpha for name, alpha in config["alpha_pattern"].items()}
    assert alphas == {name: 2 * rank for name, rank in ranks.items() if rank != RANK}
    again = llmq.train(**{**given, "name": "again"})
    assert weights_of(again.checkpoint_path) == weights_of(whole.checkpoint_path)
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**given, **folders, "steps": 3})
    monkeypatch.setattr(prepare, "look", lambda *about: pytest.fail("looks again"))
    parts = llmq.train(**{**given, **folders, "out_dir": "parts-model", "continue": 3})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    assert load(parts.checkpoint_path)[0]["ranks"]["model.layers.0.self_attn.k_proj"][0] == ranks.get("k_proj", 0)
    for change in ({"lora_rank": 2}, {"eva_rho": 1.5}, {"lora_targets": "mlp"}):
        with pytest.raises(UsageError, match="adapters"):
            llmq.train(**{**given, **folders, "continue": 3, "overwrite": True, **change})


def test_without_sharing_out_every_map_keeps_its_rank(given):
    done = llmq.train(**{**given, "eva_rho": 1, "lora_rank_pattern": "q_proj=2", "learning_rate": 0.0})
    assert ranks_of(done.model_path) == dict.fromkeys(
        ("k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), RANK
    ) | {"q_proj": 2}
    found = adapter_of(done.model_path)
    for name, value in found.items():
        if "lora_A" in name:  # orthonormal, and the same where inputs are
            np.testing.assert_allclose(value @ value.T, np.eye(len(value)), atol=1e-5)
    key, gate, up = (
        f"base_model.model.model.layers.0.{m}_proj.lora_A.weight" for m in ("self_attn.k", "mlp.gate", "mlp.up")
    )
    assert np.array_equal(found[gate], found[up]) and not np.array_equal(found[gate], found[key])


@pytest.mark.parametrize(
    "more",
    [
        {"base_dtype": "int8"},
        pytest.param({"seq_tiles": 2, "lmhead_chunks": 2, "lora_targets": "all,lm_head"}, marks=pytest.mark.slow),
        pytest.param({"dora": True}, marks=pytest.mark.slow),
    ],
)
def test_the_base_is_looked_at_as_it_is_held(given, more):
    plain = {key: value for key, value in more.items() if key == "lora_targets"}
    done, wide = (
        llmq.train(**{**given, **own, "name": name, "learning_rate": 0.0, "steps": 1})
        for name, own in (("a", more), ("b", plain))
    )
    one, other = adapter_of(done.model_path), adapter_of(wide.model_path)
    same = all(
        value.shape == one[name].shape and np.allclose(value, one[name], atol=1e-4) for name, value in other.items()
    )
    assert same == ("base_dtype" not in more)


@pytest.mark.slow
@pytest.mark.parametrize("level", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_the_first_of_many_ranks_looks_for_all(given, level, monkeypatch):
    options = {name: value for name, value in given.items() if name not in ("console", "grad_accumulation")}
    options |= {"batch_size": 1, "global_batch_size": 4, "deterministic": True, "learning_rate": 0.0, "steps": 1}
    looked = []
    monkeypatch.setattr(prepare, "look", lambda *about: looked.append(1) or look(*about))

    def work(world):
        given = {**options, "name": "two", "zero_level": level}
        return train.run(Options.parse(given), console=io.StringIO(), ranks=Ranks(world))

    two = run_ranks(2, work)
    assert len(looked) == 1
    found = adapter_of(two[0].model_path)
    np.testing.assert_allclose(
        [np.linalg.norm(row) for n, v in found.items() if "lora_A" in n for row in v], 1, atol=1e-5
    )
    assert not any(value.any() for name, value in found.items() if "lora_B" in name)


def test_what_cannot_be_found_is_refused(given):
    with pytest.raises(UsageError, match=r"q_proj the rank 80, and it has 48 inputs"):
        llmq.train(**{**given, "lora_rank": 40, "lora_targets": "q_proj"})
    with pytest.raises(UsageError, match=r"needs 34 trained tokens in a micro-batch, .*none of the first 64 has them"):
        llmq.train(**{**given, "lora_rank": 17, "lora_targets": "q_proj"})
    with pytest.raises(UsageError, match=r"--eva-rho 3 is for --lora-init eva, and this run has kaiming"):
        llmq.train(**{**given, "lora_init": "kaiming", "eva_rho": 3})
    with pytest.raises(UsageError, match=r"--eva-rho .* is for adapters"):
        llmq.train(**{**{k: v for k, v in given.items() if not k.startswith("lora")}, "eva_rho": 3})
    assert not Path("runs").exists()
    assert llmq.train(**{**given, "dry_run": True}).plan.spec.adapters.targets[0].rank == RANK
