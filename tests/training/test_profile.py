"""A profile of some steps: a trace that viewers open, of every op by lane, and no bit of the run changed."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from in_process import train_on_ranks
from tiny_runs import folder, weights_of

import llmq


def checked(path):
    """The events of a trace, each as the format has it, and none across the end of another in its row."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(text)
    assert trace.keys() == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] == "ms"
    spans, names = [], {}
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["args"], dict)
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["name"], str)
        spans.append(event)
    for row in {(one["pid"], one["tid"]) for one in spans}:
        open_until = []
        for one in sorted(
            (one for one in spans if (one["pid"], one["tid"]) == row), key=lambda one: (one["ts"], -one["dur"])
        ):
            while open_until and open_until[-1] <= one["ts"] + 1e-2:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1] + 1e-2, one
            open_until.append(one["ts"] + one["dur"])
        assert ("thread_name", *row) in names and ("process_name", row[0], 0) in names
    return spans, names


def rows(spans, names, name):
    return [one for one in spans if names["thread_name", one["pid"], one["tid"]] == name]


@pytest.mark.quick("own place")
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"profile_file": "own/trace.json"}, id="own place"),
        pytest.param({"debug_nan": True}, id="other engine"),
    ],
)
def test_each_op_of_some_steps_is_there_and_no_bit_changes(given, more):
    offloads = {"offload_residual": True, "recompute_block": True, "grad_accumulation": 2, "eval_every_n_steps": 3}
    given = {**given, **offloads, "steps": 6}
    profiled = llmq.train(**given, **more, profile=3)
    alone = llmq.train(**{**given, "name": "alone"})
    assert weights_of(profiled.checkpoint_path) == weights_of(alone.checkpoint_path)
    assert profiled.eval_loss == alone.eval_loss
    path = Path(more.get("profile_file", "runs/run/trace.json.gz"))
    assert f"Profile of steps 3 to 5: {path}" in given["console"].getvalue()
    spans, names = checked(path)
    calls = [one for lane in ("main", "to_host", "to_device") for one in rows(spans, names, lane)]
    programs = llmq.train(**{**given, "name": "dry"}, dry_run=True).plan.programs
    of_step = [call for name in ("first", "last", "update") for call in programs[name].calls]
    evaluated = [call.op for call in programs["evaluate"].calls] * 3  # batches, after the first of them
    assert Counter(one["name"] for one in calls) == Counter([call.op for call in of_step] * 3 + evaluated)
    linear = next(one for one in calls if one["name"] == "linear_forward")
    assert linear["args"]["layer"] == 0 and linear["args"]["phase"] == "forward"
    (written,) = linear["args"]["written"].values()
    assert written.endswith(" bytes") and len(rows(spans, names, "waiting for data")) == 6
    host = [one["name"] for one in rows(spans, names, "host")]
    assert (host.count("micro-step"), host.count("update")) == (6, 3) and host[-1] == "update"


def test_ranks_are_processes(given):
    train_on_ranks(2, {**given, "steps": 4, "profile": 5, "zero_level": 2, "profile_file": "trace.json"})
    spans, names = checked(Path("trace.json"))
    assert {names["process_name", rank, 0] for rank in (0, 1)} == {"rank 0", "rank 1"}
    assert {one["pid"] for one in rows(spans, names, "comm")} == {0, 1}


@pytest.mark.gpu
def test_a_gpu_marks_its_lanes_with_events_and_changes_no_bit(given, tmp_path):
    pytest.importorskip("cupy")
    wide = str(folder(tmp_path / "wide", hidden_size=64, head_dim=16, intermediate_size=384))
    own = {"device": "cuda", "model": wide, "model_dtype": "bf16", "matmul_dtype": "bf16", "master_dtype": "fp32"}
    given = {**given, **own, "offload_residual": True, "recompute_block": True, "steps": 6}
    profiled = llmq.train(**given, profile=3)
    alone = llmq.train(**{**given, "name": "alone"})
    assert weights_of(profiled.checkpoint_path) == weights_of(alone.checkpoint_path)
    spans, names = checked(Path("runs/run/trace.json.gz"))
    calls = [one for lane in ("main", "to_host", "to_device") for one in rows(spans, names, lane)]
    assert rows(spans, names, "to_host") and len(rows(spans, names, "launches")) == len(calls)
    steps = [one for one in rows(spans, names, "host") if one["name"] == "update"]
    main = max(one["ts"] + one["dur"] for one in rows(spans, names, "main") if one["args"]["phase"] == "update")
    assert all(one["dur"] > 0 for one in steps) and main <= max(one["ts"] + one["dur"] for one in steps) + 1e3


def test_a_short_run_says_that_nothing_was_profiled(given):
    llmq.train(**{**given, "steps": 2}, profile=1)
    assert "no step was profiled" in given["console"].getvalue() and not Path("runs/run/trace.json.gz").exists()
