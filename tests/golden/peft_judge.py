"""What comparisons with PEFT share: its parameters by our names, our engine with them, folders, logits."""

import re

import numpy as np
import pytest

pytest.importorskip("torch", reason="the judges are torch and transformers")
pytest.importorskip("peft", reason="the judge is PEFT")

import peft
import torch
import transformers
from adapter_cases import export_of
from safetensors.numpy import load_file
from tiny_engines import next_logits

from golden import families, transformers_judge
from golden.engines import FP32, by_name, relative_errors, value_of
from llmq.adapters.merge import merge
from llmq.backends.host import HostBackend
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.files.huggingface import Export
from llmq.files.source import find_source, open_parameters
from llmq.model.config import read_config
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import parameter_rows
from llmq.optimizers.adamw import AdamW
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.spec import Spec

LENGTH, RANK, ALPHA = 24, 4, 10.0


def ours(name):
    """Our name of a parameter of PEFT's model."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.", ".")
    name = name.replace("_vector.default.weight", "_vector").replace(".ia3_l.default", ".ia3_l")
    name = re.sub(r"\.lora_([ABE])\.default$", r".lora_\1", name)
    return name.replace(".default.", ".").replace(".base_layer.", ".")


def changed(model, changes, seed=3):
    """The model with parameters changed in place, each by the first of `changes` whose name is a part of its own."""
    if seed is not None:
        torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (part := next((part for part in changes if part in name), None)) is not None:
                changes[part](parameter)
    return model


def moved(model, by, seed):
    """The model with A and B, or what else adapters have but magnitudes, a little beside where they are."""
    return changed(model, {"magnitude": lambda p: None, "lora_": lambda p: p.add_(torch.randn_like(p) * by)}, seed)


def trained(model, of=lambda p: p.detach()):
    """Trained parameters by our names, in f64."""
    return {
        ours(name): of(p).to(torch.float64).numpy().copy() for name, p in model.named_parameters() if p.requires_grad
    }


def spec_of(parsed, adapters, precision=FP32, hyper=None, num_virtual=0):
    """A plan of our engine, with room for virtual tokens."""
    about = (Memory(), hyper or Hyperparameters(), families.BATCH, LENGTH + num_virtual)
    return Spec(parsed, precision, *about, adapters=adapters)


def engine_of(config, model, adapters, precision, hyper=None):
    """Our engine with the parameters of PEFT's model."""
    spec = spec_of(read_config(config), adapters, precision, hyper)
    named = {ours(name): p.detach().to(torch.float64).numpy() for name, p in model.named_parameters()}
    return loaded(spec, lambda row: named)


def loaded(spec, values_of):
    """Our engine with the values of each row's parts by their names, which `values_of` gives for a row."""
    engine = Engine(make_plan(spec), HostBackend())
    engine.load([(row, value_of(row, values_of(row))) for row in engine.plan.rows])
    return engine


def loaded_from(base, adapters, values, num_virtual=0):
    """Our engine in f32 with the values of all rows that `values` makes of those of a folder."""
    source = find_source(str(base))
    engine = Engine(make_plan(spec_of(source.config, adapters, num_virtual=num_virtual)), HostBackend())
    engine.load(values(open_parameters(source, 0))(engine.plan.rows))
    return engine


def assert_same_gradients(run, batch, right, loss, bound):
    """Of a micro-batch, per token, and the loss."""
    run.micro_step(batch)
    count = np.count_nonzero(batch.targets != -100)
    assert_close({name: value / count for name, value in by_name(run, run.gradient).items()}, right, bound)
    assert run.update(1, 0.0).loss == pytest.approx(loss, rel=bound)


def assert_peft_reads(run, adapters, folder, tokens, *, model=None, num_virtual=0):
    """What is exported as `ours` beside the model in `base` computes there what it does here; the loaded model."""
    export_of(adapters, run, folder / "ours", folder / "base", model).write(lambda row: run.parameter(row.name))
    found = peft.PeftModel.from_pretrained(model_in(folder / "base"), folder / "ours")
    assert_same_logits(run, found, tokens, num_virtual)
    return found


