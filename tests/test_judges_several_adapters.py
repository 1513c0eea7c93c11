"""Several adapters at once against PEFT, live: each is trained as PEFT does alone, and PEFT runs them in one batch."""

import numpy as np
import pytest

pytest.importorskip("peft", reason="the judge is PEFT")
pytest.importorskip("torch", reason="the judges are torch and transformers")

import peft
import torch
import transformers
from adapter_cases import export_of
from golden import families, transformers_judge
from golden.engines import FP32, FP64, relative_errors
from golden.peft_judge import LENGTH, export_base, loaded, ours

from llmq.adapters.lora import Lora
from llmq.adapters.several import Member, Several
from llmq.adapters.targets import chosen, targets
from llmq.data.batches.batch import Batch
from llmq.model.config import read_config
from llmq.model.optimizer import Hyperparameters
from llmq.optimizers.adamw import AdamW
from llmq.plan.memory import Memory
from llmq.plan.spec import Spec

pytestmark = pytest.mark.judge

# by name: targets as PEFT and as ours have them, rank, alpha, rate, rows, weight decay, clip
ASKED = {
    "wide": (["q_proj", "v_proj", "up_proj"], 8, 10.0, 1e-2, 1, 0.0, 0.0),
    "all": (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], 2, 3.0, 3e-3, 2, 0.1, 0.5),
}
SIZE = sum(asked[4] for asked in ASKED.values())


def lora_config(name):
    modules, rank, alpha, *_ = ASKED[name]
    return peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM")


def peft_model(config, dtype):
    """PEFT's model with random A and B of every adapter."""
    first, *others = ASKED
    base = transformers_judge.model_of(config, families.weights(config), dtype)
    model = peft.get_peft_model(base, lora_config(first), adapter_name=first)
    for name in others:
        model.add_adapter(name, lora_config(name))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return model


def parameters_of(model, name, of=lambda p: p.detach()):
    """Those of one adapter, by our names, in f64."""
    return {
        ours(key.replace(f".{name}.", ".default.")): of(p).to(torch.float64).numpy().copy()
        for key, p in model.named_parameters()
        if f".{name}." in key
    }


def several_of(config):
    members = []
    for name, (modules, rank, alpha, _, rows, decay, clip) in ASKED.items():
        every = targets(chosen(",".join(modules), read_config(config)), rank, alpha, rslora=False)
        hyper = Hyperparameters(AdamW(**{**families.ADAMW, "weight_decay": decay}), clip)
        members.append(Member(name, Lora(rank, alpha, every), rows, hyper=hyper))
    return Several(tuple(members))


def engine_of(config, model, precision):
    """Our engine with the parameters of PEFT's model."""
    about = (read_config(config), precision, Memory(), Hyperparameters())
    named = {ours(name): p.detach().to(torch.float64).numpy() for name, p in model.named_parameters()}
    each = {name: parameters_of(model, name) for name in ASKED}
    spec = Spec(*about, SIZE, LENGTH, adapters=several_of(config))
    return loaded(spec, lambda row: each[row.adapter] if row.adapter else named)


def drawn(config, step):
    """Tokens and targets of all rows."""
    return families.batch(config["vocab_size"], step, SIZE, LENGTH)


def rows_of(name):
    before = [ASKED[other][4] for other in list(ASKED)[: list(ASKED).index(name)]]
    return slice(sum(before), sum(before) + ASKED[name][4])


def of_adapter(engine, name, read):
    """Parameters or gradients of one adapter by PEFT's names."""
    found = {}
    for row in (row for row in engine.plan.rows if row.adapter == name):
        value = read(row.name).reshape(row.part_axes).astype(np.float64)
        found |= {part.name: value[part.start : part.stop] for part in row.parts}
    return found


