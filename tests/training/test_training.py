"""Training end to end: a run, its files, resuming with the same bits, interrupts, refusals, and what is left."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_tokenizers import byte_level, save
from tiny_runs import T, folder, number_stream, weights_of, write_documents

import llmq
from llmq.cli import shell
from llmq.cli.tokenize_data import command as tokenize
from llmq.data.batches.loader import open_data
from llmq.data.tokens.token_file import TokenWriter
from llmq.engine.advice import Limits, lacking
from llmq.errors import DataError, MemoryLimitError, StorageError, UsageError
from llmq.files.checkpoint import load
from llmq.report.read import read_log
from llmq.training import fp8, prepare
from llmq.training.fp8 import CopyError
from llmq.training.records import EvalRecord, TrainRecord

ROOT = Path(__file__).parents[2]


MOMENTUM = {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "opt_m_dtype": "bf16"}
FP8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "opt_m_dtype": "bf16", "opt_v_dtype": "bf16"}


def test_a_run_learns_logs_saves_and_exports(given):
    records = []
    result = llmq.train(**given, callbacks=[lambda run, record: records.append(record)])
    assert result.exit_code == 0 and result.steps == 12
    assert result.eval_loss < 0.9 * np.log(97)
    assert result.model_path == Path("runs/run/model") and result.checkpoint_path.name == "step-00000012"
    log = read_log(result.log_path)
    assert list(log.train["step"]) == list(range(1, 13)) and list(log.eval["step"]) == [4, 8, 12]
    assert log.train["loss"][-1] == result.train_loss and log.eval["loss"][-1] == result.eval_loss
    assert log.train["lr"][:3] == pytest.approx([5e-3, 1e-2, 1e-2])
    assert log.train["epoch"][9] == pytest.approx(1.0)  # 40 windows, 4 a step
    assert log.train["tokens"][0] == 4 * T
    assert [r.step for r in records if isinstance(r, EvalRecord)] == [4, 8, 12]
    text = given["console"].getvalue()
    for section in ("[Options]", "[System 0]", "[Dataset]", "[Allocator State]", "[T] step    12", "[V] step    12"):
        assert section in text
    assert json.loads((result.model_path / "config.json").read_text())["vocab_size"] == 97


def test_a_sample_is_evaluated_at_the_end_too_unless_all_is_asked_for(given):
    sample, whole = (
        read_log(llmq.train(**{**given, "name": which}, eval_num_steps=1, final_eval=which).log_path).eval
        for which in ("sample", "all")
    )
    assert list(sample["tokens"]) == [2 * T] * 3 and list(whole["tokens"]) == [2 * T] * 2 + [6 * T]
    assert list(sample["loss"][:2]) == list(whole["loss"][:2]) and sample["loss"][2] != whole["loss"][2]


def test_an_error_is_the_first_thing_that_is_seen(given, monkeypatch):
    """The last checks are those of the memory and the disk."""
    monkeypatch.setattr(prepare, "check_free_space", lambda needs: (_ for _ in ()).throw(StorageError("full")))
    with pytest.raises(StorageError, match="full"):
        llmq.train(**given)
    monkeypatch.setattr(
        prepare, "refuse_if_too_large", lambda *arguments: (_ for _ in ()).throw(MemoryLimitError("big"))
    )
    with pytest.raises(MemoryLimitError, match="big"):
        llmq.train(**given)
    assert given["console"].getvalue() == ""


def test_a_terminal_sees_a_run_begin_go_on_and_end(given, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    console = given["console"] = Terminal()
    llmq.train(**given, panel="off")
    shown = console.getvalue()
    assert "Options that are not defaults" in shown and "steps " in shown and "adam_epsilon" not in shown
    assert "Drawing weights of" in shown and "... done, " in shown
    assert "Training" in shown and " 0/12" in shown and "12 steps in 0:00:" in shown
    assert shown.index("[T] step     1 [  8.3%]") < shown.index("Epoch 2") < shown.index("[T] step    11 [ 91.7%]")


def test_an_exported_model_trains_on_from_where_it_was(given):
    first = llmq.train(**given)
    given["console"] = io.StringIO()
    again = {**given, "model": str(first.model_path), "from_scratch": False, "name": "again", "learning_rate": 1e-9}
    second = llmq.train(**{**again, "steps": 4})
    assert second.eval_loss == pytest.approx(first.eval_loss, abs=1e-5)
    assert f"Loading model from {first.model_path} ... done, " in given["console"].getvalue()


RESUMED = {
    "fp32": {},
    "moments in 8 bits": {
        "opt_m_dtype": "int8",
        "opt_v_dtype": "e4m3",
        "fused_update": True,
        "clip_by": "last",
        "grad_accumulation": 1,
    },
    "no masters": {"opt_m_dtype": "e4m3", "opt_v_dtype": "int8", "master_dtype": "none"},
    **{scaling: {**FP8, "fp8_scaling": scaling} for scaling in ("delayed", "current", "rowwise", "blockwise")},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.1},
    "momentum": {**MOMENTUM, "offload_opt_m": True},
    "mixture": {"train_file": ["train.bin", "more.bin"], "weight": [0.75, 0.25], "neftune_alpha": 5},
    "packed": {"packing": True, "seq_len": 24},
    "padded": {"packing": False, "seq_len": 24},
}


@pytest.mark.quick("moments in 8 bits", "delayed", "packed")
@pytest.mark.parametrize("name", RESUMED)
def test_a_continued_run_has_the_bits_of_one_that_was_never_stopped(given, name):
    given |= {**RESUMED[name], "steps": 8}
    rng = np.random.default_rng(0)
    for file, count in (("train", 120), ("eval", 20)) if "packing" in given else (("more", 20),):
        write_documents(file, count, rng)
    whole = llmq.train(**{**given, "name": "whole"})
    llmq.train(**{**given, "ckpt_interval": 5, "ckpt_keep_n": 0})
    parts = llmq.train(**{**given, "continue": 5, "overwrite": True})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    assert parts.eval_loss == whole.eval_loss and parts.train_loss == whole.train_loss
    one, other = (read_log(result.log_path) for result in (whole, parts))
    assert np.array_equal(one.train["loss"], other.train["loss"]) and np.array_equal(one.train["lr"], other.train["lr"])
    assert np.array_equal(one.eval["train_loss"], other.eval["train_loss"])  # the mean over all steps since the last
    courses = [load(result.checkpoint_path)[0]["course"] for result in (whole, parts)]
    assert courses[0] == courses[1] and courses[0]["steps"] == len(courses[0]["first"]) == 8
    exported = [(result.model_path / "model.safetensors").read_bytes() for result in (whole, parts)]
    assert exported[0] == exported[1]


@pytest.mark.slow
def test_a_run_with_states_on_the_host_is_stopped_and_continued_as_one_without(given):
    """Checkpoints do not know where states live: either run continues the other's."""
    given |= {**FP8, "steps": 4, "ckpt_keep_n": 0}
    flags = {"recompute_block": True, "offload_residual": True, "offload_optimizer": True, "stream_weights": True}
    flags |= {"use_zero_copy": True, "write_combined": True, "persistent_quants": False}
    whole = llmq.train(**{**given, "name": "whole"})
    llmq.train(**given, **flags, ckpt_interval=1)
    for more, start in ((flags, 1), ({}, 2)):
        again = llmq.train(**{**given, **more, "continue": start, "overwrite": True})
        assert weights_of(again.checkpoint_path) == weights_of(whole.checkpoint_path)
    hosted = read_log(whole.log_path).header["host_memory"], read_log(again.log_path).header["host_memory"]
    assert hosted[0] == {} and set(hosted[1]) == {"Activations", "Weights", "Master", "Adam M", "Adam V"}
    assert "--write-combined has no effect on the CPU" in given["console"].getvalue()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_run_says_what_it_keeps_on_the_host(given, tmp_path, device):
    """In a column of its own, and slot by slot; on a GPU also how long that memory took."""
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}  # what cuDNN and 16-byte accesses take
    given |= {"model": str(folder(tmp_path / "for the GPU", **shape)), "device": device, "model_dtype": "bf16"}
    flags = {"recompute_block": True, "offload_residual": True, "offload_optimizer": True, "debug_memory": "slots.txt"}
    llmq.train(**{**given, **flags, "steps": 2})
    said = given["console"].getvalue()
    head, *rows = said.split("[Allocator State]")[1].split("  Free")[0].strip("\n").splitlines()
    assert head.split() == ["device", "host"]
    held = {" ".join(words[:-4]): (float(words[-4]), float(words[-2])) for words in map(str.split, rows)}
    assert held["Adam M"][0] == 0 < held["Adam M"][1] and held["Weights"][0] > 0 == held["Weights"][1]
    assert ("Host memory: " in said) == (device == "cuda")
    persistent, *programs = Path("slots.txt").read_text().split("Program ")
    assert any(line.split()[::2] == ["host", "m:embed.weight"] for line in persistent.splitlines())
    assert any(line.startswith("  host") for line in programs[0].splitlines())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [{"model_dtype": "bf16"}, FP8], ids=["bf16", "e4m3"])
