"""When a run saves, which of its checkpoints stay, and what a resumed run may start over."""

import io
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_runs import weights_of

import llmq
from llmq import screen
from llmq.backends.host import HostBackend, HostMemory
from llmq.cli.train import command
from llmq.data.batches import loader
from llmq.engine.engine import Engine
from llmq.engine.token_sums import TokenSums
from llmq.errors import DataError, StorageError, UsageError
from llmq.files.checkpoint import load
from llmq.files.manifest import read_manifest
from llmq.report.read import read_log
from llmq.training import prepare, saving

SAVED = Path("runs/run/checkpoints")
ROOT = Path(__file__).parents[2]
OF_PYTHON = ("console", "from_scratch")  # among the options that are given
BEST = {"save_best": "eval/loss", "ckpt_interval": 3, "ckpt_keep_n": 1}


def steps():
    return sorted(int(path.name[5:]) for path in SAVED.glob("step-*"))


def said(given):
    return given["console"].getvalue()


def after(monkeypatch, step, what):
    """Calls `what` after the update of `step`."""
    real = Engine.update

    def update(self, number, rate, *more):
        done = real(self, number, rate, *more)
        if number == step:
            what()
        return done

    monkeypatch.setattr(Engine, "update", update)


def test_multiples_are_saved_and_never_rotated_out(given):
    llmq.train(**given, ckpt_interval=2, ckpt_keep_n=2, ckpt_major=5)
    assert steps() == [5, 10, 12]


@pytest.mark.parametrize(
    ("losses", "more", "best", "others"),
    [
        ([3.0, 1.0, 2.0], {}, 8, [12]),
        # Step 4 is saved in any case; step 6, which is worse than it and better than step 2, is not.
        ([3.0, 1.0, *[2.0] * 4], {"eval_every_n_steps": 2, "ckpt_interval": 4, "ckpt_keep_n": 0}, 4, [2, 8, 12]),
    ],
)
def test_the_best_by_its_evaluation_is_kept(given, monkeypatch, losses, more, best, others):
    left = iter(losses)
    monkeypatch.setattr(Engine, "evaluate", lambda self, batch: TokenSums(next(left, 5.0), 1, 0))
    llmq.train(**{**given, **BEST, **more})
    assert steps() == sorted([best, *others])
    assert read_manifest(SAVED / f"step-{best:08}").metrics == {"eval/loss": 1.0, "eval/accuracy": 0.0}


def test_the_best_may_be_that_of_the_highest_accuracy_also_in_a_run_that_resumes(given, monkeypatch):
    hits = iter([3, 8, 5, 7])
    monkeypatch.setattr(Engine, "evaluate", lambda self, batch: TokenSums(1.0, 10, next(hits, 0)))
    best = {**BEST, "save_best": "eval_accuracy", "ckpt_interval": 0}
    llmq.train(**{**given, "steps": 6, "eval_every_n_steps": 2}, **best)
    assert steps() == [4, 6]
    llmq.train(**{**given, "steps": 8, "eval_every_n_steps": 2, "continue": "newest", "overwrite": True}, **best)
    assert steps() == [4, 8]


@pytest.mark.parametrize(("num_steps", "kept"), [(6, [4, 5, 6]), (7, [7])])
def test_the_last_good_one_stays_while_steps_are_refused(given, monkeypatch, num_steps, kept):
    real = Engine.update

    def update(self, number, rate, *more):
        done = real(self, number, rate, *more)
        return replace(done, loss=math.nan, applied=False) if number in (5, 6) else done

    monkeypatch.setattr(Engine, "update", update)
    llmq.train(**{**given, "steps": num_steps, "eval_every_n_steps": 0}, ckpt_interval=1, ckpt_keep_n=1)
    assert steps() == kept


@pytest.fixture(autouse=True)
def one_batch_an_evaluation(monkeypatch):
    real = loader.eval_batches
    monkeypatch.setattr(loader, "eval_batches", lambda *about: list(real(*about))[:1])


def test_the_best_is_that_of_all_runs_of_the_folder(given, monkeypatch):
    losses = iter([1.0, 2.0, 1.5])
    monkeypatch.setattr(Engine, "evaluate", lambda self, batch: TokenSums(next(losses, 5.0), 1, None))
    llmq.train(**{**given, "steps": 4}, **BEST)
    llmq.train(**{**given, "continue": "newest", "overwrite": True}, **BEST)
    assert steps() == [4, 12]