@pytest.mark.parametrize("family", ["qwen2", "llama3", "qwen3_tied"])
def test_gradients_and_a_run_are_those_of_peft_alone(family):
    config = families.FAMILIES[family]
    a = families.ADAMW
    with transformers_judge.doubled():
        model = peft_model(config, "float64")
        runs = [engine_of(config, model, precision) for precision in (FP64, FP32)]
        right, losses, first = {}, {}, {name: parameters_of(model, name) for name in ASKED}
        for name, (*_, rate, _, decay, clip) in ASKED.items():
            model.set_adapter(name)
            own = [p for p in model.parameters() if p.requires_grad]
            about = {"lr": rate, "betas": (a["beta_1"], a["beta_2"]), "eps": a["epsilon"], "foreach": False}
            optimizer = torch.optim.AdamW(own, weight_decay=decay, **about)
            losses[name] = []
            for step in range(1, 11):
                tokens, marks = (part[rows_of(name)] for part in drawn(config, step))
                losses[name].append(transformers_judge.backward(model, tokens, marks))
                if step == 1:
                    right[name] = parameters_of(model, name, lambda p: p.grad)
                norm = float(torch.sqrt(sum((p.grad**2).sum() for p in own)))
                for p in own:
                    p.grad.mul_(min(1.0, clip / norm) if clip else 1.0)
                optimizer.step()
        after = {name: parameters_of(model, name) for name in ASKED}
    for run, bound in zip(runs, (1e-9, 1e-5), strict=True):
        rates = [asked[3] for asked in ASKED.values()]
        for step in range(1, 11):
            run.micro_step(Batch(*drawn(config, step)))
            for name in ASKED if step == 1 else ():
                count = np.count_nonzero(drawn(config, 1)[1][rows_of(name)] != -100)
                own = {key: value / count for key, value in of_adapter(run, name, run.gradient).items()}
                errors = relative_errors(own, right[name])
                assert max(errors.values()) < bound, max(errors, key=errors.get)
            done = run.update(step, rates)
            for name, one in zip(ASKED, done.groups, strict=True):
                assert one.loss == pytest.approx(losses[name][step - 1], rel=10 * bound)
        for name in ASKED:
            found, wanted = of_adapter(run, name, run.parameter), after[name]
            moved = ({key: v[key] - first[name][key] for key in v} for v in (found, wanted))
            errors = relative_errors(*moved)
            assert max(errors.values()) < (1e-6 if bound == 1e-9 else 1e-2), max(errors, key=errors.get)
            assert max(relative_errors(found, wanted).values()) < 1e-4


def test_peft_loads_what_is_exported_and_runs_it_in_one_batch(tmp_path):
    """PEFT's own mixed batches (`adapter_names`) have the losses that we evaluate."""
    config = families.FAMILIES["qwen2"]
    several = several_of(config)
    export_base(config, tmp_path / "base")
    run = engine_of(config, peft_model(config, "float32"), FP32)
    for step in (1, 2):
        run.micro_step(Batch(*drawn(config, step)))
        run.update(step, 1e-2)
    for member in several.members:
        export = export_of(member.adapters, run, tmp_path / member.name, tmp_path / "base", member=member.name)
        export.write(lambda row: run.parameter(row.name))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    first, *others = ASKED
    model = peft.PeftModel.from_pretrained(base, tmp_path / first, adapter_name=first)
    for name in others:
        model.load_adapter(tmp_path / name, adapter_name=name)
    tokens, marks = drawn(config, 9)
    names = [name for name in ASKED for _ in range(ASKED[name][4])]
    model.eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long(), adapter_names=names).logits
    flat = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), torch.from_numpy(marks).long(), ignore_index=-100, reduction="none"
    ).numpy()
    found = run.evaluate_groups(Batch(tokens, marks))
    assert list(found) == list(ASKED)
    for name, (loss, count) in found.items():
        assert loss == pytest.approx(float(flat[rows_of(name)].sum()), rel=1e-5)
        assert count == np.count_nonzero(marks[rows_of(name)] != -100)
