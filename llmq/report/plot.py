"""Training curves of one or several runs: loss raw and smoothed, evaluation loss, norm, learning rate, tokens/s, and
the numbers that callbacks logged.

And in numbers: means over the last steps of each, and how far they are from those of the first run. One step's loss
means little: it is that of one batch. Runs on the same data and seed see the same batches, whose noise is in all means.

Figures are made without pyplot, so nothing global changes and a notebook's own plots are left alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Column, Table
from rich.text import Text

from llmq.disk import write_whole
from llmq.errors import UsageError
from llmq.report.read import Log, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#e0a100", "#0c8599", "#c2255c", "#5f3dc4", "#495057")
WIDTH, HEIGHT, MORE_HEIGHT, COLUMNS = 11, 6.2, 2.2, 3  # inches, of which each row of callbacks' numbers adds some
LARGEST = 1e100  # that is drawn: limits of axes are computed in f64
MANY_POINTS = 20_000  # matplotlib looks at each of them for the legend's best place
INK, FAINT = "#24292f", "#8c959f"
STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": "#d0d7de",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "grid.color": "#eaeef2",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "svg.hashsalt": "llmq",
    "svg.fonttype": "none",
}


Columns = tuple[tuple[str, str, float], ...]  # tables, their columns, and what these are multiplied by
BELOW: dict[str, Columns] = {  # panels of what not every log has
    "token accuracy, %": (("train", "accuracy", 100), ("eval", "accuracy", 100)),
    "memory, GiB": (("train", "memory_mib", 1 / 1024), ("train", "allocated_mib", 1 / 1024)),
}


@dataclass(frozen=True)
class PlottedRun:
    """One run in the figure. `loss` has NaN where it was not finite; `smooth` is its running mean."""

    label: str
    colour: str
    log: Log
    loss: np.ndarray
    smooth: np.ndarray


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Mean over a bell of about 3 x `width` values around each one; values that are not finite stay NaN, uncounted.

    Centred, unlike an exponential mean, so that a steep start is not drawn too late. The bell is three passes of a box,
    which cost the same for any width.
    """
    good = np.isfinite(values)
    if width < 2:
        return _finite(values)
    total, count = np.where(good, values, 0.0), good.astype(np.float64)
    reach = width // 2
    first = np.maximum(np.arange(values.size) - reach, 0)
    last = np.minimum(np.arange(values.size) + reach + 1, values.size)
    for _ in range(3):
        total, count = (s[last] - s[first] for s in (np.cumsum([0.0, *total]), np.cumsum([0.0, *count])))
    return np.divide(total, count, out=np.full(values.shape, math.nan), where=good)


