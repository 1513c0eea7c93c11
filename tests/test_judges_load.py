"""`llmq.load` against transformers and PEFT, live: fresh random models of every family, adapters of every kind."""

import numpy as np
import pytest

pytest.importorskip("peft", reason="the judge is PEFT")
pytest.importorskip("torch", reason="the judges are torch and transformers")

import peft
import torch
from golden import families, transformers_judge
from golden.peft_judge import changed
from test_judges import LENGTH, MODELS, drawn_batch

import llmq

pytestmark = pytest.mark.judge


def assert_reads_as(model, theirs, tokens, targets):
    """Logits, log p and the loss of a judge in f32, and its hidden states, each within 1e-5 of their size."""
    with torch.no_grad():
        found = theirs(torch.from_numpy(tokens).long(), output_hidden_states=True)
    logits, hidden = (part[:, -tokens.shape[1] :].numpy() for part in (found.logits, found.hidden_states[-1]))
    every = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    scores = np.take_along_axis(every, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    close(model.logits(tokens), logits)
    close(model.hidden(tokens), hidden)
    close(model.score(tokens, targets), np.where(targets == -100, 0, scores))
    after = np.take_along_axis(every[:, :-1], tokens[:, 1:, None].astype(np.int64), axis=-1)[..., 0]
    close(model.score(tokens)[:, :-1], after)
    is_trained = np.arange(tokens.shape[1] - 1) % 3 > 0
    rows = [{"input_ids": row, "labels": [-100, *np.where(is_trained, row[1:], -100)]} for row in tokens]
    assert model.loss(rows) == pytest.approx(-after[:, is_trained].mean(), rel=1e-5)


def close(found, right):
    assert found.dtype == np.float32 and found.shape == right.shape
    assert np.abs(found - right).max() < 1e-5 * max(1, np.abs(right).max())


@MODELS
def test_a_model_reads_as_in_transformers(config, seed, tmp_path):
    """In two batches, of rows shorter than the model was loaded for; its weights are theirs."""
    theirs = transformers_judge.model_of(config, families.weights(config, seed), "float32").eval()
    theirs.save_pretrained(tmp_path / "model")
    batches = [drawn_batch(config, index) for index in range(2)]
    tokens, targets = (np.concatenate(parts)[:3] for parts in zip(*batches, strict=True))
    model = llmq.load(tmp_path / "model", device="cpu", batch_size=2, seq_len=LENGTH + 3)
    assert_reads_as(model, theirs, tokens, targets)
    ours = torch.from_dlpack(model.score(*map(torch.from_numpy, (tokens, targets))))
    assert torch.equal(ours, torch.from_numpy(model.score(tokens, targets)))
    named = dict(theirs.named_parameters())
    assert all(np.array_equal(value, named[name].detach()) for name, value in model.parameters())
    assert {name for name, _ in model.parameters()} == named.keys()


LORA = {"r": 4, "lora_alpha": 10, "target_modules": "all-linear"}
ADAPTERS = {
    "lora": peft.LoraConfig(**LORA),
    "biases": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], bias="all", use_rslora=True),
    "whole": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head", "norm"]),
    "dora": peft.LoraConfig(**LORA, use_dora=True),
    "pissa": peft.LoraConfig(**LORA, init_lora_weights="pissa"),
    "olora": peft.LoraConfig(**LORA, init_lora_weights="olora"),
    "adalora": peft.AdaLoraConfig(init_r=3, target_modules=["q_proj", "up_proj"], total_step=9),
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=5),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=5),
}


@pytest.mark.sample("sweep")
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3", "mistral"])
def test_an_adapter_reads_as_in_peft(kind, family, tmp_path):
    config = families.FAMILIES[family]
    base = transformers_judge.model_of(config, families.weights(config), "float32")
    base.save_pretrained(tmp_path / "base")
    about = ADAPTERS[kind]
    about.task_type = "CAUSAL_LM"
    theirs = peft.get_peft_model(base, about).eval()
    spread = {"magnitude": lambda p: p.mul_(1.2), "ia3_l": lambda p: p.uniform_(0.5, 1.5)}
    changed(theirs, {**spread, "lora_": lambda p: p.add_(torch.randn_like(p) * 0.1), "prompt": lambda p: p.mul_(0.3)})
    theirs.save_pretrained(tmp_path / "adapter")
    model = llmq.load(tmp_path / "base", adapter=tmp_path / "adapter", device="cpu", batch_size=2, seq_len=LENGTH)
    assert_reads_as(model, theirs, *drawn_batch(config, 1))
