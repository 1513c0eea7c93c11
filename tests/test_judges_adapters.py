"""Adapters against PEFT and PyTorch, live: gradients, runs of AdamW, folders both ways, in every family, for all target
sets; what is taken out of weights, gains, a part of the model."""

from dataclasses import replace

import numpy as np
import pytest
from golden import families, transformers_judge
from golden.engines import FP32, FP64
from golden.peft_judge import (
    ALPHA,
    RANK,
    adamw_of,
    assert_close,
    assert_peft_reads,
    assert_same_gradients,
    assert_same_logits,
    assert_same_run,
    assert_same_tensors,
    assert_same_weights,
    by_name,
    changed,
    drawn,
    engine_of,
    export_base,
    hyper,
    loaded,
    loaded_from,
    merged_with,
    model_in,
    moved,
    ours,
    peft,
    spec_of,
    tensors_of,
    torch,
    trained,
)
from peft.optimizers import create_loraplus_optimizer

from llmq.adapters.ia3 import Gains, scaled
from llmq.adapters.lora import FirstAdapter, Lora
from llmq.adapters.part import PartOfModel
from llmq.adapters.resolve import open_adapter
from llmq.adapters.targets import chosen, targets, trained_in_full
from llmq.data.batches.batch import Batch
from llmq.files.source import find_source, open_parameters
from llmq.model.config import read_config
from llmq.model.parameters import parameter_rows

pytestmark = pytest.mark.judge

SETS = {
    "all": {"target_modules": "all-linear"},
    "attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "mlp": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "q_proj,v_proj": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "layers.1.mlp.up_proj,layers.*.k_proj": {"target_modules": r".*(layers\.1\.mlp\.up_proj|k_proj)"},
    "ranks": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
        "alpha_pattern": {"q_proj": 3, "v_proj": 5},
    },
    "full": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head", "model.norm"]},
}
SETS["dora"] = {**SETS["ranks"], "use_dora": True}
SETS["dora of some"] = {"target_modules": ["q_proj", "v_proj", "up_proj"], "use_dora": True, "use_rslora": True}
# what ours are asked for by other words than the name of the set
WORDS = {
    "ranks": {
        "text": "all",
        "ranks": {"q_proj": 2, "layers.1.mlp.up_proj": 6},
        "alphas": {"q_proj": 3.0, "v_proj": 5.0},
    },
    "full": {"text": "q_proj,v_proj", "also": "embed_tokens,lm_head,model.norm"},
    "dora of some": {"text": "q_proj,v_proj,up_proj", "dora": True},
}
WORDS["dora"] = {**WORDS["ranks"], "dora": True}
CASES = [(family, "all", "none") for family in families.FAMILIES]
CASES += [("qwen2", text, bias) for text in SETS for bias in ("none", "all")]
CASES += [("qwen2", "attention", "lora_only"), ("qwen3", "q_proj,v_proj", "none"), ("llama3", "mlp", "none")]
CASES += [("qwen2.5_tied", "full", "none"), ("qwen3", "dora", "none"), ("llama3", "mlp", "lora_only")]
CASES += [(family, text, "none") for family in families.FAMILIES for text in ("dora of some", "q_proj,v_proj")]
CASES = list(dict.fromkeys(CASES))
EVERY = pytest.mark.parametrize(("family", "text", "bias"), CASES)


def adapters_of(config, text, bias):
    """Ours, as the options ask for them."""
    words, rslora = {"text": text, **WORDS.get(text, {})}, bool(SETS[text].get("use_rslora"))
    modules, also = chosen(words.pop("text"), read_config(config)), words.pop("also", None)
    full = trained_in_full(also, read_config(config), modules) if also else frozenset()
    dora = words.pop("dora", False)
    every = targets(modules, RANK, ALPHA, rslora=rslora, **words)
    return Lora(RANK, ALPHA, every, bias=bias, rslora=rslora, also=full, dora=dora)


def peft_of(config, weights, text, bias, dtype):
    """PEFT's model with random A and B."""
    about = {"r": RANK, "lora_alpha": ALPHA, "bias": bias, "task_type": "CAUSAL_LM", **SETS[text]}
    if "modules_to_save" in about and config.get("tie_word_embeddings"):
        about |= {"modules_to_save": ["embed_tokens", "model.norm"], "ensure_weight_tying": True}
    model = peft.get_peft_model(transformers_judge.model_of(config, weights, dtype), peft.LoraConfig(**about))
    spread = {"lora_magnitude": lambda p: p.mul_(torch.empty_like(p).uniform_(0.5, 1.5))}
    return changed(model, {**spread, "lora_": lambda p: p.normal_(std=0.1)})


@EVERY
def test_gradients_are_those_of_peft(family, text, bias):
    config = families.FAMILIES[family]
    weights, (tokens, marks) = families.weights(config), drawn(config, 1)
    with transformers_judge.doubled():
        model = peft_of(config, weights, text, bias, "float64")
        loss = transformers_judge.backward(model, tokens, marks)
        right = trained(model, lambda p: p.grad)
    for precision, bound in ((FP64, 1e-9), (FP32, 1e-5)):
        engine = engine_of(config, model, adapters_of(config, text, bias), precision)
        assert_same_gradients(engine, Batch(tokens, marks), right, loss, bound)