def plot_runs(logs: Sequence[Log], out: Path) -> Path:
    """Draws runs by their logs into `out`, a .png, .svg or .pdf file; returns its path.

    UsageError without matplotlib or for another format, StorageError when `out` cannot be written.
    """
    out = Path(out)
    kind = out.suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise UsageError(
            f"{out} does not end in one of {', '.join('.' + f for f in FORMATS)}: choose one of these formats"
        )
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            f"plots need matplotlib, which is not installed here ({error}): install llmq with its extra [plot], or "
            '`pip install "matplotlib>=3.8"`'
        ) from error
    style: Any = {**dict(matplotlib.rcParamsDefault), **STYLE}  # not the user's matplotlibrc
    with matplotlib.rc_context(style), np.errstate(all="ignore"):  # of numbers near the largest
        figure = Figure(dpi=160, facecolor="white")
        _draw(figure, [_run(*one) for one in zip(logs, labels(logs), cycle(COLOURS), strict=False)])
        image = io.BytesIO()
        figure.savefig(image, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_whole(out, image.getvalue())
    return out


def _run(log: Log, label: str, colour: str) -> PlottedRun:
    loss = _finite(log.train["loss"])
    return PlottedRun(label, colour, log, loss, smoothed(loss, loss.size // 60))


def _draw(figure: Figure, runs: Sequence[PlottedRun]) -> None:
    metrics = list(dict.fromkeys(name for run in runs for name in run.log.metrics))
    known = {title: columns for title, columns in BELOW.items() if any(_known(run.log, *columns) for run in runs)}
    more = -(-(len(known) + len(metrics)) // COLUMNS)  # rows of panels below the others
    height = HEIGHT + more * MORE_HEIGHT
    figure.set_size_inches(WIDTH, height)
    head = 1.08 if len(runs) == 1 else 0.8  # inches; one run has a line of facts under its name
    grid = figure.add_gridspec(
        2 + more,
        COLUMNS,
        height_ratios=(1.45, *[1] * (1 + more)),
        left=0.055,
        right=0.985,
        bottom=0.46 / height,
        top=1 - head / height,
        wspace=0.2,
        hspace=0.38,
    )
    loss = figure.add_subplot(grid[0, :2], title="training loss")
    held_out = figure.add_subplot(grid[0, 2], title="evaluation loss")
    norm, rate, speed = (
        figure.add_subplot(grid[1, i], title=title)
        for i, title in enumerate(("gradient norm", "learning rate", "tokens/s"))
    )
    count = len(known) + len(metrics)
    own = [figure.add_subplot(grid[2 + i // COLUMNS, i % COLUMNS]) for i in range(count)]
    for axes, (title, columns) in zip(own, known.items(), strict=False):
        axes.set_title(title)
        for run, (table, name, scale) in product(runs, columns):
            found, mark = getattr(run.log, table), "o" if table == "eval" else None
            axes.plot(
                found["step"],
                _finite(found[name]) * scale,
                color=run.colour,
                linewidth=1.2,
                marker=mark,
                markersize=3.5,
            )
    for axes, name in zip(own[len(known) :], metrics, strict=True):
        axes.set_title(name, parse_math=False)
        for run in runs:
            steps, values = run.log.metrics.get(name, (np.array([]), np.array([])))
            axes.plot(steps, _finite(values), color=run.colour, linewidth=1.5, marker="." if steps.size < 100 else None)
    alone = len(runs) == 1
    for run in runs:
        train, evals = run.log.train, run.log.eval
        dotted = "." if np.isfinite(run.loss).sum() < 2 else None  # one point has no line
        if not np.array_equal(run.loss, run.smooth, equal_nan=True):
            label = "each step" if alone else "_"  # "_": not in the legend
            loss.plot(train["step"], run.loss, color=run.colour, linewidth=0.8, alpha=0.35, label=label)
            label = "smoothed" if alone else run.label
        else:
            label = "each step" if alone else run.label
        loss.plot(train["step"], run.smooth, color=run.colour, linewidth=1.9, marker=dotted, label=label)
        losses = _finite(evals["loss"])
        for one in np.unique(run.log.eval_set):  # losses on other tokens are no continuation of a line
            these = run.log.eval_set == one
            held_out.plot(
                evals["step"][these], losses[these], color=run.colour, linewidth=1.5, marker="o", markersize=3.5
            )
        norm.plot(train["step"], _finite(train["norm"]), color=run.colour, linewidth=1.0, alpha=0.9, marker=dotted)
        rate.plot(train["step"], _finite(train["lr"]), color=run.colour, linewidth=1.7, marker=dotted)
        speed.plot(train["step"], _finite(train["tps"]), color=run.colour, linewidth=1.0, alpha=0.9, marker=dotted)
    _mark_lost_steps(loss, runs)
    _finish(figure, (loss, held_out, norm, rate, speed, *own), runs)


def _known(log: Log, *columns: tuple[str, str, float]) -> bool:
    """Whether a log has numbers in any of these columns."""
    return any(bool(np.isfinite(getattr(log, table)[name]).any()) for table, name, _ in columns)


def _mark_lost_steps(axes: Axes, runs: Sequence[PlottedRun]) -> None:
    """Crosses at the foot of the panel where a loss or gradient was not finite."""
    for run in runs:
        train = run.log.train
        lost = train["step"][~(np.isfinite(train["loss"]) & np.isfinite(train["norm"]) & (train["applied"] != 0))]
        if lost.size:
            foot = np.full(lost.size, 0.025)
            axes.plot(lost, foot, "x", color=run.colour, markersize=5, transform=axes.get_xaxis_transform(), label="_")
            noun = "step" if lost.size == 1 else "steps"
            axes.plot([], [], "x", color=run.colour, markersize=5, label=f"{lost.size} {noun} not finite")


def _finish(figure: Figure, panels: Sequence[Axes], runs: Sequence[PlottedRun]) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    loss, held_out, norm, rate, speed, *_ = panels
    last = max(1, *(run.log.last_step for run in runs))
    for axes in panels:
        axes.set_xlim(0, last + 0.5 if last < 50 else last * 1.01)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.margins(y=0.08)
    for axes in panels[2:]:
        axes.set_xlabel("step")
    norms = np.concatenate([_finite(run.log.train["norm"]) for run in runs])
    norms = norms[norms > 0]
    if norms.size and norms.max() > 30 * norms.min():
        norm.set_yscale("log")
    rate.set_ylim(bottom=0)
    rate.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3g}".replace("e-0", "e-")))
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    if not any(run.log.eval["step"].size for run in runs):
        held_out.text(0.5, 0.5, "no evaluations", transform=held_out.transAxes, ha="center", color=FAINT)
        held_out.set_yticks([])
    plain: dict[str, Any] = {"va": "center", "parse_math": False}  # $ in a name is no formula
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.28 / height, title, fontsize=14, fontweight="bold", **plain)
    if len(runs) == 1:
        figure.text(0.012, 1 - 0.55 / height, _summary(runs[0]), fontsize=9.5, color="#57606a", **plain)
    points = sum(run.loss.size for run in runs)
    legend = loss.legend(loc="best" if points < MANY_POINTS else "upper right")
    for text in legend.get_texts():
        text.set_parse_math(False)


def _summary(run: PlottedRun) -> str:
    """One line: model, steps, last losses, speed."""
    log, model = run.log, run.log.header.get("model")
    parts = [str(model["path"])] if isinstance(model, dict) and model.get("path") else []
    parts.append(f"{log.last_step:,} step{'' if log.last_step == 1 else 's'}")
    for what, values in (("training loss", run.smooth), ("evaluation loss", log.eval["loss"])):
        finite = values[np.isfinite(values)]
        if finite.size:
            parts.append(f"{what} {finite[-1]:.4f}")
    if not math.isnan(log.tokens_per_second):
        parts.append(f"{log.tokens_per_second:,.0f} tokens/s")
    return "   |   ".join(parts)


def _finite(values: np.ndarray) -> np.ndarray:
    """Values as they can be drawn: NaN where one is not finite, or so large that axes cannot be; 0 for tiny ones."""
    size = np.abs(values)
    return np.where(size < LARGEST, np.where(size > 1 / LARGEST, values, 0.0), math.nan)


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
    return [_means(log, label, last_steps) for log, label in zip(logs, labels(logs), strict=True)]


def _means(log: Log, label: str, last_steps: int) -> Summary:
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
