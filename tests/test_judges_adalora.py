"""AdaLoRA against PEFT, live: gradients with the regulariser, a schedule with its ranks, folders, merged models."""

from dataclasses import replace

import numpy as np
import pytest
from adapter_cases import export_of
from golden import families, transformers_judge
from golden.engines import FP32, FP64
from golden.peft_judge import (
    adamw_of,
    assert_close,
    assert_same_gradients,
    assert_same_logits,
    assert_same_tensors,
    assert_same_weights,
    by_name,
    changed,
    drawn,
    engine_of,
    export_base,
    hyper,
    loaded_from,
    merged_with,
    model_in,
    ours,
    peft,
    step_of,
    tensors_of,
    torch,
    trained,
)

from llmq.adapters.adalora import AdaLora, with_triplets
from llmq.adapters.importance import Budget
from llmq.adapters.resolve import open_adapter
from llmq.adapters.targets import chosen, targets
from llmq.data.batches.batch import Batch
from llmq.model.config import read_config

pytestmark = pytest.mark.judge
RANK, ALPHA = 6, 9.0
BUDGET = Budget(2, warmup=3, final=5, interval=4, beta_1=0.8, beta_2=0.7, orth_reg=0.3, total=families.STEPS)
PEFTS = {"target_r": 2, "tinit": 3, "tfinal": 5, "deltaT": 4, "beta1": 0.8, "beta2": 0.7, "orth_reg_weight": 0.3}
NAMES = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def batch_of(config, index):
    """Tokens, and targets that a model which shifts labels by itself can be given."""
    tokens, marks = drawn(config, index)
    marks = marks.copy()
    marks[:, -1] = -100
    return tokens, marks