def test_the_best_needs_evaluations(given):
    for without in ({"eval_file": None, "eval_every_n_steps": 0}, {"eval_every_n_steps": 0}):
        with pytest.raises(UsageError, match="--save-best goes by evaluations"):
            llmq.train(**{**given, **without}, save_best="eval_loss")
    with pytest.raises(UsageError, match=r"save-best.*eval_loss"):
        llmq.train(**given, save_best="train/loss")


def test_a_file_asks_for_a_checkpoint_and_is_removed(given, monkeypatch):
    asked = Path("runs/run/save")
    after(monkeypatch, 7, asked.touch)
    llmq.train(**given, ckpt_interval=0, ckpt_keep_n=0)
    assert steps() == [7, 12] and not asked.exists()


def test_sigusr1_saves_and_ends_with_75(given, monkeypatch):
    whole = llmq.train(**{**given, "name": "whole"})

    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)

    after(monkeypatch, 5, twice)
    result = llmq.train(**given)
    assert (result.exit_code, steps()) == (75, [5])
    monkeypatch.undo()
    monkeypatch.chdir(Path(given["model"]).parent)
    parts = llmq.train(**given, **{"continue": "newest"})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)


@pytest.mark.parametrize("of_job", ["open_source", "describe"])
def test_sigusr1_while_a_run_is_prepared_ends_it_with_75(given, monkeypatch, of_job):
    def asked(*about, **more):
        os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError("it went on")

    monkeypatch.setattr(prepare, of_job, asked)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if key not in OF_PYTHON]
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as end:
        command().main(["--from-scratch", *flags], standalone_mode=False)
    assert end.value.code == 75 and not SAVED.exists() and signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("continues", [False, True], ids=["fresh", "resumed"])
def test_sigusr1_while_values_are_loaded_ends_the_run_without_the_others(given, monkeypatch, continues):
    if continues:
        llmq.train(**{**given, "steps": 3})
    real, written = HostMemory.write, []

    def write(self, name, values):
        real(self, name, values)
        if name.startswith("master:"):
            written.append(name)
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(HostMemory, "write", write)
    result = llmq.train(**{**given, "continue": "newest" if continues else None, "overwrite": continues})
    assert (result.exit_code, len(written)) == (75, 1) and steps() == ([3] if continues else [])
    text = said(given)
    assert "Stopped after step 3. Resume with:" in text if continues else "Nothing is saved: start again." in text


def test_sigusr1_in_the_first_step_saves_it(given, monkeypatch):
    real = Engine.micro_step

    def micro_step(self, *about, **more):
        os.kill(os.getpid(), signal.SIGUSR1)
        real(self, *about, **more)

    monkeypatch.setattr(Engine, "micro_step", micro_step)
    assert llmq.train(**given).exit_code == 75 and steps() == [1]


def test_steps_go_on_while_a_checkpoint_is_written(given, monkeypatch):
    """The disk hangs from step 4 to step 7; the checkpoint has the bits of step 4 all the same."""
    whole = llmq.train(**{**given, "name": "whole", "steps": 4, "lr_schedule": "constant"})
    go_on, real = threading.Event(), os.fsync

    def sync(file):
        assert threading.current_thread() is threading.main_thread() or go_on.wait(30)
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    after(monkeypatch, 7, go_on.set)
    llmq.train(**given, ckpt_interval=4, ckpt_keep_n=0)
    assert go_on.is_set() and steps() == [4, 8, 12]
    assert weights_of(SAVED / "step-00000004") == weights_of(whole.checkpoint_path)


def test_a_failed_save_ends_the_run_at_its_next_step_and_keeps_the_last(given, monkeypatch):
    def fail():
        for thread in threading.enumerate():
            if thread.name == "llmq-save":
                thread.join()
        monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))

    after(monkeypatch, 7, fail)
    with pytest.raises(StorageError, match=r"No space left on device: .*bytes are free.*earlier checkpoints are as"):
        llmq.train(**given, ckpt_interval=4)
    assert steps() == [4] and list(SAVED.glob(".*")) == []
    assert "steps since the last checkpoint are lost: " in said(given)


