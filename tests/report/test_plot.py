"""Plots: what is drawn is what the logs say, and the image is a whole one."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sample_files
from rich.console import Console

from llmq.cli import plot, shell
from llmq.errors import DataError, StorageError, UsageError
from llmq.options.run import LogOptions
from llmq.report.plot import Summary, plot_runs, smoothed, summarize, table
from llmq.report.read import read_log, read_runs
from llmq.training.log import RunLog
from llmq.training.records import EvalRecord

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.figure import Figure  # noqa: E402

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
ROOT = Path(__file__).parents[2]


def write_run(folder: Path, steps: int = 30, lost: tuple[int, ...] = (), name: str | None = None) -> Path:
    losses = [math.nan if step in lost else 2 + 5 / step for step in range(1, steps + 1)]
    evals = {step: 2.5 + 5 / step for step in range(10, steps + 1, 10)}
    return sample_files.write_run(folder, losses, evals, name=name)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would be saved: what they hold is looked at, not how it is drawn."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: saved.append(figure))
    return saved


@pytest.mark.quick("png")
@pytest.mark.parametrize("kind", sorted(MAGIC))
def test_formats(tmp_path: Path, kind: str) -> None:
    before = dict(matplotlib.rcParams)
    out = plot_runs(read_runs([write_run(tmp_path / "a")]), tmp_path / "new" / f"out.{kind.upper()}")
    assert out.read_bytes().startswith(MAGIC[kind])
    assert dict(matplotlib.rcParams) == before


def test_panels_hold_the_numbers_of_the_log(tmp_path: Path, figures: list[Figure]) -> None:
    plot_runs(read_runs([write_run(tmp_path / "a", lost=(7, 8))]), tmp_path / "out.png")
    panels = {axes.get_title(loc="left"): axes for axes in figures[0].axes}
    assert list(panels) == ["training loss", "evaluation loss", "gradient norm", "learning rate", "tokens/s"]
    raw = panels["training loss"].lines[0]
    want = [math.nan if step in (7, 8) else 2 + 5 / step for step in range(1, 31)]
    np.testing.assert_array_equal(raw.get_xdata(), np.arange(1, 31))
    np.testing.assert_array_equal(raw.get_ydata(), want)
    np.testing.assert_array_equal(panels["training loss"].lines[1].get_xdata(), [7, 8])
    np.testing.assert_array_equal(panels["evaluation loss"].lines[0].get_ydata(), [3.0, 2.75, 2.5 + 5 / 30])
    np.testing.assert_array_equal(panels["gradient norm"].lines[0].get_ydata(), np.arange(2.0, 32.0))
    np.testing.assert_array_equal(panels["learning rate"].lines[0].get_ydata(), [1e-4] * 30)
    np.testing.assert_allclose(panels["tokens/s"].lines[0].get_ydata(), 5120.0)
    legend = [text.get_text() for text in panels["training loss"].get_legend().get_texts()]
    assert legend == ["each step", "2 steps not finite"]
    assert "evaluation loss 2.6667" in figures[0].texts[1].get_text()


def test_several_runs_share_the_panels_and_a_legend(tmp_path: Path, figures: list[Figure]) -> None:
    """By their places, where they have one name."""
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", 50) / "log.jsonl"]
    same = [write_run(tmp_path / name, name="x") for name in ("c", "d")]
    for several, names in ((runs, ["a", "b"]), (same, list(map(str, same)))):
        plot_runs(read_runs(several), tmp_path / "out.png")
        assert [text.get_text() for text in figures[-1].axes[0].get_legend().get_texts()] == names
    for axes in figures[0].axes:
        assert len({line.get_color() for line in axes.lines}) == 2
        assert axes.get_xlim()[1] >= 50


def test_a_long_run_is_smoothed(tmp_path: Path, figures: list[Figure]) -> None:
    plot_runs(read_runs([write_run(tmp_path / "a", 200)]), tmp_path / "out.png")
    loss = figures[0].axes[0]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["each step", "smoothed"]
    raw, smooth = (line.get_ydata() for line in loss.lines)
    assert not np.array_equal(raw, smooth) and raw[0] == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["$_$", "[bold]x", "a\udcffb"])
def test_names_are_drawn_and_printed_as_they_are(tmp_path, monkeypatch, name, capsys) -> None:
    drawn, draw = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **more: drawn.append(figure) or draw(figure, *args, **more)
    )
    runs = [str(write_run(tmp_path / "a", name=name)), str(write_run(tmp_path / "b"))]
    shown = name.replace("\udcff", "\\udcff")
    assert shell.run(plot.command, [*runs, "-o", str(tmp_path / "out.png")]) == 0
    assert shown in capsys.readouterr().out
    assert drawn[0].axes[0].get_legend().get_texts()[0].get_text() == shown
    assert shell.run(plot.command, [runs[0], "-o", str(tmp_path / "out.svg")]) == 0
    assert drawn[1].texts[0].get_text() == shown


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "lost"), [(2, (1, 2)), (1, ()), (5, ()), (1, (1,))])
def test_short_and_lost_runs_are_drawn(tmp_path: Path, steps: int, lost: tuple[int, ...]) -> None:
    assert plot_runs(read_runs([write_run(tmp_path / "a", steps, lost)]), tmp_path / "out.png").stat().st_size > 1000


def test_smoothing() -> None:
    values = np.array([1.0, math.nan, 3.0, 5.0, math.inf, 7.0])
    np.testing.assert_array_equal(smoothed(values, 0), [1, math.nan, 3, 5, math.nan, 7])
    np.testing.assert_allclose(smoothed(np.full(50, 2.5), 9), 2.5)
    line = np.arange(101.0)
    np.testing.assert_allclose(smoothed(line, 9)[12:-12], line[12:-12])  # centred: a slope is not delayed
    noise = np.random.default_rng().standard_normal(4000)
    assert smoothed(noise, 100).std() < 0.15
    holes = np.where(np.arange(50) % 7 == 0, math.nan, 2.5)
    np.testing.assert_allclose(smoothed(holes, 9), holes)
    assert smoothed(np.empty(0), 5).shape == (0,)


def test_what_cannot_be_drawn_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    empty = write_run(tmp_path / "empty", 0)
    with pytest.raises(DataError) as caught:
        read_runs([tmp_path / "bad.jsonl", empty, tmp_path / "absent"])
    lines = str(caught.value)
    assert all(text in lines for text in ("bad.jsonl", "has no steps yet", "absent"))
    run = write_run(tmp_path / "a")
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        plot_runs(read_runs([run]), tmp_path / "out.gif")
    with pytest.raises(StorageError, match="cannot be written"):
        plot_runs(read_runs([run]), tmp_path / "bad.jsonl" / "out.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"\[plot\]"):
        plot_runs(read_runs([write_run(tmp_path / "a")]), tmp_path / "out.png")


@pytest.mark.slow
def test_the_command_and_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write_run(tmp_path / "a"), tmp_path / "out.png"
    for arguments, code in (([str(run), "-o", str(out)], 0), ([], 2), ([str(tmp_path / "absent")], 3)):
        with pytest.raises(SystemExit) as caught:
            shell.main(plot.command, arguments)
        assert caught.value.code == code
    printed = capsys.readouterr()
    assert printed.out.endswith(f"\n{out}\n") and "2.8056" in printed.out  # the mean of its evaluations
    assert "no run folder or log" in printed.err and "Traceback" not in printed.err
    out.unlink()
    script = ROOT / "tools" / "plot-training-run.py"
    subprocess.run([sys.executable, script, run, "-o", out], check=True, cwd=tmp_path, capture_output=True)
    assert out.exists()


def test_evaluations_on_other_tokens_are_not_joined(tmp_path: Path, figures: list[Figure]) -> None:
    """Another sample's size at the end, and another file after a resume."""
    options = LogOptions(name="a", log_file=str(tmp_path / "a" / "log.jsonl"))
    for resume, file, sizes in ((None, "x.bin", {10: 512, 20: 512, 30: 4096}), (20, "y.bin", {30: 512, 40: 512})):
        with RunLog(options, io.StringIO()) as log:
            log.section("dataset", {"eval": [{"path": file, "tokens": 4096}]})
            log.begin(resume_step=resume)
            for step, size in sizes.items():
                log.evaluation(EvalRecord(step, step / 30, 3.0, 3.0, 50.0, 8192, size))
        plot_runs(read_runs([tmp_path / "a"]), tmp_path / "out.png")
    lines = [
        [line.get_xdata().tolist() for line in axes.lines]
        for figure in figures
        for axes in figure.axes
        if axes.get_title(loc="left") == "evaluation loss"
    ]
    assert lines == [[[10, 20], [30]], [[10, 20], [30, 40]]]
    assert read_log(tmp_path / "a").eval_set.tolist() == [0, 0, 1, 1]


