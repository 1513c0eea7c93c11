"""Added tokens against transformers, live: losses, gradients and steps of a model that it resizes, and tokenizers."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("peft", reason="the judge is PEFT")
pytest.importorskip("torch", reason="the judges are torch and transformers")

import torch
import transformers
from golden import families, transformers_judge
from golden.engines import FP32, FP64
from golden.peft_judge import adamw_of, assert_same_gradients, assert_same_run, drawn, export_base, hyper, spec_of
from small_tokenizers import EOS, byte_level, save

from llmq.adapters.method import NO_ADAPTERS
from llmq.backends.host import HostBackend
from llmq.data.batches.batch import Batch
from llmq.data.tokens.added_tokens import read_tokens, with_tokens
from llmq.data.tokens.tokenizer import TextTokenizer, copy_tokenizer
from llmq.engine.engine import Engine
from llmq.files.source import find_source, open_parameters
from llmq.model.config import read_config
from llmq.plan.plan import make_plan

pytestmark = pytest.mark.judge
KNOWN, COUNT = families.VOCAB - 2, 5  # tokens before, of two rows less; new ones


def grown(config):
    return {**config, "vocab_size": KNOWN + COUNT}


def resized(config, dtype):
    """transformers' model with rows for the new tokens, which are the mean of the others."""
    model = transformers_judge.model_of(config, families.weights(config), dtype)
    model.resize_token_embeddings(KNOWN + COUNT, mean_resizing=False)
    with torch.no_grad():
        for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            table[KNOWN:] = torch.from_numpy(table[:KNOWN].double().numpy().mean(axis=0).astype(np.float32))
    return model


def source_of(folder):
    """The model of a folder, with rows for the new tokens."""
    found = find_source(str(folder))
    config = replace(found.config, vocab_size=KNOWN + COUNT)
    return replace(found, config=config, new_rows=range(KNOWN, KNOWN + COUNT), stored_rows=families.VOCAB)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_tied"])
def test_losses_gradients_and_steps_are_those_of_a_resized_model(family, tmp_path):
    config = families.FAMILIES[family]
    export_base(config, tmp_path)
    rows = open_parameters(source_of(tmp_path), 0)
    with transformers_judge.doubled():
        model = resized(config, "float64")
        plans = [make_plan(spec_of(read_config(grown(config)), NO_ADAPTERS, it, hyper())) for it in (FP64, FP32)]
        first, *runs = (Engine(plan, HostBackend()) for plan in (plans[0], *plans))
        for run in (first, *runs):
            run.load(rows(run.plan.rows))
        tokens, targets = drawn(grown(config), 1)
        assert (tokens >= KNOWN).any() and (targets >= KNOWN).any()
        loss = transformers_judge.backward(model, tokens, targets)
        assert_same_gradients(first, Batch(tokens, targets), transformers_judge.gradients(model), loss, 1e-9)
        assert_same_run(grown(config), model, runs, adamw_of(model))


def test_transformers_reads_the_same_ids(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    about = {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = save(byte_level(), tmp_path / "base", about)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.add_tokens(["<think>", "a b"])
    theirs.add_tokens(["<|tool|>"], special_tokens=True)
    theirs.save_pretrained(tmp_path / "theirs")
    listed = ["<think>", "a b", {"content": "<|tool|>", "special": True}]
    (tmp_path / "tokens.json").write_text(json.dumps(listed))
    for name in ("base", "theirs"):  # the second has them, in the form in which transformers writes them
        opened = with_tokens(TextTokenizer.open(str(tmp_path / name)), read_tokens(tmp_path / "tokens.json"), print)
        copy_tokenizer(opened.folder, tmp_path / f"{name} now")
        found = transformers.AutoTokenizer.from_pretrained(tmp_path / f"{name} now")
        assert len(found) == len(theirs)
        for text in ("It's <think>a b</think>", "<|tool|>x <|tool|>", "a  b<think>"):
            ids = theirs(text)["input_ids"]
            assert found(text)["input_ids"] == ids
            for skip in (True, False):
                assert found.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
