"""What callbacks ask of a run that all its ranks carry out: losses on data, parameters."""

import io
import json
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from in_process import train_on_ranks
from safetensors.numpy import load_file
from tiny_runs import text_options, weights_of

import llmq
from llmq import Callback, Trainer
from llmq.errors import DataError, MemoryLimitError, UsageError
from llmq.hardware import device
from llmq.report.read import read_log
from llmq.training import requests
from llmq.training.ranks import Ranks
from llmq.training.records import EvalRecord

ROWS = [{"text": f"the number {i}, " * (1 + i % 5)} for i in range(60)]
HELD_OUT = [{"text": f"another {i}, " * (1 + i % 3)} for i in range(9)]
IDS = np.random.default_rng(0).integers(0, 97, 600)


@pytest.fixture
def on_text(tmp_path, monkeypatch):
    """Options of a small run, without data, in a folder and with a cache of its own."""
    return text_options(tmp_path, monkeypatch)


class Evaluates(Callback):
    """Keeps the loss on some data at an evaluation, and that of the evaluation."""

    def __init__(self, *data):
        self.data, self.found = data, []

    def on_evaluate(self, run, record):
        self.found = [record.loss, *(run.evaluate(one) for one in self.data)]


@pytest.mark.quick("None")
@pytest.mark.parametrize("packing", [None, False, "windows"])
def test_the_loss_on_data_is_that_of_the_same_data_held_out(on_text, packing):
    texts = [row["text"] for row in HELD_OUT]
    kinds = [None, HELD_OUT, pyarrow.Table.from_pylist(HELD_OUT), texts, iter(texts), HELD_OUT[:4]]
    looks = Evaluates(*kinds)
    Trainer(**on_text, packing=packing).train(ROWS, HELD_OUT, callbacks=[looks], console=io.StringIO())
    first, *others, part = looks.found
    assert np.isfinite(first) and others == [first] * 5 and part != first


def test_tokens_are_evaluated_as_those_of_a_token_file(on_text):
    looks = Evaluates(IDS[:100], IDS[100:200])
    Trainer(**on_text).train(IDS, IDS[:100], callbacks=[looks], console=io.StringIO())
    assert looks.found[0] == looks.found[1] != looks.found[2]
    with pytest.raises(DataError, match=r"data has nothing to predict \(1 tokens\)"):
        Trainer(**on_text).train(IDS, IDS[:100], callbacks=[Evaluates(IDS[:1])], console=io.StringIO())


def test_rows_of_a_run_without_held_out_data(on_text):
    asks = {"rows": [{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}], "nothing": None, "untrained": None}
    found = {}

    def looks(run, record):
        found.update({name: run.evaluate(data) for name, data in asks.items()})

    Trainer(**on_text, eval_fraction=0).train(ROWS, callbacks=[looks], console=io.StringIO())
    assert np.isfinite(found["rows"]) and np.isnan(found["nothing"])


def test_a_run_on_a_stream_is_evaluated_too(on_text):
    found = []
    looks = lambda run, record: found.append((run.evaluate(HELD_OUT), run.evaluate()))  # noqa: E731
    Trainer(**{**on_text, "eval_every_n_steps": 0}).train(iter(ROWS), callbacks=[looks], console=io.StringIO())
    assert np.isfinite([loss for loss, _ in found]).all() and np.isnan([loss for _, loss in found]).all()


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ([], DataError, "data has no rows"),
        ([1], DataError, "data: row 1 is an int"),
        (5, UsageError, "data is an int: give a list"),
        ({"a", "b"}, UsageError, "data is a set, whose order differs"),
        (np.full(9, 500), DataError, "500, but the vocabulary has"),
        ([{"input_ids": [1, 2]}, {"input_ids": [1, 500]}], DataError, "data:2: token 1 has the id 500, but"),
        ([{"text": "a long document " * 20}], DataError, "data has a document of 32 tokens, and the longest"),
    ],
)
def test_data_that_cannot_be_evaluated_is_refused(on_text, data, error, match):
    rows = [{"text": "short"}] * 60
    with pytest.raises(error, match=match):
        Trainer(**on_text).train(rows, callbacks=[lambda run, record: run.evaluate(data)], console=io.StringIO())


