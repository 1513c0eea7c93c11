"""What a run must not lose: its steps when an error or a signal ends it, its bits and its records when it goes on."""

import io
import json
import math
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import T, weights_of

import llmq
from llmq.data import stream
from llmq.data.batches import loader
from llmq.data.batches.loader import RankBatches
from llmq.data.tokens.token_file import TokenWriter
from llmq.disk import replaced_name
from llmq.engine.engine import Engine
from llmq.engine.token_sums import TokenSums
from llmq.errors import DataError, NonFiniteError, StorageError, UsageError
from llmq.files.checkpoint import load
from llmq.options.parse import Options
from llmq.report.read import read_log
from llmq.training import ready
from llmq.training import train as training
from llmq.training.faults import NON_FINITE_LIMIT

KEEP = {"ckpt_interval": 5, "ckpt_keep_n": 0}
SAVED = Path("runs/run/checkpoints")


def failing(monkeypatch, name, after, error):
    """The method `name` of the engine raises `error` at its call number `after`, once."""
    real, calls = getattr(Engine, name), []

    def method(*arguments, **numbers):
        calls.append(name)
        if len(calls) == after:
            raise error
        return real(*arguments, **numbers)

    monkeypatch.setattr(Engine, name, method)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        *(pytest.param(one, marks=pytest.mark.slow) for one in (DataError("a bad token"), OSError("gone"))),
    ],
    ids=repr,
)
def test_an_error_within_a_step_keeps_the_steps_before(given, monkeypatch, error):
    whole = llmq.train(**{**given, "name": "whole"})
    failing(monkeypatch, "micro_step", 16, error)  # the last one of step 8
    with pytest.raises(type(error)):
        llmq.train(**{**given, "ckpt_interval": 0})
    assert [path.name for path in SAVED.glob("step*")] == ["step-00000007"]
    (end,) = [event for event in read_log(Path("runs/run/log.jsonl")).events if event["type"] == "end"]
    assert (end["reason"], end["error"]) == ("failed", str(error) or "MemoryError")
    parts = llmq.train(**{**given, "continue": "auto"})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)


def test_a_step_that_is_half_applied_is_not_saved(given, monkeypatch):
    failing(monkeypatch, "update", 8, MemoryError())
    with pytest.raises(MemoryError):
        llmq.train(**given, **KEEP)
    assert [path.name for path in SAVED.glob("step*")] == ["step-00000005"]
    assert "The 2 steps since the last checkpoint are lost: the error came within an update" in said(given)


def test_steps_without_an_update_leave_the_checkpoints_as_they_are(given, monkeypatch):
    spoil(monkeypatch, range(7, 99))
    with pytest.raises(NonFiniteError, match=f"last {NON_FINITE_LIMIT} steps"):
        llmq.train(**{**given, "steps": 40, "ckpt_interval": 6, "ckpt_keep_n": 2})
    assert not read_log(Path("runs/run/log.jsonl")).train["applied"][-NON_FINITE_LIMIT:].any()
    assert sorted(path.name for path in SAVED.glob("step*")) == ["step-00000006", "step-00000012"]


def test_what_an_error_saves_takes_no_other_checkpoint_s_place(given, monkeypatch):
    failing(monkeypatch, "micro_step", 16, DataError("a bad token"))  # the last one of step 8
    with pytest.raises(DataError):
        llmq.train(**{**given, "ckpt_interval": 3, "ckpt_keep_n": 1})
    assert sorted(path.name for path in SAVED.glob("step*")) == ["step-00000006", "step-00000007"]


def spoil(monkeypatch, steps):
    """The updates of these steps count as not applied, with a gradient that is not finite."""
    real = Engine.update

    def update(self, step, rate, *more):
        done = real(self, step, rate, *more)
        return replace(done, applied=False, norm=math.inf) if step in steps else done

    monkeypatch.setattr(Engine, "update", update)


def ruined(given, why):
    """The result of a run that exports nothing for this reason, and that of one that should nonetheless."""
    result = llmq.train(**given)
    assert (result.exit_code, result.model_path) == (5, None) and why in result.warnings[-1]
    assert not Path("runs/run/model").exists() and not list(Path("runs/run").glob(".*"))
    again = llmq.train(**given | {"continue": "newest"})  # has no step left, and knows of the last one
    assert (again.exit_code, again.model_path) == (5, None)
    anyway = llmq.train(**given | {"continue": "newest"}, export_anyway=True)
    assert (anyway.exit_code, anyway.model_path) == (0, Path("runs/run/model"))
    assert (anyway.model_path / "model.safetensors").is_file()
    assert f"The model is exported although {why}" in anyway.warnings[-1]
    return result


