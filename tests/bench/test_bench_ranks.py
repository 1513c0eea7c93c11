"""Several ranks: they measure the same in the same order, agree on what depends on one, and the first prints."""

import json
import statistics
from types import SimpleNamespace

import pytest
from in_process import run_ranks
from tiny_engines import tiny

from llmq.bench import run as bench_run
from llmq.bench.configuration import Configuration
from llmq.bench.ladder import WHOLE
from llmq.cli import bench, shell
from llmq.comm.environment import Place
from llmq.comm.launch import Group, run_group
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import device
from llmq.hardware.device import CPU
from llmq.model.config import to_hf
from llmq.options.commands import BenchOptions


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The host's ceilings without half a second of products and copies."""
    monkeypatch.setattr(device, "measured_peak", lambda dtype: 1e11)
    monkeypatch.setattr("llmq.bench.ladder._host_copy", lambda: 1e10)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def shape(tmp_path):
    """A tiny run, its model a folder."""
    (tmp_path / "config.json").write_text(json.dumps(to_hf(tiny(num_layers=1), "fp32")))
    sizes = {"seq_len": 16, "tokens_per_step": 128, "steps": 2, "warmup": 1}
    return BenchOptions(models=(str(tmp_path),), dtypes=("fp32",), batch_size=(2,), **sizes)


def asked(request, **changes):
    """A request with changes."""
    return request.model_copy(update=changes)


def on_ranks(request, size=2):
    """Ranks that are threads."""
    return run_ranks(size, lambda world: bench_run.run_on(request, {}, "llmq-bench", CPU, world))


@pytest.mark.slow
def test_one_then_all_at_every_level(shape, tmp_path, capsys):
    assert on_ranks(asked(shape, zero_levels=(1, 3), save=f"{tmp_path}/out.json")) == [None, None]
    printed = capsys.readouterr().out
    assert printed.count("Measured ceilings") == 1 and "2 GPUs: x" in printed
    assert "2x16 on 2 GPUs, level 3, 128 tokens a step" in printed
    alone, first, third = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (alone["gpus"], alone["zero_level"], alone["scaling"]) == (1, None, None)
    assert [(one["gpus"], one["zero_level"]) for one in (first, third)] == [(2, 1), (2, 3)]
    assert alone["tokens_per_step"] == first["tokens_per_step"] == 128
    for one in (first, third):
        step_ms, rate = 1e3 * statistics.median(one["step_s"]), one["tokens_per_second"]["median"]
        assert one["scaling"] == pytest.approx(rate / alone["tokens_per_second"]["median"])
        # a step of 128 tokens is two micro-batches of 32 on each of two ranks
        assert one["micro_batch_ms"] == pytest.approx(step_ms / 2) and one["gaps_ms"] == pytest.approx(0, abs=1e-9)
        assert [(rung["family"], rung["ms"]) for rung in one["ladder"]] == [(WHOLE, one["micro_batch_ms"])]


@pytest.mark.slow
def test_the_batch_fits_every_rank_at_every_level(shape, monkeypatch):
    seen, fitting = [], Configuration.fitting_plan

    def plan(one, backend):
        size, rank = one.facts.size, one.facts.rank
        if one.batch_size is None:
            return SimpleNamespace(spec=SimpleNamespace(batch_size=4 if size == 1 else 2 - rank))
        seen.append((size, rank, one.batch_size))
        return fitting(one, backend)

    monkeypatch.setattr(Configuration, "fitting_plan", plan)
    assert on_ranks(asked(shape, batch_size=())) == [None, None]
    assert {batch for *_, batch in seen} == {1} and {(2, 0, 1), (2, 1, 1), (1, 0, 1)} == set(seen)


def refusing(monkeypatch, size, rank):
    """Has no room for the plans of a rank of this many."""
    fitting = Configuration.fitting_plan

    def plan(one, backend):
        if (one.facts.size, one.facts.rank) == (size, rank):
            raise MemoryLimitError("3 GiB are missing")
        return fitting(one, backend)

    monkeypatch.setattr(Configuration, "fitting_plan", plan)


def test_what_is_too_large_for_one_rank_is_refused_on_all(shape, monkeypatch):
    refusing(monkeypatch, 2, 1)

    def work(world):
        with pytest.raises(MemoryLimitError, match="--zero-levels 1 on 2 GPUs: 3 GiB are missing"):
            bench_run.run_on(shape, {}, "llmq-bench", CPU, world)
        return True

    assert run_ranks(2, work) == [True, True]


def test_what_is_too_large_for_one_gpu_is_measured_on_all(shape, monkeypatch, capsys, tmp_path):
    refusing(monkeypatch, 1, 0)
    assert on_ranks(asked(shape, save=f"{tmp_path}/out.json")) == [None, None]
    (found,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["gpus"] == 2 and found["scaling"] is None
    assert "too large for one GPU" in capsys.readouterr().out


def test_tokens_of_a_step_are_whole_micro_batches_of_all(shape):
    with pytest.raises(UsageError, match="not a multiple of micro-batches of 2 x 16, on 3 GPUs: use 96"):
        on_ranks(shape, 3)


def test_gpus_are_started_with_the_same_arguments(shape, monkeypatch, capsys):
    groups = []
    monkeypatch.setattr("llmq.bench.run.run_group", lambda group: groups.append(group) or 7)
    monkeypatch.setattr(device, "gpu_addresses", lambda gpus: ["0000:18:00.0", ""][: gpus or 1])
    monkeypatch.setattr(device, "pick_device", lambda options: CPU)
    monkeypatch.setattr("llmq.bench.run.cores_of_ranks", lambda num, gpus: [frozenset()] * num)
    sizes = ["--seq-len=16", "--batch-size=2", f"--models={shape.models[0]}", "--dtypes=fp32"]
    assert shell.run(bench.command, [*sizes, "--gpus=2", "--zero-levels=3"]) == 7
    (group,) = groups
    assert group.command == ("llmq.cli.start:bench", *sizes, "--gpus=2", "--zero-levels=3") and group.num == 2
    assert shell.run(bench.command, [*sizes, "--gpus=2", "--tokens-per-step=32"]) == 2
    assert "on 2 GPUs: use 64" in capsys.readouterr().err and len(groups) == 1
    assert shell.run(bench.command, [*sizes, "--gpus=0", "--zero-levels=1"]) == 2
    assert "is for several GPUs" in capsys.readouterr().err and len(groups) == 1, "one is here: nothing is started"


@pytest.mark.slow
def test_processes_measure_together(shape, tmp_path):
    """Also without a batch that is asked for."""
    arguments = [f"--models={shape.models[0]}", "--dtypes=e4m3", "--seq-len=16", "--tokens-per-step=4096"]
    arguments += ["--steps=2", "--warmup=1", "--device=cpu", "--zero-levels=0,2", f"--save={tmp_path}/out.json"]
    command = ("llmq.cli.start:bench", *arguments)
    assert run_group(Group(command, Place(0, 2, 0, 2, "127.0.0.1", 0, "a token", "--gpus"), tmp_path)) == 0
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(one["gpus"], one["zero_level"]) for one in found] == [(1, None), (2, 0), (2, 2)]
    assert not (tmp_path / "rank-00001.log").read_text()
