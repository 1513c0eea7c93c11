"""Added tokens against transformers, live: losses, gradients and steps of a model that it resizes, and tokenizers."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("peft", reason="the judge is PEFT")
pytest.importorskip("torch", reason="the judges are torch and transformers")

import peft
import torch
import transformers
from adapter_cases import export_of
from golden import families, transformers_judge
from golden.engines import FP32, FP64, by_name
from golden.peft_judge import (
    ALPHA,
    RANK,
    adamw_of,
    assert_close,
    assert_same_gradients,
    assert_same_logits,
    assert_same_run,
    assert_same_tensors,
    changed,
    drawn,
    export_base,
    hyper,
    loaded,
    merged_with,
    model_in,
    ours,
    spec_of,
    step_of,
    tensors_of,
)
from more_families import MORE
from small_tokenizers import EOS, byte_level, save

from llmq.adapters.added_tokens import grown_for
from llmq.adapters.lora import Lora
from llmq.adapters.method import NO_ADAPTERS
from llmq.adapters.resolve import open_adapter
from llmq.adapters.targets import chosen, targets
from llmq.backends.host import HostBackend
from llmq.data.batches.batch import Batch
from llmq.data.tokens.added_tokens import read_tokens, with_tokens
from llmq.data.tokens.tokenizer import TextTokenizer, copy_tokenizer
from llmq.engine.engine import Engine
from llmq.errors import DataError
from llmq.files.source import find_source, open_parameters
from llmq.generation.prompts import Question
from llmq.generation.text import Writer
from llmq.model.config import read_config
from llmq.options.commands import GenerateOptions
from llmq.plan.plan import make_plan

pytestmark = pytest.mark.judge
KNOWN, COUNT = families.VOCAB - 2, 5  # tokens before, of two rows less; new ones


def grown(config):
    return {**config, "vocab_size": KNOWN + COUNT}


def resized(config, dtype):
    """transformers' model with rows for the new tokens, which are the mean of the others."""
    named = transformers_judge.empty_model(config).named_parameters()
    weights = families.weights(config, 0, {name: tuple(value.shape) for name, value in named})
    model = transformers_judge.model_of(config, weights, dtype)
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
        tokens, marks = drawn(grown(config), 1)
        assert (tokens >= KNOWN).any() and (marks >= KNOWN).any()
        loss = transformers_judge.backward(model, tokens, marks)
        assert_same_gradients(first, Batch(tokens, marks), transformers_judge.gradients(model), loss, 1e-9)
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


def peft_of(config, dtype):
    """PEFT's model with adapters and trainable rows, on the resized one."""
    torch.manual_seed(3)
    ids = [*range(KNOWN, KNOWN + COUNT)]
    names = ["embed_tokens"] if config["tie_word_embeddings"] else ["embed_tokens", "lm_head"]
    made = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
        trainable_token_indices=dict.fromkeys(names, ids),
    )
    return peft.get_peft_model(resized(config, dtype), made)


def lora_of(parsed):
    found = chosen("q_proj,down_proj", parsed)
    return Lora(RANK, ALPHA, targets(found, RANK, ALPHA, rslora=False), new_rows=range(KNOWN, KNOWN + COUNT))


def values_of(model):
    """PEFT's parameters by our names, of which the model's have zeros for the new tokens."""
    named = {}
    for name, p in model.named_parameters():
        name = ours(name).removesuffix(".default").replace(".token_adapter.weight", ".weight")
        value = p.detach().to(torch.float64).numpy().copy()
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            value[KNOWN:] = 0
        named[name] = value
    return named


@pytest.mark.parametrize(
    "config",
    [families.FAMILIES["qwen2"], families.FAMILIES["qwen3_tied"], MORE["gemma3"]],
    ids=lambda it: it["model_type"],
)
def test_rows_beside_adapters_are_trained_as_in_peft(config):
    with transformers_judge.doubled():
        model = peft_of(config, "float64")
        named, parsed = values_of(model), read_config(grown(config))
        runs = [loaded(spec_of(parsed, lora_of(parsed), it, hyper()), lambda row: named) for it in (FP64, FP32)]
        optimizer = adamw_of(model)
        for step in range(1, families.STEPS + 1):
            tokens, marks = drawn(grown(config), step)
            loss = transformers_judge.backward(model, tokens, marks)
            step_of(optimizer, step)
            for run, bound in zip(runs, (1e-9 if step == 1 else 1e-6, 1e-4), strict=True):
                run.micro_step(Batch(tokens, marks))
                assert run.update(step, families.learning_rate(step)).loss == pytest.approx(loss, rel=bound)
        right = values_of(model)
    for run, bound in zip(runs, (1e-6, 1e-4), strict=True):
        found = by_name(run, run.parameter)
        assert {name for name in found if name.endswith("_delta")} == {
            name for name in right if name.endswith("_delta")
        }
        assert_close(found, {name: right[name] for name in found}, bound)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_tied"])
