"""Runs side by side: means over the last steps, and distances from the first run."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from written_runs import write_run

from llmq.report.read import read_runs
from llmq.report.summary import Summary, summarize, table


def shown(runs: list[Summary], last_steps: int) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(table(runs, last_steps))
    return out.getvalue()


def test_means_are_those_of_the_last_steps(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", [9.0, 4.0, 3.0, 2.0], {1: 8.0, 3: 5.0, 4: 4.0}),
        write_run(tmp_path / "b", [9.0, 4.0, math.nan, 3.0], {2: 7.0}, seconds=200.0),
    ]
    first, second = summarize(read_runs(runs), 2)
    assert (first.label, first.steps, first.train_loss, first.eval_loss) == ("a", 4, 2.5, 4.5)
    assert (second.label, second.train_loss) == ("b", 3.0) and math.isnan(second.eval_loss)
    counts = [(run.train_count, run.eval_count) for run in (first, second)]
    assert counts == [(2, 2), (1, 0)], "what is not finite is not counted"
    alone = summarize(read_runs(runs[:1]), 1)[0]
    assert (alone.eval_loss, alone.eval_count) == (4.0, 1)
    assert first.tokens_per_second == pytest.approx(2 * second.tokens_per_second)
    assert summarize(read_runs(runs[:1]), 100)[0].train_loss == 4.5  # all that there are


def test_a_mean_is_of_evaluations_on_the_same_tokens(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [9.0, 4.0, 3.0, 2.0], {2: 8.0, 3: 5.0, 4: 4.0}, whole=4)
    (summary,) = summarize(read_runs([run]), 4)
    assert (summary.eval_loss, summary.eval_count) == (4.0, 1)


def test_the_table_says_how_far_runs_are_from_the_first() -> None:
    runs = [Summary("bf16", 150, 2.0, 2.5, 1000.0, 30, 2), Summary("e4m3", 150, 2.01, 2.4, 1300.0, 30, 2)]
    text = shown([*runs, Summary("none", 0, math.nan, math.nan, math.nan, 0, 0)], 30)
    lines = [line for line in text.splitlines() if "bf16" in line or "e4m3" in line]
    assert "30 of each run" in text and "2.0000" in lines[0] and "%" not in lines[0]
    assert [cell.strip() for cell in lines[0].split("\u2502")[3:7]] == ["2.0000", "30", "2.5000", "2"]
    assert "2.0100 (+0.50%)" in lines[1] and "2.4000 (-4.00%)" in lines[1] and "1,300" in lines[1]
    assert "nan" not in text
