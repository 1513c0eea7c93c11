"""`llmq-bench op`: the different calls of a one-layer plan, their work, and the rows that it prints."""

import json

import fake_gpu
import pytest
from fake_cuda import RTX_4090, FakeDriver
from tiny_engines import FP8, FP32, plan_of, tiny

from llmq.bench.ladder import CallWork, Ceilings
from llmq.bench.op import OpCall, different_calls, one_layer
from llmq.cli import bench, shell
from llmq.engine.measure import Clock
from llmq.model.config import to_hf
from llmq.ops.seam import record

CEILINGS = Ceilings({"bf16": 8e14}, 4e12)


@pytest.fixture
def shape(tmp_path):
    """Options of a tiny model, its shape a folder."""
    (tmp_path / "config.json").write_text(json.dumps(to_hf(tiny(), "fp32")))
    return [f"--models={tmp_path}", "--batch-size=2", "--seq-len=16", "--device=cpu"]


def run(*arguments):
    return shell.run(bench.command, ["op", *arguments])


def test_calls_that_differ_are_listed_once():
    plan = plan_of(FP8["e4m3", "delayed"], config=one_layer(tiny()))
    found = different_calls(plan, "*")
    assert len(found) == len(set(found.values()))
    assert {call.op for call in found.values()} == {
        call.op for name in ("middle", "update") for call in plan.programs[name].calls
    }
    forward = {(call.shapes, call.dtypes) for call in different_calls(plan, "linear_f*").values()}
    assert forward == {
        ("2x16x96 <- 2x16x48", "bf16 <- e4m3/row/delayed"),
        ("2x16x48 <- 2x16x48", "bf16 <- e4m3/row/delayed"),
        ("2x16x128 <- 2x16x48", "bf16 <- e4m3/row/delayed"),
        ("2x16x48 <- 2x16x64", "bf16 <- e4m3/row/delayed"),
        ("32x128 <- 32x48", "bf16 <- bf16"),
    }
    ends, between, *_ = different_calls(plan_of(FP32, config=one_layer(tiny())), "rmsnorm_backward").values()
    assert ends.shapes == between.shapes and ends.work != between.work, "the residual stream begins behind the head"
    assert all(plan.programs[name].calls[index].op == call.op for (name, index), call in found.items())


def test_a_layer_has_the_window_of_the_first():
    assert one_layer(tiny(windows=(4, None))) == tiny(num_layers=1, windows=(4,)) and one_layer(tiny()).windows == ()


def test_products_are_stated_in_flops_and_other_ops_in_bytes():
    product = OpCall("linear_forward", "8x4 <- 8x2", "bf16 <- bf16", CallWork("bf16", 2 * 10**12, 2**30))
    copy = OpCall("cast", "8 <- 8", "bf16 <- fp32", CallWork("fp32", 0, 10**9))
    assert product.row(5.0, CEILINGS) == (
        "| linear_forward | 8x4 <- 8x2 | bf16 <- bf16 | 1024.0 | 5000.0 | 400 TFLOP/s | 50% |"
    )
    assert copy.row(0.5, CEILINGS) == "| cast | 8 <- 8 | bf16 <- fp32 | 953.7 | 500.0 | 2,000 GB/s | 50% |"


def test_the_plans_own_calls_are_timed(shape, capsys, monkeypatch):
    monkeypatch.setattr(
        "llmq.bench.ladder.measure_ceilings", lambda kind, dtypes: Ceilings(dict.fromkeys(dtypes, 1e11), 1e10)
    )
    assert run("linear_*", *shape, "--dtypes=bf16,e4m3", "--fp8-scaling=current") == 0
    printed = capsys.readouterr().out
    assert "bf16 2x16, one layer" in printed and "e4m3 2x16, one layer" in printed and "e4m3/col/current" in printed
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| linear_")]
    assert rows and all(record(row[0].removeprefix("| ")).is_linear and float(row[4]) > 0 for row in rows)


def test_a_gpu_is_timed_by_its_own_clock(shape, capsys, monkeypatch):
    """The GPU's way through the command, with the host in the place of the GPU."""
    fake_gpu.install(monkeypatch, FakeDriver(gpus=(RTX_4090,)))
    clocks, ceilings = [], Ceilings({"bf16": 1e14, "e4m3": 2e14}, 9e11)
    monkeypatch.setattr("llmq.bench.configuration.CudaClock", lambda: clocks.append(Clock()) or clocks[0])
    monkeypatch.setattr("llmq.bench.ladder.measure_ceilings", lambda kind, dtypes: ceilings)
    assert run("swiglu_*", *shape[:-1]) == 0
    told = capsys.readouterr().out
    assert "NVIDIA GeForce RTX 4090" in told and "bf16 100 TFLOP/s (61% of the peak)" in told
    assert told.count("| swiglu_") == 2 and len(clocks) == 1


def test_the_list_measures_nothing(shape, capsys, monkeypatch):
    monkeypatch.setattr("llmq.bench.ladder.measure_ceilings", lambda *a: pytest.fail("measured"))
    assert run("--list", *shape) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "swiglu_forward | 2x16x64 <- 2x16x128 | bf16 <- bf16 | 0.0" in printed and len(printed) == len(set(printed))


@pytest.mark.gpu
def test_ops_are_timed_on_a_gpu(capsys):
    assert run("*", "--models=Qwen2.5-0.5B", "--batch-size=8") == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.count(" | ") == 6][1:]
    assert {"linear_wgrad", "attention_backward", "adamw"} <= {row[0].removeprefix("| ") for row in rows}
    for row in rows:
        megabytes, microseconds, share = float(row[3]), float(row[4]), float(row[6].rstrip("% |"))
        assert microseconds > 0 and share < 130, row
        assert share > 10 or megabytes < 16, f"large ops are not bound by their launch: {row}"