def test_a_run_on_the_gpu_has_the_same_bits_wherever_it_is_stopped(given, tmp_path, precision):
    """Stopped after five random steps, each time within the run that continued the one before."""
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}  # what cuDNN and 16-byte accesses take
    given |= {**precision, "model": str(folder(tmp_path / "for the GPU", **shape)), "device": "cuda", "ckpt_keep_n": 0}
    whole = llmq.train(**{**given, "name": "whole", "ckpt_interval": 1})
    steps = random.sample(range(1, 12), 5)
    for stop in (*sorted(steps), 12):

        def watch(run, record, stop=stop):
            if isinstance(record, TrainRecord) and record.step == stop < 12:
                signal.raise_signal(signal.SIGUSR1)

        part = llmq.train(**given, **{"continue": "auto"}, callbacks=[watch])
        same = whole.checkpoint_path.with_name(part.checkpoint_path.name)
        assert (part.exit_code, part.steps) == (0 if stop == 12 else 75, stop)
        assert weights_of(part.checkpoint_path) == weights_of(same), f"stopped after {sorted(steps)}"
    assert part.eval_loss == whole.eval_loss and part.train_loss == whole.train_loss
    exported = [(result.model_path / "model.safetensors").read_bytes() for result in (whole, part)]
    assert exported[0] == exported[1]