def test_a_refused_last_step_exports_nothing_by_default(given, monkeypatch):
    spoil(monkeypatch, [12])
    given |= {"ckpt_interval": 4, "ckpt_keep_n": 1}
    result = ruined(given, "the last step, 12, changed nothing: it was not finite")
    assert sorted(path.name for path in SAVED.glob("step*")) == ["step-00000008", "step-00000012"]  # 8 may be sound
    (warning,) = result.warnings
    assert "the checkpoints of step 8 with --continue" in warning and f"[Warnings]\n  - {warning}" in said(given)
    ends = [event for event in read_log(result.log_path).events if event["type"] == "end"]
    assert (ends[0]["reason"], ends[0]["warnings"]) == ("failed", [warning])
    monkeypatch.undo()
    monkeypatch.chdir(Path(given["model"]).parent)
    assert llmq.train(**given | {"continue": 8, "overwrite": True}).exit_code == 0


@pytest.mark.parametrize("rate", [1e30, 1e6])
def test_a_rate_that_ruins_the_model_is_no_success(given, rate):
    result = llmq.train(**{**given, "learning_rate": rate, "steps": 4, "warmup": 0})
    assert (result.exit_code, result.model_path) == (5, None)
    assert result.checkpoint_path == SAVED / "step-00000004"


@pytest.fixture
def blind(given):
    """A run of one step without data to evaluate on: no loss is measured after its update."""
    del given["eval_file"], given["eval_every_n_steps"]
    return {**given, "steps": 1, "warmup": 0}


def test_a_last_update_that_ruins_the_model_is_found_without_an_evaluation(blind):
    """Weights of 1e30 are finite, but what they compute is not; a run that resumes there finds it, too."""
    ruined({**blind, "learning_rate": 1e30}, "after the last step the loss of a batch is nan")


def test_a_last_update_that_makes_the_model_worse_than_a_guess_is_a_warning(blind):
    first, found = llmq.train(**{**blind, "learning_rate": 100}).warnings
    assert first.startswith("--learning-rate 100 moves weights by up to that much in every step")
    assert found.startswith("The loss ended at ") and "of a guess: lower --learning-rate" in found
    assert llmq.train(**blind, overwrite=True).warnings == ()


def test_a_rate_of_zero_is_a_warning(blind):
    result = llmq.train(**{**blind, "learning_rate": 0})
    assert result.exit_code == 0
    assert result.warnings == ("--learning-rate 0 trains nothing: the weights do not change",)
    assert said(blind).count("--learning-rate 0 trains nothing") == 2  # before the run, and at its end


@pytest.mark.quick("bf16")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weights_that_are_not_finite_export_nothing_by_default(given, monkeypatch, dtype):
    """The step was applied: only the weights themselves tell."""
    real = Engine.parameter

    def parameter(self, name):
        values = real(self, name)
        if name.endswith("mlp.down.weight"):
            values[-1, -1] = np.inf if dtype == "bf16" else np.nan
        return values

    monkeypatch.setattr(Engine, "parameter", parameter)
    ruined({**given, "model_dtype": dtype}, "the weights of layers.0.mlp.down.weight are not all finite")


def test_a_last_evaluation_that_is_not_finite_exports_nothing_by_default(given, monkeypatch):
    """Finite weights can be too large to compute with, and the step that made them was sound."""
    monkeypatch.setattr(Engine, "evaluate", lambda self, batch: TokenSums(math.nan, 1, 0))
    ruined(given, "the loss of the last evaluation is nan")


class Pipe(io.StringIO):
    """A console whose reader goes away."""

    def write(self, text):
        if "step     3" in self.getvalue():
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_run_outlives_its_console(given):
    result = llmq.train(**{**given, "console": Pipe()})
    log = read_log(result.log_path)
    assert result.steps == 12 and log.train["step"][-1] == 12
    assert any("console cannot be written" in event.get("text", "") for event in log.events)


def test_a_signal_is_heard_while_there_is_no_data(given, monkeypatch):
    """The steps are saved at once, and not after a thread that waits for the network has ended.

    That thread waits 30 seconds, and would be seen to end; on a busy machine the run ends long before.
    """
    monkeypatch.setattr(stream, "JOIN_S", 0.1)
    real, hang, late = RankBatches.read, threading.Event(), []

    def batches(self, *about):
        for number, batch in enumerate(real(self, *about)):
            if number == 9:  # within step 5
                while "[T] step     4" not in given["console"].getvalue():
                    time.sleep(0.01)
                time.sleep(0.3)  # the run has come to wait for it
                os.kill(os.getpid(), signal.SIGTERM)
                late.append(not hang.wait(30))
            yield batch

    monkeypatch.setattr(RankBatches, "read", batches)
    result = llmq.train(**given)
    assert result.exit_code == 75 and not late
    hang.set()
    assert [path.name for path in SAVED.glob("step*")] == ["step-00000004"]