def tensors_of(*folders):
    """What the files of adapters have."""
    return [load_file(folder / "adapter_model.safetensors") for folder in folders]


def assert_same_tensors(*folders):
    """The files of two adapters have the same bits."""
    one, other = tensors_of(*folders)
    assert one.keys() == other.keys() and all(np.array_equal(value, other[name]) for name, value in one.items())


def merged_with(folder, name):
    """The folder that we write of the model in `base` and an adapter beside it."""
    source = find_source(str(folder / "base"))
    return merge(source, {folder / name: 1.0}, folder / "merged", dtype=None, overwrite=False).folder


def adamw_of(model, decays=lambda p: p.ndim > 1):
    """AdamW of what is trained, with the weight decay of all runs where `decays`."""
    a, own = families.ADAMW, [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in own if decays(p) == is_decayed], "weight_decay": decay}
        for is_decayed, decay in ((True, a["weight_decay"]), (False, 0.0))
    ]
    about = {"lr": 0.0, "betas": (a["beta_1"], a["beta_2"]), "eps": a["epsilon"], "foreach": False}
    return torch.optim.AdamW([group for group in groups if group["params"]], **about)


def step_of(optimizer, step):
    """A step with the rate of all runs."""
    for group in optimizer.param_groups:
        group["lr"] = families.learning_rate(step)
    optimizer.step()


def assert_same_run(config, model, runs, optimizer, *, of_change=False):
    """20 steps of theirs and of ours, in f64 within 1e-6 of the parameters or `of_change`, in f32 within 1e-4."""
    before = trained(model)
    for step in range(1, families.STEPS + 1):
        loss = transformers_judge.backward(model, *drawn(config, step))
        step_of(optimizer, step)
        for run, bound in zip(runs, (1e-6, 1e-4), strict=True):
            run.micro_step(Batch(*drawn(config, step)))
            assert run.update(step, families.learning_rate(step)).loss == pytest.approx(loss, rel=bound)
    right = trained(model)
    for run, of, bound in zip(runs, (of_change, False), (1e-6, 1e-4), strict=True):
        found, first = by_name(run, run.parameter), before if of else dict.fromkeys(before, 0.0)
        assert_close(*({name: v[name] - first[name] for name in v} for v in (found, right)), bound)


def model_in(folder):
    """The model of a folder, as transformers reads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def assert_same_weights(folder, right):
    """The model of a folder has the weights of another one."""
    named = dict(model_in(folder).named_parameters())
    for name, value in right.named_parameters():
        torch.testing.assert_close(named[name].detach(), value.detach(), rtol=1e-5, atol=1e-6)


def assert_close(found, right, bound):
    errors = relative_errors(found, right)
    assert max(errors.values()) < bound, max(errors, key=errors.get)


def drawn(config, index):
    return families.batch(config["vocab_size"], index, length=LENGTH)


def hyper():
    return Hyperparameters(AdamW(**families.ADAMW), grad_clip=0.0)


def export_base(config, folder):
    """The model without adapters, as a folder."""
    weights, parsed = families.weights(config), read_config(config)
    rows = parameter_rows(parsed)
    Export(folder, parsed, rows, "fp32").write(lambda row: value_of(row, weights).astype(np.float32))


def assert_same_logits(run, model, tokens, num_virtual=0):
    """Of the next token, after a few and after all tokens of a row, with places for virtual ones before them."""
    wanted = transformers_judge.logits_of(model, tokens)[:, -tokens.shape[1] :]
    for row, count in ((0, 3), (1, tokens.shape[1])):
        led = np.concatenate([np.zeros(num_virtual, np.int32), tokens[row, :count]])
        found, right = next_logits(run, led), wanted[row, count - 1]
        assert np.linalg.norm(found - right) < 1e-5 * np.linalg.norm(right)
