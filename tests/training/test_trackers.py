"""Trackers of a run while it trains: what they get, from which thread, after a resume, and when they fail or are slow;
and the real packages of three, offline."""

import math
import threading
import time
from pathlib import Path

import pytest
from offline_trackers import wandb_run
from tiny_runs import weights_of

import llmq
from llmq.errors import UsageError
from llmq.report.wandb import export_wandb
from llmq.training import trackers
from llmq.training.trackers import Sender, TrackedRun, Tracker, numbers_of

MINE = {"mine": 2.5}


class Kept(Tracker):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.steps, self.texts, self.ended, self.threads = {}, [], None, set()

    def open(self, run):
        self.run = run
        return run.sent

    def numbers(self, step, values, time):
        self.threads.add(threading.current_thread())
        self.steps.setdefault(step, {}).update(values)

    def text(self, step, name, columns, rows):
        self.texts.append((step, name, list(columns), len(rows)))

    def close(self, end):
        self.ended = end


def logs(run, record):
    run.log(**MINE)


def prompts():
    Path("prompts.jsonl").write_text('{"tokens": [1, 2]}\n{"tokens": [3]}\n')
    return {"sample_prompts": "prompts.jsonl", "sample_tokens": 2, "eval_every_n_steps": 4}


def test_it_gets_the_log_by_name_and_changes_no_bit(given):
    kept = Kept()
    result = llmq.train(**{**given, **prompts(), "steps": 6}, callbacks=[kept, logs])
    alone = llmq.train(**{**given, **prompts(), "steps": 6, "name": "alone"})
    assert weights_of(result.checkpoint_path) == weights_of(alone.checkpoint_path)
    assert [kept.steps[step]["train/loss"] for step in range(1, 7)] == result.history["loss"].tolist()
    assert [kept.steps[step]["eval/loss"] for step in (4, 6)] == result.history["eval_loss"].tolist()
    assert kept.steps[3]["metrics/mine"] == 2.5 and kept.steps[3]["train/applied"] == 1 and kept.steps[3]["epoch"] > 0
    assert kept.texts == [(step, "samples", ["prompt", "completion", "end"], 2) for step in (4, 6)]
    assert kept.run.config["seq_len"] == 16 and kept.run.config["llmq"]["model"] and kept.run.name == "run"
    assert (kept.ended["reason"], kept.ended["eval_loss"]) == ("finished", result.eval_loss)
    assert kept.threads and not kept.threads & {threading.main_thread(), *threading.enumerate()}


def test_a_resumed_run_is_the_same_one_and_sends_no_step_again(given):
    first, second, other = Kept(), Kept(), Kept()
    llmq.train(**{**given, "steps": 6, "ckpt_interval": 4, "ckpt_keep_n": 0}, callbacks=[first])
    again = {**given, "steps": 8, "continue": 4}
    llmq.train(**again, callbacks=[second])
    assert second.run.id == first.run.id and (second.run.resumed, second.run.sent) == (4, 6)
    assert list(first.steps) == [1, 2, 3, 4, 5, 6] and list(second.steps) == [7, 8]
    beside = {"checkpoint_dir": "runs/run/checkpoints", "name": "other", "steps": 8, "continue": 6}
    llmq.register("callback", "another", lambda: other)
    llmq.train(**{**given, **beside}, report_to="another")
    assert other.run.id != first.run.id and list(other.steps) == [7, 8]


def test_every_number_of_a_record_has_its_name():
    gpu = {"type": "gpu", "time": 1.0, "step": 3, "watts": 655.5, "celsius": None, "throttled": ["power cap"]}
    assert numbers_of(gpu) == {"gpu/watts": 655.5}
    train = {"type": "train", "time": 1.0, "step": 3, "epoch": 0.5, "norm": "Infinity", "applied": False}
    assert numbers_of(train) == {"epoch": 0.5, "train/norm": math.inf, "train/applied": 0.0}
    assert numbers_of({"type": "metrics", "step": 3, "values": {"mine": 2, "loss": "NaN"}}).keys() == {
        "metrics/mine",
        "metrics/loss",
    }
    assert numbers_of({"type": "notice", "step": 3, "text": "hi"}) == {}


@pytest.mark.parametrize("replaces", [False, True])
def test_a_rollback_sends_no_step_again_unless_it_takes_the_place_of_the_first(replaces):
    kept = Kept()
    kept.back = lambda step: replaces
    sender = Sender(kept, TrackedRun("id", "run", Path(), {}))
    for step, loss in ((1, 1.0), (2, 2.0), (3, "NaN"), (1, None), (2, 20.0), (3, 30.0), (4, 40.0)):
        kind = "rollback" if loss is None else "train"
        sender.take({"type": kind, "step": step, "loss": loss, "time": 1.0})
    found = [values["train/loss"] for values in kept.steps.values()]
    assert found == pytest.approx([1, 20, 30, 40] if replaces else [1, 2, math.nan, 40], nan_ok=True)


