"""--eval-metrics: scores of the model's answers at every evaluation, which change nothing of a run and never end it."""

import json
from pathlib import Path

import numpy as np
import pytest
from small_tokenizers import EOS, byte_level, save
from tiny_runs import folder, weights_of

import llmq
from llmq.cli import shell
from llmq.cli.eval import command
from llmq.errors import UsageError
from llmq.files.manifest import read_manifest
from llmq.report.read import read_log

ROWS = [{"prompt": f"{word} of", "completion": " ships"} for word in ("king", "Aye", "3", "What", "ROMEO") * 6]


@pytest.fixture
def asked(given, tmp_path, monkeypatch):
    """A run on prompts and answers that it learns by heart, and that asks those held out."""
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    tokenizer = byte_level()
    source = folder(tmp_path / "named", vocab_size=tokenizer.get_vocab_size(), max_position=64)
    save(tokenizer, source, {"eos_token": EOS})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("train_file", "eval_file"):
        del given[name]
    about = {
        "model": str(source),
        "data": "rows.jsonl",
        "sample_tokens": 8,
        "eval_answers": 3,
        "steps": 24,
        "eval_every_n_steps": 8,
    }
    return {**given, **about, "learning_rate": 5e-2, "eval_metrics": "exact_match"}


@pytest.mark.slow
def test_scores_are_logged_and_change_no_bit(asked, tmp_path, capsys):
    """Those of the last evaluation are what llmq-eval finds of the exported model; early stopping goes by them."""
    result = llmq.train(**asked)
    found = result.history["eval_exact_match"]
    assert list(result.history.steps("eval_exact_match")) == [8, 16, 24] == list(result.history.steps("eval_loss"))
    steps, values = read_log(result.log_path).metrics["eval_exact_match"]
    assert list(steps) == [8, 16, 24] and np.array_equal(values, found) and found[-1] == 1
    plain = {key: value for key, value in asked.items() if key not in ("eval_metrics", "eval_answers")}
    assert weights_of(llmq.train(**{**plain, "name": "plain"}).checkpoint_path) == weights_of(result.checkpoint_path)
    data = tmp_path / "held.jsonl"
    data.write_text(json.dumps(ROWS[0]) + "\n")
    arguments = [f"--model={result.model_path}", f"--data={data}", "--metrics=exact_match", "--device=cpu", "--json"]
    assert shell.run(command, [*arguments, "--max-tokens=8"]) == 0
    assert json.loads(capsys.readouterr().out)["exact_match"] == 1
    early = {"early_stopping_patience": 1, "early_stopping_metric": "eval_exact_match", "name": "early", "steps": 80}
    assert "eval_exact_match has not improved" in llmq.train(**{**asked, **early}).stopped_by


def test_the_best_checkpoint_is_kept(asked, monkeypatch):
    """By a score that is best in the first evaluation, and again in the last, which is no better."""
    scores = iter([0.5, 0.25, 0.5])
    monkeypatch.setattr("llmq.training.answers.answer_scores", lambda *about: {"rougeL": next(scores)})
    monkeypatch.setattr("llmq.training.answers.require_packages", lambda metrics: None)
    best = {"eval_metrics": "rouge", "save_best": "eval_rougeL", "ckpt_interval": 0, "ckpt_keep_n": 1}
    result = llmq.train(**{**asked, **best})
    kept = {
        path.name: read_manifest(path).metrics["eval_rougeL"] for path in result.checkpoint_path.parent.glob("step-*")
    }
    assert kept == {"step-00000008": 0.5, "step-00000024": 0.5}
    with pytest.raises(UsageError, match="--save-best eval_bleu is of answers: add --eval-metrics"):
        llmq.train(**{**asked, "save_best": "eval_bleu"})


def test_a_failure_is_a_warning(asked, monkeypatch):
    """Said once, below that of the tokenizer; nothing of it is counted by early stopping."""

    def fails(*about):
        raise RuntimeError("no such thing")

    monkeypatch.setattr("llmq.training.answers.answer_scores", fails)
    stopping = {"early_stopping_patience": 1, "early_stopping_metric": "eval_exact_match"}
    result = llmq.train(**{**asked, **stopping})
    assert result.steps == 24 and result.warnings[1:] == ("--eval-metrics failed: RuntimeError: no such thing",)
    assert np.isnan(result.history["eval_exact_match"]).all()
    assert not read_log(result.log_path).metrics


def test_what_cannot_be_asked_is_refused(asked):
    def refused(words, **changes):
        with pytest.raises(UsageError, match=words):
            llmq.train(**{**asked, **changes})

    refused("--eval-metrics goes by evaluations, and this run makes none", eval_every_n_steps=0)
    refused("--eval-answers 3 is for --eval-metrics", eval_metrics=None)
    refused("scores the most likely answers: leave --sample-temperature 0.5 out", sample_temperature=0.5)
    Path("text.jsonl").write_text('{"text": "It is the king. Nothing but ships."}\n' * 40)
    refused("no held-out row has a prompt of fewer than 16 tokens", data="text.jsonl")
    assert llmq.train(**asked, dry_run=True).plan is not None
