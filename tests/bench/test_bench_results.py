"""Results as data: what is kept of readings, the file and back, changes between two files, and Markdown."""

import copy
import io
import json
import math

import pytest
from rich.console import Console
from tiny_engines import FP32, plan_of

from llmq.bench import table as bench_table
from llmq.bench.ceilings import Ceilings, Machine
from llmq.bench.ladder import Ladder, Rung
from llmq.bench.results import compare, document, gpu_during, load, require_common, result_of, save
from llmq.engine.measure import Speed
from llmq.errors import DataError, StorageError, UsageError
from llmq.hardware.device import CPU
from llmq.hardware.nvml import Reading

PEAKS = {"fp32": 1e12, "bf16": 2e12}
READINGS = (
    Reading(sm_mhz=1500, watts=690.0, celsius=60, throttled=("power cap",), used_bytes=2**30),
    Reading(sm_mhz=1400, watts=700.0, celsius=62, throttled=("power cap", "temperature"), used_bytes=2**31),
    Reading(sm_mhz=1980, watts=None, celsius=61, throttled=(), used_bytes=2**30),
)
RUNGS = (Rung("linears forward", 6, 40.0, 30.0, 1e9, 1e6), Rung("norms", 4, 5.0, 4.5, 0.0, 2e6))
SYSTEM = {"device": "cuda: NVIDIA H200", "driver": "580.65.06 (CUDA 13.0)", "cuBLASLt": "13.1.0", "numpy": "2.4"}


def machine(system=SYSTEM):
    """The CPU, with rates of its own."""
    return Machine(CPU, system, PEAKS, Ceilings({"fp32": 9e11}, 4.2e12))


def result(model="m", dtype="fp32", seconds=(0.2, 0.1, 0.25), readings=READINGS, others=0, deterministic=True):
    """A result of 64 tokens a step in micro-batches of 32, beside so many other processes on the card."""
    plan = plan_of(FP32)
    speed = Speed(plan, 64, seconds, 3.0, (4.5, 4.25), (), readings, 12345)
    found = Ladder(RUNGS, speed.micro_batch_ms)
    made = result_of(model, dtype, speed, found, machine(), deterministic)
    return {**made, "gpu": {**made["gpu"], "other_processes": others}}


def content(*results, system=SYSTEM):
    """A file's content."""
    return document(results or (result(),), "llmq-bench --models m", machine(system))


def test_a_result_says_what_was_measured():
    r = result()
    assert r["tokens_per_second"] == {
        "median": pytest.approx(320),
        "min": pytest.approx(256),
        "max": pytest.approx(640),
    }
    assert r["micro_batch_ms"] == pytest.approx(100) and r["gaps_ms"] == pytest.approx(55)
    assert r["ceiling_share"] == pytest.approx(0.345) and r["losses"] == [4.5, 4.25]
    assert r["memory"] == {"plan_bytes": plan_of(FP32).total_bytes, "used_bytes": 12345, "nvml_bytes": 2**31}
    assert r["gpu"]["other_processes"] == 0 and r["ladder"][0]["family"] == "linears forward"


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
    made = content(result(), {**result(dtype="bf16"), "first_step_s": math.inf})
    save(tmp_path / "a.json", made)
    assert load(tmp_path / "a.json") == made == json.loads((tmp_path / "a.json").read_text())
    assert made["results"][1]["first_step_s"] == "Infinity", "JSON has no such number"
    with pytest.raises(StorageError, match=r"none.a\.json: cannot be written .*--save"):
        save(tmp_path / "none" / "a.json", made)


@pytest.mark.parametrize("change", [{"schema": 2}, {"kind": "log"}, {"results": None}])
def test_a_file_of_another_kind_is_refused(change, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({**content(), **change}))
    with pytest.raises(DataError, match=r"a\.json (has schema 2|is not a result of llmq-bench)"):
        load(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ladder": None}, r"results\[0\] has no valid ladder"),
        ({"ladder": [{"family": "norms"}]}, "has no valid ladder"),
        ({"gaps_ms": "NaN"}, "has no valid gaps_ms"),
        ({"tokens_per_second": {"median": 0}}, "has no valid tokens_per_second"),
        ({"tokens_per_second": 7}, "has no valid tokens_per_second"),
        ({"model": 3, "seq_len": "x"}, "has no valid model, seq_len"),
    ],
)
def test_a_damaged_result_is_refused(change, says, tmp_path):
    whole = content()
    whole["results"][0] |= change
    (tmp_path / "a.json").write_text(json.dumps(whole))
    with pytest.raises(DataError, match=f"--compare .*a.json is damaged: .*{says}"):
        load(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps({**content(), "results": [3], "system": None}))
    with pytest.raises(DataError, match=r"results\[0\] is not an object; system is not there"):
        load(tmp_path / "a.json")