def test_folders_with_rows_go_both_ways(family, tmp_path):
    config = families.FAMILIES[family]
    export_base(config, tmp_path / "base")
    theirs, parsed, (tokens, _) = peft_of(config, "float32"), read_config(grown(config)), drawn(grown(config), 5)
    changed(theirs, {"trainable_tokens_delta": lambda p: p.add_(torch.randn_like(p) * 0.1)})
    theirs.save_pretrained(tmp_path / "theirs")
    source = grown_for(find_source(str(tmp_path / "base")), tmp_path / "theirs")
    assert source.config.vocab_size == KNOWN + COUNT
    read = open_adapter(tmp_path / "theirs", source.config)
    assert read.adapters == lora_of(parsed)
    run = Engine(make_plan(spec_of(source.config, read.adapters)), HostBackend())
    run.load(read.values(open_parameters(source, 0))(run.plan.rows))
    assert_same_logits(run, theirs, tokens)
    export_of(read.adapters, run, tmp_path / "ours", tmp_path / "base").write(lambda row: run.parameter(row.name))
    assert_same_tensors(tmp_path / "ours", tmp_path / "theirs")
    found = peft.PeftModel.from_pretrained(resized(config, "float32"), tmp_path / "ours")
    assert_same_logits(run, found, tokens)
    assert_same_logits(run, model_in(merged_with(tmp_path, "theirs")), tokens)
    about = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = found.generate(input_ids=torch.from_numpy(tokens[:1, :7]).long(), **about)[0, 7:].tolist()
    settings = GenerateOptions(
        model=str(tmp_path / "base"), adapter=str(tmp_path / "ours"), max_tokens=6, device="cpu", ignore_end=True
    )
    (answer,) = Writer(settings, reads_text=False).answers([Question({}, tokens=tuple(tokens[0, :7].tolist()))])
    assert list(answer.tokens) == written


@pytest.mark.parametrize("family", ["qwen2", "qwen3_tied"])
def test_what_peft_stores_of_a_resized_model_is_read(family, tmp_path):
    """Beside the rows the whole matrices, as its base on the disk has fewer rows."""
    config = families.FAMILIES[family]
    export_base(config, tmp_path / "base")
    about = peft_of(config, "float32").peft_config["default"]
    base = model_in(tmp_path / "base")
    base.resize_token_embeddings(KNOWN + COUNT)  # the new rows are random
    theirs = peft.get_peft_model(base, about)
    theirs.save_pretrained(tmp_path / "theirs")
    (stored,) = tensors_of(tmp_path / "theirs")
    assert any(name.endswith("embed_tokens.token_adapter.base_layer.weight") for name in stored)
    source = grown_for(find_source(str(tmp_path / "base")), tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", source.config)
    assert read.adapters == lora_of(read_config(grown(config))) and read.check_base(source, 0) is None
    run = Engine(make_plan(spec_of(source.config, read.adapters)), HostBackend())
    run.load(read.values(open_parameters(source, 0))(run.plan.rows))
    assert_same_logits(run, theirs, drawn(grown(config), 5)[0])


def test_rows_do_not_go_with_an_adapter_of_the_head(tmp_path):
    config = families.FAMILIES["qwen2"]
    model = resized(config, "float32")
    ids = [*range(KNOWN, KNOWN + COUNT)]
    about = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "lm_head"]}
    for said, words in (
        ({"embed_tokens": ids}, "llmq trains one range of ids, in embed_tokens and lm_head"),
        ([3, 4, 9], "llmq trains one range of ids"),
    ):
        made = peft.LoraConfig(**about | {"target_modules": ["q_proj"]}, trainable_token_indices=said)
        peft.get_peft_model(resized(config, "float32"), made).save_pretrained(tmp_path / "theirs")
        with pytest.raises(DataError, match=words):
            open_adapter(tmp_path / "theirs", read_config(grown(config)))
    made = peft.LoraConfig(**about, trainable_token_indices={"embed_tokens": ids})
    peft.get_peft_model(model, made).save_pretrained(tmp_path / "theirs")
    with pytest.raises(DataError, match="does not fit the model"):
        open_adapter(tmp_path / "theirs", read_config(grown(config)))
