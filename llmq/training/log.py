"""The run's log: what the console shows, and the JSON-lines file in the run folder (llmq/report/read.py reads it).

The file has one JSON object per line, with a `type`:

    header      first record: schema, started, version, and the sections options, system, model, dataset, allocator
                and host_memory (MiB by name), and matmuls where timing chose their dtypes
    train       one optimizer step: the fields of TrainRecord, and tps
    eval        one evaluation: the fields of EvalRecord, and tps
    samples     completions of --sample-prompts after `step` updates: a list of the prompt, messages or tokens of each,
                its `text` (null without a tokenizer), its `new_tokens`, and its `end`: stop, or length
    metrics     what callbacks logged after `step` updates: `values`, numbers by name
    gpu         the GPU while a step ran: the fields of GpuRecord
    resume      the run was continued from the checkpoint of `step`; carries the header's sections again
    rollback    the run went back to what it was after `step`, with the data that follows
    algorithms  the table of matrix-product algorithms of a GPU, or the threads of BLAS, which decide the run's bits
    fp8         errors of fp8 copies before the step after `step`: the fields of CopyError for each
    notice, checkpoint, end     what happened, at which step; a notice that is a warning has `warning`, and the end has
                the list of all `warnings`, if there are any

Each has the `time` at which it was written, in seconds since 1970.

`step` counts finished updates: the train record of step 7 describes the seventh update. Losses are nats per trained
token, `sol` is a fraction of the speed of light, `epoch` counts passes over the data with its fraction.

JSON has no word for a number that is not finite, so such a number is one of the strings "NaN", "Infinity",
"-Infinity"; the reader makes numbers of them again in the tables of train, eval and gpu records. What is not known is
null (NaN in the tables). A continued run appends to its file: on a `resume` or `rollback` record of step S the reader
drops earlier rows, samples, metrics and fp8 records of steps beyond S, and of several records of one step and type the
last one counts. A last line without an end is what a killed process leaves: the reader ignores it and a continued run
removes it.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

import llmq
from llmq.disk import storage
from llmq.errors import StorageError, UsageError
from llmq.redact import redacted_in
from llmq.screen import AFTER_S, Report, Screen, Words, fact_lines
from llmq.training.records import EvalRecord, GpuRecord, TrainRecord, to_json

if TYPE_CHECKING:
    from llmq.options.run import LogOptions
    from llmq.training.panel import Panel

SCHEMA = 1
GOING_BACK = ("resume", "rollback")  # what drops earlier records of steps beyond its own
OPENING = b'{"type": "header'
DETAILS, USUAL, SUMMARY = 1, 0, -1  # the least --verbosity that shows a line
SECTIONS = ("options", "system", "model", "dataset", "matmuls", "allocator", "host_memory")


class RunLog:
    """Writes one run's console lines and its file. The sections are printed as they come; `begin` opens the file.

    That of a rank other than the first one is silent: it writes nothing. Of one that starts `again`, lines before that
    are details: the console has them from the first start.
    """

    def __init__(
        self, options: LogOptions, console: TextIO | None = None, *, is_silent: bool = False, again: bool = False
    ) -> None:
        self.name = options.name
        self.path = Path(options.log_file)
        self._eval_steps = (options.eval_num_steps, 0 if options.final_eval == "all" else options.eval_num_steps)
        self.gpu_every = options.log_gpu_util
        self.sample_prompts = None if options.sample_prompts is None else Path(options.sample_prompts)
        self.sample_tokens, self.sample_length = options.sample_tokens, options.sample_length
        self.sample_temperature = options.sample_temperature
        self.eval_metrics, self.eval_answers = options.eval_metrics, options.eval_answers
        self._every = (options.log_every, options.eval_every_n_steps)
        self._verbosity = options.verbosity
        self._screen = Screen(console)
        self._has_bars = options.verbosity >= USUAL and not is_silent
        self._panel, self._has_panel = options.panel, False
        self._console_lost = self._is_silent = is_silent
        self._begins_again = again
        self.console_is_all = False  # of a dry run the lines are all that there is
        self._sections: dict[str, Any] = dict.fromkeys(SECTIONS)
        self._file: IO[str] | None = None
        failed, advice = "the log cannot be written", "name another place with --log-file"
        self._storage = partial(storage, self.path, failed, advice=advice)
        self._has_ended = False
        self._step = self._num_steps = 0
        self._epoch: int | None = None  # of the last [T] line
        self.warnings: list[str] = []
        self._of_data: list[str] = []  # lines that wait for [Dataset]
        self._waiting: list[tuple[str, dict[str, Any]]] | None = []  # notices before `begin`
        self._opening: dict[str, Any] = {}  # the first record of this process
        self._followers: list[Callable[[dict[str, Any] | None], None]] = []

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether the update `step` (from 1) gets a line: each n-th one, the first, and the last of the run."""
        return last or step == 1 or step % self._every[0] == 0

    def eval_due(self, step: int, *, last: bool = False) -> bool:
        """Whether to evaluate after the update `step`: each n-th one and the last, or never with n = 0."""
        return self._every[1] > 0 and (last or step % self._every[1] == 0)

    def eval_steps(self, *, last: bool) -> int | None:
        """Batches of an evaluation, which may be the last; None: all that there are."""
        return self._eval_steps[last] or None

    def options(self, options: Mapping[str, Any], given: Collection[str] = ()) -> None:
        """[Options]: flat names and values; on a terminal only those that are `given`, unless all are asked for."""
        shown = options
        if self._screen.stream.isatty() and self._verbosity < DETAILS:
            shown = {name: value for name, value in options.items() if name in given}
        self._sections["options"] = dict(options)
        self.head("Options" if len(shown) == len(options) else "Options that are not defaults (-v shows all)")
        self.items(shown)

    def section(self, key: str, facts: Mapping[str, Any], title: str = "") -> None:
        """A section of the file's header, which the console has below a title, if it is given one."""
        self._sections[key] = dict(facts)
        if title:
            self.head(title)
            self.items(facts)

    def about_data(self, text: str) -> None:
        """A line on the data, below [Dataset]: there, if that is yet to come, so that an error comes before it."""
        if self._sections["dataset"] is None:
            self._of_data.append(text)
        else:
            self.say(text)

    def say_of_data(self) -> None:
        """The lines that waited for [Dataset]."""
        while self._of_data:
            self.say(textwrap.indent(self._of_data.pop(0), "  "))

    def begin(self, *, resume_step: int | None = None, num_steps: int = 0) -> None:
        """Opens the file and writes its header, or appends after the checkpoint of `resume_step`.

        Of `num_steps`, those of the run, lines show the share that is done; 0 is not known.

        A fresh run does not overwrite the log of an earlier one: that is renamed to PATH.1, PATH.2, ...
        """
        self._step, self._num_steps, self._begins_again = resume_step or 0, num_steps, False
        if self._is_silent:
            return
        kept = None
        self.check()
        with self._storage():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is None and self.path.exists() and self.path.stat().st_size > 0:
                kept = next(p for n in range(1, 10**6) if not (p := Path(f"{self.path}.{n}")).exists())
                os.rename(self.path, kept)
            elif resume_step is not None and self.path.exists():
                with open(self.path, "r+b") as file:  # without a line that a killed process did not finish
                    file.truncate(file.read().rfind(b"\n") + 1)
            self._file = open(self.path, "a", buffering=1, encoding="ascii", newline="\n")  # noqa: SIM115
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = {"schema": SCHEMA, "started": started, "version": llmq.__version__, **self._sections}
        if resume_step is not None and self.path.stat().st_size > 0:
            self.record("resume", step=resume_step, **about)
        else:
            self.record("header", **about)
        self.say_waiting()
        if kept is not None:
            self.notice(f"The log of an earlier run at {self.path} is kept as {kept}")

    def check(self) -> None:
        """StorageError if there is something else than a log at the path, or nothing can be, as it is too long.
        UsageError for a panel without a terminal."""
        if self._panel == "on" and not (self._screen.is_terminal or self._is_silent):
            raise UsageError("--panel on needs a terminal, and the console is none: use auto, or leave it out")
        start = b""
        with self._storage():
            if not (is_folder := self.path.is_dir()) and self.path.is_file():
                with open(self.path, "rb") as file:
                    start = file.read(len(OPENING))
        if is_folder:
            raise StorageError(f"--log-file {self.path} is a folder: name a file, such as {self.path / 'log.jsonl'}")
        if not OPENING.startswith(start):
            raise StorageError(f"--log-file {self.path} is a file that is no log: name another one")

    def train(self, record: TrainRecord) -> None:
        """One [T] line and its record; before the first one of another epoch, its number."""
        self._step = record.step
        epoch = max(math.ceil(record.epoch - 1e-9), 1)
        if epoch != (self._epoch or epoch):
            self.say(f"Epoch {epoch}")
        self._epoch = epoch
        line = record.line(self._num_steps, details=self._verbosity >= DETAILS)
        self.say(line, least=DETAILS if self._has_panel else USUAL)
        self.record("train", **record.values)

    def evaluation(self, record: EvalRecord) -> None:
        """One [V] line and its record."""
        self._step = record.step
        self.say(record.line(self._num_steps), least=SUMMARY)
        self.record("eval", **record.values)

    def rollback(self, step: int) -> None:
        """The run is back at `step`."""
        self._step, self._epoch = step, None
        self.record("rollback", step=step)

    def gpu(self, record: GpuRecord) -> None:
        """One [G] line and its record."""
        self.say(record.line(), least=DETAILS if self._has_panel else USUAL)
        self.record("gpu", **asdict(record))

    def say_waiting(self) -> None:
        """The notices so far. Others do not wait."""
        waiting, self._waiting = self._waiting or [], None
        for text, facts in waiting:
            self.notice(text, **facts)

    def notice(self, text: str, **facts: Any) -> None:
        """A line that the user should see, and its record. Before `begin` it waits for that."""
        if self._waiting is not None:
            self._waiting.append((text, facts))
            return
        is_warning = facts.get("warning", False)
        self.say(f"Warning: {text}" if is_warning else text, least=SUMMARY if is_warning else USUAL)
        self.record("notice", step=self._step, text=text, **facts)

    def warn(self, text: str) -> None:
        """A notice of something that may spoil the run; `end` repeats it, and is the last record."""
        self.warnings.append(text)
        if self._has_ended:
            self.say(f"Warning: {text}", least=SUMMARY)
        else:
            self.notice(text, warning=True)

    def end(self, reason: str, warnings: Sequence[str] = (), **metrics: Any) -> None:
        """The run is over: `reason` is finished, interrupted, terminated or failed.

        Prints all warnings, those of `warn` once more and `warnings`, which are new. Only the first call counts: a rank
        that misses another one may notice that itself, and hear it from the watchdog.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self.warnings += [text for text in warnings if text not in self.warnings]
        found = {"warnings": self.warnings} if self.warnings else {}
        self.record("end", step=self._step, reason=reason, **metrics, **found)
        if found:
            self.head("Warnings", least=SUMMARY)
        for text in self.warnings:
            self.say(f"  - {text}", least=SUMMARY)

    def record(self, kind: str, **values: Any) -> None:
        """Appends one record to the file, if it is open."""
        if self._file is None:
            return
        record = redacted_in(to_json({"type": kind, "time": round(time.time(), 3), **values}))
        self._opening = self._opening or record
        with self._storage():
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        for follower in self._followers:
            follower(record)

    def follow(self, follower: Callable[[dict[str, Any] | None], None]) -> None:
        """Calls a function with the first record of this process, with each one from here on, and with None when the
        log is closed."""
        self._followers.append(follower)
        follower(self._opening)

    @property
    def wants_panel(self) -> bool:
        """Whether a user watches, and is to see a panel."""
        is_plain = "NO_COLOR" in os.environ or "CI" in os.environ or self._panel == "off"
        return self._has_bars and self._screen.is_terminal and (self._panel == "on" or not is_plain)

    @property
    def has_unicode(self) -> bool:
        """Whether the console can have any letter."""
        return "utf" in (getattr(self._screen.stream, "encoding", None) or "").lower()

    def show(self, panel: Panel) -> None:
        """Has a panel above the bars, in place of the lines of steps."""
        self._has_panel, self._screen.above = True, panel.lines
        self.follow(panel.take)

    def say(self, text: str, *, least: int = USUAL) -> None:
        """One console line, if --verbosity is `least` or more.

        A run outlives its console: once a line cannot be written (a pipe without a reader, a full disk), none is. Of a
        dry run the lines are all that there is: OSError.
        """
        if self._console_lost or self._verbosity < least + self._begins_again:
            return
        try:
            self._screen.line(text)
        except OSError as error:
            self._lose_console(error)

    @contextmanager
    def task(
        self, title: str, *, after_s: float = AFTER_S, only_bar: bool = False, words: Words | None = None
    ) -> Iterator[Report]:
        """Shows what is reported of a task that takes long; see Screen."""
        with self._screen.task(title, after_s=after_s, only_bar=only_bar, words=words) as report:

            def shown(done: int, total: int | None) -> None:
                if self._has_bars and not self._console_lost:
                    try:
                        report(done, total)
                    except OSError as error:
                        self._lose_console(error)

            yield shown

    def _lose_console(self, error: OSError) -> None:
        if self.console_is_all:
            raise error
        self._console_lost = True
        self._screen.drop_bars()
        self.record("notice", step=self._step, text=f"the console cannot be written to any more: {error}")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        file, self._file = self._file, None
        for follower in self._followers:
            follower(None)
        if file is not None:
            with self._storage():
                file.close()

    def head(self, title: str, *, least: int = USUAL) -> None:
        """`[title]`, in bold on a terminal."""
        plain = not self._screen.is_terminal or "NO_COLOR" in os.environ
        self.say(f"[{title}]" if plain else f"\x1b[1m[{title}]\x1b[0m", least=least)

    def items(self, facts: Mapping[str, Any]) -> None:
        """A line for each fact, below a title."""
        for line in fact_lines(facts):
            self.say(line)