@pytest.mark.sample("sweep")
@EVERY
def test_a_run_of_adamw_is_that_of_peft(family, text, bias):
    config = families.FAMILIES[family]
    with transformers_judge.doubled():
        model = peft_of(config, families.weights(config), text, bias, "float64")
        runs = [engine_of(config, model, adapters_of(config, text, bias), p, hyper()) for p in (FP64, FP32)]
        assert_same_run(config, model, runs, adamw_of(model), of_change=True)


@EVERY
def test_folders_go_both_ways(family, text, bias, tmp_path):
    """PEFT's folder is trained on here, and what is exported is loaded by PEFT, and by us again."""
    config = families.FAMILIES[family]
    parsed, (tokens, _) = read_config(config), drawn(config, 5)
    export_base(config, tmp_path / "base")
    model = peft_of(config, families.weights(config), text, bias, "float32")
    model.save_pretrained(tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", parsed)
    wanted = adapters_of(config, text, bias)
    assert read.adapters == wanted
    run = engine_of(config, model, read.adapters, FP32)
    loaded = {
        row.name: value
        for row, value in read.values(lambda rows: ((row, run.parameter(row.name)) for row in rows))(run.plan.rows)
    }
    assert all(np.array_equal(value, run.parameter(name)) for name, value in loaded.items())
    assert {row.name for row in run.plan.rows if row.trainable} <= loaded.keys()
    assert_same_logits(run, model, tokens)
    for step in (1, 2):
        run.micro_step(Batch(*drawn(config, step)))
        run.update(step, 1e-2)
    assert_peft_reads(run, wanted, tmp_path, tokens)
    one, other = tensors_of(tmp_path / "ours", tmp_path / "theirs")
    assert one.keys() == other.keys()
    assert open_adapter(tmp_path / "ours", parsed).adapters == wanted


@pytest.mark.parametrize("ratio", [1.0, 16.0])
def test_rates_are_those_of_lora_plus(ratio):
    """PEFT's optimizer of LoRA+ gives B and biases the rate times the ratio."""
    config, a = families.FAMILIES["qwen2"], families.ADAMW
    with transformers_judge.doubled():
        model = peft_of(config, families.weights(config), "attention", "all", "float64")
        adapters = replace(adapters_of(config, "attention", "all"), plus=ratio)
        run = engine_of(config, model, adapters, FP64, hyper())
        before = trained(model)
        about = {"betas": (a["beta_1"], a["beta_2"]), "eps": a["epsilon"], "foreach": False}
        about |= {"lr": 1.0, "loraplus_lr_ratio": ratio, "loraplus_weight_decay": a["weight_decay"]}
        optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, **about)
        factors = [group["lr"] for group in optimizer.param_groups]
        for step in range(1, 6):
            transformers_judge.backward(model, *drawn(config, step))
            for group, factor in zip(optimizer.param_groups, factors, strict=True):
                group["lr"] = factor * families.learning_rate(step)
            optimizer.step()
            optimizer.zero_grad()
            run.micro_step(Batch(*drawn(config, step)))
            run.update(step, families.learning_rate(step))
        right = trained(model)
    found = by_name(run, run.parameter)
    assert_close(*({name: v[name] - before[name] for name in v} for v in (found, right)), 1e-6)


@pytest.mark.parametrize(
    ("family", "text"), [("qwen2", "all"), ("qwen3", "q_proj,v_proj"), ("qwen2.5_tied", "full"), ("qwen2", "dora")]
)
def test_a_merged_model_computes_what_peft_does(family, text, tmp_path):
    config = families.FAMILIES[family]
    export_base(config, tmp_path / "base")
    model = peft_of(config, families.weights(config), text, "all", "float32")
    model.save_pretrained(tmp_path / "theirs")
    assert_same_weights(merged_with(tmp_path, "theirs"), model.merge_and_unload())


