"""--sample-prompts: completions at every evaluation, in the log and on the console, that change nothing of a run."""

import json
from pathlib import Path

import numpy as np
import pytest
from small_tokenizers import EOS, byte_level, save
from tiny_runs import folder, weights_of

import llmq
from llmq.errors import DataError, MemoryLimitError, UsageError
from llmq.generation.prompts import Question
from llmq.generation.text import Writer
from llmq.hardware import device
from llmq.options.commands import GenerateOptions
from llmq.report.read import read_log
from llmq.training.records import EvalRecord

TOKENS = [[5, 17, 3], [9], [1, 2, 3, 4, 5, 6, 7, 8], [42, 42], [7]]


@pytest.fixture
def asked(given):
    """A run with prompts of tokens, as its data are tokens."""
    Path("prompts.jsonl").write_text("".join(json.dumps({"tokens": prompt}) + "\n" for prompt in TOKENS))
    return {**given, "sample_prompts": "prompts.jsonl", "sample_tokens": 6}


def samples(result):
    return {event["step"]: event["samples"] for event in read_log(result.log_path).events if event["type"] == "samples"}


def test_completions_come_with_every_evaluation_and_change_no_bit(asked, given):
    result = llmq.train(**asked)
    found = samples(result)
    assert list(found) == [4, 8, 12] == list(read_log(result.log_path).eval["step"])
    for shown in found.values():
        assert [one["tokens"] for one in shown] == TOKENS and {one["end"] for one in shown} == {"length"}
        assert all(len(one["new_tokens"]) == 6 and one["text"] is None for one in shown)
    assert found[4] != found[12]
    text = asked["console"].getvalue()
    after = text[text.index("[V] step     4") :].splitlines()[1:]
    assert after[0].startswith("[S] step     4 | [5, 17, 3] -> [") and after[5].startswith("[T] step     5")
    silent = llmq.train(**{**given, "name": "silent"})
    assert weights_of(result.checkpoint_path) == weights_of(silent.checkpoint_path)
    assert not samples(silent) and "Completions" not in read_log(silent.log_path).header["allocator"]
    assert read_log(result.log_path).header["allocator"]["Completions"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("matmuls", ["bf16", "e4m3"])
def test_a_gpu_completes_by_the_weights_that_it_trains(asked, given, tmp_path, matmuls):
    """The last completions are those of the export, callbacks get the same, and the run has the bits of one without."""
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}  # what cuDNN and 16-byte accesses take
    model = str(folder(tmp_path / "for the GPU", **shape))
    on_it = {"model": model, "device": "cuda", "model_dtype": "bf16", "matmul_dtype": matmuls}
    written = {}

    def looks(run, record):
        if isinstance(record, EvalRecord):
            assert run.evaluate() == record.loss
            written[run.step] = [list(one.tokens) for one in run.generate(TOKENS)]
            assert np.isfinite(run.evaluate(np.arange(90)))

    result = llmq.train(**{**asked, **on_it}, callbacks=[looks])
    found = samples(result)
    assert list(found) == [4, 8, 12] and found[4] != found[12]
    assert written == {step: [one["new_tokens"] for one in shown] for step, shown in found.items()}
    silent = llmq.train(**{**given, **on_it, "name": "silent"})
    assert weights_of(result.checkpoint_path) == weights_of(silent.checkpoint_path)
    if matmuls == "bf16":
        writer = Writer(GenerateOptions(model=str(result.model_path), device="cuda", max_tokens=6, batch_size=8))
        written = writer.answers([Question({}, tokens=prompt) for prompt in TOKENS])
        assert [list(one.tokens) for one in written] == [one["new_tokens"] for one in found[12]]


def test_they_need_no_evaluation_data_and_none_is_repeated_by_a_resumed_run(asked):
    del asked["eval_file"]
    first = llmq.train(**{**asked, "steps": 4})
    assert list(samples(first)) == [4]
    kept = first.log_path.read_text().count('"type": "samples"')
    again = llmq.train(**{**asked, "steps": 8, "continue": "newest", "overwrite": True})
    assert list(samples(again)) == [4, 8] and kept == 1
    assert again.log_path.read_text().count('"type": "samples"') == 2


def test_text_is_read_and_shown_by_the_tokenizer_of_the_model(asked, tmp_path):
    tokenizer = byte_level()
    source = folder(tmp_path / "named", vocab_size=tokenizer.get_vocab_size(), max_position=64)
    save(tokenizer, source, {"eos_token": EOS, "chat_template": "{{ messages[0].content }}"})
    Path("rows.jsonl").write_text('{"text": "It is the king. Nothing but ships."}\n' * 40)
    rows = [{"prompt": "It's\nthe"}, {"messages": [{"role": "user", "content": "Nothing"}]}]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    del asked["train_file"], asked["eval_file"]
    result = llmq.train(**{**asked, "model": str(source), "data": "rows.jsonl", "steps": 4})
    (shown,) = samples(result).values()
    assert [row | {} for row in rows] == [
        {k: v for k, v in one.items() if k in ("prompt", "messages")} for one in shown
    ]
    assert all(isinstance(one["text"], str) for one in shown)
    (written,) = llmq.generate(str(result.model_path), [rows[0]["prompt"]], max_tokens=6, device="cpu")
    assert (written.text, written.tokens) == (shown[0]["text"], tuple(shown[0]["new_tokens"]))
    lines = [line for line in asked["console"].getvalue().splitlines() if line.startswith("[S]")]
    assert (
        lines[0].startswith(r'[S] step     4 | "It\'s\nthe" -> "'.replace(r"\'", "'")) and '"Nothing" -> ' in lines[1]
    )


def test_what_cannot_be_completed_is_refused_before_anything_is_printed(asked):
    def refused(error, words, **changes):
        with pytest.raises(error, match=words):
            llmq.train(**{**asked, **changes})

    refused(DataError, r"--sample-prompts none\.txt: cannot be read", sample_prompts="none.txt")
    refused(UsageError, "--eval-every-n-steps 0 makes none", eval_every_n_steps=0)
    refused(UsageError, "prompt 3 has 8 tokens, which with --sample-tokens 60 is more than the 64", sample_tokens=60)
    Path("text.txt").write_text("Once upon a time\n")
    refused(UsageError, "the model has no tokenizer", sample_prompts="text.txt")
    assert asked["console"].getvalue() == ""


def test_their_memory_is_planned_and_leaving_them_out_is_advised(asked, given, monkeypatch):
    with_them, without = (llmq.train(**options, dry_run=True).plan.total_bytes for options in (asked, given))
    assert without < with_them
    monkeypatch.setattr(device, "memory_bytes", lambda *where: (with_them, without))
    with pytest.raises(MemoryLimitError, match="without --sample-prompts"):
        llmq.train(**asked)