def made(config, weights, dtype):
    """PEFT's model, with singular values that are not zero, and vectors of about length 1."""
    about = peft.AdaLoraConfig(
        task_type="CAUSAL_LM", init_r=RANK, lora_alpha=ALPHA, total_step=families.STEPS, target_modules=NAMES, **PEFTS
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(transformers_judge.model_of(config, weights, dtype), about)
    return changed(model, {"lora_E": lambda p: p.normal_(), "lora_": lambda p: p.mul_(8)}, seed=None)


def backward(model, tokens, marks):
    """Leaves gradients of PEFT's loss, the regulariser among it; returns the cross-entropy alone."""
    model.zero_grad(set_to_none=True)
    ids, labels = torch.from_numpy(tokens).long(), torch.full(tokens.shape, -100)
    labels[:, 1:] = torch.from_numpy(marks[:, :-1])
    found = model(input_ids=ids, labels=labels)
    found.loss.backward()
    flat, logits = torch.from_numpy(marks).long().reshape(-1), found.logits.detach()
    return torch.nn.functional.cross_entropy(logits.reshape(flat.numel(), -1), flat, ignore_index=-100).item()


def relative_errors(found, right):
    """Errors by name; what is 0 must be that, and what is empty is left out."""
    assert found.keys() == right.keys()
    norms = {name: np.linalg.norm(value) for name, value in right.items() if value.size}
    return {name: np.linalg.norm(found[name] - right[name]) / (norm or 1.0) for name, norm in norms.items()}


def values_as_one(found):
    """The singular values of all maps as one vector: of one that is left alone the gradient may be next to nothing."""
    values = [value.ravel() for name, value in found.items() if "lora_E" in name]
    return {name: value for name, value in found.items() if "lora_E" not in name} | {"lora_E": np.concatenate(values)}


def adapters_of(config):
    every = targets(chosen(",".join(NAMES), read_config(config)), RANK, ALPHA, rslora=False)
    return AdaLora(RANK, ALPHA, with_triplets(every), schedule=BUDGET)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_gradients_are_those_of_peft(family):
    """With the regulariser, in f64 and f32, and the same in two micro-batches."""
    config = families.FAMILIES[family]
    weights, (tokens, marks) = families.weights(config), batch_of(config, 1)
    with transformers_judge.doubled():
        model = made(config, weights, "float64")
        loss = backward(model, tokens, marks)
        gradients = {ours(n): p.grad.numpy() for n, p in model.named_parameters() if p.requires_grad}
        runs = [engine_of(config, model, adapters_of(config), precision, hyper()) for precision in (FP64, FP32)]
    count = np.count_nonzero(marks != -100)
    for run, bound in zip(runs, (1e-9, 1e-5), strict=True):
        assert_same_gradients(run, Batch(tokens, marks), gradients, loss, bound)
        half = [np.where(np.arange(len(marks))[:, None] % 2 == part, marks, -100) for part in (0, 1)]
        for part in (0, 1):
            run.micro_step(Batch(tokens, half[part]), first=part == 0, last=part == 1)
        found = {name: value / count for name, value in by_name(run, run.gradient).items()}
        assert_close(found, gradients, bound)
        assert run.update(1, 0.0).loss == pytest.approx(loss, rel=bound)


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("llama3", "qwen3_tied") else pytest.param(name, marks=pytest.mark.sweep)
        for name in families.FAMILIES
    ],
)
def test_twenty_steps_keep_the_ranks_that_peft_keeps(family, tmp_path):
    """AdamW in f64 and f32, with the schedule; the folder that each writes, read by the other; merged models."""
    config = families.FAMILIES[family]
    weights, parsed, adapters = families.weights(config), read_config(config), adapters_of(config)
    with transformers_judge.doubled():
        model = made(config, weights, "float64")
        runs = [engine_of(config, model, adapters, precision, hyper()) for precision in (FP64, FP32)]
        optimizer, patterns = adamw_of(model, decays=lambda p: p.shape[1] > 1), []  # singular values have none
        for step in range(1, families.STEPS + 1):
            tokens, marks = batch_of(config, step)
            loss = backward(model, tokens, marks)
            step_of(optimizer, step)
            model.base_model.update_and_allocate(step)
            theirs = model.peft_config["default"].rank_pattern
            patterns.append({} if theirs is None else {ours(n)[:-7]: tuple(flags) for n, flags in theirs.items()})
            for run, bound in zip(runs, (1e-6, 1e-4), strict=True):
                tracked = run.plan.tracked
                tracked.before_step(run, step)
                run.micro_step(Batch(tokens, marks))
                assert run.update(step, families.learning_rate(step)).loss == pytest.approx(loss, rel=bound)
                tracked.after_update(run, step)
                if patterns[-1]:
                    assert tracked.patterns(tracked.kept(run)) == patterns[-1], step
        right = trained(model)
    assert patterns[2] == {} and patterns[3] and len({str(pattern) for pattern in patterns}) > 3
    counts = [sum(map(sum, pattern.values())) for pattern in patterns]
    assert counts[-1] == 2 * len(adapters.targets) and len({sum(flags) for flags in patterns[-1].values()}) > 1
    for run, bound in zip(runs, (1e-6, 1e-4), strict=True):
        assert max(relative_errors(by_name(run, run.parameter), right).values()) < bound
    export_base(config, tmp_path / "base")
    model.float().save_pretrained(tmp_path / "theirs")
    run = runs[1]
    export = run.plan.tracked.exported(export_of(adapters, run, tmp_path / "ours", tmp_path / "base"), run)
    export.write(lambda row: run.parameter(row.name))
    one, other = tensors_of(tmp_path / "ours", tmp_path / "theirs")
    assert {name: value.shape for name, value in one.items()} == {name: value.shape for name, value in other.items()}
    assert any(value.size == 0 for value in one.values())  # a map of which nothing is kept
    assert max(relative_errors(one, other).values()) < 1e-4
    configs = [peft.PeftConfig.from_pretrained(tmp_path / side) for side in ("ours", "theirs")]
    for key in ("init_r", "lora_alpha", "total_step", "rank_pattern", "peft_type", *PEFTS):
        assert getattr(configs[0], key) == getattr(configs[1], key), key
    tokens, marks = batch_of(config, 1)
    loaded = peft.PeftModel.from_pretrained(model_in(tmp_path / "base"), tmp_path / "ours")
    assert_same_logits(run, loaded, tokens)
    read = open_adapter(tmp_path / "ours", parsed)
    kept = {target.module.name: target.kept for target in read.adapters.targets}
    assert kept == patterns[-1] and read.adapters.schedule == replace(BUDGET, spent=True)
    again = loaded_from(tmp_path / "base", read.adapters, read.values)
    assert_same_logits(again, loaded, tokens)
    export = export_of(read.adapters, again, tmp_path / "again", tmp_path / "base")
    export.write(lambda row: again.parameter(row.name))
    assert_same_tensors(tmp_path / "again", tmp_path / "ours")
    with transformers_judge.doubled():  # trained on, with what is kept
        configs[0].inference_mode = False
        theirs = peft.get_peft_model(transformers_judge.model_of(config, weights, "float64"), configs[0])
        peft.set_peft_model_state_dict(theirs, {name: torch.from_numpy(value) for name, value in one.items()})
        backward(theirs, tokens, marks)
        gradients = {ours(n): p.grad.numpy() for n, p in theirs.named_parameters() if p.requires_grad}
    again.micro_step(Batch(tokens, marks))
    count = np.count_nonzero(marks != -100)
    found = {name: value / count for name, value in by_name(again, again.gradient).items()}
    own = {name: found[name][tuple(map(slice, value.shape))] for name, value in gradients.items()}
    assert max(relative_errors(values_as_one(own), values_as_one(gradients)).values()) < 1e-5
    assert all(np.count_nonzero(found[name]) == np.count_nonzero(own[name]) for name in own)
    whole = peft.PeftModel.from_pretrained(model_in(tmp_path / "base"), tmp_path / "theirs")
    assert_same_weights(merged_with(tmp_path, "theirs"), whole.merge_and_unload())