def test_a_folder_means_the_runs_in_it(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_run(tmp_path / "runs" / name)
    write_run(tmp_path / "runs" / "just begun", steps=0)
    assert [log.name for log in read_runs([tmp_path / "runs", tmp_path / "runs" / "b"])] == ["a", "b", "b"]
    with pytest.raises(DataError, match="no steps yet"):
        read_runs([tmp_path / "runs" / "just begun"])


def test_means_are_those_of_the_last_steps(tmp_path: Path) -> None:
    runs = [
        sample_files.write_run(tmp_path / "a", [9.0, 4.0, 3.0, 2.0], {1: 8.0, 3: 5.0, 4: 4.0}),
        sample_files.write_run(tmp_path / "b", [9.0, 4.0, math.nan, 3.0], {2: 7.0}, seconds=200.0),
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
    other = sample_files.write_run(tmp_path / "c", [9.0, 4.0, 3.0, 2.0], {2: 8.0, 3: 5.0, 4: 4.0}, whole=4)
    (summary,) = summarize(read_runs([other]), 4)
    assert (summary.eval_loss, summary.eval_count) == (4.0, 1), "those on other tokens are not counted"


def test_the_table_says_how_far_runs_are_from_the_first() -> None:
    runs = [Summary("bf16", 150, 2.0, 2.5, 1000.0, 30, 2), Summary("e4m3", 150, 2.01, 2.4, 1300.0, 30, 2)]
    out, none = io.StringIO(), Summary("none", 0, math.nan, math.nan, math.nan, 0, 0)
    Console(file=out, width=120).print(table([*runs, none], 30))
    text = out.getvalue()
    lines = [line for line in text.splitlines() if "bf16" in line or "e4m3" in line]
    assert "30 of each run" in text and "2.0000" in lines[0] and "%" not in lines[0]
    assert [cell.strip() for cell in lines[0].split("\u2502")[3:7]] == ["2.0000", "30", "2.5000", "2"]
    assert "2.0100 (+0.50%)" in lines[1] and "2.4000 (-4.00%)" in lines[1] and "1,300" in lines[1]
    assert "nan" not in text


def test_numbers_of_callbacks_have_panels_of_their_own(tmp_path: Path, figures: list[Figure]) -> None:
    """Without what a resume dropped; of one name in two runs both lines."""
    one, two, plain = (write_run(tmp_path / name) / "log.jsonl" for name in "abc")
    numbers = [(1, {"$_$": 1.0, "b": "NaN"}), (2, {"b": 5}), (1, {"b": 3.0})]
    lines = [{"type": "metrics", "step": step, "values": values} for step, values in numbers]
    with one.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*lines, {"type": "resume", "step": 1}])
    with two.open("a") as file:
        file.write(json.dumps({"type": "metrics", "step": 9, "values": {"b": 7, "c": 1, "d": 2}}) + "\n")
    plot_runs(read_runs([plain, one, two]), tmp_path / "out.png")
    panels = {axes.get_title(loc="left"): axes for axes in figures[0].axes[5:]}
    assert list(panels) == ["$_$", "b", "c", "d"]
    drawn = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in panels["b"].lines]
    assert drawn == [([], []), ([1], [3.0]), ([9], [7.0])]
    assert plot_runs(read_runs([one]), tmp_path / "one.png") and len(figures[1].axes) == 7
    with one.open("a") as file:
        file.write('{"type": "metrics", "step": 2, "values": {"b": "x"}}\n{"type": "metrics", "step": 2}\n')
    with pytest.raises(DataError, match=r"(?s)not a number: b is 'x'.*values is not an object"):
        read_log(one)