def test_changes_are_in_percent_of_before():
    old, new = content(), content(result(seconds=(0.1,)))
    new["results"][0]["ladder"][0]["ms"] = 20.0
    new["results"][0]["ladder"].append({**new["results"][0]["ladder"][0], "family": "quantize", "ms": 1.0})
    del old["results"][0]["ladder"][1]
    ((change,), lone) = compare(old, new)
    assert change.name == "m fp32 2x16" and change.percent == pytest.approx(100) and lone == []
    gaps = (pytest.approx(55), pytest.approx(5))
    assert change.families == {
        "linears forward": (40, 20), "norms": (None, 5), "quantize": (None, 1), "gaps": gaps,
    }  # fmt: skip
    assert change.settings == {}


def test_differing_settings_are_said():
    old, new = content(), content(system={**SYSTEM, "driver": "590 (CUDA 13.1)"})
    old["results"][0]["precision"]["scaling"] = "current"
    ((change,), _) = compare(old, new)
    assert set(change.settings) == {"precision", "driver"}
    console = Console(file=io.StringIO(), width=100)
    bench_table.show_changes(console, "old.json", [change], ["x bf16 1x1"])
    told = console.file.getvalue()
    assert "precision: scaling current -> delayed" in told and "-> 590 (CUDA 13.1)" in told
    assert "320 -> 320 tokens/s, +0.0%" in told and "In one of the two only: x bf16 1x1" in told


def test_a_file_that_does_not_say_otherwise_is_deterministic():
    silent = content()
    del silent["results"][0]["deterministic"]
    for old in (content(), silent):
        for strict, settings in ((True, {}), (False, {"deterministic": (True, False)})):
            ((change,), _) = compare(old, content(result(deterministic=strict)))
            assert change.settings == settings


def test_what_only_one_has_is_named():
    old, new = content(result("a"), result("b")), content(result("b"), result("c"))
    changes, lone = compare(old, new)
    assert [change.name for change in changes] == ["b fp32 2x16"]
    assert lone == ["a fp32 2x16", "c fp32 2x16"]
    with pytest.raises(UsageError, match="nothing to compare: the old file has a fp32 2x16, b fp32 2x16: measure one"):
        compare(old, content(result("d")))
    require_common(old, [("d", "fp32", 16), ("a", "fp32", 16)])
    with pytest.raises(UsageError, match="nothing to compare"):
        require_common(old, [("a", "fp32", 32)])


def test_markdown_is_two_tables_with_the_command_and_the_machine():
    lone = {**result("n", "bf16", readings=()), "ladder": [{**result()["ladder"][1], "family": "rope"}]}
    text = bench_table.markdown(content(result(), lone))
    head, _, *lines = text.splitlines()
    assert head.startswith("`llmq-bench --models m` on NVIDIA H200; driver 580.65.06 (CUDA 13.0), cuBLASLt 13.1.0. ")
    assert "fp32 0.9 TFLOP/s (90% of the peak), copy 4,200 GB/s" in head and "numpy" not in head
    first, second = lines[2:4]
    assert first.startswith("| m | fp32 | 2x16 | 320 (256 to 640) | ")
    assert first.endswith(" | 34.5% | 801,792 bytes | 1500 MHz | 695 W |") and second.endswith(" | - | - |")
    assert "| linears forward | 40.00 (30.00) | - |" in lines and "| rope | - | 5.00 (4.50) |" in lines
    assert "| gaps (negative: overlap) | 55.00 | 55.00 |" in lines
    assert "| micro-batch | 100.00 (34.50) | 100.00 (4.50) |" in lines
    rows = [line for line in lines if line.startswith("|")]
    widths = [row.count("|") for row in rows]
    assert len(set(widths[:4])) == 1 and len(set(widths[4:])) == 1


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (0, "no other process on the card"),
        (1, "Warning: 1 other process on the card"),
        (None, "NVML does not say who else is on the card"),
    ],
)
def test_tenants_are_told(others, says):
    assert any(line.startswith(says) for line in bench_table.gpu_lines(result(others=others)["gpu"]))
    assert bench_table.gpu_lines(result(readings=())["gpu"]) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sol": 1.01}, "the peaks were measured while other work took the machine"),
        ({"ceiling_share": 1.01}, "the peaks were measured while other work took the machine"),
        ({"ladder": [{**result()["ladder"][0], "roofline_ms": 50.0}]}, "found their data in a cache"),
    ],
)
def test_more_than_what_can_be_is_told(change, says):
    console = Console(file=io.StringIO(), width=200)
    found = content({**result(), **change})
    bench_table.show(console, found["results"][0])
    for told in (console.file.getvalue(), bench_table.markdown(found)):
        assert says in told and "m fp32 2x16" in told
    assert bench_table.beyond(result()) == ""


def test_a_step_faster_than_its_ops_overlaps():
    r = copy.deepcopy(result())
    r |= {"gaps_ms": -5.0, "micro_batch_ms": 40.0}
    console = Console(file=io.StringIO(), width=100)
    bench_table.show(console, r)
    told = console.file.getvalue()
    assert "overlap" in told and "-12.5%" in told and "gaps" not in told
