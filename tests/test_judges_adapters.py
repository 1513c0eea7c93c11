"""Adapters against PEFT, live: gradients, a run of AdamW, folders both ways, in every family, for all target sets."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("peft", reason="the judge is PEFT")
pytest.importorskip("torch", reason="the judges are torch and transformers")

import peft
import torch
from adapter_cases import export_of
from golden import families, transformers_judge
from golden.engines import FP32, FP64
from golden.peft_judge import (
    ALPHA,
    RANK,
    adamw_of,
    assert_close,
    assert_same_logits,
    assert_same_run,
    assert_same_weights,
    by_name,
    drawn,
    engine_of,
    export_base,
    hyper,
    model_in,
    trained,
)
from peft.optimizers import create_loraplus_optimizer
from safetensors.numpy import load_file

from llmq.adapters.lora import Lora
from llmq.adapters.merge import merge
from llmq.adapters.resolve import open_adapter
from llmq.adapters.targets import chosen, targets, trained_in_full
from llmq.data.batches.batch import Batch
from llmq.files.source import find_source
from llmq.model.config import read_config

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
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
            elif "lora_" in name:
                parameter.normal_(std=0.1)
    return model


@EVERY
def test_gradients_are_those_of_peft(family, text, bias):
    config = families.FAMILIES[family]
    weights, (tokens, marks) = families.weights(config), drawn(config, 1)
    with transformers_judge.doubled():
        model = peft_of(config, weights, text, bias, "float64")
        loss = transformers_judge.backward(model, tokens, marks)
        right = trained(model, lambda p: p.grad)
    count = np.count_nonzero(marks != -100)
    for precision, bound in ((FP64, 1e-9), (FP32, 1e-5)):
        engine = engine_of(config, model, adapters_of(config, text, bias), precision)
        engine.micro_step(Batch(tokens, marks))
        found = {name: value / count for name, value in by_name(engine, engine.gradient).items()}
        assert_close(found, right, bound)
        assert engine.update(1, 0.0).loss == pytest.approx(loss, rel=bound)


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
    loaded = {row.name: value for row, value in read.values(lambda rows: iter(()))(run.plan.rows)}
    assert all(np.array_equal(value, run.parameter(name)) for name, value in loaded.items())
    assert {row.name for row in run.plan.rows if row.trainable} <= loaded.keys()
    assert_same_logits(run, model, tokens)
    for step in (1, 2):
        run.micro_step(Batch(*drawn(config, step)))
        run.update(step, 1e-2)
    export_of(wanted, run, tmp_path / "ours", tmp_path / "base").write(lambda row: run.parameter(row.name))
    names = [set(load_file(tmp_path / side / "adapter_model.safetensors")) for side in ("ours", "theirs")]
    assert names[0] == names[1]
    again = peft.PeftModel.from_pretrained(model_in(tmp_path / "base"), tmp_path / "ours")
    assert_same_logits(run, again, tokens)
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
    source = find_source(str(tmp_path / "base"))
    merge(source, {tmp_path / "theirs": 1.0}, tmp_path / "merged", dtype=None, overwrite=False)
    assert_same_weights(tmp_path / "merged", model.merge_and_unload())
