"""Runs in numbers: means over the last steps of each, and how far they are from those of the first run.

One step's loss means little: it is that of one batch. Runs on the same data and seed see the same batches, so the noise
of these is in all of their means alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Column, Table
from rich.text import Text

from llmq.report.read import Log, labels


@dataclass(frozen=True)
class Summary:
    """A run: losses are means over its last steps, nats per token; the speed is the median step's. NaN: not known.

    Evaluations on other held-out tokens than the last one's are left out.
    """

    label: str
    steps: int
    train_loss: float
    eval_loss: float
    tokens_per_second: float
    train_count: int  # of the losses that the mean is of
    eval_count: int


def summarize(logs: Sequence[Log], last_steps: int) -> list[Summary]:
    """A line for each log. Losses that are not finite are not counted."""
    return [_summary(log, label, last_steps) for log, label in zip(logs, labels(logs), strict=True)]


def _summary(log: Log, label: str, last_steps: int) -> Summary:
    steps = log.last_step

    def late(table: dict[str, np.ndarray], counts: np.ndarray | bool = True) -> tuple[float, int]:
        values = table["loss"][(table["step"] > steps - last_steps) & counts]
        values = values[np.isfinite(values)]
        return (float(values.mean()) if values.size else math.nan), values.size

    (train, train_count), (held_out, eval_count) = late(log.train), late(log.eval, log.eval_set == log.eval_set[-1:])
    return Summary(label, steps, train, held_out, log.tokens_per_second, train_count, eval_count)


def table(runs: Sequence[Summary], last_steps: int) -> Table:
    """The lines for a console; from the second one on with the distance from the first, in percent."""
    titles = ("steps", "training loss", "of", "evaluation loss", "of", "tokens/s")
    shown = Table("run", *(Column(title, justify="right") for title in titles))
    shown.title = "losses: means of all in the last step" + ("" if last_steps == 1 else f"s, {last_steps} of each run")
    for run in runs:
        train = _cell(run.train_loss, runs[0].train_loss, run is runs[0]), str(run.train_count)
        held_out = _cell(run.eval_loss, runs[0].eval_loss, run is runs[0]), str(run.eval_count)
        speed = "-" if math.isnan(run.tokens_per_second) else f"{run.tokens_per_second:,.0f}"
        shown.add_row(Text(run.label), f"{run.steps:,}", *train, *held_out, speed)
    return shown


def _cell(value: float, first: float, is_first: bool) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" + ("" if is_first or not first > 0 else f" ({100 * (value / first - 1):+.2f}%)")
