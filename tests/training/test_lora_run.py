"""A run of --lora-rank: the adapter is what it saves, exports and continues from."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_runs import changed_adapter, on_weights, weights_of

import llmq
from llmq.adapters.merge import merge
from llmq.errors import DataError, UsageError
from llmq.files.checkpoint import load
from llmq.files.source import find_source

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


def test_modules_in_full_and_ranks_by_pattern_are_exported_and_trained_on(given):
    about = {"lora_targets": "attention", "lora_rank_pattern": "q_proj=2,o_proj=3", "lora_alpha_pattern": "o_proj=1"}
    first = llmq.train(**given, **about, train_also="lm_head,model.norm", lora_plus_ratio=4)
    assert "Adapters of ranks 2 to 4 on 4 linear maps, beside 2 parameters in full: " in given["console"].getvalue()
    config, found = json.loads((first.model_path / "adapter_config.json").read_text()), adapter_of(first.model_path)
    assert config["modules_to_save"] == ["model.embed_tokens", "model.norm"] and config["ensure_weight_tying"]
    assert found["base_model.model.lm_head.weight"].shape[1] == 48
    assert np.array_equal(*(found[f"base_model.model.{name}.weight"] for name in ("lm_head", "model.embed_tokens")))
    assert not np.array_equal(
        found["base_model.model.lm_head.weight"], load_file("base/model.safetensors")["model.embed_tokens.weight"]
    )
    ranks = {name.split(".")[-3]: len(v) for name, v in found.items() if "lora_A" in name}
    assert ranks == {"q_proj": 2, "k_proj": 4, "v_proj": 4, "o_proj": 3}
    assert {name.rpartition(".")[2]: v for name, v in config["alpha_pattern"].items()} == {"o_proj": 1}
    rest = {name: value for name, value in given.items() if name not in ("lora_rank", "lora_dropout")}
    again = llmq.train(**{**rest, "name": "again", "adapter": str(first.model_path), "learning_rate": 0.0, "steps": 1})
    assert again.eval_loss == first.eval_loss
    one, other = adapter_of(first.model_path), adapter_of(again.model_path)
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_magnitudes_are_trained_saved_resumed_and_merged(given):
    options = {**given, "dora": True, "lora_targets": "q_proj,v_proj,mlp"}
    whole = llmq.train(**options)
    assert "Adapters with magnitudes of rank 4 on 5 linear maps: " in given["console"].getvalue()
    found = adapter_of(whole.model_path)
    base = load_file("base/model.safetensors")
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        first = np.linalg.norm(base[f"model.layers.0.{module}.weight"], axis=1)
        moved = found[f"{PREFIX}.{module}.lora_magnitude_vector"] / first - 1
        assert 0 < np.abs(moved).max() < 0.2
    assert json.loads((whole.model_path / "adapter_config.json").read_text())["use_dora"]
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**options, **folders, "steps": 3})
    parts = llmq.train(**{**options, **folders, "out_dir": "parts-model", "continue": 3})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    begun = llmq.train(**{**options, "name": "begun", "steps": 1, "learning_rate": 0.0})
    plain = llmq.train(**{**given, "name": "plain", "steps": 1, "learning_rate": 0.0})
    assert begun.eval_loss == pytest.approx(plain.eval_loss, rel=1e-6)
    rest = {name: value for name, value in given.items() if name not in ("lora_rank", "lora_dropout")}
    rest |= {"learning_rate": 0.0, "steps": 1}
    again = llmq.train(**{**rest, "name": "again", "adapter": str(whole.model_path)})
    assert again.eval_loss == whole.eval_loss
    merge(find_source("base"), {whole.model_path: 1.0}, Path("merged"), dtype="fp32", overwrite=False)
    merged = llmq.train(**{**rest, "name": "merged", "model": "merged"})
    assert merged.eval_loss == pytest.approx(whole.eval_loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_is_taken_out_of_the_weights_fits_them_when_it_is_exported(given, init):
    """It has twice the rank, and the run resumes on the weights that are left."""
    options = {**given, "lora_init": init, "lora_targets": "q_proj,v_proj,mlp", "lora_rank_pattern": "v_proj=2"}
    whole = llmq.train(**options)
    found, config = adapter_of(whole.model_path), json.loads((whole.model_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (8, 16, True)
    assert found[f"{PREFIX}.self_attn.v_proj.lora_A.weight"].shape == (4, 48)
    assert found[f"{PREFIX}.mlp.down_proj.lora_B.weight"].shape == (48, 8)
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**options, **folders, "steps": 3})
    parts = llmq.train(**{**options, **folders, "out_dir": "parts-model", "continue": 3})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    other = adapter_of(parts.model_path)
    assert all(np.array_equal(value, other[name]) for name, value in found.items())
    with pytest.raises(UsageError, match=rf"adapters init: {init} in the checkpoint"):
        llmq.train(**{**options, **folders, "continue": 3, "lora_init": "kaiming", "overwrite": True})
    rest = {name: value for name, value in given.items() if name not in ("lora_rank", "lora_dropout")}
    rest |= {"learning_rate": 0.0, "steps": 1}
    again = llmq.train(**{**rest, "name": "again", "adapter": str(whole.model_path)})
    assert again.eval_loss == pytest.approx(whole.eval_loss, rel=1e-5)
    begun = llmq.train(**{**options, "name": "begun", "steps": 1, "learning_rate": 0.0})
    plain = llmq.train(**{**rest, "name": "plain"})
    assert begun.eval_loss == pytest.approx(plain.eval_loss, rel=1e-5)


def test_gains_are_trained_saved_resumed_exported_and_trained_on(given):
    rest = {name: value for name, value in given.items() if not name.startswith("lora")}
    options = {**rest, "ia3": "k_proj,v_proj,down_proj", "train_also": "model.norm"}
    whole = llmq.train(**options)
    assert "Gains (IA3) on 3 linear maps: 160 of" in given["console"].getvalue()
    found, config = adapter_of(whole.model_path), json.loads((whole.model_path / "adapter_config.json").read_text())
    assert {name.removeprefix(PREFIX): value.shape for name, value in found.items()} == {
        ".self_attn.k_proj.ia3_l": (24, 1),
        ".self_attn.v_proj.ia3_l": (24, 1),
        ".mlp.down_proj.ia3_l": (1, 64),
        "base_model.model.model.norm.weight": (48,),
    }
    assert all(np.abs(value - 1).max() > 1e-3 for value in found.values())
    assert (config["peft_type"], config["feedforward_modules"]) == ("IA3", ["down_proj"])
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**options, **folders, "steps": 3})
    parts = llmq.train(**{**options, **folders, "out_dir": "parts-model", "continue": 3})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    still = {"learning_rate": 0.0, "steps": 1}
    again = llmq.train(**{**rest, **still, "name": "again", "adapter": str(whole.model_path)})
    assert again.eval_loss == whole.eval_loss
    assert json.loads((again.model_path / "adapter_config.json").read_text()) == config
    begun = llmq.train(**{**options, **still, "name": "begun"})
    assert begun.eval_loss == llmq.train(**{**rest, **still, "name": "plain"}).eval_loss
    merge(find_source("base"), {whole.model_path: 1.0}, Path("merged"), dtype="fp32", overwrite=False)
    merged = llmq.train(**{**rest, **still, "name": "merged", "model": "merged"})
    assert merged.eval_loss == pytest.approx(whole.eval_loss, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, c: t.pop(f"{PREFIX}.mlp.up_proj.ia3_l"), r"missing: model\.layers\.0\.mlp\.up_proj\.ia3_l"),
        (lambda t, c: t.update({f"{PREFIX}.mlp.up_proj.ia3_l": np.ones((3, 1))}), r"shape \[3, 1\], .* for \[64, 1\]"),
        pytest.param(
            lambda t, c: t.update(other=np.zeros(3)), r"other is no part of an adapter", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda t, c: t.update({f"{PREFIX}5.mlp.up_proj.ia3_l": np.ones((3, 1))}),
            r"layers\.05\.mlp.*no linear",
            marks=pytest.mark.slow,
        ),
        (lambda t, c: c.update(feedforward_modules=["up_proj"]), r"shape \[64, 1\], .*(.|\n)*which llmq reads once"),
        (lambda t, c: c.update(peft_type="VERA"), "VERA is not read, only LORA, IA3, ADALORA, PROMPT_TUNING"),
    ],
)
def test_gains_that_do_not_fit_are_refused(given, tmp_path, change, says):
    rest = {name: value for name, value in given.items() if not name.startswith("lora")}
    done = llmq.train(**{**rest, "ia3": "q_proj,up_proj", "steps": 1})
    changed_adapter(done.model_path, tmp_path / "changed", change)
    with pytest.raises(DataError, match=says):
        llmq.train(**{**rest, "name": "next", "adapter": str(tmp_path / "changed")})


def test_a_tied_head_cannot_be_taken_out_of(given):
    with pytest.raises(UsageError, match=r"--lora-init pissa takes .* lm_head is the embedding too: leave it out"):
        llmq.train(**given, lora_init="pissa", lora_targets="all,lm_head")


@pytest.mark.parametrize("said", ["q_proj", "q_proj=0", "=3", "q_proj=two", "q_proj=2,", "q_proj=1.5"])
def test_a_pattern_without_a_rank_is_refused(given, said):
    with pytest.raises(UsageError, match=r"--lora-rank-pattern .*: write PATTERN=NUMBER with a number above 0"):
        llmq.train(**given, lora_rank_pattern=said)


@pytest.mark.parametrize("option", ["lora_rank_pattern", "lora_alpha_pattern"])
def test_a_pattern_with_two_values_is_refused(given, option):
    with pytest.raises(UsageError, match=rf"--{option.replace('_', '-')} gives q_proj twice, as 4 and as 2:"):
        llmq.train(**given, **{option: "q_proj=4,v_proj=2, q_proj=2"})


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
        (lambda t, c: c.update(modules_to_save=["model.norm"]), r"missing: model\.norm\.weight, of modules_to_save"),
        pytest.param(
            lambda t, c: c.update(modules_to_save=["embed_tokens"]),
            r"ties them, without ensure_weight_tying",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda t, c: c.update(modules_to_save=["up_proj"]),
            r"has a part of layers\.0\.mlp\.up\.weight, which",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda t, c: t.update({f"{PREFIX}.self_attn.q_proj.bias": np.zeros(3)}),
            r"q_proj\.bias has shape \[3\], the model asks for \[48\]",
            marks=pytest.mark.slow,
        ),
        (lambda t, c: c.update(use_dora=True), r"missing: .*_proj\.lora_magnitude_vector \(and 6 more like it\)"),
        pytest.param(
            lambda t, c: c.update(init_lora_weights="corda"),
            r"init_lora_weights corda changes the model as llmq does not",
            marks=pytest.mark.slow,
        ),
        (lambda t, c: c.update(r=8), r"has shape \[4, \d+\], .* ask for \[8, \d+\] \(and 13 more"),
        (lambda t, c: t.update(other=np.zeros(3)), r"other is no part of an adapter"),
        pytest.param(
            lambda t, c: t.update({f"{PREFIX}5.mlp.up_proj.lora_A.weight": np.zeros((4, 48))}),
            r"layers\.05\.mlp.*no linear",
            marks=pytest.mark.slow,
        ),
        (lambda t, c: c.update(use_qalora=True), "llmq does not have use_qalora True"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(given, tmp_path, change, says):
    done = llmq.train(**{**given, "steps": 1})
    changed_adapter(done.model_path, tmp_path / "changed", change)
    rest = {name: value for name, value in given.items() if not name.startswith("lora")}
    with pytest.raises(DataError, match=says):
        llmq.train(**{**rest, "name": "next", "adapter": str(tmp_path / "changed")})
    assert not (tmp_path / "runs" / "next").exists()


@pytest.mark.parametrize(
    ("base", "matmul"),
    [
        ("e4m3", "fp32"),
        pytest.param("nf4", "e4m3", marks=pytest.mark.slow),
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
