"""Logs of llm.q, the trainer in C++, as plot, report and export read them."""

import json
import math
from pathlib import Path

import pytest
from sample_files import log_of_llm_q

from llmq.cli import plot, shell
from llmq.errors import DataError
from llmq.report.read import read_log, read_runs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "log.json"
    file.write_text(log_of_llm_q())
    return file


def test_its_objects_are_records_of_ours(path: Path) -> None:
    """Update 0 is our step 1, and what comes before update 2 happened after 2 steps."""
    log = read_log(path.parent)
    assert log.name == "c++" and log.header["options"]["learning_rate"] == 1e-5
    assert log.header["system"] == {"trainer": "llm.q", "device": "cuda: NVIDIA RTX 4090", "memory": "24.0 GiB"}
    assert log.header["dataset"]["train"] == [{"path": "data/train.bin", "files": 1, "tokens": 5000, "seed": 7}]
    assert (log.header["allocator"], log.header["host_memory"]) == ({"weights": 1.0}, {"weights": 2.0})
    assert log.train["step"].tolist() == [1, 2, 3, 4]
    assert log.train["loss"][:2].tolist() == [5.0, 2.5] and math.isnan(log.train["loss"][2])
    assert log.train["norm"].tolist() == [2, 2, -math.inf, 2]
    assert log.train["tps"].tolist() == [10240] * 4 and log.train["sol"][0] == 0.256
    assert log.train["time"][:2].tolist() == [1757507690.25, 1757507691.25]
    assert log.eval["step"].tolist() == [2, 4] and log.eval["loss"].tolist() == [2.8, 2.5]
    assert log.eval_set.tolist() == [0, 1]  # the last one is on more tokens
    assert log.gpu["watts"].tolist() == [380.5] * 4 and math.isnan(log.gpu["memory_percent"][0])
    assert log.gpu["used_mib"][0] == pytest.approx((25757220864 - 24 * 2**30) / 2**20)  # of the first GPU
    assert log.throttled["power cap"].tolist() == [1, 2, 3, 4]
    assert {name: values[0] for name, (_, values) in log.metrics.items()} == {
        "lse_max": 9.5,
        "forward_ms": 30,
        "head_ms": 5,
        "backward_ms": 55,
        "update_ms": 7.5,
        "abs_max": 3.5,
    }
    happened = [(event["type"], event["step"]) for event in log.events if event["type"] != "metrics"]
    assert happened == [("notice", 0), ("notice", 0), ("checkpoint", 2), ("notice", 4), ("end", 4)]
    assert 'a "quoted" folder' in log.events[0]["text"]


def test_a_killed_process_leaves_half_an_object(path: Path) -> None:
    whole = path.read_text()
    for end in ('"step": 3, "epoch": 0.75, "step_tok', '"step": 3, "epoch": 0.75, "step_tokens": 10\n]'):
        path.write_text(whole[: whole.index('"step": 3, "epoch"')] + end)
        assert read_log(path).train["step"].tolist() == [1, 2, 3]
    path.write_text("[\n\n]\n")
    with pytest.raises(DataError, match="no steps yet"):
        read_runs([path])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"step": 1, "epoch"', '"step": -1, "epoch"', "object 18: step is -1"),
        ('"loss": 2.5,', '"loss": "high",', "train at step 2: not a number: loss is 'high'"),
        ('"duration_ms": 100', '"duration_ms": 100 x', "object 13: "),
    ],
)
def test_what_is_wrong_is_named(path: Path, old: str, new: str, says: str) -> None:
    whole = path.read_text()
    assert old in whole
    path.write_text(whole.replace(old, new, 1))
    with pytest.raises(DataError, match="is corrupt") as caught:
        read_log(path)
    assert says in str(caught.value)


def test_fields_of_other_kinds_than_expected_are_unknown(path: Path) -> None:
    """Where they are only what others are computed from."""
    for old, new in (('"step_tokens": 1024', '"step_tokens": null'), ('"power": 380500', '"power": true')):
        path.write_text(path.read_text().replace(old, new))
    log = read_log(path)
    assert all(math.isnan(value) for value in (*log.train["tps"], *log.gpu["watts"]))


@pytest.mark.slow
def test_it_is_plotted_beside_a_log_of_ours(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    ours = path.parent / "ours.jsonl"
    header = {"type": "header", "schema": 1, "options": {"name": "ours"}}
    lines = [header, *({"type": "train", "step": step, "loss": 2.0, "tps": 5.0} for step in range(1, 5))]
    ours.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert shell.run(plot.command, [str(path), str(ours), "-o", str(path.parent / "out.png")]) == 0
    printed = capsys.readouterr().out
    assert "c++" in printed and "10,240" in printed
