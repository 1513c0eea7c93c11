"""The panel of a run on a terminal: what it shows at any width, that it is drawn seldom, and that it leaves nothing."""

import io
import math
import os
import re
import struct
import sys
import threading
from contextlib import suppress
from itertools import count

import pytest

import llmq
from llmq import screen as screens
from llmq.errors import UsageError
from llmq.report.read import read_log
from llmq.screen import Screen
from llmq.training.panel import MOST_POINTS, Curve, Panel

STEP = {"type": "train", "loss": 2.5, "norm": 1.25, "lr": 1e-5, "tps": 43211.5, "sol": 0.512, "memory_mib": 40960.3}
SHOWN = "loss 3 2.5 evaluation 2.2500 best accuracy 41.2% tokens/s 43,212 sol lr 1.00e-05 norm 1.25 memory 40.0/80 GiB"
OTHERS = "clock 1755 MHz power 655 W temperature 61 C busy 99% held by power cap a_long_name_of_a_number 0.12346"


class Terminal(io.StringIO):
    """A stream that a user watches, which may go away after some writes."""

    encoding = "utf-8"
    left = math.inf

    def isatty(self):
        return True

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise OSError("gone")
        return super().write(text)


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def panel(*, has_unicode=True):
    found = Panel(None, 80 << 30, has_unicode=has_unicode)
    assert not [*found.lines(80)]
    found.take({"type": "train", **STEP, "loss": 3.0, "sol": None, "accuracy": None})
    found.take({"type": "train", **STEP, "accuracy": 0.412})
    found.take({"type": "eval", "loss": 2.25, "accuracy": 0.25})
    found.take(
        {"type": "gpu", "sm_mhz": 1755, "watts": 655.2, "celsius": 61, "gpu_percent": 99, "throttled": ["power cap"]}
    )
    found.take({"type": "metrics", "values": {"a_long_name_of_a_number": 0.123456}})
    found.take(None)
    return found


@pytest.mark.parametrize("width", [40, 80, 160])
def test_all_numbers_fit_any_width(width):
    lines = [*panel().lines(width - 1)]
    shown = "\n".join(line.plain for line in lines)
    assert all(line.cell_len < width for line in lines) and len(lines) <= {40: 11, 80: 6, 160: 4}[width]
    assert all(word in shown for word in f"{SHOWN} {OTHERS}".split()) and "█▁" in shown
    assert all(ord(letter) < 128 for line in panel(has_unicode=False).lines(width) for letter in line.plain)


def test_the_narrowest_terminal_and_numbers_that_are_not_finite_are_no_error():
    found = panel()
    found.take({"type": "train", **STEP, "loss": "NaN", "norm": "Infinity"})
    for width in (1, 5, 17, 19):
        assert max(line.cell_len for line in found.lines(width)) < 40
    assert "nan" in "".join(line.plain for line in found.lines(80))


def test_the_course_of_any_length_is_means_of_neighbours():
    curve = Curve()
    for step in range(10 * MOST_POINTS):
        curve.add(float(step))
    curve.add(math.nan)
    assert MOST_POINTS / 2 <= len(curve.points) < MOST_POINTS and curve.points == sorted(curve.points)
    assert curve.points[0] == pytest.approx(7.5) and curve.spark(8, "01234567") == "01234567"
    assert Curve().spark(8, "01") == "" and curve.spark(1, "01") == "0"


def test_steps_of_10_ms_are_drawn_ten_times_a_second_and_less_where_that_takes_long(monkeypatch):
    now, drawn = [100.0], count()
    monkeypatch.setattr(screens.time, "monotonic", lambda: now[0])

    def slow(took):
        next(drawn)
        now[0] += took
        return ()

    for took, num_steps, least, most in ((0.0, 200, 18, 22), (0.001, 1000, 40, 55), (0.05, 1000, 9, 14)):
        screen, before = Screen(Terminal()), next(drawn)
        screen.above = lambda width, took=took: slow(took)
        with screen.task("Training", after_s=0.0) as report:
            for step in range(num_steps):
                now[0] += 0.01
                report(step, 1000)
        assert least <= next(drawn) - before <= 2 * most, "a drawing, and those that begin and end"


def test_on_a_terminal_a_panel_takes_the_place_of_lines_of_steps(given):
    given |= {"console": Terminal(), "callbacks": [lambda run, record: run.log(own_number=7.0)]}
    result = llmq.train(**given)
    shown = given["console"].getvalue()
    assert "tokens/s" in shown and "own_number" in shown and "[V] step" in shown and "[T] step" not in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") and read_log(result.log_path).train["step"].size == 12
    last = shown.rpartition("\x1b[?25h")[2]
    assert "tokens/s" not in last.replace(" tokens/s\n", "") and "12 steps in" in last


@pytest.mark.parametrize("plain", ["pipe", "NO_COLOR", "CI", "dumb", "off"])
def test_elsewhere_lines_are_plain_and_nothing_of_it_is_loaded(given, monkeypatch, plain):
    monkeypatch.delitem(sys.modules, "llmq.training.panel")
    console = io.StringIO() if plain == "pipe" else Terminal()
    monkeypatch.setenv("TERM" if plain == "dumb" else plain, "dumb" if plain == "dumb" else "1")
    llmq.train(**{**given, "console": console, "steps": 2}, panel="off" if plain == "off" else "auto")
    assert console.getvalue().count("[T] step") == 2 and "llmq.training.panel" not in sys.modules


def test_a_panel_that_cannot_be_is_refused(given):
    with pytest.raises(UsageError, match="--panel on needs a terminal"):
        llmq.train(**given, panel="on")
    with pytest.raises(UsageError, match="--panel on shows steps, and --verbosity -1 leaves them out"):
        llmq.train(**given, panel="on", verbosity=-1)


@pytest.mark.parametrize("writes", [30, 60, 100])
def test_a_terminal_that_goes_away_does_not_end_the_run(given, writes):
    given["console"] = Terminal()
    given["console"].left = writes
    assert llmq.train(**given).steps == 12


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of Unix")
def test_a_real_terminal_may_change_its_width_and_is_clean_after_ctrl_c(monkeypatch):
    import fcntl
    import termios

    monkeypatch.delenv("COLUMNS")
    now = [100.0]
    monkeypatch.setattr(screens.time, "monotonic", lambda: now[0])
    user, ours = os.openpty()
    real = os.get_terminal_size
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: real(ours))  # rich asks stdin first
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    written = bytearray()

    def drain():
        with suppress(OSError):  # EIO: the other end is closed
            while found := os.read(user, 1 << 16):
                written.extend(found)

    reader = threading.Thread(target=drain)
    reader.start()
    with open(ours, "w", encoding="utf-8") as stream:
        screen = Screen(stream)
        screen.above = panel().lines
        with pytest.raises(KeyboardInterrupt), screen.task("Training", after_s=0.0) as report:
            report(1, 9)
            screen.line("a line")
            fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
            now[0] += 2
            report(2, 9)
            raise KeyboardInterrupt
    reader.join()
    os.close(user)
    narrow, _, wide = written.decode().partition("a line")
    plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) for text in (narrow, wide)]
    widths = [max(map(len, re.split(r"[\r\n]+", text))) for text in plain]
    assert widths[0] <= 40 < widths[1] <= 100
    assert "tokens/s" in narrow and wide.count("\x1b[2K") >= 10, "each line of the panel is cleared"
    assert narrow.count("\x1b[?25l") == wide.count("\x1b[?25h") == 1 and "\x1b[?25l" not in wide