class Asks(Callback):
    """Asks for all that there is whenever it may."""

    def __init__(self):
        self.losses, self.norms, self.moments = [], [], []

    def look(self, run, moment):
        self.moments.append(moment)
        self.losses.append((run.evaluate(), run.evaluate(IDS[:100])))
        self.norms.append(run.parameter("model.norm.weight"))
        assert run.parameter("model.layers.0.mlp.up_proj.weight").ndim == 2
        with pytest.raises(KeyError, match="lm_head is no parameter"):
            run.parameter("lm_head")

    def on_begin(self, run):
        self.look(run, "begin")

    def on_step(self, run, record):
        self.look(run, "step")

    def on_evaluate(self, run, record):
        self.look(run, "evaluate")
        assert self.losses[-1][0] == record.loss

    def on_checkpoint(self, run, path):
        with pytest.raises(UsageError, match=r"run.evaluate\(\) is for a callback's on_begin, on_step"):
            run.evaluate()

    def on_end(self, run, result):
        self.look(run, "end")


@pytest.mark.quick("3")
@pytest.mark.parametrize("level", [0, 2, 3])
def test_all_ranks_do_what_the_callbacks_of_the_first_ask(given, level):
    given |= {"batch_size": 1, "global_batch_size": 4, "grad_accumulation": None, "steps": 2, "zero_level": level}
    asks, alone = Asks(), Asks()
    alone.on_checkpoint = lambda run, path: run.evaluate()  # of one rank it may
    results, _ = train_on_ranks(2, given, callbacks=[asks])
    llmq.train(**{**given, "zero_level": 0, "batch_size": 1, "name": "alone"}, callbacks=[alone])
    plain, _ = train_on_ranks(2, {**given, "name": "plain"})
    assert weights_of(results[0].checkpoint_path) == weights_of(plain[0].checkpoint_path)
    assert asks.moments == alone.moments == ["begin", "step", "step", "evaluate", "end"]
    np.testing.assert_allclose(asks.losses, alone.losses, rtol=1e-5)
    assert np.array_equal(asks.norms[-1], load_file(results[0].model_path / "model.safetensors")["model.norm.weight"])
    assert len({norm.tobytes() for norm in asks.norms}) == 3  # before the first step, and after each


def test_an_idle_callback_costs_one_agreement_at_each_moment(given, monkeypatch):
    given |= {"batch_size": 1, "global_batch_size": 4, "grad_accumulation": None, "steps": 3}
    agreed, counts, idle = Ranks.agreed, [], lambda run, record: None
    monkeypatch.setattr(Ranks, "agreed", lambda self, value: counts.append(self.rank) or agreed(self, value))
    train_on_ranks(2, given)
    alone, counts[:] = counts.count(1), []
    train_on_ranks(2, {**given, "name": "beside"}, callbacks=[idle])
    assert counts.count(0) == counts.count(1) == alone + 6  # at begin and end, three steps, an evaluation


def test_rows_reach_all_ranks_from_the_first(on_text):
    del on_text["grad_accumulation"]
    Path("rows.jsonl").write_text("".join(f'{{"text": "{row["text"]}"}}\n' for row in ROWS))
    about = {**on_text, "data": "rows.jsonl", "batch_size": 1, "global_batch_size": 2}
    looks, alone = Evaluates(HELD_OUT), Evaluates(HELD_OUT)
    train_on_ranks(2, about, callbacks=[looks])
    llmq.train(**{**about, "name": "alone"}, callbacks=[alone], console=io.StringIO())
    np.testing.assert_allclose(looks.found, alone.found, rtol=1e-5)


def test_what_a_callback_gets_wrong_on_many_ranks_ends_all(given):
    """Before the others hear of it."""
    given |= {"batch_size": 1, "global_batch_size": 4, "grad_accumulation": None}
    with pytest.raises((UsageError, RuntimeError), match="data is an int"):
        train_on_ranks(2, given, callbacks=[lambda run, record: run.evaluate(5)])


