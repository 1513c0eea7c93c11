"""A run of --lora-rank: the adapter is what it saves, exports and continues from."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_runs import on_weights, weights_of

import llmq
from llmq.errors import DataError, UsageError
from llmq.files.checkpoint import load

PREFIX = "base_model.model.model.layers.0"


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a run with adapters on a model with weights."""
    monkeypatch.chdir(tmp_path)
    options = on_weights(tmp_path, times=5)
    changes = {"lora_rank": 4, "lora_dropout": 0.1, "steps": 6, "warmup": 0}
    return {**options, **changes}


def adapter_of(path):
    return load_file(path / "adapter_model.safetensors")


def test_a_run_trains_saves_and_exports_an_adapter(given):
    done = llmq.train(**given, lora_targets="q_proj,v_proj,mlp", lora_bias="all")
    said = given["console"].getvalue()
    assert "Adapters of rank 4 on 5 linear maps with biases: 2," in said
    config = json.loads((done.model_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "base" and (config["r"], config["lora_alpha"]) == (4, 8)
    assert sorted(config["target_modules"]) == ["down_proj", "gate_proj", "q_proj", "up_proj", "v_proj"]
    assert not (done.model_path / "config.json").exists()
    found = adapter_of(done.model_path)
    shapes = {name.removeprefix(PREFIX): value.shape for name, value in found.items()}
    assert shapes == {
        ".self_attn.q_proj.lora_A.weight": (4, 48),
        ".self_attn.q_proj.lora_B.weight": (48, 4),
        ".self_attn.v_proj.lora_A.weight": (4, 48),
        ".self_attn.v_proj.lora_B.weight": (24, 4),
        ".self_attn.q_proj.base_layer.bias": (48,),
        ".self_attn.k_proj.bias": (24,),
        ".self_attn.v_proj.base_layer.bias": (24,),
        **{f".mlp.{p}_proj.lora_A.weight": (4, 64 if p == "down" else 48) for p in ("gate", "up", "down")},
        **{f".mlp.{p}_proj.lora_B.weight": (48 if p == "down" else 64, 4) for p in ("gate", "up", "down")},
    }
    assert all(np.any(value) for value in found.values())
    _, read = load(done.checkpoint_path)
    held = {name.partition(":")[2] for name in read.tensors}
    assert not [name for name in held if name.endswith("weight") or "norm" in name]
    assert {"layers.0.attention.qkv.lora_a", "layers.0.attention.qkv.bias"} <= held


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(given):
    whole = llmq.train(**given)
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**given, **folders, "steps": 3})
    parts = llmq.train(**{**given, **folders, "out_dir": "parts-model", "continue": 3})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    one, other = adapter_of(whole.model_path), adapter_of(parts.model_path)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    with pytest.raises(UsageError, match=r"adapters targets model\.layers\.0\.self_attn\.q_proj"):
        llmq.train(**{**given, **folders, "continue": 3, "lora_alpha": 5, "overwrite": True})


def test_an_adapter_is_trained_on(given):
    first = llmq.train(**given, lora_alpha=6, lora_targets="all,lm_head", rslora=True)
    shape = ("lora_rank", "lora_dropout")
    rest = {name: value for name, value in given.items() if name not in shape}
    again = llmq.train(**{**rest, "name": "again", "adapter": str(first.model_path), "learning_rate": 0.0, "steps": 1})
    assert again.eval_loss == first.eval_loss
    one, other = adapter_of(first.model_path), adapter_of(again.model_path)
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    configs = [json.loads((run.model_path / "adapter_config.json").read_text()) for run in (first, again)]
    assert configs[0] == configs[1]