def test_a_mixed_run_says_its_shares(given):
    with TokenWriter("more.bin", vocab_size=97) as file:
        file.append((np.arange(7 * T + 1) % 97).astype(np.int32))
    given |= {"train_file": ["train.bin", "more.bin"], "weight": [0.75, "0.25"], "steps": 8}
    result = llmq.train(**given)
    assert "more.bin: 25.00% of the tokens, 8 samples, 1.14 epochs" in given["console"].getvalue()
    shares = read_log(result.log_path).header["dataset"]["mixture"]
    assert [(s["weight"], s["share"], s["samples"]) for s in shares] == [(0.75, 0.75, 24), (0.25, 0.25, 8)]
    with pytest.raises(UsageError, match="mixture: "):
        llmq.train(**{**given, "weight": [0.5, 0.5], "continue": 8, "overwrite": True})


def test_a_run_on_a_stream_goes_on_with_the_same_bits(given, monkeypatch):
    opened = []

    def open_stream(options, vocab_size, seed, **about):
        return replace(open_data(options, vocab_size, seed, **about), train=number_stream(T, vocab_size, opened))

    monkeypatch.setattr(prepare, "open_data", open_stream)
    whole = llmq.train(**{**given, "name": "whole"})
    llmq.train(**{**given, "ckpt_interval": 5, "ckpt_keep_n": 0})
    opened.clear()
    parts = llmq.train(**{**given, "continue": 5, "overwrite": True})
    assert opened[0] > (0, 0, 0)
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    assert np.array_equal(*(read_log(result.log_path).train["epoch"] for result in (whole, parts)))
    with pytest.raises(UsageError, match="set --steps"):
        llmq.train(**{**given, "name": "epochs", "steps": None, "epochs": 1})


