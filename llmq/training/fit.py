"""`--fit`: the settings with which a run takes least time inside the memory that there is, by predicted steps.

What is searched are options of the command line, so that what comes out is a command. A setting that is given stays:
the search adds to it. The tokens of a step stay the same, as micro-batches get smaller, where their size is not given.
Numbers change only by what `--fit-may` names, and only where that makes a step 1% faster, or fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from llmq.backends import Backend, open_backend
from llmq.disk import shown
from llmq.engine.advice import Setting, table
from llmq.engine.cost import Costs
from llmq.engine.predict import assumed, rates_of
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.optimizers.rule import dtype_option, offload_option
from llmq.options.parse import Options, minimal
from llmq.plan import precision
from llmq.plan.few_layers import with_layers
from llmq.plan.lattice import Box, Cost, Point, fastest
from llmq.plan.memory import ROLES, Memory
from llmq.plan.plan import Plan, Scratch, make_plan, uncollected
from llmq.plan.remedies import RECOMPUTE, Changes, narrower_states
from llmq.plan.spec import Spec
from llmq.screen import Report, unreported

if TYPE_CHECKING:
    from llmq.data.batches.loader import Data
    from llmq.training.log import RunLog

SpecOf = Callable[[Options], Spec]
SEARCHING = "Settings tried, to find those that fit"
BEST = 5  # settings that are printed
WORTH = 1.01  # how much faster a step has to be for each kind of numbers that change
MOST_TOKENS = 2**17  # of a micro-batch that holds more than one sequence
ATTENTION, HEAD_TIMES, TILES = 4, 4, (4, 16)  # chunks of attention; of the head, times as many; tiles of tokens
TILE_TOKENS = 2048  # at least: products of fewer are slow, which the prediction does not know
SIZES = ("batch_size", "grad_accumulation")
ALL_MAY = ("states", "matmul")
KINDS = ("opt_m_dtype", "master_dtype", "matmul_dtype")  # of numbers that a frame changes
NUMBERS = ("matmul_dtype", "opt_m_dtype", "opt_v_dtype", "master_dtype")  # that a run keeps when it resumes


@dataclass(frozen=True)
class Fit:
    """Options with the chosen settings in place of --fit, which are `changes`; the plan that they give, and the best
    settings as a table."""

    options: Options
    changes: Changes = field(default_factory=dict)
    plan: Plan | None = None
    lines: tuple[str, ...] = ()

    def resized(self, data: Data) -> Data:
        """The data in micro-batches of the chosen size, as many samples a step."""
        size = int(self.changes.get("batch_size", data.batch_size))
        return replace(data, batch_size=size, grad_accumulation=data.batch_size * data.grad_accumulation // size)


def lines_of(best: Sequence[Setting], free_bytes: int, where: Device) -> tuple[str, ...]:
    """Settings by rank, with what they cost."""
    title = (
        f"The fastest by predicted steps in {shown(free_bytes)}{assumed(where)}, and those that need less; 1 is taken:"
    )
    return (title, *table(best, where.num_sharing))


def fitted(
    options: Options,
    spec_of: SpecOf,
    where: Device,
    scratch_bytes: Scratch,
    own_scratch_bytes: Scratch,
    samples: int,
    kept: Changes | None = None,
    fixed: Collection[str] | None = None,
    report: Report = unreported,
) -> Fit:
    """The best settings of a run that takes so many `samples` a step on each rank.

    `spec_of` resolves options. Many plans are made with `scratch_bytes`, and the last with the backend's own. Where
    numbers are `kept`, as of a checkpoint, --fit-may allows none. Options that are `fixed` stay, by default those that
    are given. `report` gets how many settings were planned. MemoryLimitError with the nearest setting if none fits.
    """
    if precision.is_auto(options.precision):
        raise UsageError(
            "--fit plans matmuls of one dtype, and --matmul-dtype auto times them first: use e4m3, or bf16 with "
            "--fit-may matmul"
        )
    free = {"free_bytes": device.memory_bytes(where)[1], "free_host_bytes": _host_bytes(options, where)}
    costs = Costs(scratch_bytes, own_scratch_bytes, rates_of(where))
    may = (options.to_flat()["fit_may"] or ()) if kept is None else ()
    fixed, has_fp8 = options.given if fixed is None else fixed, device.has_fp8(where)
    about = partial(Search, options, spec_of, costs, samples, has_fp8=has_fp8, kept=kept or {})
    search = about(may=may, fixed=fixed, report=report)
    best = search.best(**free)
    if not best:
        raise MemoryLimitError(search.shortage(**free))
    first = search.parsed(best[0].changes)
    return Fit(first, best[0].changes, costs.plan(spec_of(first)), lines_of(best, free["free_bytes"], where))


def chosen(
    options: Options,
    spec_of: SpecOf,
    where: Device,
    data: Data,
    backend: Backend,
    kept: Changes | None,
    told: Changes | None,
    log: RunLog,
) -> Fit:
    """The best settings of a run on this data, said in its log, or those that the first rank has `told`."""
    samples = data.batch_size * data.grad_accumulation
    if told is not None:
        return Fit(taken(options, {**(kept or {}), **told}, samples), told)
    modelled = open_backend("planned", **device.backend_settings(options.system, where))
    with log.task(SEARCHING) as report:
        scratch = (modelled.scratch_bytes, backend.scratch_bytes)
        found = fitted(options, spec_of, where, *scratch, samples, kept, report=report)
    for line in found.lines:
        log.say(line)
    return found


def taken(options: Options, changes: Changes, samples: int) -> Options:
    """The options of a run with settings that a search chose, and as many samples a step."""
    told, flat = minimal(options), options.to_flat()
    again = {key: flat[key] for key in ("continue", "reset") if flat[key] is not None}
    kept = {k: v for k, v in {**told, **again}.items() if k not in ("fit", "fit_may", "grad_accumulation")}
    size = int(changes["batch_size"])
    accumulation = {} if "global_batch_size" in told else {"grad_accumulation": samples // size}
    return Options.parse({**kept, **accumulation, **changes})


def _host_bytes(options: Options, where: Device) -> int:
    """Host memory that may be kept."""
    found = device.host_bytes(options.system, where)
    return 2**62 if found is None else found


class Search:
    """Settings of a run as a lattice: axes from fast to frugal, for each frame of what has no such order."""

    def __init__(
        self,
        options: Options,
        spec_of: SpecOf,
        costs: Costs,
        samples: int,
        may: Sequence[str],
        *,
        has_fp8: bool,
        kept: Changes,
        fixed: Collection[str],
        report: Report = unreported,
    ) -> None:
        about = partial(Search, options, spec_of, costs, samples, has_fp8=has_fp8, kept=kept)
        self._again = partial(about, fixed=fixed, report=report)
        self._options, self._spec_of, self._costs, self._samples = options, spec_of, costs, samples
        self._may, self._has_fp8 = may, has_fp8
        self._kept, self._fixed, self._report = kept, frozenset(fixed), report
        self._spec = spec_of(self.parsed({"batch_size": 1}))
        self.frames = self._frames()
        self.axes = [[self._open(axis) for axis in self._all_axes(frame)] for frame in self.frames]
        self._known: dict[Point, Cost | None] = {}

    def best(self, *, free_bytes: int, free_host_bytes: int, count: int = BEST) -> list[Setting]:
        """The fastest settings that fit, the first of which is planned whole."""
        limits = {"free_bytes": free_bytes, "free_host_bytes": free_host_bytes}
        found: list[Setting] = []

        def accepts(point: Point) -> bool:
            return bool(found) or not self._planned(point).missing(**limits)

        boxes = [self._box(index) for index in range(len(self.frames))]
        with uncollected():
            for point, _ in islice(fastest(boxes, self.cost_at, accepts, **limits), count):
                found.append(self.setting(point))
        return found

    def setting(self, point: Point) -> Setting:
        """The options of a point, with what they cost."""
        changes = self.changes(point)
        cost = self._cost(changes)
        assert cost is not None
        spec = self._spec
        return Setting(changes, cost, self._samples * spec.seq_len * spec.sharding.size)

    def cost_at(self, point: Point) -> Cost | None:
        """The cost of a point, with more seconds where numbers change; None for what cannot be combined."""
        if point not in self._known:
            self._report(len(self._known), None)
            cost = self._cost(self.changes(point))
            factor = WORTH ** sum(key in KINDS for key in self.frames[point[0]])
            self._known[point] = cost and replace(cost, seconds=factor * cost.seconds)
        return self._known[point]

    def changes(self, point: Point) -> dict[str, Any]:
        """The options of a point: of its frame, and of an index for each axis."""
        found: dict[str, Any] = dict(self.frames[point[0]])
        for axis, index in zip(self.axes[point[0]], point[1:], strict=True):
            found |= axis[index]
        return self._counted(found)

    def parsed(self, changes: Changes) -> Options:
        """The options of the run with these."""
        return taken(self._options, {**self._kept, **changes}, self._samples)

    def shortage(self, *, free_bytes: int, free_host_bytes: int) -> str:
        """What to say where nothing fits: the setting that misses least, and whether more of --fit-may would help."""
        limits = {"free_bytes": free_bytes, "free_host_bytes": free_host_bytes}
        nearest = self.nearest(**limits)
        if nearest is None:
            return f"--fit: no setting of this run can be planned in {shown(free_bytes)}: leave --fit out to see why"
        cost = nearest.cost
        needs = [_need(cost.num_bytes, free_bytes, "")] if cost.num_bytes > free_bytes else []
        needs += [_need(cost.host_bytes, free_host_bytes, " of the host")] if cost.host_bytes > free_host_bytes else []
        allows_all = set(self._may) == {*ALL_MAY} or bool(self._kept)
        other = None if allows_all else self._again(may=ALL_MAY).nearest(**limits)
        helps = other is not None and not other.cost.missing(**limits)
        advice = f": --fit-may {','.join(ALL_MAY)} allows one that does" if helps else ""
        if not advice and not self._fixed.isdisjoint(SIZES) and self._spec_of(self._options).batch_size > 1:
            advice = (
                ": --global-batch-size in place of --batch-size and --grad-accumulation leaves the micro-batch open"
            )
        return f"--fit: no setting fits: the nearest, {nearest.flags}, needs {' and '.join(needs)}{advice}"

    def nearest(self, *, free_bytes: int, free_host_bytes: int) -> Setting | None:
        """The setting that misses least, of those that need least of the device, or of the host."""
        boxes = [self._box(index) for index in range(len(self.frames))]
        points = {point for low, high in boxes for point in (high, (*low[:4], *high[4:]))}
        found = [self.setting(point) for point in sorted(points) if self.cost_at(point) is not None]
        return min(found, key=lambda one: one.cost.missing(free_bytes, free_host_bytes), default=None)

    def _all_axes(self, frame: Changes) -> list[list[Changes]]:
        hosted = [self._weights(frame), self._flag("offload_gradients"), self._states(frame)]
        return [*hosted, self._batches(), self._recomputed(), self._flag("offload_residual"), self._chunks()]

    def _open(self, changes: Sequence[Changes]) -> list[Changes]:
        """Those that change nothing that is fixed."""
        flat = self._options.to_flat()
        return [one for one in changes if all(flat[key] == one[key] for key in self._fixed & one.keys())]

    def _box(self, frame: int) -> Box:
        """The points of a frame."""
        axes = self.axes[frame]
        low, high = [frame, *(0 for _ in axes)], [frame, *(len(axis) - 1 for axis in axes)]
        if "fused_update" in self.frames[frame]:  # one micro-batch a step, whose gradients are not kept
            high[2] = high[4] = 0
        return tuple(low), tuple(high)

    def _cost(self, changes: Changes) -> Cost | None:
        try:
            return self._costs.of(self._spec_of(self.parsed(changes)), self._micro_steps(changes))
        except UsageError:
            return None

    def _planned(self, point: Point) -> Cost:
        """The cost by the plan of the whole, which the search counts with from then on."""
        changes = self.changes(point)
        self._costs.plan(self._spec_of(self.parsed(changes)))
        self._known.pop(point, None)
        cost = self.cost_at(point)
        assert cost is not None
        return cost

    def _micro_steps(self, changes: Changes) -> int:
        return self._samples // int(changes["batch_size"])

    def _counted(self, changes: dict[str, Any]) -> dict[str, Any]:
        """With numbers in place of what depends on the size of a micro-batch."""
        size = int(changes["batch_size"])
        tokens = size * self._spec.seq_len
        if (pieces := changes.pop("attn_bwd_chunks", None)) is not None and size > 1:
            changes["attn_bwd_chunks"] = _divisor(size, pieces)
        tiles = min(changes.pop("seq_tiles", 1), tokens // TILE_TOKENS)
        if tiles > 1:
            changes["seq_tiles"] = tiles = _divisor(tokens, tiles)
        if (times := changes.pop("lmhead_chunks", None)) is not None:
            fewest = self._fewest(size)
            chunks = _divisor(tokens, max(min(times * fewest, tokens // TILE_TOKENS), tiles))
            changes |= {"lmhead_chunks": chunks} if chunks > max(fewest, tiles) else {}
        return changes

    def _fewest(self, size: int) -> int:
        """Chunks of the head by the size of a micro-batch alone."""
        return self._spec_of(self.parsed({"batch_size": size})).memory.head_chunks

    def _weights(self, frame: Changes) -> list[Changes]:
        memory, spec = self._options.memory, self._spec
        has_quants = frame.get("matmul_dtype", spec.precision.matmul) == "e4m3"
        master = frame.get("master_dtype", spec.precision.master)
        if spec.adapters.freezes or memory.stream_weights or master == "none":
            return [{}]
        is_kept = has_quants and memory.persistent_quants
        quants = [{"offload_quants": True}] if is_kept and not memory.offload_quants else []
        return [{}, *quants, {"stream_weights": True}]

    def _states(self, frame: Changes) -> list[Changes]:
        memory = self._options.memory
        if memory.offload_optimizer:
            return [{}]
        has_master = self._spec_of(self.parsed({"batch_size": 1, **_resting(frame)})).precision.has_own_master
        keys = [offload_option(kind.name) for kind in self._spec.hyper.rule.states]
        given = [getattr(memory, key) for key in keys]
        if not (keys or has_master):
            return [{}]
        some = [] if any(given) else [dict.fromkeys(keys[:count], True) for count in range(1, len(keys))]
        every = [dict.fromkeys(keys, True)] if has_master and not all(given) else []
        return [{}, *some, *every, {"offload_optimizer": True}]

    def _flag(self, key: str) -> list[Changes]:
        return [{}] if getattr(self._options.memory, key) else [{}, {key: True}]

    def _batches(self) -> list[Changes]:
        """Sizes of a micro-batch, each at most half of the one before; that which is given, or follows."""
        if not self._fixed.isdisjoint(SIZES):
            return [{"batch_size": self._options.to_flat()["batch_size"]}]
        sizes: list[int] = []
        for size in range(self._samples, 0, -1):
            small = size * self._spec.seq_len <= MOST_TOKENS or size == 1
            if self._samples % size == 0 and small and (not sizes or 2 * size <= sizes[-1] or size == 1):
                sizes.append(size)
        return [{"batch_size": size} for size in sizes]

    def _recomputed(self) -> list[Changes]:
        """Levels of recomputing, without flags that free nothing in this run."""
        given = {name.removeprefix("recompute_") for name in self._spec.memory.flags}
        small = with_layers(self._spec, 1)
        useful = {name.removeprefix("recompute_") for name in ROLES if self._frees(small, name)}
        found: dict[frozenset[str], Changes] = {}
        for level in RECOMPUTE:
            names = [name for name in level.split() if name in useful - given]
            roles = frozenset().union(*(ROLES[f"recompute_{name}"] for name in {*names, *given}))
            found.setdefault(roles, {f"recompute_{name}": True for name in names})
        return list(found.values())

    def _frees(self, spec: Spec, name: str) -> bool:
        try:
            make_plan(replace(spec, memory=Memory((name,)), observe=False, completions=None))
        except UsageError:
            return False
        return True

    def _chunks(self) -> list[Changes]:
        """Chunks of attention's backward, of the head, and tiles of the MLP, each beside those before."""
        memory = self._options.memory
        attention = {"attn_bwd_chunks": ATTENTION} if memory.attn_bwd_chunks == "auto" else {}
        head = attention | ({} if memory.lmhead_chunks else {"lmhead_chunks": HEAD_TIMES})
        counts = TILES if self._spec.seq_len >= TILES[-1] * TILE_TOKENS else TILES[:1]
        tiles = [] if memory.seq_tiles > 1 else [{**head, "seq_tiles": count} for count in counts]
        return [{}, *([head] if head else []), *tiles]

    def _frames(self) -> list[Changes]:
        """Changes of numbers that are allowed, and the update in backward: less memory, and faster at once."""
        now = self._spec.precision
        moments: list[Changes] = [{}]
        masters: list[Changes] = [{}]
        if "states" in self._may:
            moments += [
                {dtype_option(name): dtype for name, dtype in states.items()} for states in narrower_states(self._spec)
            ]
            if not self._spec.adapters.freezes and now.master != "none":
                masters += [{"master_dtype": now.model}] if now.master != now.model else []
                masters += [{"master_dtype": "none"}]
        matmuls: list[Changes] = [{}]
        if "matmul" in self._may and now.model == "bf16":
            other = "bf16" if now.matmul == "e4m3" else "e4m3"
            matmuls += [{"matmul_dtype": other}] if other == "bf16" or self._has_fp8 else []
        fused: list[Changes] = [{}, {"fused_update": True}]
        if self._options.memory.fused_update or self._batches()[0] != {"batch_size": self._samples}:
            fused = [{}]
        parts = product(moments, masters, matmuls, fused)
        found = [{key: value for part in frame for key, value in part.items()} for frame in parts]
        return [frame for frame in self._open(found) if self._can_be(frame)]

    def _can_be(self, frame: Changes) -> bool:
        """Whether options of a frame go together."""
        size = self._samples if "fused_update" in frame or self._options.memory.fused_update else 1
        try:
            spec = with_layers(self._spec_of(self.parsed({"batch_size": size, **frame})), 1)
            make_plan(replace(spec, batch_size=1, seq_len=1, packing=None, memory=replace(spec.memory, head_chunks=1)))
        except UsageError:
            return False
        return True


def _need(num_bytes: int, free: int, of: str) -> str:
    return f"{shown(num_bytes)}{of}, {shown(free)} are free, {shown(num_bytes - free)} are missing"


def _resting(frame: Changes) -> Changes:
    """A frame but for the update in backward, which goes with one size of a micro-batch."""
    return {key: value for key, value in frame.items() if key != "fused_update"}


def _divisor(tokens: int, least: int) -> int:
    """The smallest divisor of `tokens` that is no smaller, or all of them."""
    return next((n for n in range(max(min(least, tokens), 1), tokens) if tokens % n == 0), tokens)
