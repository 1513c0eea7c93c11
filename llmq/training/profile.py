"""`--profile`: a Chrome trace of some steps, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.data.batches.batch import Batch
from llmq.disk import write_whole
from llmq.engine.engine import Engine, StepResult
from llmq.errors import StorageError
from llmq.training.hooks import Hook, RunView
from llmq.training.records import TrainRecord, TrainResult

if TYPE_CHECKING:
    from llmq.engine.profile import Profile
    from llmq.options.run import ProfileOptions
    from llmq.training.ready import Ready

WARM_UP = 2  # steps of a process: the first one compiles kernels, the second one captures graphs


def profiled(options: ProfileOptions, engine: type[Engine]) -> type[Engine]:
    """An engine whose steps can be profiled, if some are to be."""
    if options.profile is None:
        return engine
    from llmq.engine.profile import Profiled

    return type("ProfiledEngine", (Profiled, engine), {})


def profile_hooks(ready: Ready) -> tuple[Hook, ...]:
    """The hook that the option asks for."""
    return () if ready.asked.profile.profile is None else (ProfileHook(ready),)


class ProfileHook(Hook):
    """Profiles the steps after the warm-up, and writes their trace."""

    def __init__(self, ready: Ready) -> None:
        options = ready.asked.profile
        self._log, self._ranks, self._is_gpu = ready.log, ready.ranks, ready.device.kind == "cuda"
        self._left, self._path = options.profile or 0, Path(options.profile_file)
        self._warm, self._steps = 0, list[int]()
        self._profile: Profile | None = None
        self._between = 0.0  # when the last step that is profiled ended

    def before_step(self, run: RunView, batch: Batch) -> None:
        """The step is profiled from here on, if its turn has come."""
        self._warm += 1
        if self._warm <= WARM_UP or not self._left:
            return
        if (profile := self._profile) is None:
            profile = self._profile = self._begun()
        else:
            waited = 1e-3 * batch.wait_ms
            seconds = time.perf_counter() - self._between - waited
            profile.add("log, callbacks, evaluation, checkpoint", self._between, seconds=max(seconds, 0.0))
        profile.settle()
        profile.start()
        _begin(run.engine, profile)

    def _begun(self) -> Profile:
        from llmq.engine.measure import Clock, CudaClock
        from llmq.engine.profile import Profile

        return Profile(CudaClock() if self._is_gpu else Clock())

    def after_update(self, run: RunView, done: StepResult) -> None:
        """The step is over, and the device with it."""
        if (profile := self._profile) is not None and self._left:
            self._between = time.perf_counter()
            profile.settle()
            self._steps.append(run.progress.step + 1)
            self._left -= 1

    def after_step(self, run: RunView, record: TrainRecord) -> None:
        """Writes the trace after the last of the steps."""
        if self._steps and not self._left:
            self._write(run)

    def on_end(self, run: RunView, result: TrainResult) -> None:
        """Writes the trace of a run that has ended before."""
        if self._steps:
            self._write(run)
        elif self._left:
            self._log.say(f"--profile: no step was profiled, as the first {WARM_UP} of a process are its warm-up")

    def _write(self, run: RunView) -> None:
        profile, steps, self._profile, self._steps, self._left = self._profile, self._steps, None, [], 0
        assert profile is not None
        _begin(run.engine, None)
        with self._ranks.long("the trace of its profile"):
            found = self._ranks.all_of({"shown": profile.shown, "spans": profile.spans, "epoch": profile.epoch})
        if not self._ranks.is_first:
            return
        text = json.dumps({"traceEvents": trace_events(found), "displayTimeUnit": "ms"}).encode()
        try:
            write_whole(self._path, gzip.compress(text, 5) if self._path.suffix == ".gz" else text)
        except StorageError as error:  # the run is worth more than its profile
            self._log.warn(f"--profile-file: {error}")
            return
        which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        self._log.notice(f"Profile of {which}: {self._path}, for ui.perfetto.dev or chrome://tracing")


def _begin(engine: Engine, profile: Profile | None) -> None:
    from llmq.engine.profile import Profiled

    assert isinstance(engine, Profiled)
    engine.begin(profile)


def trace_events(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The events of a trace: each rank is a process, each row a thread of it; times are microseconds from the first."""
    epoch = min(one["epoch"] for one in ranks)
    later = [1e6 * (one["epoch"] - epoch) for one in ranks]  # of each rank's clock
    first = min(at + start for at, one in zip(later, ranks, strict=True) for _, _, start, _ in one["spans"])
    found: list[dict[str, Any]] = []
    for rank, one in enumerate(ranks):
        rows = {row: number for number, row in enumerate(dict.fromkeys(row for row, *_ in one["spans"]))}
        names = [("process_name", 0, f"rank {rank}"), *(("thread_name", number, row) for row, number in rows.items())]
        found += [
            {"ph": "M", "name": kind, "pid": rank, "tid": number, "args": {"name": name}}
            for kind, number, name in names
        ]
        for row, number, start, length in one["spans"]:
            span = {
                "ph": "X",
                "pid": rank,
                "tid": rows[row],
                "ts": round(later[rank] + start - first, 3),
                "dur": round(length, 3),
            }
            found.append({**span, "cat": row, **one["shown"][number]})
    return found