@pytest.mark.slow
def test_an_evaluation_that_a_signal_cuts_off_is_made_up_for(given, monkeypatch):
    whole = llmq.train(**{**given, "name": "whole"})
    real = loader.eval_batches

    def batches(*about):
        yield from real(*about)
        signal.raise_signal(signal.SIGINT)
        yield next(real(*about))

    for at, number in ((4, 1), (12, 3)):  # in the middle of the run, and at its end
        monkeypatch.setattr(loader, "eval_batches", nth(real, batches, number))
        with pytest.raises(KeyboardInterrupt):
            llmq.train(**{**given, "name": f"cut{at}"})
        monkeypatch.setattr(loader, "eval_batches", real)
        parts = llmq.train(**{**given, "name": f"cut{at}", "continue": "auto"})
        assert (parts.steps, parts.eval_loss, parts.train_loss) == (12, whole.eval_loss, whole.train_loss)
        assert parts.checkpoint_path is not None
        one, other = (read_log(result.log_path).eval for result in (whole, parts))
        for column in ("step", "epoch", "loss", "train_loss"):
            assert np.array_equal(one[column], other[column])


def nth(real, other, number):
    calls = []

    def choose(*about):
        calls.append(about)
        return (other if len(calls) == number else real)(*about)

    return choose


def test_what_changed_is_refused_or_logged(given):
    llmq.train(**given, **KEEP)
    with TokenWriter("other.bin", vocab_size=97) as file:
        file.append((np.arange(40 * T + 1) % 97).astype(np.int32))
    with pytest.raises(UsageError, match=r"training files: .*641-"):
        llmq.train(**{**given, "train_file": "other.bin", "continue": 5, "overwrite": True})
    config = Path(given["model"], "config.json")
    text = config.read_text()
    config.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert config.read_text() != text
    with pytest.raises(UsageError, match=r"model rms_norm_eps: 1e-06 in the checkpoint, 1e-05 now"):
        llmq.train(**{**given, "continue": 5, "overwrite": True})
    config.write_text(text)
    for change, says in (
        ({"opt_m_dtype": "bf16"}, r"--opt-m-dtype: fp32 in the checkpoint, bf16 now"),
        ({"seed": 7}, "seed"),
        ({"steps": 8, "continue": 10}, r"step 10, and this run ends after 8: raise --steps"),
    ):
        with pytest.raises(UsageError, match=says):
            llmq.train(**{**given, "continue": 5, "overwrite": True, **change})
    llmq.train(**{**given, "weight_decay": 0, "grad_accumulation": 4, "continue": 5, "overwrite": True})
    rows = "rows per step 4 to 8"
    options = "--grad-accumulation 2 to 4, --weight-decay 0.1 to 0.0, --ckpt-interval 5 to 100"
    assert f"Changed since then: {options}" in said(given) and f", {rows}\n" in said(given)


def test_a_checkpoint_of_an_earlier_release_goes_on_with_the_same_bits(given, monkeypatch):
    """Its schedule was a cosine that never falls, by default; it knows nothing of losses and refused steps."""
    whole = llmq.train(**{**given, "name": "whole"})
    llmq.train(**given, **KEEP)

    def earlier(path, **how):
        state, read = load(path, **how)
        del state["course"], state["rejected"], state["options"]["min_lr"], state["options"]["warmup_ratio"]
        del state["options"]["ckpt_major"], state["options"]["save_best"], state["options"]["reset"]
        state["options"] |= {"lr_schedule": "cosine", "final_lr_fraction": 1.0}
        return {**state, "applied": 5}, read

    monkeypatch.setattr(ready, "load", earlier)
    parts = llmq.train(**{**given, **KEEP, "continue": 5, "overwrite": True})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    assert "Changed since then: --lr-schedule cosine to constant" in said(given)
    given["console"] = io.StringIO()
    spelled = {"lr_schedule": "cosine", "final_lr_fraction": 1.0, **KEEP}
    parts = llmq.train(**{**given, **spelled, "continue": 5, "overwrite": True})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    assert "Changed since then" not in said(given)


def test_checkpoints_below_the_model_outlive_a_kill_within_its_export(given, monkeypatch):
    given |= {"out_dir": "out", "checkpoint_dir": "out/checkpoints", **KEEP}
    whole = llmq.train(**{**given, "name": "whole", "out_dir": "whole", "checkpoint_dir": "whole/checkpoints"})
    llmq.train(**{**given, "steps": 6})
    os.rename("out", replaced_name(Path("out").absolute()))  # what a kill between the two renames leaves
    parts = llmq.train(**{**given, "continue": "auto", "overwrite": True})
    assert "Continued from out/checkpoints/step-00000006" in said(given)
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)