FALLS = {**FP8, "log_fp8_every": 2, "ckpt_interval": 5, "ckpt_keep_n": 0}


def strict(monkeypatch, sites):
    """Readings call the copies of these sites low."""
    monkeypatch.setattr(CopyError, "is_low", property(lambda error: bool({*error.sites} & {*sites})))


@pytest.mark.slow
def test_a_site_that_stays_low_is_named(given, monkeypatch):
    strict(monkeypatch, ["layers.0.mlp.down"])
    log = read_log(llmq.train(**{**given, **FALLS}).log_path)
    texts = [event["text"] for event in log.events if event["type"] == "notice"]
    assert len([t for t in texts if "of layers.0.mlp.down stays at" in t and "--fp8-fallback" in t]) == 1
    read = [event for event in log.events if event["type"] == "fp8"]
    assert [event["step"] for event in read] == [0, 2, 4, 6, 8, 10]
    assert {"name", "sites", "amax", "snr_db", "clipped", "flushed"} == read[0]["copies"][0].keys()
    assert "fp8: 12 copies, worst" in given["console"].getvalue()


@pytest.mark.slow
def test_a_site_falls_back_and_a_continued_run_knows(given, monkeypatch):
    strict(monkeypatch, ["layers.0.mlp.down", "layers.0.attention.o"])
    whole = llmq.train(**{**given, **FALLS, "fp8_fallback": True, "name": "whole"})
    plain = llmq.train(**{**given, **FALLS, "name": "plain"})
    assert weights_of(whole.checkpoint_path) != weights_of(plain.checkpoint_path)
    events = read_log(whole.log_path).events
    (event,) = [event for event in events if "fell_back" in event]
    assert (event["step"], event["fell_back"]) == (2, ["layers.0.attention.o", "layers.0.mlp.down"])
    assert [len(event["copies"]) for event in events if event["type"] == "fp8"] == [12, 12, 6, 6, 6, 6]
    llmq.train(**{**given, **FALLS, "fp8_fallback": True, "steps": 7})
    for step in (5, 2):  # a later one, and that of the fallback
        parts = llmq.train(**{**given, **FALLS, "fp8_fallback": True, "continue": step, "overwrite": True})
        assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
        assert parts.train_loss == whole.train_loss
    assert [event["step"] for event in read_log(parts.log_path).events if "fell_back" in event] == [2, 2]  # of both


def test_a_fallback_that_does_not_fit_is_refused(given, monkeypatch):
    strict(monkeypatch, ["layers.0.mlp.down"])
    tight = lambda plan, room: lacking(plan, Limits(plan.total_bytes - 1))  # noqa: E731
    monkeypatch.setattr(fp8, "lacking", tight)
    result = llmq.train(**{**given, **FALLS, "fp8_fallback": True})
    texts = [event["text"] for event in read_log(result.log_path).events if event["type"] == "notice"]
    assert any(text.startswith("layers.0.mlp.down cannot leave fp8: the run needs") for text in texts)
    assert result.steps == 12


AUTO = {**FP8, "matmul_dtype": "auto", "ckpt_interval": 5, "ckpt_keep_n": 0}


