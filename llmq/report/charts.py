"""The charts of a report: what runs logged by step, thinned out to what a screen can show, and where each step is in
tokens and in time.

A series that is longer than MOST points is cut into as many parts: of each the mean is kept, the least and the largest
value. So a single spike stays visible, and a log of any length makes a page of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmq.report.plot import LARGEST
from llmq.report.read import Log

MOST, ALL = 1200, 6000  # points of a series, and of all runs in one chart
DIGITS = 6


@dataclass(frozen=True)
class Look:
    """How a number is shown: in which section, under which title, times `factor` in `unit`."""

    title: str
    unit: str = ""
    factor: float = 1.0
    section: str = "curves"
    is_smoothed: bool = False
    has_log_axis: bool = False  # where the values ask for it


TRAINING = {
    "loss": Look("Loss", "nats per token", is_smoothed=True),
    "accuracy": Look("Token accuracy", "%", 100, is_smoothed=True),
    "norm": Look("Gradient norm", is_smoothed=True, has_log_axis=True),
    "lr": Look("Learning rate"),
    "sent_error": Look("Error of compressed gradients", "of the gradient", is_smoothed=True),
    "tps": Look("Speed", "tokens/s", section="speed", is_smoothed=True),
    "sol": Look("Speed of light", "%", 100, "speed", is_smoothed=True),
    "wait": Look("Waiting for data", "% of the step", 100, "speed", is_smoothed=True),
    "padding": Look("Padding", "% of the tokens", 100, "speed", is_smoothed=True),
    "memory_mib": Look("Memory in use", "MiB", section="memory"),
}
GPU = {
    "sm_mhz": Look("SM clock", "MHz", section="gpu"),
    "memory_mhz": Look("Memory clock", "MHz", section="gpu"),
    "watts": Look("Power", "W", section="gpu"),
    "celsius": Look("Temperature", "°C", section="gpu"),
    "used_mib": Look("Memory in use on the card", "MiB", section="gpu"),
    "gpu_percent": Look("Time with a kernel running", "%", section="gpu"),
    "memory_percent": Look("Time with memory traffic", "%", section="gpu"),
    "pcie_rx_kb_s": Look("PCIe to the GPU", "MB/s", 1e-3, "gpu"),
    "pcie_tx_kb_s": Look("PCIe from the GPU", "MB/s", 1e-3, "gpu"),
}
FP8 = {
    "snr_db": Look("Worst signal-to-noise ratio", "dB", section="fp8"),
    "clipped": Look("Most clipped", "% of a copy", 100, "fp8"),
    "flushed": Look("Most flushed to zero", "% of a copy", 100, "fp8"),
}
UNSHOWN = {"step", "time", "time_ms", "wait_ms", "epoch", "tokens", "trained_tokens", "real_tokens", "applied"}
STEADY = ("memory", "gpu")  # sections of numbers that often stay the same
OF_EVAL = UNSHOWN | {"tps", "train_loss"}


@dataclass(frozen=True)
class Series:
    """A line of a chart: values by step of one run; `kind` is training, evaluation or nothing."""

    run: int
    kind: str
    steps: np.ndarray
    values: np.ndarray


def charts(logs: Sequence[Log]) -> tuple[list[dict[str, Any]], dict[str, list[tuple[str, str]]]]:
    """All charts, as the script of the page takes them: `id`, what a Look says, and `series`. And by section what never
    changes of memory and GPU, whose charts would be empty: a title, and the value."""
    found: dict[str, tuple[Look, list[Series]]] = {}
    for run, log in enumerate(logs):
        for name, look, one in _series(run, log):
            if np.isfinite(one.values).any():
                found.setdefault(name, (look, []))[1].append(one)
    order = {name: place for place, name in enumerate((*TRAINING, *GPU, *FP8))}
    names = sorted(found, key=lambda name: order.get(name, len(order)))  # what has no place comes last
    most = max(min(MOST, ALL // max(len(logs), 1)), 100)
    steady: dict[str, list[tuple[str, str]]] = {section: [] for section in STEADY}
    drawn = []
    for name in names:
        look, series = found[name]
        values = np.unique(np.concatenate([one.values[np.isfinite(one.values)] for one in series]))
        if look.section in STEADY and values.size == 1:
            steady[look.section].append((look.title, f"{look.factor * values[0]:,.6g} {look.unit}"))
        else:
            drawn.append(_chart(name, look, series, most=most))
    return drawn, steady


def _chart(name: str, look: Look, series: Sequence[Series], *, most: int) -> dict[str, Any]:
    lines = [{"run": one.run, "kind": one.kind, **thinned(one.steps, look.factor * one.values, most)} for one in series]
    values = np.concatenate([one.values for one in series])
    positive = values[np.isfinite(values) & (values > 0)]
    is_log = look.has_log_axis and positive.size > 0 and bool(positive.max() > 30 * positive.min())
    about = {"title": look.title, "unit": look.unit, "section": look.section, "smooth": look.is_smoothed}
    return {"id": name, **about, "log": is_log, "series": lines}


def _series(run: int, log: Log) -> Iterator[tuple[str, Look, Series]]:
    """Everything that a log has by step, by name."""
    train, evals, steps = log.train, log.eval, log.train["step"]
    with np.errstate(all="ignore"):  # what is divided by 0 is not finite, and so not drawn
        derived = {"wait": train["wait_ms"] / train["time_ms"], "padding": 1 - train["real_tokens"] / train["tokens"]}
    if not np.nan_to_num(derived["wait"]).max(initial=0) > 0.001:
        del derived["wait"]
    columns = {**{name: values for name, values in train.items() if name not in UNSHOWN}, **derived}
    for name, values in columns.items():
        yield name, TRAINING.get(name, _look(name)), Series(run, "training", steps, values)
    for name, values in evals.items():
        if name not in OF_EVAL:
            # Losses on other held-out tokens are no continuation of a line: a point between them is missing.
            cuts = 1 + np.flatnonzero(np.diff(log.eval_set))
            parted = np.insert(evals["step"], cuts, evals["step"][cuts]), np.insert(values, cuts, math.nan)
            yield name, TRAINING.get(name, _look(name)), Series(run, "evaluation", *parted)
    for name, values in log.gpu.items():
        if name not in UNSHOWN:
            look = GPU.get(name, replace(_look(name), section="gpu"))
            yield name if name in GPU else f"gpu {name}", look, Series(run, "", log.gpu["step"], values)
    for name, (at, values) in log.metrics.items():
        look = Look(name, section="metrics", is_smoothed=True)
        yield f"metric {name}", look, Series(run, "", at, values)
    for name, (at, values) in worst_copies(log).items():
        yield name, FP8[name], Series(run, "", at, values)


def _look(name: str) -> Look:
    """That of a column which nothing is known of but its name."""
    text, unit = name.removesuffix("_mib"), "MiB" if name.endswith("_mib") else ""
    section = "memory" if unit else "curves"
    return Look(text.replace("_", " ").capitalize(), unit, section=section, is_smoothed=not unit)


def worst_copies(log: Log) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of each reading of fp8 errors the worst, by the name of the number: steps, and values."""
    readings = [(event["step"], event["copies"]) for event in log.events if event["type"] == "fp8" and event["copies"]]
    steps = np.array([step for step, _ in readings], np.int64)
    found = {}
    for name, worst in (("snr_db", min), ("clipped", max), ("flushed", max)):
        known = ([one[name] for one in copies if isinstance(one[name], (int, float))] for _, copies in readings)
        found[name] = steps, np.array([worst(values, default=math.nan) for values in known], np.float64)
    return found


