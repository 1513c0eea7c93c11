"""A run on several ranks from Python, of which the caller is the first."""

import io
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import tiny_options, weights_of

import llmq
from llmq.api import ranks
from llmq.api.ranks import others
from llmq.comm.launch import LocalRank
from llmq.errors import UsageError, WorldError
from llmq.options.parse import Options, arguments_of
from llmq.training.ranks import joined
from llmq.training.records import TrainRecord
from llmq.training.train import run


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = {"batch_size": 1, "global_batch_size": 4, "steps": 4, "device": "cpu"}
    left_out = ("console", "grad_accumulation")
    return {key: value for key, value in tiny_options(tmp_path).items() if key not in left_out} | shape


def on_two(given, **more):
    options = Options.parse(given)
    with others(options, 2) as place, joined(options, place) as ranks:
        return run(options, ranks=ranks, console=io.StringIO(), **more)


@pytest.mark.slow
def test_a_process_beside_this_one_trains_with_it(given):
    alone = llmq.train(**given, name="alone", console=io.StringIO()) if "name" not in given else None
    seen, asked, ids = [], [], np.random.default_rng(0).integers(0, 97, 100)

    def looks(run, record):
        seen.append(record.step)
        asked.append((run.evaluate(ids), run.parameter("model.norm.weight").sum(), run.generate([1, 2], max_tokens=3)))
        if run.step == 3:
            assert asked[-1][0] != run.evaluate() and (isinstance(record, TrainRecord) or run.evaluate() == record.loss)
            run.stop("x")

    result = on_two({**given, "sample_length": 8, "zero_level": 3}, callbacks=[looks])
    assert np.isfinite([loss for loss, *_ in asked]).all() and len({total for _, total, _ in asked}) == 3
    assert all(len(answer.tokens) == 3 for *_, (answer,) in asked)
    assert (result.steps, result.stopped_by, result.exit_code) == (3, "x", 0) and alone is None
    assert result.history.steps("loss").tolist() == [1, 2, 3] and result.best_step == 3 and result.warnings == ()
    assert result.memory["planned"] > 0 and result.log_path.is_file() and result.model_path.is_dir()
    assert seen == [1, 2, 3, 3] and (Path("runs/run") / "rank-00001.log").is_file()
    again = on_two({**given, "sample_length": 8, "zero_level": 3, "continue": "newest"})
    assert again.steps == 4 and again.model_path.is_dir() and weights_of(again.checkpoint_path)


@pytest.mark.slow
def test_an_error_here_ends_the_other(given, monkeypatch):
    started = []
    own = LocalRank.__init__
    monkeypatch.setattr(LocalRank, "__init__", lambda self, *about: started.append(self) or own(self, *about))
    with pytest.raises(ZeroDivisionError):
        on_two(given, callbacks=[lambda run, record: 1 / 0])
    assert [one.poll() is not None for one in started] == [True]


def test_one_that_fails_at_once_is_not_waited_for(given, monkeypatch):
    monkeypatch.setattr(ranks, "PROGRAM", "llmq.absent:main")
    with pytest.raises(
        WorldError, match=r"(?s)rank 1 ended with exit code 1; the end of .*No module named 'llmq.absent'"
    ):
        on_two(given)


def test_arguments_give_the_same_options(given):
    from llmq.cli.train import options_of

    options = Options.parse({**given, "continue": "auto", "train_file": ["train.bin", "train.bin"], "lora_rank": 4})
    assert options_of(arguments_of(options)) == options


def test_gpus_that_are_not_there_are_refused(given):
    with pytest.raises(UsageError, match="gpus 2"):
        llmq.train(**{**given, "device": "auto", "gpus": 2})
    with pytest.raises(UsageError, match="launcher='ray' is for the command"):
        llmq.train(**{**given, "launcher": "ray"})
