"""Draws docs/throughput.svg, the picture in the README, from docs/throughput.json."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmq.report.plot import COLOURS, FAINT, STYLE  # noqa: E402

DATA, PICTURE = ROOT / "docs/throughput.json", ROOT / "docs/throughput.svg"
MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B")
TRAINERS = {"llmq": COLOURS[0], "llm.q": "#a5c8f5", "PyTorch": "#d0d7de"}


def bars(results: list[dict[str, Any]], model: str) -> list[tuple[str, str, float]]:
    """(matmuls, trainer, tokens/s) of a model, with the head in bf16, which is what all trainers were measured with."""
    rows = [row for row in results if row["model"] == model and row["head"] == "bf16"]
    named = [(row["matmuls"], {**row, "llmq": row["tokens_per_s"]}) for row in rows]
    return [(matmuls, trainer, row[trainer]) for matmuls, row in named for trainer in TRAINERS if trainer in row]


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """One panel for each model, a bar for each trainer and dtype."""
    style: Any = {**dict(matplotlib.rcParamsDefault), **STYLE, "axes.grid": False, "axes.spines.bottom": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 2.7), facecolor="white")
        panels = figure.subplots(1, len(MODELS))
        for axes, model in zip(panels, MODELS, strict=True):
            found = bars(results, model)
            most = max(speed for _, _, speed in found)
            for place, (matmuls, trainer, speed) in enumerate(found):
                y = place + 0.6 * (matmuls == "e4m3")
                axes.barh(y, speed, height=0.82, color=TRAINERS[trainer])
                axes.text(speed + 0.02 * most, y, f"{speed:,}", va="center", fontsize=8.5)
                axes.text(-0.02 * most, y, f"{trainer} {matmuls}", va="center", ha="right", fontsize=8.5)
            axes.set(title=model, xlim=(0, 1.25 * most), xticks=[], yticks=[])
            axes.invert_yaxis()
        figure.text(0.012, 0.03, "Training tokens/s on one H200, 1024 tokens in a sequence", color=FAINT, fontsize=8.5)
        figure.subplots_adjust(left=0.09, right=0.99, top=0.88, bottom=0.12, wspace=0.42)
        figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(DATA.read_text("utf-8"))["results"], PICTURE)
