"""Adapters against PEFT, live: gradients, a run of AdamW, folders both ways, in every family, for all target sets."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("peft", reason="the judge is PEFT")
pytest.importorskip("torch", reason="the judges are torch and transformers")

import peft
import torch
import transformers
from golden import families, transformers_judge
from golden.engines import FP32, FP64, relative_errors
from peft.optimizers import create_loraplus_optimizer
from safetensors.numpy import load_file
from tiny_engines import next_logits

from llmq.backends.host import HostBackend
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.files.adapters import AdapterExport, adapter_config, doubled, open_adapter, stored_rows, with_first
from llmq.files.first_adapter import FirstAdapter
from llmq.files.huggingface import Export
from llmq.files.merge import merge
from llmq.files.source import find_source, open_parameters
from llmq.model.adapters import Adapters, chosen, scaled, targets, trained_in_full
from llmq.model.config import read_config
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import parameter_rows
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.spec import Spec

pytestmark = pytest.mark.judge

LENGTH, RANK, ALPHA = 24, 4, 10.0
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
CASES += [("qwen2.5_tied", "full", "none"), ("qwen3", "dora", "none"), ("llama3", "dora of some", "none")]
EVERY = pytest.mark.parametrize(("family", "text", "bias"), CASES)


def adapters_of(config, text, bias):
    """Ours, as the options ask for them."""
    words, rslora = {"text": text, **WORDS.get(text, {})}, bool(SETS[text].get("use_rslora"))
    modules, also = chosen(words.pop("text"), read_config(config)), words.pop("also", None)
    full = trained_in_full(also, read_config(config), modules) if also else frozenset()
    dora = words.pop("dora", False)
    every = targets(modules, RANK, ALPHA, rslora=rslora, **words)
    return Adapters(RANK, ALPHA, every, bias=bias, rslora=rslora, also=full, dora=dora)


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


def ours(name):
    """Our name of a parameter of PEFT's model."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.", ".")
    name = name.replace("_vector.default.weight", "_vector").replace(".ia3_l.default", ".ia3_l")
    return name.replace(".default.", ".").replace(".base_layer.", ".")


def trained(model, of=lambda p: p.detach()):
    """Trained parameters by our names, in f64."""
    return {
        ours(name): of(p).to(torch.float64).numpy().copy() for name, p in model.named_parameters() if p.requires_grad
    }


def engine_of(config, model, adapters, precision, hyper=None):
    """Our engine with the parameters of PEFT's model."""
    spec = Spec(
        read_config(config), precision, Memory(), hyper or Hyperparameters(), families.BATCH, LENGTH, adapters=adapters
    )
    engine = Engine(make_plan(spec), HostBackend())
    named = {ours(name): p.detach().to(torch.float64).numpy() for name, p in model.named_parameters()}
    rows = []
    for row in engine.plan.rows:
        value = np.zeros(row.shape)
        for part in row.parts:
            value[part.start : part.stop] = named[part.name]
        rows.append((row, value))
    engine.load(rows)
    return engine


def by_name(engine, read):
    """Our trained parameters, or their gradients, by name."""
    found = {}
    for row in engine.plan.rows:
        if row.trainable:
            found |= {part.name: read(row.name)[part.start : part.stop].astype(np.float64) for part in row.parts}
    return found


def drawn(config, index):
    return families.batch(config["vocab_size"], index, length=LENGTH)


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
        errors = relative_errors(found, right)
        assert max(errors.values()) < bound, max(errors, key=errors.get)
        assert engine.update(1, 0.0).loss == pytest.approx(loss, rel=bound)


@pytest.mark.parametrize(("family", "text", "bias"), [case for case in CASES if case[0] in ("qwen2", "qwen3")])
def test_a_run_of_adamw_is_that_of_peft(family, text, bias):
    """20 steps, in f64 within 1e-6 of the change and in f32 within 1e-4 of the parameters."""
    config = families.FAMILIES[family]
    a, weights = families.ADAMW, families.weights(config)
    with transformers_judge.doubled():
        model = peft_of(config, weights, text, bias, "float64")
        runs = [engine_of(config, model, adapters_of(config, text, bias), p, hyper()) for p in (FP64, FP32)]
        before, losses = trained(model), []
        groups = [
            {"params": [p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == matrix], "weight_decay": w}
            for matrix, w in ((True, a["weight_decay"]), (False, 0.0))
        ]
        about = {"lr": 0.0, "betas": (a["beta_1"], a["beta_2"]), "eps": a["epsilon"], "foreach": False}
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], **about)
        for step in range(1, families.STEPS + 1):
            losses.append(transformers_judge.backward(model, *drawn(config, step)))
            for group in optimizer.param_groups:
                group["lr"] = families.learning_rate(step)
            optimizer.step()
        right = trained(model)
    for run, change, bound in zip(runs, (True, False), (1e-6, 1e-4), strict=True):
        for step, loss in enumerate(losses, 1):
            run.micro_step(Batch(*drawn(config, step)))
            assert run.update(step, families.learning_rate(step)).loss == pytest.approx(loss, rel=bound)
        found = by_name(run, run.parameter)
        first = before if change else dict.fromkeys(before, 0.0)
        errors = relative_errors(*({name: v[name] - first[name] for name in v} for v in (found, right)))
        assert max(errors.values()) < bound, max(errors, key=errors.get)