def thinned(steps: np.ndarray, values: np.ndarray, most: int) -> dict[str, Any]:
    """A series as JSON: `s` steps and `v` values, None where one is not finite; of a longer one than `most` the means
    of its parts, with the least and the largest value as `lo` and `hi`."""
    with np.errstate(invalid="ignore"):
        good = np.isfinite(values) & (np.abs(values) < LARGEST)
        values = np.where(np.abs(values) > 1 / LARGEST, values, 0.0 * values)  # NaN stays NaN
    if steps.size <= most:
        return {"s": steps.tolist(), "v": _numbers(np.where(good, values, math.nan))}
    starts = np.linspace(0, steps.size, most, endpoint=False).astype(np.int64)
    middles = (starts + np.append(starts[1:], steps.size) - 1) // 2
    count = np.add.reduceat(good.astype(np.int64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.add.reduceat(np.where(good, values, 0.0), starts) / count
    low = np.minimum.reduceat(np.where(good, values, math.inf), starts)
    high = np.maximum.reduceat(np.where(good, values, -math.inf), starts)
    return {"s": steps[middles].tolist(), "v": _numbers(means), "lo": _numbers(low), "hi": _numbers(high)}


def axes(log: Log) -> dict[str, list[Any]]:
    """Where the steps of a run are: `step`, and for each the `tokens` so far and the `seconds` of training."""
    steps, tokens, seconds = log.train["step"], tokens_so_far(log), elapsed_s(log)
    kept = np.unique(np.linspace(0, max(steps.size - 1, 0), min(MOST, steps.size)).astype(np.int64))
    return {"step": steps[kept].tolist(), "tokens": _numbers(tokens[kept]), "seconds": _numbers(seconds[kept])}


def strides(log: Log) -> np.ndarray:
    """How many steps each training record speaks for: those since the one before it."""
    steps = log.train["step"]
    return np.diff(steps, prepend=steps[:1] - 1).astype(np.float64)


def tokens_so_far(log: Log) -> np.ndarray:
    """Tokens trained on up to each training record, those before the first one included."""
    tokens = np.nan_to_num(log.train["tokens"])
    before = tokens[:1] * (log.train["step"][:1] - 1)
    return np.cumsum(tokens * strides(log)) + (before if before.size else 0.0)


def elapsed_s(log: Log) -> np.ndarray:
    """Seconds of training up to each training record, without those between the end of a process and its resumption."""
    times, steps = log.train["time"], log.train["step"]
    took = np.nan_to_num(log.train["time_ms"]) / 1000 * strides(log)
    if not (times.size and np.isfinite(times).all()):
        return np.cumsum(took)
    began = log.header.get("time")
    start = began if is_number(began) and began <= times[0] else times[0] - took[0]
    gaps = np.zeros(times.size)
    for event in log.events:
        if event["type"] == "resume" and is_number(event.get("time")):
            first = int(np.searchsorted(steps, event["step"], "right"))
            gaps[first:] += max(event["time"] - (times[first - 1] if first else start), 0.0)
    return np.maximum.accumulate(np.maximum(times - start - gaps, 0.0))


def is_number(value: Any) -> bool:
    """Whether a value of a record is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(values: np.ndarray) -> list[float | None]:
    """Values of DIGITS digits; None for those that are not finite."""
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]


def lost_steps(log: Log) -> Mapping[int, str]:
    """Steps without an update, as their loss or gradient was not finite or a spike: each with what was logged."""
    train = log.train
    lost = ~(np.isfinite(train["loss"]) & np.isfinite(train["norm"])) | (train["applied"] == 0)
    rows = np.flatnonzero(lost & (np.isfinite(train["applied"]) | ~np.isnan(train["loss"])))
    return {int(train["step"][row]): f"loss {train['loss'][row]}, norm {train['norm'][row]}" for row in rows}
