"""The engine of a run: there is one at a time, and another plan gets another one, in the same memory."""

from pathlib import Path

from llmq.engine.engine import Engine
from llmq.files.checkpoint import load
from llmq.plan.plan import Plan
from llmq.training.faults import engine_of
from llmq.training.fp8 import carried
from llmq.training.profile import profiled
from llmq.training.ready import Ready


class Engines:
    """`now` is the engine that trains, `light_s` the seconds of a token at the speed of light under its plan."""

    def __init__(self, ready: Ready) -> None:
        self._ready = ready
        self._open(ready.plan)
        if ready.backend.allocated:
            ready.log.say(ready.backend.allocated)

    def _open(self, plan: Plan) -> None:
        asked = self._ready.asked
        self.now: Engine = profiled(asked.profile, engine_of(asked.faults))(plan, self._ready.backend)
        self.light_s = self._ready.light_s(plan)

    def reopen(self, plan: Plan) -> None:
        """Another engine, whose memory is that of the one before, once no rank has it open."""
        del self.now
        self._ready.ranks.all_of(None)
        self._open(plan)

    def switch(self, plan: Plan, path: Path | None) -> None:
        """Another engine with the state of this one, of which there is a checkpoint at `path`."""
        assert path is not None
        old, (_, reader) = self.now.plan, load(path, verified=False)
        self.reopen(plan)
        self.now.restore(carried(reader.in_one_memory(), old, plan), self._ready.frozen(plan))