def test_short_of_memory_training_waits_and_says_so_once(given, monkeypatch):
    whole = llmq.train(**{**given, "name": "whole"})
    monkeypatch.setattr(saving.device, "memory_bytes", lambda *where: (1 << 40, 1 << 33))
    result = llmq.train(**given, ckpt_interval=4)
    assert said(given).count("Training waits while a checkpoint is written") == 1
    assert weights_of(result.checkpoint_path) == weights_of(whole.checkpoint_path)


def test_verifying_reading_timing_and_saving_show_how_far_they_are(given, monkeypatch):
    llmq.train(**{**given, "steps": 3})
    path, console = SAVED / "step-00000003", io.StringIO()
    monkeypatch.setattr(screen, "PLAIN_S", 0.0)
    monkeypatch.setattr(HostBackend, "prepare", lambda self, calls, report: report(2, 2))
    llmq.train(**{**given, "steps": 4, "console": console, "continue": "newest", "overwrite": True})
    lines = console.getvalue().splitlines()
    work = (f"Verifying {path}", f"Reading {path}", f"Saving {path.with_name('step-00000004')}")
    for what in (*work, "Timing matrix products"):
        shares = [int(line.rpartition("(")[2][:-2]) for line in lines if line.startswith(f"{what}: ")]
        assert shares == sorted(shares) and shares[-1] == 100, f"{what}: {shares}"


def test_a_damaged_newest_one_is_passed_over_with_a_warning(given):
    whole = llmq.train(**given, ckpt_interval=5, ckpt_keep_n=0)
    want = weights_of(whole.checkpoint_path)
    (file,) = (SAVED / "step-00000012").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match="Others there: steps 5, 10"):
        llmq.train(**{**given, "continue": 12, "overwrite": True})
    result = llmq.train(**{**given, "continue": "auto", "overwrite": True})
    assert f"{file} is corrupt" in result.warnings[0] and "step-00000010" in result.warnings[0]
    assert weights_of(result.checkpoint_path) == want


def test_the_optimizer_starts_over(given, monkeypatch):
    llmq.train(**{**given, "steps": 6})
    seen, real = [], Engine.update

    def update(self, number, rate, *more):
        if not seen:
            seen.append({name: array.any() for name, array in self.state() if name in self.plan.moment_names})
        seen.append(number)
        return real(self, number, rate, *more)

    monkeypatch.setattr(Engine, "update", update)
    more = {**given, "overwrite": True, "ckpt_interval": 2}
    llmq.train(**{**more, "steps": 8}, **{"continue": "newest", "reset": "optimizer"})
    assert seen[0] and not any(seen[0].values()) and seen[1:] == [1, 2], "bias correction counts from zero moments"
    llmq.train(**{**more, "steps": 10}, **{"continue": "newest"})
    assert seen[3:] == [3, 4]


def test_the_data_starts_over_and_may_be_other_data(given):
    llmq.train(**{**given, "steps": 6})
    more = {**given, "train_file": "eval.bin", "overwrite": True}
    with pytest.raises(UsageError, match="training files"):
        llmq.train(**more, **{"continue": "newest"})
    result = llmq.train(**more, **{"continue": "newest", "reset": ["data"]})
    state, _ = load(result.checkpoint_path)
    assert (state["step"], state["position"]) == (12, 6 * 4)
    assert llmq.train(**{**more, "steps": 14}, **{"continue": "newest"}).steps == 14


def test_the_schedule_starts_over(given):
    rates = {"warmup": 2, "lr_schedule": "linear", "final_lr_fraction": 0.0, "overwrite": True, "ckpt_interval": 3}
    llmq.train(**{**given, **rates, "steps": 6})
    result = llmq.train(**{**given, **rates}, **{"continue": "newest", "reset": "lr"})
    want = [5e-3, 1e-2, *(1e-2 * (1 - i / 4) for i in range(4))]
    assert read_log(result.log_path).train["lr"][-6:] == pytest.approx(want)
    again = llmq.train(**{**given, **rates}, **{"continue": 9})  # began at step 6 all the same
    assert read_log(again.log_path).train["lr"][-3:] == pytest.approx(want[-3:])


@pytest.mark.slow
def test_the_proofs_hold_in_a_sample(tmp_path):
    numbers = ("--kills=6", "--mutants=60", "--resumes=3", "--saves=24")
    command = [sys.executable, "tests/checkpoint_proofs.py", f"--folder={tmp_path}", *numbers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count("PASS") == len(numbers), done.stdout + done.stderr
