"""Going back within a run: to its last checkpoint, or to its beginning, as one that resumes there would begin, but with
the data that follows, so that what led to a fault is not met again.

The checkpoint is the last of those that are saved every so many steps, whatever else is there: where an interrupt has
saved one between these, the resumed run goes back as far as one that was never interrupted, and so has its bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmq.engine.engine import Engine
from llmq.errors import NonFiniteError
from llmq.files.checkpoint import found, load
from llmq.plan.plan import Plan
from llmq.training.hooks import Hook, RunView
from llmq.training.interrupt import Interrupt
from llmq.training.progress import Progress
from llmq.training.ready import Ready
from llmq.training.saving import RunCheckpoints, load_weights, restore


class Rollbacks:
    """Takes a run back, at most --rollback-limit times to one checkpoint."""

    def __init__(self, ready: Ready, saving: RunCheckpoints, hooks: Sequence[Hook]) -> None:
        self._ready, self._saving, self._hooks = ready, saving, hooks
        self._first = {hook.key: hook.state() for hook in hooks if hook.key}
        self._path, self._state = ready.earlier.path, ready.earlier.state  # of where it goes
        self._count = 0  # how often in a row

    def begin(self, run: RunView) -> Plan:
        """Completes all saves and decides where to; the plan to go on with. NonFiniteError for once too often."""
        self._saving.settle(run)
        path, log, limit = self._last(run), self._ready.log, self._ready.options["rollback_limit"]
        self._count = self._count + 1 if path == self._path else 1
        self._path, self._state = path, load(path, verified=False)[0] if path else {}
        where = f"the checkpoint of step {self._state['step']}" if path else "its beginning"
        if self._count > limit:
            raise NonFiniteError(
                f"the run went back to {where} {limit} times, each time with other data, and has not come further than "
                f"to step {run.progress.step}: lower --learning-rate, set --grad-clip, or use a wider --matmul-dtype; "
                "a larger --rollback-limit goes on trying"
            )
        log.notice(
            f"Back to {where}, {self._count} of at most {limit} times; the data goes on after sample "
            f"{run.progress.position:,}"
        )
        return self._plan(run.engine.plan)

    def _last(self, run: RunView) -> Path | None:
        """The last checkpoint that was due, or the one that the run has resumed from; None without any."""
        earlier, ranks = self._ready.earlier, self._ready.ranks
        least = earlier.step if earlier.checkpoints.resets else 0  # what is before is of another course
        there = found(earlier.checkpoints.folder)
        due = [step for step in there if least < step < run.progress.step and earlier.checkpoints.due(step)]
        path = ranks.agreed(str(there[max(due)]) if due else None)
        return Path(path) if path else earlier.path

    def _plan(self, now: Plan) -> Plan:
        """That of the checkpoint, which may have been saved before sites left fp8."""
        sites: Mapping[str, Any] = self._state.get("sites", {})
        before = self._ready.plan.spec.precision
        dtypes = replace(before, wide=tuple(sites["wide"]), matmul=sites["matmul"]) if sites else before
        return now if dtypes == now.spec.precision else self._ready.replan(dtypes, now.total_bytes)

    def restore(self, engine: Engine, now: Progress) -> Progress:
        """Loads that state into an engine that is new, and into the hooks; how far the run then is. It is not
        interrupted, as there is no state to save meanwhile."""
        ready, earlier, uninterrupted = self._ready, self._ready.earlier, Interrupt()
        resets = earlier.checkpoints.resets if self._path == earlier.path else ()
        with ready.ranks.long("going back"):
            if self._path is None:
                load_weights(ready, engine, uninterrupted)
            else:
                restore(ready, engine, uninterrupted, load(self._path, verified=False)[1], resets=resets)
        state = {**self._first, **self._state}
        for hook in self._hooks:
            if hook.key in state:
                hook.resume(state[hook.key])
        before = Progress.read(self._state).reset(resets) if self._path else Progress()
        self._saving.go_back(self._path, before.step)
        return replace(before, position=now.position, stream=now.stream)
