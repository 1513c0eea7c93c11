"""Damaged and made-up logs: plot and report take each of them or refuse it with one error of ours, no traceback."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mutants import change, damaged
from sample_files import log_of_llm_q

from llmq.errors import LlmqError
from llmq.report.page import page
from llmq.report.plot import plot_runs, summarize, table
from llmq.report.read import Log, read_runs

pytest.importorskip("matplotlib")

SWEEP = [pytest.param(seed, 500, marks=pytest.mark.sweep) for seed in range(40)]  # 20,000 mutants


def whole() -> list[dict[str, Any]]:
    """A log with every kind of record."""
    sections = {
        "options": {"name": "a", "learning_rate": 1e-5, "train_file": ["x.bin"]},
        "system": {"device": "cuda: NVIDIA H200", "python": "3.11"},
        "model": {"path": "m", "parameters": 7},
        "dataset": {"train": [{"path": "x.bin", "tokens": 50}], "eval": [{"path": "y.bin", "tokens": 5}], "steps": 9},
        "allocator": {"Weights": 2.5, "Free": 10.0},
        "host_memory": {"Master": 1.0},
    }
    copy = {"name": "0.mlp.x@e4m3", "sites": ["a"], "amax": 3.0, "snr_db": 31.0, "clipped": 0.0, "flushed": 0.1}
    records: list[dict[str, Any]] = [{"type": "header", "schema": 1, "started": "2026-01-01T00:00:00Z", **sections}]
    for step in range(1, 7):
        about = {"step": step, "time": 1e9 + step, "time_ms": 100.0, "tokens": 512, "trained_tokens": 512}
        records.append({"type": "train", **about, "loss": 5 / step, "norm": 1.0, "lr": 1e-5, "sol": 0.5, "tps": 5120.0})
        records[-1] |= {"accuracy": step / 10, "memory_mib": 99.5, "wait_ms": 1.5}
        records.append({"type": "metrics", "step": step, "values": {"mine": step / 2, "$_$": "NaN"}})
        if step % 2 == 0:
            records.append({"type": "eval", **about, "loss": 4 / step, "train_loss": 1.0, "epoch": 1.0, "tps": 1.0})
            records.append({"type": "gpu", "step": step, "sm_mhz": 1755, "watts": 655.5, "throttled": ["power cap"]})
            sample = {"prompt": "Once\nupon", "text": " a <i>time", "new_tokens": [1, 2], "end": "length"}
            chat = {"messages": [{"role": "user", "content": "hi"}], "text": None, "new_tokens": [5], "end": "stop"}
            records.append({"type": "samples", "step": step, "samples": [sample, chat]})
            records.append({"type": "fp8", "step": step, "copies": [copy, {**copy, "snr_db": None}]})
            records.append({"type": "checkpoint", "step": step, "path": f"ckpt/step_{step}"})
        if step == 4:
            records.append({"type": "resume", "step": 3, "time": 1e9 + 50, **sections, "options": {"name": "a"}})
    records.append({"type": "rollback", "step": 6, "time": 1e9 + 60})
    records.append({"type": "notice", "step": 6, "text": "Careful", "warning": True})
    records.append({"type": "end", "step": 6, "reason": "finished", "train_loss": 1.0, "warnings": ["Careful"]})
    return records


def mutant(chance: random.Random, records: list[dict[str, Any]]) -> bytes:
    """A log of `records` with some values replaced, moved or dropped, records in another order, or bytes damaged."""
    records = json.loads(json.dumps(records))
    change(chance, records)
    if chance.random() < 0.1:
        chance.shuffle(records)
    text = "".join(json.dumps(record) + "\n" for record in records).encode("ascii")
    return damaged(chance, text) if chance.random() < 0.2 else text


def taken(seed: object, count: int, path: Path, use: Callable[[list[Log]], object]) -> int:
    """How many of `count` mutants at `path` are logs, which are used; every tenth is one of llm.q's."""
    chance, found = random.Random(seed), 0
    ours, theirs = whole(), log_of_llm_q().encode()
    for number in range(count):
        content = damaged(chance, theirs) if number % 10 == 0 else mutant(chance, ours)
        path.write_bytes(content)
        try:
            logs = read_runs([path])
            found += 1
            use(logs)
        except LlmqError:
            continue
        except Exception as error:
            raise AssertionError(f"{content!r}") from error
    return found


@pytest.mark.parametrize(("seed", "count"), [("sample", 8), *SWEEP])
def test_plot_takes_or_refuses_any_log(seed, count, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laid out, not painted, and each picture once: that would take most of the time."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **about: figure.draw_without_rendering())

    drawn = set[str]()

    def plot(logs: list[Log]) -> None:
        log = replace(logs[0], events=(), gpu={}, throttled={}, header={})
        picture = repr([log, logs[0].name, (logs[0].header.get("model") or {}).get("path")])
        if picture not in drawn:
            drawn.add(picture)
            plot_runs(logs, tmp_path / "out.png")
            table(summarize(logs, 30), 30)

    assert 0.1 * count < taken(seed, count, tmp_path / "a.jsonl", plot) < count


@pytest.mark.parametrize(("seed", "count"), [("sample", 60), *SWEEP])
def test_report_takes_or_refuses_any_log(seed, count, tmp_path: Path) -> None:
    """Its numbers are JSON, and no page has another script than its own."""

    def report(logs: list[Log]) -> None:
        content = page([*logs, *logs] if len(logs[0].events) % 2 else logs).decode()
        data = re.findall(r'<script type="application/json" id="data">(.*?)</script>', content)
        json.loads(data[0], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert content.count("<script") == content.count("</script") == 2 and len(data) == 1

    assert 0.1 * count < taken(seed, count, tmp_path / "a.jsonl", report) < count
