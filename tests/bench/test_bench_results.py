"""Results as data: what is kept of readings, the file, and what is printed."""

import io
import json
import math
import re

import pytest
from rich.console import Console
from tiny_engines import FP32, plan_of

from llmq.bench import results as bench_results
from llmq.bench.configuration import GENERATED, Configuration
from llmq.bench.ladder import Ceilings, Ladder, Machine, Rung
from llmq.bench.results import document, gpu_during, result_of, save
from llmq.engine.measure import Speed
from llmq.errors import StorageError
from llmq.hardware.device import CPU
from llmq.hardware.nvml import Reading
from llmq.options.commands import BenchOptions
from llmq.training.ready import Facts

PEAKS = {"fp32": 1e12, "bf16": 2e12}
READINGS = (
    Reading(sm_mhz=1500, watts=690.0, celsius=60, throttled=("power cap",), used_bytes=2**30),
    Reading(sm_mhz=1400, watts=700.0, celsius=62, throttled=("power cap", "temperature"), used_bytes=2**31),
    Reading(sm_mhz=1980, watts=None, celsius=61, throttled=(), used_bytes=2**30),
)
RUNGS = (Rung("linears forward", 6, 40.0, 30.0, 1e9, 1e6), Rung("norms", 4, 5.0, 4.5, 0.0, 2e6))
SYSTEM = {"device": "cuda: NVIDIA H200", "driver": "580.65.06 (CUDA 13.0)", "cuBLASLt": "13.1.0", "numpy": "2.4"}


def machine():
    """The CPU, with rates of its own."""
    return Machine(CPU, SYSTEM, PEAKS, Ceilings({"fp32": 9e11}, 4.2e12))


def result(model="m", dtype="fp32", seconds=(0.2, 0.1, 0.25), readings=READINGS, others=0):
    """A result of 64 tokens a step in micro-batches of 32, beside this many other processes on the card."""
    plan = plan_of(FP32)
    speed = Speed(plan, 64, seconds, 3.0, (4.5, 4.25), (), readings, 12345)
    found = Ladder(RUNGS, speed.micro_batch_ms)
    one = Configuration(
        BenchOptions(), model, dtype, Facts(plan.spec.config, CPU), {**GENERATED, "model": model}, frozenset()
    )
    made = result_of(one, speed, found, machine())
    return {**made, "gpu": {**made["gpu"], "other_processes": others}}


def test_a_result_says_what_was_measured():
    r = result()
    assert list(r["tokens_per_second"].values()) == pytest.approx([320, 256, 640])
    assert r["micro_batch_ms"] == pytest.approx(100) and r["gaps_ms"] == pytest.approx(55)
    assert r["ceiling_share"] == pytest.approx(0.345) and r["losses"] == [4.5, 4.25]
    assert r["memory"] == {"plan_bytes": plan_of(FP32).total_bytes, "used_bytes": 12345, "nvml_bytes": 2**31}
    assert r["gpu"]["other_processes"] == 0 and r["ladder"][0]["family"] == "linears forward"


@pytest.mark.parametrize(
    ("gaps_ms", "named"), [(55.0, r"gaps\W+55\.000\W+55\.0%"), (-5.0, r"overlap\W+-5\.000\W+-5\.0%")]
)
def test_what_ops_do_not_explain_is_gaps_or_overlap(gaps_ms, named):
    bench_results.show(console := Console(file=io.StringIO(), width=100), {**result(), "gaps_ms": gaps_ms})
    assert re.search(named, console.file.getvalue())


def test_the_gpu_is_a_median_and_a_share_of_the_time():
    assert gpu_during(READINGS) == {
        "sm_mhz": 1500,
        "watts": 695.0,
        "celsius": 62,
        "throttled": {"power cap": pytest.approx(2 / 3), "temperature": pytest.approx(1 / 3)},
        "readings": 3,
    }
    nothing = {"sm_mhz": None, "watts": None, "celsius": None, "throttled": None}
    assert gpu_during(()) == {**nothing, "readings": 0} and gpu_during((Reading(),)) == {**nothing, "readings": 1}


def test_a_file_comes_back_as_it_was(tmp_path):
    results = result(), {**result(dtype="bf16"), "first_step_s": math.inf}
    made = document(results, "llmq-bench --models m", machine())
    save(tmp_path / "a.json", made)
    assert made == json.loads((tmp_path / "a.json").read_text())
    assert made["results"][1]["first_step_s"] == "Infinity", "JSON has no such number"
    with pytest.raises(StorageError, match=r"none.a\.json: cannot be written .*--save"):
        save(tmp_path / "none" / "a.json", made)


def test_tenants_are_reported():
    for others, says in (
        (0, "no other process on the card"),
        (1, "Warning: 1 other process on the card"),
        (None, "NVML does not say who else is on the card"),
    ):
        assert any(line.startswith(says) for line in bench_results.gpu_lines(result(others=others)["gpu"]))
    assert bench_results.gpu_lines(result(readings=())["gpu"]) == []