@pytest.mark.parametrize("about", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_is_taken_out_of_the_weights_is_what_peft_takes(init, about, tmp_path):
    """First values and weights, the folder unchanged, its merged model, the folder that PEFT converts."""
    config = families.FAMILIES["qwen2"]
    parsed, (tokens, _), weights = read_config(config), drawn(config, 5), families.weights(config)
    export_base(config, tmp_path / "base")
    source = find_source(str(tmp_path / "base"))
    lora = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear", "init_lora_weights": init, **about}
    made = peft.LoraConfig(task_type="CAUSAL_LM", **lora)
    theirs = peft.get_peft_model(transformers_judge.model_of(config, weights, "float32"), made)
    rslora, dora = bool(about.get("use_rslora")), bool(about.get("use_dora"))
    every = targets(chosen("all", parsed), RANK, ALPHA, rslora=rslora)
    adapters = Lora(RANK, ALPHA, every, rslora=rslora, init=init, dora=dora)
    engine = loaded_from(tmp_path / "base", adapters, lambda model: FirstAdapter(adapters, parsed, model).values)
    assert_same_logits(engine, theirs, tokens)
    named = {ours(name): p.detach().numpy() for name, p in theirs.named_parameters()}
    values = {part.name: engine.parameter(r.name)[part.start : part.stop] for r in engine.plan.rows for part in r.parts}
    for target in every:
        name = target.module.name
        weight, a, b = (f"{name}.{key}" for key in ("weight", "lora_A.weight", "lora_B.weight"))
        np.testing.assert_allclose(values[weight], named[weight], atol=2e-5)
        np.testing.assert_allclose(values[b] @ values[a], named[b] @ named[a], atol=2e-5)
        np.testing.assert_allclose(np.abs(values[a]), np.abs(named[a]), atol=1e-3)
    theirs.save_pretrained(tmp_path / "first")
    moved(theirs, 0.05, seed=4).save_pretrained(tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", parsed)
    assert read.adapters == adapters
    engine.load(read.values(open_parameters(source, 0))(engine.plan.rows))
    assert_same_logits(engine, theirs, tokens)
    assert_same_logits(engine, model_in(merged_with(tmp_path, "theirs")), tokens)
    found = assert_peft_reads(engine, adapters, tmp_path, tokens, model=open_parameters(source, 0))
    if dora:  # whose magnitudes PEFT leaves out when it converts
        return
    theirs.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    one, other = tensors_of(tmp_path / "ours", tmp_path / "converted")
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.shape == other[name].shape
        if name.endswith("lora_A.weight"):
            b = name.replace("lora_A", "lora_B")
            np.testing.assert_allclose(one[b] @ value, other[b] @ other[name], atol=5e-5)
    wanted, written = peft.LoraConfig.from_pretrained(tmp_path / "converted"), found.peft_config["default"]
    assert (wanted.r, wanted.init_lora_weights) == (written.r, written.init_lora_weights)
    assert wanted.lora_alpha == pytest.approx(written.lora_alpha)


GAINS = {
    "paper": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "outputs": {"target_modules": ["q_proj", "up_proj", "down_proj"], "feedforward_modules": []},
    "inputs": {"target_modules": ["o_proj", "gate_proj"], "feedforward_modules": ["o_proj"]},
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("qwen2", kind) for kind in GAINS), *((name, "paper") for name in families.FAMILIES if name != "qwen2")],
)
def test_gains_are_those_of_peft(family, kind, tmp_path):
    """Losses, gradients in f64 and f32, 20 steps of AdamW, folders both ways, the merged model."""
    config = families.FAMILIES[family]
    parsed, weights, (tokens, marks) = read_config(config), families.weights(config), drawn(config, 1)
    modules = chosen(",".join(GAINS[kind]["target_modules"]), parsed)
    inward = {module.name for module in modules if module.key in GAINS[kind]["feedforward_modules"]}
    adapters = Gains(scaled(modules, inward))
    assert kind != "paper" or adapters.targets == scaled(modules)

    def made(dtype):
        about = peft.IA3Config(task_type="CAUSAL_LM", **GAINS[kind])
        model = peft.get_peft_model(transformers_judge.model_of(config, weights, dtype), about)
        return changed(model, {"ia3_l": lambda p: p.uniform_(0.5, 1.5)})

    with transformers_judge.doubled():
        model = made("float64")
        loss = transformers_judge.backward(model, tokens, marks)
        gradients = trained(model, lambda p: p.grad)
        runs = [engine_of(config, model, adapters, precision, hyper()) for precision in (FP64, FP32)]
        for run, bound in zip(runs, (1e-9, 1e-5), strict=True):
            assert_same_gradients(run, Batch(tokens, marks), gradients, loss, bound)
        model = made("float64")
        runs = [engine_of(config, model, adapters, precision, hyper()) for precision in (FP64, FP32)]
        assert_same_run(config, model, runs, adamw_of(model, lambda p: False))
    export_base(config, tmp_path / "base")
    theirs = made("float32")
    theirs.save_pretrained(tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", parsed)
    assert read.adapters == adapters
    run = loaded_from(tmp_path / "base", adapters, read.values)
    assert_same_logits(run, theirs, tokens)
    assert_peft_reads(run, adapters, tmp_path, tokens)
    assert_same_tensors(tmp_path / "ours", tmp_path / "theirs")
    assert_same_weights(merged_with(tmp_path, "ours"), theirs.merge_and_unload())


@pytest.mark.parametrize("text", ["*.bias", "layers.1.mlp,norm"])
def test_a_part_of_the_model_is_trained_as_by_torch(text):
    """BitFit's biases, or a layer: 20 steps of AdamW in f64 and in f32."""
    config = families.FAMILIES["qwen2"]
    parsed, weights = read_config(config), families.weights(config)
    adapters = PartOfModel.named(text, parsed)
    kept = {part.name for row in adapters.rows(parameter_rows(parsed), parsed) if row.trainable for part in row.parts}
    with transformers_judge.doubled():
        model = transformers_judge.model_of(config, weights, "float64")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in kept)
        named = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        runs = [loaded(spec_of(parsed, adapters, precision, hyper()), lambda row: named) for precision in (FP64, FP32)]
        assert_same_run(config, model, runs, adamw_of(model))