@pytest.mark.quick("False")
@pytest.mark.parametrize("catches", [False, True])
def test_a_request_that_fails_ends_all_ranks(given, monkeypatch, catches):
    """Also where a callback would go on: the ranks are no longer together."""
    given |= {"batch_size": 1, "global_batch_size": 4, "grad_accumulation": None}

    def fails(run, *about):
        raise ValueError(f"on rank {run.ranks.rank}")

    def looks(run, record):
        with suppress(ValueError) if catches else nullcontext():
            run.evaluate()

    monkeypatch.setattr(requests, "WORK", {"loss": fails})
    with pytest.raises(ValueError, match="on rank"):
        train_on_ranks(2, given, callbacks=[looks])
    llmq.train(**{**given, "name": "alone", "steps": 2}, callbacks=[lambda run, record: suppressed(run)])


def suppressed(run):
    """A request that fails, on one rank."""
    for _ in range(2):
        with pytest.raises(ValueError, match="on rank 0"):
            run.evaluate()


def test_asking_at_no_moment_of_the_run_is_refused(given):
    runs = []
    llmq.train(**{**given, "steps": 2}, callbacks=[lambda run, record: runs.append(run)])
    with pytest.raises(UsageError, match=r"run.parameter\(\) is for a callback's"):
        runs[0].parameter("model.norm.weight")


def test_all_ranks_know_why_a_callback_stopped(given):
    given |= {"batch_size": 1, "global_batch_size": 4, "grad_accumulation": None}
    stop = lambda run, record: isinstance(record, EvalRecord) and run.stop("enough")  # noqa: E731
    results, _ = train_on_ranks(2, given, callbacks=[stop])
    assert [(result.steps, result.stopped_by) for result in results] == [(4, "enough")] * 2


PROMPTS = [[5, 17, 3], [9], [1, 2, 3, 4, 5, 6, 7, 8], [42, 42]]


class Writes(Callback):
    """Keeps what the model writes."""

    def __init__(self, prompts=PROMPTS, **settings):
        self.prompts, self.settings, self.found = prompts, settings, []

    def on_evaluate(self, run, record):
        self.found.append([one.tokens for one in run.generate(self.prompts, **self.settings)])


def test_callbacks_have_the_model_write_as_sample_prompts_does(given):
    """At every evaluation, changing no bit; the last answers are those of the exported model."""
    Path("prompts.jsonl").write_text("".join(json.dumps({"tokens": prompt}) + "\n" for prompt in PROMPTS))
    writes, both = Writes(max_tokens=6), Writes(max_tokens=6)
    result = llmq.train(**given, sample_length=20, callbacks=[writes])
    plain = llmq.train(**{**given, "name": "plain"})
    assert weights_of(result.checkpoint_path) == weights_of(plain.checkpoint_path)
    about = {"sample_prompts": "prompts.jsonl", "sample_tokens": 6, "name": "samples"}
    asked = llmq.train(**{**given, **about}, callbacks=[both])
    events = [event for event in read_log(asked.log_path).events if event["type"] == "samples"]
    shown = [[tuple(one["new_tokens"]) for one in event["samples"]] for event in events]
    assert writes.found == both.found == shown and len(shown) == 3 and shown[0] != shown[2]
    written = llmq.generate(str(result.model_path), PROMPTS, max_tokens=6, device="cpu")
    assert [one.tokens for one in written] == shown[2]