class Failing(Kept):
    def numbers(self, step, values, time):
        if step == 2:
            raise SystemExit("no such host")
        super().numbers(step, values, time)


class Slow(Kept):
    def numbers(self, step, values, time_):
        time.sleep(60)


def test_one_that_fails_is_said_once_and_left_out(given):
    failing, kept = Failing(), Kept()
    done = llmq.train(**{**given, "steps": 5}, callbacks=[failing, kept, lambda run, record: time.sleep(0.01)])
    (text,) = [one for one in done.warnings if "Failing" in one]
    assert "gets nothing more of this run: SystemExit: no such host" in text and done.exit_code == 0
    assert list(failing.steps) == [1] and list(kept.steps) == [1, 2, 3, 4, 5]
    assert given["console"].getvalue().count(text) == 2  # once more at the end


def test_one_that_is_slow_holds_up_no_step(given, monkeypatch):
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    monkeypatch.setattr(trackers, "FLUSH_S", 0.3)
    began = time.monotonic()
    done = llmq.train(**given, callbacks=[Slow()])
    assert time.monotonic() - began < 50 and done.steps == 12
    printed = given["console"].getvalue()
    assert printed.count("Slow is slower than the run") == 2 and "Slow does not have the end of this run" in printed


def test_its_package_is_asked_for_at_the_start(given, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name, package in {"wandb": "wandb", "tensorboard": "tensorboardX", "mlflow": "mlflow-skinny"}.items():
        with pytest.raises(UsageError, match=rf'pip install "{package}>='):
            llmq.train(**given, report_to=name)
    with pytest.raises(UsageError, match="nonsense is not one of wandb, tensorboard, mlflow"):
        llmq.train(**given, report_to="tensorboard,nonsense")


@pytest.fixture
def offline(given, monkeypatch):
    """Options of a run of six steps, which is saved at the fourth, in a folder where no tracker has a key."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(Path.cwd()))
    return {**given, **prompts(), "steps": 6, "ckpt_interval": 4, "ckpt_keep_n": 0}


@pytest.mark.slow
def test_tensorboard(offline):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: extra [tensorboard]")
    from tensorboardX.proto.event_pb2 import Event

    def events(path):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at:][:8], "little")
            yield Event.FromString(data[at + 12 :][:size])
            at += size + 16

    result = llmq.train(**offline, report_to="tensorboard", callbacks=[logs])
    llmq.train(**{**offline, "steps": 8, "continue": 4}, report_to="tensorboard")
    first, second = (list(events(path)) for path in sorted(Path("runs/run/tensorboard").iterdir()))
    scalars = [(event.step, value) for event in first for value in event.summary.value]
    losses = [value.simple_value for _, value in scalars if value.tag == "train/loss"]
    assert losses == pytest.approx(result.history["loss"].tolist())
    assert {"eval/loss", "metrics/mine", "samples/text_summary", "options/text_summary"} <= {v.tag for _, v in scalars}
    assert [event.step for event in second if event.session_log.status] == [5]  # what the viewer drops
    assert {event.step for event in second if event.summary.value} == {4, 5, 6, 7, 8}


@pytest.mark.slow
def test_wandb(offline):
    pytest.importorskip("wandb", reason="wandb is not installed: extra [wandb]")
    result = llmq.train(**offline, report_to="wandb:project=mine", callbacks=[logs])
    llmq.train(**{**offline, "steps": 8, "continue": 4}, report_to="wandb:project=mine")
    files = sorted(Path("wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    (steps, config, summary), (more, _, _) = map(wandb_run, files)
    assert files[0].name == files[1].name and export_wandb("runs/run", offline=True).run_id in files[0].name
    assert [steps[step]["train/loss"] for step in range(1, 7)] == result.history["loss"].tolist()
    assert steps[6]["metrics/mine"] == 2.5 and steps[6]["samples/_type"] == "table-file" and config["seq_len"] == 16
    assert list(more) == [7, 8] and summary["end/reason"] == "finished"


@pytest.mark.slow
def test_mlflow(offline):
    pytest.importorskip("mlflow", reason="mlflow is not installed: extra [mlflow]")
    from mlflow import MlflowClient

    result = llmq.train(**offline, report_to="mlflow", callbacks=[logs])
    llmq.train(**{**offline, "steps": 8, "continue": 4}, report_to="mlflow")
    client = MlflowClient("mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("llmq").experiment_id])
    found = client.get_metric_history(run.info.run_id, "train/loss")
    assert [one.step for one in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [one.value for one in found[:6]] == result.history["loss"].tolist()
    assert run.data.params["seq_len"] == "16" and math.isclose(run.data.metrics["metrics/mine"], 2.5)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert {f"samples/step-0000000{n}.json" for n in (4, 6, 8)} == {
        one.path for one in client.list_artifacts(run.info.run_id, "samples")
    }
