"""Runs of --prompt-tuning and --prefix-tuning: what is trained, logged, saved, exported, written, and refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from adapter_cases import adapter_of
from tiny_runs import changed_adapter, write_documents

import llmq
from llmq.generation.prompts import read_questions
from llmq.generation.text import Writer
from llmq.options.commands import GenerateOptions
from llmq.report.read import read_log

COUNT, C, KV = 3, 48, 24
SHAPES = {"prompt_tuning": (COUNT, C), "prefix_tuning": (COUNT, 2 * KV)}
METHODS = pytest.mark.parametrize("method", SHAPES)


@METHODS
def test_they_are_trained_and_exported(based, method):
    whole = llmq.train(**based, **{method: COUNT})
    said = based["console"].getvalue()
    kind = "Embeddings" if method == "prompt_tuning" else "Keys and values in every layer"
    number = COUNT * SHAPES[method][1]
    assert f"{kind} of 3 virtual tokens before each document: {number} of" in said
    assert "3 before each document" in said
    found = adapter_of(whole.model_path)
    assert {name: value.shape for name, value in found.items()} == {"prompt_embeddings": SHAPES[method]}
    config = json.loads((whole.model_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["num_virtual_tokens"]) == (method.upper(), COUNT)
    assert read_log(whole.log_path).train["tokens"][0] == 4 * (based["seq_len"] - COUNT)


@pytest.mark.quick("prompt_tuning")
@METHODS
def test_the_loss_of_evaluation_falls(based, method):
    """A prompt of one model without other options."""
    options = {**based, method: COUNT, "learning_rate": 3e-2}
    begun = llmq.train(**{**options, "steps": 1, "learning_rate": 0.0, "name": "begun"})
    assert llmq.train(**{**options, "steps": 40, "name": "done"}).eval_loss < begun.eval_loss - 0.05


@pytest.mark.quick("prefix_tuning")
@METHODS
def test_packed_and_padded_rows_have_the_same_evaluation(based, method):
    rng = np.random.default_rng(1)
    for name, count in (("train", 80), ("eval", 20)):
        write_documents(name, count, rng)
    options = {**based, method: COUNT, "learning_rate": 0, "steps": 1, "seq_len": 30 + COUNT}
    runs = [{"packing": True}, {"packing": True, "max_docs": 2}, {"packing": False}]
    found = [llmq.train(**{**options, **run, "name": str(n)}) for n, run in enumerate(runs)]
    assert [run.eval_loss for run in found] == pytest.approx([found[0].eval_loss] * 3, rel=1e-6)
    assert found[0].eval_loss != llmq.train(**{**based, "learning_rate": 0, "steps": 1, "name": "plain"}).eval_loss
    packed, *_ = (read_log(run.log_path).train for run in found)
    assert packed["trained_tokens"][0] < packed["tokens"][0] <= 4 * 30


def test_a_prompt_that_peft_began_as_a_text_is_continued(based, tmp_path):
    text = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "Aye", "tokenizer_name_or_path": "base"}
    done = llmq.train(**based, prompt_tuning=COUNT)
    changed_adapter(done.model_path, tmp_path / "made", lambda tensors, about: about.update(text))
    still = {"name": "again", "adapter": "made", "learning_rate": 0.0, "steps": 1}
    assert llmq.train(**{**based, **still}).eval_loss == pytest.approx(done.eval_loss)


@pytest.mark.quick("prefix_tuning")
@METHODS
def test_a_model_writes_with_them_also_while_it_is_trained(based, method):
    Path("prompts.jsonl").write_text('{"tokens": [5, 17, 3]}\n{"tokens": [9]}\n')
    options = {**based, method: COUNT, "sample_prompts": "prompts.jsonl", "sample_tokens": 6, "learning_rate": 0.3}
    done = llmq.train(**{**options, "steps": 12})
    questions = read_questions(Path("prompts.jsonl"))
    about = {"max_tokens": 6, "device": "cpu", "dtype": "fp32"}

    def texts(**more):
        writer = Writer(GenerateOptions(model="base", **about, **more), reads_text=False)
        found = [answer.tokens for answer in writer.answers(questions)]
        assert writer.course.prompt_tokens == 4
        return found

    found = texts(adapter=str(done.model_path))
    *_, last = [event for event in read_log(done.log_path).events if event["type"] == "samples"]
    assert [tuple(record["new_tokens"]) for record in last["samples"]] == found
    assert found != texts() and found == texts(adapter=str(done.model_path), batch_size=1)
    penalized = texts(adapter=str(done.model_path), repetition_penalty=1e9)
    # What a text has is not repeated, and the place of virtual tokens is no token of it.
    assert all(not {5, 17, 3} & set(text) and len(set(text)) == 6 for text in penalized[:1])