def test_auto_takes_fp8_where_it_is_faster_and_a_continued_run_keeps_that(given, monkeypatch):
    timed = []

    def gains(spec, *where, **run):
        """attention.o gains 2 ms, mlp.down 1 ms, the others lose half of one."""
        timed.append(spec)
        sites = {"attention.qkv": 0.5, "attention.o": -2, "mlp.up": 0.5, "mlp.down": -1}
        ms = 10 + sum(ms for site, ms in sites.items() if f"layers.0.{site}" not in spec.precision.wide)
        return SimpleNamespace(micro_batch_ms=ms)

    monkeypatch.setattr(fp8, "measure", gains)
    whole = llmq.train(**{**given, **AUTO, "name": "whole"})
    assert len(timed) == 6
    log = read_log(whole.log_path)
    assert "bf16 5.000 ms, e4m3 4.000 ms a layer: e4m3" in log.header["matmuls"]["attention.o"]
    assert log.header["matmuls"]["mlp.up"].endswith(": bf16")
    assert "1.43 times as fast" in given["console"].getvalue()
    wide = {**FP8, "bf16_layers": "attention.qkv,mlp.up"}
    same = llmq.train(**{**given, **wide, "name": "same"})
    assert weights_of(same.checkpoint_path) == weights_of(whole.checkpoint_path)
    llmq.train(**{**given, **AUTO, "steps": 7})
    monkeypatch.setattr(fp8, "measure", lambda *where, **run: pytest.fail("timed again"))
    parts = llmq.train(**{**given, **AUTO, "continue": 5, "overwrite": True})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)


@pytest.mark.slow
def test_auto_times_every_site(given):
    found = read_log(llmq.train(**{**given, **AUTO, "steps": 2}).log_path).header["matmuls"]
    assert found.keys() == {"attention.qkv", "attention.o", "mlp.up", "mlp.down", "together"}
    assert all(float(found[site].split()[1]) > 0 for site in found if site != "together")


def test_auto_needs_a_gpu_to_time(given):
    with pytest.raises(UsageError, match="auto times a GPU"):
        llmq.train(**{**given, **AUTO, "dry_run": True, "device": "cuda", "gpu": "H200"})


def test_continue_without_a_checkpoint_is_an_error_that_names_the_nearest_run(given):
    llmq.train(**{**given, "steps": 2})
    before = sorted(Path("runs").rglob("*"))
    with pytest.raises(DataError, match=r"no checkpoint in runs/rnu/checkpoints .*\n.*--name run \(step 2\)"):
        llmq.train(**{**given, "name": "rnu", "continue": True, "train_file": "absent.bin"})
    assert sorted(Path("runs").rglob("*")) == before


def test_continue_auto_without_a_checkpoint_starts_over_and_warns_each_time(given):
    result = llmq.train(**{**given, "continue": "auto"})
    assert result.steps == 12
    (warning,) = result.warnings
    assert warning == "--continue auto found no checkpoint in runs/run/checkpoints: this run begins at step 0"
    text = given["console"].getvalue()
    assert f"Warning: {warning}\n[T] step     1" in text and text.endswith(f"[Warnings]\n  - {warning}\n")
    assert text.startswith("[Options]") and text.count(warning) == 2  # all is checked before anything is said
    events = read_log(result.log_path).events
    assert [event["text"] for event in events if event.get("warning")] == [warning]
    assert events[-1]["warnings"] == [warning]
    again = llmq.train(**{**given, "continue": "auto", "overwrite": True})
    assert again.warnings == ()


def test_a_model_of_another_run_is_not_replaced_unasked(given):
    llmq.train(**given)
    other = {**given, "name": "other", "out_dir": "other"}
    before = (llmq.train(**other).model_path / "model.safetensors").read_bytes()
    with pytest.raises(StorageError, match="--overwrite"):
        llmq.train(**{**given, "continue": "auto", "steps": 14, "out_dir": "other"})
    assert Path("other/model.safetensors").read_bytes() == before
    assert llmq.train(**{**given, "continue": "auto", "steps": 14, "out_dir": "other", "overwrite": True}).steps == 14
    assert Path("other/model.safetensors").read_bytes() != before