@pytest.mark.slow
def test_answers_may_be_drawn(given):
    """Others at each step and for each sample, the same in a resumed run; of a low temperature the likeliest."""
    given |= {"sample_length": 20, "ckpt_interval": 4, "ckpt_keep_n": 0}
    draws, again, cold = (Writes(max_tokens=6, samples=count) for count in (3, 3, 1))
    llmq.train(**given, sample_temperature=1.5, callbacks=[draws])
    assert [len({*found}) for found in draws.found] == [12] * 3 and draws.found[0] != draws.found[1]
    llmq.train(**{**given, "overwrite": True, "continue": 4}, sample_temperature=1.5, callbacks=[again])
    assert again.found == draws.found[1:]
    llmq.train(**{**given, "name": "cold"}, sample_temperature=1e-6, callbacks=[cold])
    greedy = Writes(max_tokens=6)
    llmq.train(**{**given, "name": "greedy"}, callbacks=[greedy])
    assert cold.found == greedy.found


def test_text_is_written_by_the_tokenizer_of_the_run(on_text):
    found = {}

    def looks(run, record):
        found["plain"] = run.generate("the number", max_tokens=8)[0]
        found["cut"] = run.generate("the number", max_tokens=8, stop=found["plain"].text[2:4])[0]

    Trainer(**on_text, sample_length=40).train(ROWS, callbacks=[looks], console=io.StringIO())
    assert len(found["plain"].tokens) == 8 and found["plain"].finish_reason == "length"
    assert found["cut"].finish_reason == "stop" and found["plain"].text.startswith(found["cut"].text)
    assert len(found["cut"].text) <= 2


@pytest.mark.quick("3")
@pytest.mark.parametrize("level", [0, 3])
def test_ranks_write_together(given, level):
    given |= {"batch_size": 1, "global_batch_size": 4, "grad_accumulation": None, "zero_level": level, "steps": 4}
    given |= {"sample_length": 20, "sample_temperature": 0.7}
    writes, alone = Writes(max_tokens=5, samples=2), Writes(max_tokens=5, samples=2)
    train_on_ranks(2, given, callbacks=[writes])
    llmq.train(**{**given, "zero_level": 0, "name": "alone"}, callbacks=[alone])
    assert writes.found == alone.found and len(alone.found) == 1


@pytest.mark.parametrize(
    ("options", "settings", "match"),
    [
        ({}, {}, r"run.generate\(\) needs a cache .*: add --sample-length N"),
        ({"sample_length": 9}, {"max_tokens": 3}, r"prompt 3 has 8 tokens, which with max_tokens=3 is more than the 9"),
        ({"sample_length": 9}, {"max_tokens": 0}, r"run.generate\(max_tokens=0\): use 1 or more"),
        ({"sample_length": 9}, {"samples": 2}, r"run.generate\(samples=2\): use 1; or more in a run with"),
        ({"sample_length": 9, "sample_temperature": 1}, {"samples": 0}, r"run.generate\(samples=0\): use 1"),
        ({"sample_length": 9}, {"max_tokens": 1, "stop": ""}, r"run.generate\(stop=\[''\]\): give a text"),
        ({"sample_length": 9}, {"max_tokens": 1, "stop": "x"}, "the model has no tokenizer"),
        ({"sample_length": 9}, {"prompts": "text", "max_tokens": 1}, "the model has no tokenizer"),
        ({"sample_length": 9}, {"prompts": [[97]], "max_tokens": 1}, "token 97 of a prompt is not in the vocabulary"),
        ({"sample_length": 65}, {}, "--sample-length 65 is more than the 64 positions of"),
        ({"sample_length": 1}, {}, "--sample-length 1"),
    ],
)
def test_what_cannot_be_written_is_refused(given, options, settings, match):
    with pytest.raises(UsageError, match=match):
        llmq.train(**{**given, **options}, callbacks=[Writes(**settings)])


@pytest.mark.slow
def test_room_for_answers_is_planned_and_leaving_it_out_is_advised(given, monkeypatch):
    with_it, without = (llmq.train(**{**given, **more}, dry_run=True).plan for more in ({"sample_length": 20}, {}))
    assert without.total_bytes < with_it.total_bytes
    monkeypatch.setattr(device, "memory_bytes", lambda *where: (with_it.total_bytes, without.total_bytes))
    with pytest.raises(MemoryLimitError, match="without --sample-length"):
        llmq.train(**given, sample_length=20)