def hyper():
    return replace(Hyperparameters(**families.ADAMW), grad_clip=0.0)


def export_base(config, folder):
    """The model without adapters, as a folder."""
    weights, parsed = families.weights(config), read_config(config)
    rows = parameter_rows(parsed)
    values = {}
    for row in rows:
        values[row.name] = np.zeros(row.shape, np.float32)
        for part in row.parts:
            values[row.name][part.start : part.stop] = weights[part.name]
    Export(folder, parsed, rows, "fp32").write(lambda row: values[row.name])


def assert_same_logits(run, model, tokens):
    wanted = transformers_judge.logits_of(model, tokens)
    for row, count in ((0, 3), (1, tokens.shape[1])):
        found, right = next_logits(run, tokens[row, :count]), wanted[row, count - 1]
        assert np.linalg.norm(found - right) < 1e-5 * np.linalg.norm(right)


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
    rows = stored_rows(run.plan.rows, wanted)
    about = adapter_config(wanted, parsed, str(tmp_path / "base"), None)
    AdapterExport(tmp_path / "ours", parsed, rows, "fp32", about=about).write(lambda row: run.parameter(row.name))
    names = [set(load_file(tmp_path / side / "adapter_model.safetensors")) for side in ("ours", "theirs")]
    assert names[0] == names[1]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
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
    errors = relative_errors(*({name: v[name] - before[name] for name in v} for v in (found, right)))
    assert max(errors.values()) < 1e-6, max(errors, key=errors.get)


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
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    right = model.merge_and_unload()
    named = dict(found.named_parameters())
    for name, value in right.named_parameters():
        torch.testing.assert_close(named[name].detach(), value.detach(), rtol=1e-5, atol=1e-6)


def initial_of(config, weights, init, **about):
    """PEFT's model as it begins."""
    made = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=init, **about
    )
    return peft.get_peft_model(transformers_judge.model_of(config, weights, "float32"), made)