def test_overwrite_starts_a_run_over(given):
    llmq.train(**{**given, "ckpt_interval": 4, "ckpt_keep_n": 0})
    with pytest.raises(DataError):  # nothing goes before all that is new is checked
        llmq.train(**{**given, "overwrite": True, "train_file": "absent.bin"})
    assert len(list(Path("runs/run/checkpoints").iterdir())) == 3
    result = llmq.train(**{**given, "overwrite": True, "steps": 2})
    assert result.steps == 2 and [path.name for path in Path("runs/run/checkpoints").iterdir()] == ["step-00000002"]
    assert sorted(path.name for path in Path("runs/run").iterdir()) == ["checkpoints", "log.jsonl", "model"]
    assert len(read_log(result.log_path).train["loss"]) == 2
    said = given["console"].getvalue()
    assert "--overwrite: removed what an earlier run left: runs/run/checkpoints/step-00000004, " in said
    alone = {**given, "name": "alone", "steps": 2, "console": io.StringIO()}
    assert llmq.train(**alone, overwrite=True).train_loss == result.train_loss
    assert "--overwrite" not in alone["console"].getvalue(), "nothing was there"


def test_a_dry_run_writes_nothing_and_does_not_mind_what_is_there(given, tmp_path):
    def there():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = there()
    result = llmq.train(**given, dry_run=True)
    assert result.exit_code == 0 and there() == before
    text = given["console"].getvalue()
    assert "[Allocator State]" in text and "Activations" in text and "[T]" not in text
    assert f"{result.plan.table()['Activations'] / 2**20:,.1f} MiB" in text and result.plan.total_bytes > 0
    assert llmq.train(**{**given, "steps": 2}).plan is None
    before = there()
    for overwrite in (False, True):
        assert llmq.train(**given, dry_run=True, overwrite=overwrite).exit_code == 0
    assert there() == before


def test_nothing_is_left_also_by_a_run_in_another_thread(given):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads, results = set(threading.enumerate()), []
    thread = threading.Thread(target=lambda: results.append(llmq.train(**given)))
    thread.start()
    thread.join()
    with pytest.raises(UsageError, match="earlier run"):
        llmq.train(**given)
    assert results[0].exit_code == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert set(threading.enumerate()) == threads


def test_a_model_trained_from_scratch_takes_its_tokenizer_and_its_end_token_from_the_data(given, tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<end>"])
    source = save(tokenizer, tmp_path / "letters", {"eos_token": "<end>"})
    Path("text.txt").write_text("abc\n" * 300)
    arguments = ["--input=text.txt", f"--tokenizer={source}", "--eval-fraction=0", "--out-dir=tokens"]
    assert shell.run(tokenize, arguments) == 0
    given |= {"train_file": "tokens/train.bin", "eval_file": "tokens/train.bin", "steps": 2}
    result = llmq.train(**{**given, "model": str(folder(tmp_path / "large", vocab_size=440))})
    for name in ("config.json", "generation_config.json"):
        assert json.loads((result.model_path / name).read_text())["eos_token_id"] == tokenizer.token_to_id("<end>")
    assert (result.model_path / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    tuning = {**given, "model": str(result.model_path), "from_scratch": False, "name": "tuned", "dry_run": True}
    llmq.train(**tuning)
    tokenizer.add_special_tokens(["<other>"])
    tokenizer.save(str(result.model_path / "tokenizer.json"))
    llmq.train(**tuning)  # the ids of before are what they were
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<other>", "<end>"])
    tokenizer.save(str(result.model_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"train\.bin is of another tokenizer"):
        llmq.train(**tuning)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_a_process_that_is_ended_goes_on_with_the_same_bits(given, number):
    """It is never more than a page of output, 40 steps, ahead of its reader."""
    given |= {"steps": 60, "eval_every_n_steps": 0, "ckpt_interval": 3 if number == signal.SIGKILL else 0}
    whole = llmq.train(**{**given, "name": "whole"})
    values = {key: value for key, value in given.items() if key not in ("console", "from_scratch")}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "llmq.cli.train", "--from-scratch", *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pipesize=4096,
    )
    seen = "Checkpoint: runs/run/checkpoints/step-00000006" if number == signal.SIGKILL else "[T] step     5"
    assert any(seen in line for line in process.stdout)
    process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait() == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[number]
    assert ("--continue" in rest) == (number == signal.SIGINT)
    done = llmq.train(**given, **{"continue": "auto"})
    assert weights_of(done.checkpoint_path) == weights_of(whole.checkpoint_path)