def test_a_run_of_one_step_begins_where_the_base_is(given):
    plain = {name: value for name, value in given.items() if not name.startswith("lora")}
    rest = {"steps": 1, "learning_rate": 0.0}
    runs = [llmq.train(**{**options, **rest, "name": name}) for name, options in (("a", given), ("b", plain))]
    assert runs[0].eval_loss == runs[1].eval_loss


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, c: t.pop(f"{PREFIX}.mlp.up_proj.lora_B.weight"), r"missing: model\.layers\.0\.mlp\.up_proj\.lora_B"),
        (
            lambda t, c: [t.pop(f"{PREFIX}.mlp.up_proj.lora_{k}.weight") for k in "AB"],
            r"missing: model\.layers\.0\.mlp\.up_proj\.lora_A\.weight and",
        ),
        (lambda t, c: c.update(r=8), r"q_proj\.lora_A\.weight has shape \[4, 48\], .* ask for \[8, 48\]"),
        (lambda t, c: t.update(other=np.zeros(3)), r"other is no part of an adapter"),
        (
            lambda t, c: t.update({f"{PREFIX}5.mlp.up_proj.lora_A.weight": np.zeros((4, 48))}),
            r"layers\.05\.mlp.*no linear",
        ),
        (lambda t, c: c.update(peft_type="IA3"), "peft_type IA3 is not read, only LORA"),
        (lambda t, c: c.update(use_dora=True), "llmq does not have use_dora True"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(given, tmp_path, change, says):
    done = llmq.train(**{**given, "steps": 1})
    tensors, config = adapter_of(done.model_path), json.loads((done.model_path / "adapter_config.json").read_text())
    change(tensors, config)
    (tmp_path / "changed").mkdir()
    save_file(tensors, tmp_path / "changed" / "adapter_model.safetensors")
    (tmp_path / "changed" / "adapter_config.json").write_text(json.dumps(config))
    rest = {name: value for name, value in given.items() if not name.startswith("lora")}
    with pytest.raises(DataError, match=says):
        llmq.train(**{**rest, "name": "next", "adapter": str(tmp_path / "changed")})
    assert not (tmp_path / "runs" / "next").exists()


@pytest.mark.parametrize(
    ("base", "matmul"),
    [
        ("e4m3", "fp32"),
        ("nf4", "e4m3"),
        *(pytest.param(base, "fp32", marks=pytest.mark.slow) for base in ("int8", "nf4", "mxfp4")),
    ],
)
def test_a_quantized_base_is_made_again_when_a_run_resumes(given, base, matmul):
    if matmul == "e4m3":
        given |= {"matmul_dtype": "e4m3", "model_dtype": "bf16"}
    options = {**given, "base_dtype": base, "sample_tokens": 4}
    whole = llmq.train(**options)
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**options, **folders, "steps": 3})
    parts = llmq.train(**{**options, **folders, "out_dir": "parts-model", "continue": 3})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    assert whole.eval_loss != llmq.train(**{**given, "name": "wide"}).eval_loss
    with pytest.raises(UsageError, match=rf"adapters base: {base} in the checkpoint, None now"):
        llmq.train(**{**given, **folders, "continue": 3, "overwrite": True})


@pytest.mark.parametrize("change", [{}, {"lora_rank": None, "lora_dropout": None, "train_only": "*.bias"}])
def test_a_run_on_another_base_is_not_continued(given, change):
    """Which has the same tensors, but for the numbers of one; the same ones in other files are no other base."""
    options = {**given, **change, "steps": 1}
    llmq.train(**options)
    path = f"{given['model']}/model.safetensors"
    tensors = load_file(path)
    save_file(dict(reversed(tensors.items())), path, {"written": "again"})
    llmq.train(**{**options, "steps": 2, "continue": True, "overwrite": True})
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name] + np.float32(1e-3)}, path)
    with pytest.raises(UsageError, match=r"frozen model: [0-9a-f]{64} in the checkpoint, [0-9a-f]{64} now"):
        llmq.train(**{**options, "steps": 3, "continue": True, "overwrite": True})


def test_a_run_that_trains_biases_leaves_a_whole_model(given):
    options = {name: value for name, value in given.items() if not name.startswith("lora")} | {"train_only": "*.bias"}
    whole = llmq.train(**options)
    assert "A part of the model: 96 of" in given["console"].getvalue()
    base, found = (load_file(f"{folder}/model.safetensors") for folder in ("base", whole.model_path))
    changed = {name for name, value in base.items() if not np.array_equal(value, found[name])}
    assert changed == {name for name in base if name.endswith("bias")} and base.keys() == found.keys()
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**options, **folders, "steps": 3})
    parts = llmq.train(**{**options, **folders, "out_dir": "parts-model", "continue": 3})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    with pytest.raises(UsageError, match=r"trained: \*\.bias in the checkpoint, \*\.bias,embed_tokens now"):
        llmq.train(**{**options, **folders, "continue": 3, "train_only": "*.bias,embed_tokens", "overwrite": True})
