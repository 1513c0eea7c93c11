"""Lines and progress on one stream: bars below the lines on a terminal, now and then a plain line anywhere else.

A task that is over within AFTER_S shows nothing. Bars are drawn by the calls that report progress, not by a thread of
rich's: a terminal that went away is then an OSError where it can be handled, and timings are not disturbed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from llmq.redact import redacted

if TYPE_CHECKING:
    from rich.progress import Progress

AFTER_S = 2.0  # a task shows nothing before
DRAW_S, SELDOM_S = 0.1, 1.0  # from one drawing of the bars to the next, at least and at most
DRAWN = 0.005  # share of the time that drawings take, if that is no more than SELDOM_S
PLAIN_S = 10.0  # from one plain line of a task to the next

T = TypeVar("T")
Report = Callable[[int, int | None], None]  # how much is done, and how much there is, where that is known
Words = Callable[[int], str]  # formats an amount
StartTask = Callable[[str], AbstractContextManager[Report]]  # by its title; it ends with the block


class Screen:
    """A stream with lines, and with bars while tasks run; by default stdout, whatever that is at the time."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._bars: Progress | None = None
        self._draws_at = 0.0
        self.above: Callable[[int], Iterable[Any]] = lambda width: ()  # lines above the bars, no wider than `width`

    @property
    def stream(self) -> TextIO:
        """Where lines go."""
        return sys.stdout if self._stream is None else self._stream

    @property
    def is_terminal(self) -> bool:
        """Whether a user watches, so that bars can be drawn."""
        return self.stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def line(self, text: str) -> None:
        """One line, flushed, above the bars; what the encoding lacks is escaped. OSError if it cannot be written."""
        encoding = getattr(self.stream, "encoding", None) or "ascii"
        text = redacted(text).encode(encoding, "backslashreplace").decode(encoding)
        if self._bars is None:
            print(text, file=self.stream, flush=True)
        else:
            self._bars.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    @contextmanager
    def task(
        self, title: str, *, after_s: float = AFTER_S, only_bar: bool = False, words: Words | None = None
    ) -> Iterator[Report]:
        """Shows what is reported of a task from `after_s` seconds on; with `only_bar`, on a terminal only.

        `words` formats an amount, as `disk.shown` formats bytes; without it an amount is a number.
        """
        amount_in_words, title = words or "{:,}".format, redacted(title)
        began = printed = time.monotonic()
        bar, first = None, (0.0, 0)

        def report(done: int, total: int | None) -> None:
            nonlocal bar, first, printed
            now = time.monotonic()
            if now < self._draws_at:  # on a terminal, which was drawn a moment ago
                return
            if not self.is_terminal:
                if not only_bar and now - printed >= PLAIN_S:
                    printed = now
                    share = f" of {amount_in_words(total)} ({100 * done // total}%)" if total else ""
                    self.line(f"{title}: {amount_in_words(done)}{share}")
            elif bar is not None or now - began >= after_s:
                bars = self._started()
                if bar is None:
                    bar, first = bars.add_task(title, amount="", rate=""), (now, done)
                amount = f"{amount_in_words(done)}/{'?' if total is None else amount_in_words(total)}"
                rate = _rate(done - first[1], now - first[0], words)
                began_drawing = time.monotonic()
                bars.update(bar, completed=done, total=total, amount=amount, rate=rate, refresh=True)
                took = time.monotonic() - began_drawing
                self._draws_at = now + min(max(DRAW_S, took / DRAWN), SELDOM_S)

        try:
            yield report
        finally:
            if bar is not None and self._bars is not None:
                self._bars.remove_task(bar)
                if not self._bars.tasks:
                    self.drop_bars()

    def drop_bars(self) -> None:
        """Removes all bars; a terminal that went away has none."""
        bars, self._bars = self._bars, None
        if bars is not None:
            with suppress(OSError):
                bars.stop()

    def _started(self) -> Progress:
        if self._bars is not None:
            return self._bars
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(file=self.stream)

        class Bars(Progress):
            def get_renderables(bars) -> Iterator[Any]:
                yield from self.above(console.width - 1)
                yield from super().get_renderables()

        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"),
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bars.start()
        return self._bars


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """A line for each fact, which goes below a title."""

    def shown(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else "-" if value is None else str(value)

    width = max(map(len, facts), default=0)
    return [f"  {name:<{width}} : {shown(value)}" for name, value in facts.items()]


def unreported(done: int, total: int | None) -> None:
    """The Report of a task that nothing shows."""


def counted(items: Iterable[T], total: int | None, report: Report) -> Iterator[T]:
    """The items, each reported once the next one is asked for."""
    done = 0
    for done, item in enumerate(items, 1):
        yield item
        report(done, total)


@contextmanager
def unshown(title: str) -> Iterator[Report]:
    """A task whose progress does not matter."""
    yield unreported


def _rate(done: int, seconds: float, words: Words | None) -> str:
    """`12.3/s`, or of what takes longer than a second `4.5 s each`; of bytes, as `words` formats them, `1.2 GiB/s`."""
    if done <= 0 or seconds <= 0:
        return ""
    if words is not None:
        return f"{words(int(done / seconds))}/s"
    return f"{done / seconds:,.1f}/s" if done >= seconds else f"{seconds / done:,.1f} s each"
