"""Runs with adapters of every method: what they train is what they save, export and continue from."""

import numpy as np
import pytest
from adapter_cases import METHODS, VIRTUAL, adapter_of, config_of
from safetensors.numpy import load_file, save_file
from tiny_runs import changed_adapter, on_weights, weights_of

import llmq
from llmq.adapters.resolve import open_adapter
from llmq.errors import DataError, UsageError
from llmq.files.checkpoint import load
from llmq.model.config import from_folder

PREFIX = "base_model.model.model.layers.0"


LORA = {"lora_rank": 4, "lora_dropout": 0.1}
PATTERNS = {"lora_targets": "attention", "lora_rank_pattern": "q_proj=2,o_proj=3", "lora_alpha_pattern": "o_proj=1"}
FP8 = {"matmul_dtype": "e4m3", "model_dtype": "bf16"}
# Options of a run, what a run that continues it cannot have in their place, and how that is said.
LIVES = {
    "lora": ({**LORA, "lora_bias": "all"}, {"lora_alpha": 5}, r"adapters targets model\.layers\.0\.self_attn\.q_proj"),
    "head": (METHODS["head"], {"rslora": False}, "adapters rslora: True in the checkpoint, False now"),
    "full": ({**LORA, **PATTERNS, "train_also": "lm_head,model.norm"}, {"train_also": "model.norm"}, "adapters also"),
    "dora": ({**LORA, "dora": True, "lora_targets": "q_proj,v_proj,mlp"}, {"dora": False}, "qkv.lora_m"),
    **{
        init: (
            {"lora_rank": 4, "lora_init": init, "lora_targets": "q_proj,v_proj,mlp", "lora_rank_pattern": "v_proj=2"},
            {"lora_init": "kaiming"},
            rf"adapters init: {init} in the checkpoint",
        )
        for init in ("pissa", "olora")
    },
    "ia3": ({**METHODS["ia3"], "train_also": "model.norm"}, {"ia3": "k_proj,v_proj"}, "adapters inward"),
    "prompt": (METHODS["prompt"], {"prompt_tuning": 4}, "adapters virtual tokens"),
    "prefix": (METHODS["prefix"], {"prefix_tuning": 4}, "adapters virtual tokens"),
    "part": ({"train_only": "*.bias"}, {"train_only": "*.bias,embed_tokens"}, r"trained: \*\.bias in .*,embed_tokens"),
    **{
        base: ({**LORA, "base_dtype": base}, {"base_dtype": None}, rf"adapters base: {base} in the checkpoint, None")
        for base in ("e4m3", "int8", "nf4", "mxfp4")
    },
    "fp8": ({**LORA, **FP8, "base_dtype": "nf4"}, {"base_dtype": None}, "adapters base: nf4 in the checkpoint, None"),
}
SELDOM = ("head", "full", "dora", "pissa", "prefix", "e4m3", "fp8")
SWEEP = ("olora", "int8", "nf4", "mxfp4")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SELDOM) + [pytest.mark.sweep] * (name in SWEEP))
        for name in LIVES
    ],
)
def test_what_is_trained_is_saved_resumed_exported_and_trained_on(based, name):
    """A resumed run has the bits of one that was never stopped, and a new one begins where the model is."""
    own, change, says = LIVES[name]
    options = {**based, **own}
    whole = llmq.train(**options)
    cut = {**options, "out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**cut, "steps": 3})
    parts = llmq.train(**{**cut, "out_dir": "parts-model", "continue": 3})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    with pytest.raises(UsageError, match=says):
        llmq.train(**{**cut, **change, "continue": 3, "overwrite": True})
    if name == "part":
        return
    same(parts, whole)
    if name == "fp8":  # whose delayed scales are of the steps before
        return
    still = {**based, "learning_rate": 0.0, "steps": 1}
    again = llmq.train(**{**still, "name": "again", "adapter": str(whole.model_path)})
    if is_taken_out := "lora_init" in own:
        assert again.eval_loss == pytest.approx(whole.eval_loss, rel=1e-5)
    else:
        assert again.eval_loss == whole.eval_loss
        same(again, whole)
    begun, plain = (llmq.train(**{**still, **more}).eval_loss for more in ({**own, "name": "begun"}, {"name": "plain"}))
    if name in VIRTUAL or "base_dtype" in own:
        assert begun != plain
    else:
        close = 1e-5 if is_taken_out else 1e-6 if "dora" in own else 0.0
        assert begun == pytest.approx(plain, rel=close, abs=0.0)


def same(one, other):
    """Whether two runs left the same adapter."""
    assert config_of(one.model_path) == config_of(other.model_path)
    found, right = adapter_of(one.model_path), adapter_of(other.model_path)
    assert found.keys() == right.keys() and all(np.array_equal(value, right[name]) for name, value in found.items())


def test_a_run_trains_saves_and_exports_an_adapter(based):
    done = llmq.train(**based, **LORA, lora_targets="q_proj,v_proj,mlp", lora_bias="all")
    said = based["console"].getvalue()
    assert "Adapters of rank 4 on 5 linear maps with biases: 2," in said
    config = config_of(done.model_path)
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


def test_modules_in_full_and_ranks_by_pattern_are_exported(based):
    first = llmq.train(**based, **LORA, **PATTERNS, train_also="lm_head,model.norm", lora_plus_ratio=4)
    assert "Adapters of ranks 2 to 4 on 4 linear maps, beside 2 parameters in full: " in based["console"].getvalue()
    config, found = config_of(first.model_path), adapter_of(first.model_path)
    assert config["modules_to_save"] == ["model.embed_tokens", "model.norm"] and config["ensure_weight_tying"]
    assert found["base_model.model.lm_head.weight"].shape[1] == 48
    assert np.array_equal(*(found[f"base_model.model.{name}.weight"] for name in ("lm_head", "model.embed_tokens")))
    assert not np.array_equal(
        found["base_model.model.lm_head.weight"], load_file("base/model.safetensors")["model.embed_tokens.weight"]
    )
    ranks = {name.split(".")[-3]: len(v) for name, v in found.items() if "lora_A" in name}
    assert ranks == {"q_proj": 2, "k_proj": 4, "v_proj": 4, "o_proj": 3}
    assert {name.rpartition(".")[2]: v for name, v in config["alpha_pattern"].items()} == {"o_proj": 1}


def test_magnitudes_begin_as_norms_and_are_exported(based):
    whole = llmq.train(**based, **LIVES["dora"][0])
    assert "Adapters with magnitudes of rank 4 on 5 linear maps: " in based["console"].getvalue()
    found = adapter_of(whole.model_path)
    base = load_file("base/model.safetensors")
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        first = np.linalg.norm(base[f"model.layers.0.{module}.weight"], axis=1)
        moved = found[f"{PREFIX}.{module}.lora_magnitude_vector"] / first - 1
        assert 0 < np.abs(moved).max() < 0.2
    assert config_of(whole.model_path)["use_dora"]


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_is_taken_out_of_the_weights_fits_them_when_it_is_exported(based, init):
    """It has twice the rank."""
    whole = llmq.train(**based, **LIVES[init][0])
    found, config = adapter_of(whole.model_path), config_of(whole.model_path)
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (8, 16, True)
    assert found[f"{PREFIX}.self_attn.v_proj.lora_A.weight"].shape == (4, 48)
    assert found[f"{PREFIX}.mlp.down_proj.lora_B.weight"].shape == (48, 8)


def test_gains_are_exported(based):
    whole = llmq.train(**based, **LIVES["ia3"][0])
    assert "Gains (IA3) on 3 linear maps: 160 of" in based["console"].getvalue()
    found, config = adapter_of(whole.model_path), config_of(whole.model_path)
    assert {name.removeprefix(PREFIX): value.shape for name, value in found.items()} == {
        ".self_attn.k_proj.ia3_l": (24, 1),
        ".self_attn.v_proj.ia3_l": (24, 1),
        ".mlp.down_proj.ia3_l": (1, 64),
        "base_model.model.model.norm.weight": (48,),
    }
    assert all(np.abs(value - 1).max() > 1e-3 for value in found.values())
    assert (config["peft_type"], config["feedforward_modules"]) == ("IA3", ["down_proj"])


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (
            {"lora_rank": 4, "lora_init": "pissa"},
            r"--lora-init pissa takes .* lm_head is the embedding too: leave it out",
        ),
        ({"lora_rank": 4, "dora": True}, r"--dora keeps what .* leave lm_head out of --lora-targets"),
        ({"ia3": "all,lm_head"}, r"--ia3 keeps what a map computes .* leave lm_head out of --ia3"),
    ],
)
def test_a_head_that_cannot_be_adapted_is_refused(based, own, says):
    with pytest.raises(UsageError, match=says):
        llmq.train(**based, **own, **({} if "ia3" in own else {"lora_targets": "all,lm_head"}))


