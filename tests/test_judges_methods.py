"""Methods beside LoRA against PEFT and PyTorch, live: what is taken out of weights, gains, a part of the model."""

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
    LENGTH,
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
    loaded,
    model_in,
    ours,
    trained,
)
from safetensors.numpy import load_file

from llmq.adapters.ia3 import Gains, scaled
from llmq.adapters.lora import FirstAdapter, Lora
from llmq.adapters.merge import merge
from llmq.adapters.part import PartOfModel
from llmq.adapters.resolve import open_adapter
from llmq.adapters.targets import chosen, targets
from llmq.backends.host import HostBackend
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.files.source import find_source, open_parameters
from llmq.model.config import read_config
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import parameter_rows
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.spec import Spec

pytestmark = pytest.mark.judge


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
    adapters = Lora(RANK, ALPHA, every, rslora=rslora, init=init, dora=dora)
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
    assert_same_logits(engine, model_in(tmp_path / "merged"), tokens)
    export = export_of(adapters, engine, tmp_path / "ours", "base", open_parameters(source, 0))
    export.write(lambda row: engine.parameter(row.name))
    assert_same_logits(engine, peft.PeftModel.from_pretrained(model_in(tmp_path / "base"), tmp_path / "ours"), tokens)
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
    assert (wanted.r, wanted.init_lora_weights) == (export.about["r"], export.about["init_lora_weights"])
    assert wanted.lora_alpha == pytest.approx(export.about["lora_alpha"])


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
        torch.manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "ia3_l" in name:
                    parameter.uniform_(0.5, 1.5)
        return model

    with transformers_judge.doubled():
        model = made("float64")
        loss = transformers_judge.backward(model, tokens, marks)
        gradients = trained(model, lambda p: p.grad)
        runs = [engine_of(config, model, adapters, precision, hyper()) for precision in (FP64, FP32)]
        count = np.count_nonzero(marks != -100)
        for run, bound in zip(runs, (1e-9, 1e-5), strict=True):
            run.micro_step(Batch(tokens, marks))
            found = {name: value / count for name, value in by_name(run, run.gradient).items()}
            assert_close(found, gradients, bound)
            assert run.update(1, 0.0).loss == pytest.approx(loss, rel=bound)
        model = made("float64")
        runs = [engine_of(config, model, adapters, precision, hyper()) for precision in (FP64, FP32)]
        assert_same_run(config, model, runs, adamw_of(model, lambda p: False))
    export_base(config, tmp_path / "base")
    theirs, source = made("float32"), find_source(str(tmp_path / "base"))
    theirs.save_pretrained(tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", parsed)
    assert read.adapters == adapters
    run = runs[1]
    run.load(read.values(open_parameters(source, 0))(run.plan.rows))
    assert_same_logits(run, theirs, tokens)
    export_of(adapters, run, tmp_path / "ours", tmp_path / "base").write(lambda row: run.parameter(row.name))
    one, other = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert one.keys() == other.keys() and all(np.array_equal(value, other[name]) for name, value in one.items())
    assert_same_logits(run, peft.PeftModel.from_pretrained(model_in(tmp_path / "base"), tmp_path / "ours"), tokens)
    merge(source, {tmp_path / "ours": 1.0}, tmp_path / "merged", dtype=None, overwrite=False)
    assert_same_weights(tmp_path / "merged", theirs.merge_and_unload())


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
        runs = []
        for precision in (FP64, FP32):
            spec = Spec(parsed, precision, Memory(), hyper(), families.BATCH, LENGTH, adapters=adapters)
            runs.append(loaded(spec, lambda row: named))
        assert_same_run(config, model, runs, adamw_of(model))
