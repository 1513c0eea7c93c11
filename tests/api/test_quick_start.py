"""`quick_start`: what a strategy is made into, and the run."""

from pathlib import Path

import pytest
from tiny_runs import text_model, tiny_options

import llmq
from llmq.api import quick_start as module
from llmq.errors import MemoryLimitError, UsageError
from llmq.options.parse import Options


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    left_out = ("console", "warmup")
    return {key: value for key, value in tiny_options(tmp_path).items() if key not in left_out} | {"device": "cpu"}


@pytest.mark.parametrize("strategy", module.STRATEGIES)
def test_every_strategy_trains(given, capsys, strategy):
    result = llmq.quick_start(strategy=strategy, **{**given, "steps": 1})
    text = capsys.readouterr().out
    assert result.steps == 1 and result.model_path.is_dir()
    assert text.startswith(f"Strategy {strategy}:\n") and "[Options]" in text


def test_strategies_are_options():
    for strategy, options in module.STRATEGIES.items():
        assert Options.parse({"model": "m", "data": "d", **options}), strategy


def test_auto_takes_the_first_that_fits(given, capsys, monkeypatch):
    """All weights, unless they do not fit."""
    more = {"steps": 1, "global_batch_size": 4, "grad_accumulation": None, "batch_size": None}
    about = {key: value for key, value in (given | more).items() if value is not None}
    assert llmq.quick_start(**about).steps == 1
    assert "lora_rank" not in capsys.readouterr().out.partition("[Options]")[0]
    plan = module.Trainer.plan

    def planned(self, *data, **about):
        if "lora_rank" not in self.config.options:
            raise MemoryLimitError("too large")
        return plan(self, *data, **about)

    monkeypatch.setattr(module.Trainer, "plan", planned)
    assert llmq.quick_start(**{**about, "name": "lora"}).steps == 1
    text = capsys.readouterr().out.partition("[Options]")[0]
    assert "lora_rank" in text and "base_dtype" not in text


def test_an_iterator_is_read_once(given, capsys):
    """Though plans are made of it before."""
    ids = [{"input_ids": [1, 2, 3, 4]}] * 40
    text_model(Path("text"))
    left_out = ("train_file", "eval_file", "batch_size", "grad_accumulation")
    about = {key: value for key, value in given.items() if key not in left_out}
    assert llmq.quick_start(**{**about, "model": "text", "steps": 2, "global_batch_size": 4}, data=iter(ids)).steps == 2


def test_other_words_are_refused():
    with pytest.raises(UsageError, match=r"strategy is 'lorra': give auto, standard, ddp, .*: did you mean lora\?"):
        llmq.quick_start("m", strategy="lorra")