UP, MODULE = f"{PREFIX}.mlp.up_proj", r"model\.layers\.0\.mlp\.up_proj"


@pytest.fixture(scope="module")
def fitting(tmp_path_factory):
    """A model's config, and an adapter of the model by each of some methods."""
    folder = tmp_path_factory.mktemp("fitting")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        based = {**on_weights(folder, times=5), "steps": 3, "warmup": 0}
        methods = {**METHODS, "ia3": {"ia3": "q_proj,up_proj"}}
        names = ("lora", "ia3", "adalora", *VIRTUAL)
        paths = {name: folder / llmq.train(**{**based, **methods[name], "name": name}).model_path for name in names}
    return from_folder(folder / "base"), paths


def without(*keys):
    return lambda tensors, about: [tensors.pop(f"{UP}.{key}") for key in keys]


def having(value, key):
    return lambda tensors, about: tensors.update({key: value})


def saying(**more):
    return lambda tensors, about: about.update(more)


def padded(tensors, about):
    wide = {name: [(0, 0)] * (value.ndim - 1) + [(0, 16)] for name, value in tensors.items() if "_A" in name}
    tensors.update({name: np.pad(tensors[name], width) for name, width in wide.items()})


NONE, ONES = np.zeros(3), np.ones((3, 1))


@pytest.mark.parametrize(
    ("method", "change", "says"),
    [
        ("lora", without("lora_B.weight"), rf"missing: {MODULE}\.lora_B"),
        ("lora", without("lora_A.weight", "lora_B.weight"), rf"missing: {MODULE}\.lora_A\.weight and"),
        ("lora", saying(modules_to_save=["model.norm"]), r"missing: model\.norm\.weight, of modules"),
        ("lora", saying(modules_to_save=["embed_tokens"]), r"ties them, without ensure_weight_tying"),
        ("lora", saying(modules_to_save=["up_proj"]), r"has a part of layers\.0\.mlp\.up\.weight, which"),
        ("lora", having(NONE, f"{PREFIX}.self_attn.q_proj.base_layer.bias"), r"bias has shape \[3\], .* \[48\]"),
        ("lora", saying(use_dora=True), r"missing: .*_proj\.lora_magnitude_vector \(and 6 more like"),
        ("lora", saying(init_lora_weights="corda"), r"corda changes the model as llmq"),
        ("lora", saying(r=8), r"has shape \[4, \d+\], .* ask for \[8, \d+\] \(and 13 more"),
        ("lora", padded, r"has shape \[4, 64\], the model and its rank ask for \[4, 48\] \(and 6 more"),
        ("lora", saying(use_qalora=True), "llmq does not have use_qalora True"),
        ("ia3", without("ia3_l"), rf"missing: {MODULE}\.ia3_l"),
        ("ia3", having(ONES, f"{UP}.ia3_l"), r"shape \[3, 1\], .* for \[64, 1\]"),
        ("ia3", saying(feedforward_modules=["up_proj"]), r"shape \[64, 1\], .*(.|\n)*reads once"),
        ("ia3", saying(peft_type="VERA"), "VERA is not read, only LORA, IA3, ADALORA, PROMPT_TUN"),
        ("adalora", without("lora_E"), rf"missing: {MODULE}\.lora_E"),
        ("adalora", without("lora_A", "lora_B", "lora_E"), rf"missing: {MODULE}\.lora_A, lora_B and lora_E"),
        ("adalora", having(np.ones((5, 48)), f"{UP}.lora_A"), r"lora_A has shape \[5, 48\], .* for \[\d, 48\]"),
        ("adalora", saying(init_r=6), r"rank_pattern of .* has 4 flags, and init_r is 6"),
        ("adalora", saying(rank_pattern=None), r"lora_A has shape .* for \[4, 48\]"),
        ("adalora", having(np.ones((2, 1), np.int32), f"{UP}.lora_E"), r"stored as I32"),
        *(
            (method, having(ONES, f"{PREFIX}5.mlp.up_proj.{key}"), r"layers\.05\.mlp.*no linear")
            for method, key in (("lora", "lora_A.weight"), ("ia3", "ia3_l"), ("adalora", "lora_E"))
        ),
        *((method, having(NONE, "other"), r"other is no part of an adapter") for method in ("lora", "ia3", "adalora")),
        ("prompt", lambda tensors, about: tensors.clear() or having(ONES, "x")(tensors, about), r"missing: prompt_"),
        ("prompt", having(NONE, "other"), r"other is no part"),
        ("prompt", having(np.zeros((3, 5), np.float32), "prompt_embeddings"), r"\[3, 5\], .* for \[3, 48\]"),
        ("prefix", saying(num_virtual_tokens=4), r"shape \[3, 48\], .* for \[4, 48\]"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(fitting, tmp_path, method, change, says):
    config, adapters = fitting
    changed_adapter(adapters[method], tmp_path / "changed", change)
    with pytest.raises(DataError, match=says):
        open_adapter(tmp_path / "changed", config)


@pytest.mark.quick("own1")
@pytest.mark.parametrize("own", [LORA, {"train_only": "*.bias"}])
def test_a_run_on_another_base_is_not_continued(based, own):
    """Which has the same tensors, but for the numbers of one; the same ones in other files are no other base."""
    options = {**based, **own, "steps": 1}
    llmq.train(**options)
    path = f"{based['model']}/model.safetensors"
    tensors = load_file(path)
    save_file(dict(reversed(tensors.items())), path, {"written": "again"})
    llmq.train(**{**options, "steps": 2, "continue": True, "overwrite": True})
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name] + np.float32(1e-3)}, path)
    with pytest.raises(UsageError, match=r"frozen model: [0-9a-f]{64} in the checkpoint, [0-9a-f]{64} now"):
        llmq.train(**{**options, "steps": 3, "continue": True, "overwrite": True})


def test_a_run_that_trains_biases_leaves_a_whole_model(based):
    whole = llmq.train(**based, train_only="*.bias")
    assert "A part of the model: 96 of" in based["console"].getvalue()
    base, found = (load_file(f"{folder}/model.safetensors") for folder in ("base", whole.model_path))
    changed = {name for name, value in base.items() if not np.array_equal(value, found[name])}
    assert changed == {name for name in base if name.endswith("bias")} and base.keys() == found.keys()
