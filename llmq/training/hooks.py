"""What hooks of the training loop know of it, and what `llmq.train` takes as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llmq.engine.engine import Engine
from llmq.errors import UsageError
from llmq.plan.plan import Plan
from llmq.training.job import Job
from llmq.training.log import RunLog
from llmq.training.progress import Progress
from llmq.training.ranks import Ranks
from llmq.training.records import EvalRecord, TrainRecord

Watch = Callable[[TrainRecord | EvalRecord], None]


def check_hooks(watch: object, console: object) -> None:
    """UsageError if `watch` cannot be called, or `console` cannot be written to."""
    if watch is not None and not callable(watch):
        raise UsageError(f"watch is {watch!r}: give a function, which is called with each record")
    if console is not None and not hasattr(console, "write"):
        raise UsageError(f"console is {console!r}: give an open text file, such as sys.stderr or io.StringIO()")


class Loop(Protocol):
    """What hooks read of the training loop, change and ask of it.

    `light_s` is that of the job; `is_cold`: no delayed scale has seen a batch yet.
    """

    job: Job
    log: RunLog
    engine: Engine
    progress: Progress
    ranks: Ranks
    light_s: float
    is_cold: bool

    def switch(self, plan: Plan) -> None:
        """Goes on under another plan; first saves a checkpoint of this step."""

    def reopen(self, plan: Plan) -> None:
        """Puts an engine under another plan, which has no values yet, in the place of the run's."""
