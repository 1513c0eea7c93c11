"""What a run would take of memory and time, by plans of a few layers: a tenth of a second where its own takes twenty.

States of the optimizer change nothing in a micro-step, and the batch nothing in an update: each half is planned for
itself, once, and a search over many settings adds up pairs of them. Bytes of arenas are those alive at a time, in
proportion to what a few layers take for it: an estimate, which a plan of the whole has to confirm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmq.disk import GIB
from llmq.engine.predict import Rates, program_seconds
from llmq.optimizers.rule import MASTER, spaces
from llmq.plan.levels import micro_programs, with_layers
from llmq.plan.memory import Memory
from llmq.plan.plan import Plan, Scratch, make_plan
from llmq.plan.spec import Spec

# By plans of 2 and 3 layers the bytes of 20 came out exactly for every way to recompute and to offload, and the seconds
# within 0.1%; where weights or gradients come a layer ahead, or weights are made each time, by 3 and 4.
LAYERS = 2
MICRO, UPDATE = ("only", "first", "middle", "last"), ("update",)  # what counts of the time of each half
UPDATES = ("update", "publish", "publish_counted", "calibrate", "gather")
LARGE_PIECES = GIB  # of states on the host: as many calls as needed in a plan, but few to count here
TOKENS = 64  # of a sequence in a plan whose update is all that counts


@dataclass(frozen=True)
class Cost:
    """What a plan takes: bytes of the device and of the host, and seconds of an optimizer step."""

    num_bytes: int
    host_bytes: int
    seconds: float


@dataclass(frozen=True)
class _Half:
    """A plan in numbers: bytes outside the arena, those alive in it at a time, how much more it takes than these, bytes
    on the host, and the seconds of programs."""

    held_bytes: float
    live_bytes: float
    spread: float
    host_bytes: float
    seconds: Mapping[str, float]

    def grown(self, more: _Half, layers: int) -> _Half:
        """The numbers with `layers` more layers, of which `more` has one."""

        def grow(now: float, then: float) -> float:
            return now + layers * (then - now)

        return _Half(
            grow(self.held_bytes, more.held_bytes),
            max(grow(self.live_bytes, more.live_bytes), more.live_bytes),
            (self.spread + more.spread) / 2,
            grow(self.host_bytes, more.host_bytes),
            {name: grow(time, more.seconds[name]) for name, time in self.seconds.items()},
        )


class Costs:
    """Costs of specs on a card, each plan of a few layers made once; whole plans with the backend's own scratch.

    Of a spec that was planned whole the bytes are those of the plan, the seconds still those of a few layers.
    """

    def __init__(self, scratch_bytes: Scratch | None, own_scratch_bytes: Scratch | None, rates: Rates) -> None:
        self._scratch_bytes, self._own_scratch_bytes, self._rates = scratch_bytes, own_scratch_bytes, rates
        self._halves: dict[tuple[Spec, tuple[str, ...]], _Half] = {}
        self._whole: dict[Spec, Plan] = {}

    def of(self, spec: Spec, micro_steps: int) -> Cost:
        """The cost of a step with `micro_steps`. UsageError for what no plan can do."""
        found = self._estimated(spec, micro_steps)
        if (whole := self._whole.get(spec)) is None:
            return found
        return replace(found, num_bytes=whole.total_bytes, host_bytes=whole.host_bytes)

    def _estimated(self, spec: Spec, micro_steps: int) -> Cost:
        micro = self._half(_on_device(spec), MICRO)
        states, beside = (self._half(_states(one), UPDATE) for one in (spec, _on_device(spec)))
        num_bytes = micro.held_bytes + micro.spread * micro.live_bytes + states.held_bytes - beside.held_bytes
        host_bytes = micro.host_bytes + states.host_bytes - beside.host_bytes
        seconds = sum(micro.seconds[name] for name in micro_programs(micro_steps)) + states.seconds["update"]
        return Cost(round(num_bytes), round(host_bytes), seconds)

    def plan(self, spec: Spec) -> Plan:
        """The whole plan."""
        if spec not in self._whole:
            self._whole[spec] = make_plan(spec, self._own_scratch_bytes)
        return self._whole[spec]

    def _half(self, spec: Spec, timed: tuple[str, ...]) -> _Half:
        """A plan of all layers in numbers, by two of a few where there are more."""
        if (spec, timed) not in self._halves:
            comes_ahead = not {"grad", "quant", "weight"}.isdisjoint(spec.memory.host)
            is_made = spec.precision.master == "none" or not spec.memory.persistent_quants
            layers = LAYERS + (comes_ahead or is_made)
            left = spec.config.num_layers - layers
            wanted = (layers, layers + 1) if left > 1 else (spec.config.num_layers,)
            plans = [make_plan(with_layers(spec, count), self._scratch_bytes) for count in wanted]
            some, *more = (self._numbers(plan, timed) for plan in plans)
            self._halves[spec, timed] = some.grown(more[0], left) if more else some
        return self._halves[spec, timed]

    def _numbers(self, plan: Plan, timed: Sequence[str]) -> _Half:
        """A plan of a few layers in numbers."""
        hosts, tokens = plan.spec.memory.host, plan.spec.batch_size * plan.spec.seq_len
        counted = [one for name, one in plan.programs.items() if not hosts or name not in UPDATES]
        live = max(one.live_bytes["device"] for one in counted)
        arena = max(one.arena_bytes["device"] for one in counted)
        distinct = {id(one): one for one in map(plan.programs.__getitem__, timed)}
        times = {key: program_seconds(one, self._rates, tokens) for key, one in distinct.items()}
        seconds = {name: times[id(plan.programs[name])] for name in timed}
        return _Half(plan.total_bytes - plan.arena_bytes(), live, arena / max(live, 1), plan.host_bytes, seconds)


def _on_device(spec: Spec) -> Spec:
    """The spec with the states of the optimizer on the device, if micro-steps do not read them: as they read masters of
    weights that are streamed, or remade."""
    if spec.memory.fused:
        return spec
    kept = (MASTER,) if "weight" in spec.memory.host or not spec.memory.persistent_quants else ()
    host = tuple(space for space in spec.memory.host if space in kept or space not in spaces(spec.hyper.rule))
    return replace(spec, memory=replace(spec.memory, host=host, piece_bytes=LARGE_PIECES))


def _states(spec: Spec) -> Spec:
    """The spec with the least batch: of its plan, states and update are those of the run."""
    given = {name: getattr(spec.memory, name) for name in ("host", "fused", "zero_copy", "persistent_quants")}
    memory = Memory(piece_bytes=LARGE_PIECES, **given)
    short = replace(spec, batch_size=1, seq_len=min(spec.seq_len, TOKENS), packing=None)
    return replace(short, memory=memory, observe=False, completions=None)