def test_what_is_wrong_is_said_before_what_an_earlier_run_left(given):
    out = llmq.train(**{**given, "steps": 2}).model_path
    for change, error, says in (
        ({}, UsageError, "holds checkpoints of an earlier run"),
        ({"name": "new", "out_dir": str(out)}, StorageError, "already holds a model"),
        ({"train_file": "absent.bin"}, DataError, r"absent\.bin: cannot be read"),
        ({"model": "absent/model/x"}, DataError, "there is no folder absent/model/x"),
        ({"from_scratch": False, "train_file": "absent.bin"}, DataError, r"has no model\.safetensors"),
        ({"from_scratch": False, "train_file": "absent.bin", "dry_run": True}, DataError, r"has no model\.safetensors"),
        ({"adapter": "absent"}, DataError, r"absent has no adapter_config\.json"),
        ({"lora_rank": 4, "lora_targets": "q_porj"}, UsageError, "q_porj"),
        ({"bf16_layers": "layers.9", "matmul_dtype": "e4m3"}, UsageError, r"layers\.9"),
        ({"seq_tiles": 7}, UsageError, "--seq-tiles 7 does not divide"),
        ({"sample_prompts": "absent.txt"}, DataError, r"absent\.txt"),
    ):
        with pytest.raises(error, match=says):
            llmq.train(**{**given, **change})


@pytest.fixture
def signalled(monkeypatch):
    """Makes runs get a signal in their third step."""
    real = Engine.update

    def send(number):
        def update(self, step, rate, *more):
            if step == 3:
                signal.raise_signal(number)
            return real(self, step, rate, *more)

        monkeypatch.setattr(Engine, "update", update)

    return send


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT], ids=["SIGHUP", "SIGINT"])
def test_a_closed_terminal_ends_the_step_and_a_detached_run_stays(given, signalled, number, capfd):
    signalled(number)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert llmq.train(**{**given, "name": "detached", "steps": 5}).steps == 5
        signal.signal(number, signal.SIG_DFL)
        result = training.run(Options.parse({key: value for key, value in given.items() if key != "console"}))
    finally:
        signal.signal(number, before)
    assert (result.exit_code, result.steps) == ({signal.SIGHUP: 75, signal.SIGINT: 130}[number], 3)
    assert ("A second Ctrl-C ends at once" in capfd.readouterr().err) == (number == signal.SIGINT)


def test_ctrl_c_is_raised_in_python_after_the_checkpoint(given, signalled):
    signalled(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llmq.train(**given)
    assert [path.name for path in SAVED.glob("step*")] == ["step-00000003"]
    assert "Stopped after step 3. Resume with:" in said(given)


def test_a_run_that_handles_no_signals_leaves_them_to_its_caller(given, signalled):
    heard, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        signalled(signal.SIGTERM)
        result = llmq.train(**given, handle_signals=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (result.exit_code, result.steps, heard) == (0, 12, [signal.SIGTERM])
    signalled(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llmq.train(**{**given, "name": "cut"}, handle_signals=False)
    assert not list(Path("runs/cut/checkpoints").glob("step*"))


def test_the_last_step_is_saved_before_its_evaluation(given, monkeypatch):
    monkeypatch.setattr(loader, "eval_batches", nth(loader.eval_batches, broken, 3))
    with pytest.raises(OSError, match="gone"):
        llmq.train(**given)
    assert [path.name for path in SAVED.glob("step*")] == ["step-00000012"]


def broken(*about):
    raise OSError("gone")


def test_a_dry_run_for_another_machine_s_gpu_does_not_look_at_this_disk(given, monkeypatch):
    free = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    llmq.train(**{**given, "dry_run": True, "device": "cuda", "gpu": "H200", "model_dtype": "bf16"})
    assert "On disk: the checkpoints" in said(given)
    with pytest.raises(StorageError, match=r"the model in .* 1\.0 MiB are free"):
        llmq.train(**{**given, "dry_run": True})


def test_the_held_out_loss_is_that_of_the_data(given):
    losses = [llmq.train(**{**given, "z_loss": z, "learning_rate": 0, "name": f"z{z}"}).eval_loss for z in (0, 0.1)]
    assert losses[0] == losses[1]


def test_rows_beyond_the_model_s_positions_are_warned_of_and_exported(given):
    config = Path(given["model"], "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 8}))
    result = llmq.train(**given)
    assert "--seq-len 16 exceeds the max_position_embeddings 8" in said(given)
    assert json.loads((result.model_path / "config.json").read_text())["max_position_embeddings"] == T


def said(given):
    return given["console"].getvalue()
