"""Progress: a bar on a terminal, below the lines; elsewhere a plain line now and then; nothing of what is over soon."""

import io

import pytest

from llmq import screen as module
from llmq.disk import shown
from llmq.screen import Screen, counted


class Terminal(io.StringIO):
    """A stream that a user watches."""

    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The time, which only the test moves; and a terminal that can draw."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return now


def run(stream, clock, seconds, *, count=100, **settings):
    """A task of this many seconds a piece; returns what was printed."""
    with Screen(stream).task("Working", **settings) as report:
        for _ in counted(range(count), count, report):
            clock[0] += seconds
    return stream.getvalue()


def test_a_short_task_shows_nothing(clock):
    assert run(Terminal(), clock, 0.019) == run(io.StringIO(), clock, 0.019) == ""


def test_a_terminal_has_a_bar_after_two_seconds(clock):
    shown = run(Terminal(), clock, 0.5)
    assert "Working" in shown and " 5/100" in shown and " 50%" in shown and "2.0/s" in shown and "0:00:" in shown
    assert " 3/100" not in shown
    assert " 1/100" in run(Terminal(), clock, 0.5, after_s=0.0)
    assert "4.5 s each" in run(Terminal(), clock, 4.5)


def test_a_pipe_has_a_line_at_most_every_ten_seconds(clock):
    lines = run(io.StringIO(), clock, 0.3).splitlines()
    assert lines == ["Working: 34 of 100 (34%)", "Working: 68 of 100 (68%)"]
    assert run(io.StringIO(), clock, 0.3, only_bar=True) == ""


def test_lines_stand_above_the_bar_as_they_are(clock):
    stream = Terminal()
    screen = Screen(stream)
    with screen.task("Training", after_s=0.0) as report:
        report(1, 9)
        screen.line("[T] step [/T] :smile: " + "x" * 300)
        clock[0] += 1
        with screen.task("Evaluating", after_s=0.0) as inner:
            inner(3, 4)
        clock[0] += 1
        report(2, 9)
    screen.line("after")
    shown = stream.getvalue()
    assert "[T] step [/T] :smile: " + "x" * 300 in shown and "Evaluating" in shown and "2/9" in shown
    assert shown.endswith("after\n") and shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back


def test_a_bar_is_gone_after_an_error(clock):
    stream = Terminal()
    screen = Screen(stream)
    with pytest.raises(KeyboardInterrupt), screen.task("Training", after_s=0.0) as report:
        report(1, 9)
        raise KeyboardInterrupt
    after = stream.getvalue().rpartition("1/9")[2]
    assert "\x1b[2K\x1b[?25h" in after  # the line is cleared, the cursor is back


def test_bytes_are_said_as_such(clock):
    def moved(stream):
        with Screen(stream).task("Saving", words=shown) as report:
            for gib in range(21):
                report(gib << 30, 20 << 30)
                clock[0] += 1
        return stream.getvalue()

    assert moved(io.StringIO()).splitlines() == [
        "Saving: 10.0 GiB of 20.0 GiB (50%)",
        "Saving: 20.0 GiB of 20.0 GiB (100%)",
    ]
    bar = moved(Terminal())
    assert " 5.0 GiB/20.0 GiB" in bar and " 25%" in bar and "1.0 GiB/s" in bar