def changed(model, seed=4):
    """The same with A and B a little beside where they began."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("about", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_is_taken_out_of_the_weights_is_what_peft_takes(init, about, tmp_path):
    """First values and weights, the folder as it is, its merged model, the folder that PEFT converts."""
    config = families.FAMILIES["qwen2"]
    parsed, (tokens, _), weights = read_config(config), drawn(config, 5), families.weights(config)
    export_base(config, tmp_path / "base")
    source = find_source(str(tmp_path / "base"))
    theirs = initial_of(config, weights, init, **about)
    rslora, dora = bool(about.get("use_rslora")), bool(about.get("use_dora"))
    every = targets(chosen("all", parsed), RANK, ALPHA, rslora=rslora)
    adapters = Adapters(RANK, ALPHA, every, rslora=rslora, init=init, dora=dora)
    first = FirstAdapter(adapters, parsed, open_parameters(source, 0))
    spec = Spec(parsed, FP32, Memory(), Hyperparameters(), families.BATCH, LENGTH, adapters=adapters)
    engine = Engine(make_plan(spec), HostBackend())
    engine.load(first.values(engine.plan.rows))
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
    changed(theirs).save_pretrained(tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", parsed)
    assert read.adapters == adapters
    engine.load(read.values(open_parameters(source, 0))(engine.plan.rows))
    assert_same_logits(engine, theirs, tokens)
    merge(source, {tmp_path / "theirs": 1.0}, tmp_path / "merged", dtype=None, overwrite=False)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert_same_logits(engine, found, tokens)
    twice = doubled(adapters)
    rows, exported = with_first(stored_rows(engine.plan.rows, adapters)), adapter_config(twice, parsed, "base", None)
    export = AdapterExport(tmp_path / "ours", parsed, rows, "fp32", about=exported, first=first)
    export.write(lambda row: engine.parameter(row.name))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    assert_same_logits(engine, peft.PeftModel.from_pretrained(base, tmp_path / "ours"), tokens)
    if dora:  # whose magnitudes PEFT leaves out when it converts
        return
    theirs.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    one, other = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "converted"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.shape == other[name].shape
        if name.endswith("lora_A.weight"):
            b = name.replace("lora_A", "lora_B")
            np.testing.assert_allclose(one[b] @ value, other[b] @ other[name], atol=5e-5)
    wanted = peft.LoraConfig.from_pretrained(tmp_path / "converted")
    assert (wanted.r, wanted.init_lora_weights) == (exported["r"], exported["init_lora_weights"])
    assert wanted.lora_alpha == pytest.approx(exported["lora_alpha"])


GAINS = {
    "paper": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "outputs": {"target_modules": ["q_proj", "up_proj", "down_proj"], "feedforward_modules": []},
    "inputs": {"target_modules": ["o_proj", "gate_proj"], "feedforward_modules": ["o_proj"]},
}


@pytest.mark.parametrize(("family", "kind"), [*(("qwen2", kind) for kind in GAINS), ("qwen3", "paper")])
def test_gains_are_those_of_peft(family, kind, tmp_path):
    """Losses, gradients in f64 and f32, 20 steps of AdamW, folders both ways, the merged model."""
    config, a = families.FAMILIES[family], families.ADAMW
    parsed, weights, (tokens, marks) = read_config(config), families.weights(config), drawn(config, 1)
    modules = chosen(",".join(GAINS[kind]["target_modules"]), parsed)
    inward = {module.name for module in modules if module.key in GAINS[kind]["feedforward_modules"]}
    adapters = Adapters(0, 1.0, scaled(modules, inward), method="ia3")
    assert kind != "paper" or adapters.targets == scaled(modules)

    def made(dtype):
        about = peft.IA3Config(task_type="CAUSAL_LM", **GAINS[kind])
        model = peft.get_peft_model(transformers_judge.model_of(config, weights, dtype), about)
        torch.manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "ia3_l" in name:
                    parameter.uniform_(0.5, 1.5)
        return model

    with transformers_judge.doubled():
        model = made("float64")
        loss = transformers_judge.backward(model, tokens, marks)
        gradients = {ours(n): p.grad.numpy() for n, p in model.named_parameters() if p.requires_grad}
        runs = [engine_of(config, model, adapters, precision, hyper()) for precision in (FP64, FP32)]
        count = np.count_nonzero(marks != -100)
        for run, bound in zip(runs, (1e-9, 1e-5), strict=True):
            run.micro_step(Batch(tokens, marks))
            found = {name: value / count for name, value in by_name(run, run.gradient).items()}
            errors = relative_errors(found, gradients)
            assert max(errors.values()) < bound, max(errors, key=errors.get)
            assert run.update(1, 0.0).loss == pytest.approx(loss, rel=bound)
        model = made("float64")
        runs = [engine_of(config, model, adapters, precision, hyper()) for precision in (FP64, FP32)]
        about = {"lr": 0.0, "betas": (a["beta_1"], a["beta_2"]), "eps": a["epsilon"], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False, **about)
        for step in range(1, families.STEPS + 1):
            loss = transformers_judge.backward(model, *drawn(config, step))
            optimizer.param_groups[0]["lr"] = families.learning_rate(step)
            optimizer.step()
            for run, bound in zip(runs, (1e-6, 1e-4), strict=True):
                run.micro_step(Batch(*drawn(config, step)))
                assert run.update(step, families.learning_rate(step)).loss == pytest.approx(loss, rel=bound)
        right = {ours(n): p.detach().numpy() for n, p in model.named_parameters() if p.requires_grad}
    for run, bound in zip(runs, (1e-6, 1e-4), strict=True):
        assert max(relative_errors(by_name(run, run.parameter), right).values()) < bound
    export_base(config, tmp_path / "base")
    theirs, source = made("float32"), find_source(str(tmp_path / "base"))
    theirs.save_pretrained(tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", parsed)
    assert read.adapters == adapters
    run = runs[1]
    run.load(read.values(open_parameters(source, 0))(run.plan.rows))
    assert_same_logits(run, theirs, tokens)
    about = adapter_config(adapters, parsed, str(tmp_path / "base"), None)
    rows = stored_rows(run.plan.rows, adapters)
    AdapterExport(tmp_path / "ours", parsed, rows, "fp32", about=about).write(lambda row: run.parameter(row.name))
    one, other = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert one.keys() == other.keys() and all(np.array_equal(value, other[name]) for name, value in one.items())
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    assert_same_logits(run, peft.PeftModel.from_pretrained(base, tmp_path / "ours"), tokens)
    merge(source, {tmp_path / "ours": 1.0}, tmp_path / "merged", dtype=None, overwrite=False)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    named = dict(found.named_parameters())
    for name, value in theirs.merge_and_unload().named_parameters():
        torch.testing.assert_close(named[name].detach(), value.detach(), rtol=1e-5, atol=1e-6)
