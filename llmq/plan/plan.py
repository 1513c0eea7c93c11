"""The plan: everything that is decided before memory is allocated, and the table that `--dry-run` prints.

A recording goes through the passes in llmq/plan/passes/, in this order; a decision is made by one of them and written
on the call, and nothing is decided after the last one:

    prune, fates, prune again      which calls are made, which intermediates are kept, made again, or wait on the host
    fuse                           in generation: one call for several that follow each other
    forms, casts                   what each call writes, and the copies that a producer cannot write
    join                  one call for SwiGLU's gradient and what adapters make of it
    accumulate, collect            which writes add, which count the amax of delayed scales
    transfers, lanes, place        copies between homes, what waits for what, offsets in memory
"""

import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from llmq.adapters.method import Tracked
from llmq.errors import UsageError
from llmq.model.held import HELD_FORMS, HeldBase, room_bytes
from llmq.ops.record import Call
from llmq.optimizers.rule import MASTER, State, spaces
from llmq.plan.arena import aligned
from llmq.plan.decoding import DecodingRecordings, completions_of
from llmq.plan.memory import ROLES, Memory
from llmq.plan.names import known_scale, own_scales, scale_cell, scale_name, scale_ref, storage_name
from llmq.plan.observe import errors_cell, observed
from llmq.plan.passes.accumulate import accumulate, collect
from llmq.plan.passes.casts import casts
from llmq.plan.passes.fates import Fates, Item, apply, decide
from llmq.plan.passes.forms import forms, prune, reads_of_weights
from llmq.plan.passes.join import join
from llmq.plan.passes.lanes import lanes
from llmq.plan.passes.place import Program, place
from llmq.plan.passes.transfers import transfers
from llmq.plan.recordings import Recordings
from llmq.plan.spec import Spec
from llmq.row import Row
from llmq.stores.activations import Frame
from llmq.stores.fetched_weights import COUNTED
from llmq.stores.sharding import Shards
from llmq.tensor import LARGEST, Ref, stored_bytes

# what the allocator table calls each space, in its order, after the optimizer's states
CATEGORIES = {
    "grad": "Gradients",
    "activation": "Activations",
    MASTER: "Master",
    "weight": "Weights",
    "shard": "Weights",
    "workspace": "Workspace",
}
SCALE_STRIDE = 4  # floats from one delayed scale to the next: matmuls read scales at 16-byte aligned addresses only
HISTORY = 16  # steps whose amax a delayed scale covers

Scratch = Callable[[Call], int]  # bytes that a call needs beside its arguments


def scratch_storage(lane: str) -> str:
    """The storage that one call of a lane after the other uses while it runs."""
    return f"workspace:scratch.{lane}"


@dataclass(frozen=True)
class SavedSlice:
    """What a rank has of a tensor of the run, whose shape is `whole`: the indices from `start` on, of this `shape`."""

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Plan:
    """`persistent` maps storages outside the arenas to Refs; `table` sums bytes by category.

    Programs of a micro-step go by its place in the step: `only`, `first`, `middle`, `last`; those that are alike are
    one object.
    """

    spec: Spec
    rows: tuple[Row, ...]
    programs: Mapping[str, Program]
    persistent: Mapping[str, Ref]
    scales: tuple[str, ...]  # cells: each has every SCALE_STRIDE-th element of the scale vectors
    fates: Fates
    kept: Mapping[str, int]  # bytes of what stays on the device from forward to backward, by storage
    observed: Mapping[str, tuple[str, ...]]  # sites that read a copy, by `observe`'s cell
    cells: Frame  # handles of what the engine reads and writes beside rows
    weights: Mapping[str, Ref]  # handles by row name; gradients and states of the rows that are trained
    grads: Mapping[str, Ref]
    moments: Mapping[str, State]
    tracked: Tracked

    @cached_property
    def shards(self) -> Shards:
        """Which rank has which rows of what is shared out."""
        return Shards(self.rows, self.spec.sharding.size, self.spec.sharding.rank)

    @property
    def limits(self) -> tuple[float, ...]:
        """The vector of largest finite values that belongs to the vector of scales."""
        return tuple(x for cell in self.scales for x in (LARGEST[cell.rsplit("@", 1)[1]], *[1.0] * (SCALE_STRIDE - 1)))

    def arena_bytes(self, home: str = "device") -> int:
        """Bytes of the arena of a home, which all programs share, one at a time, with what makes held copies."""
        held = (self.held(row.name) for row in self.rows if home == "device")  # whose copies are made one at a time
        rooms = (room_bytes(ref) for ref in held if ref.form is not None)
        return max([*(program.arena_bytes[home] for program in self.programs.values()), *rooms])

    def table(self, home: str = "device") -> dict[str, int]:
        """Bytes by category of the allocator table, of what lives in a home."""
        spaces_here = {ref.space for ref in self.persistent.values()}
        more = {"cache": "Completions"} if "cache" in spaces_here else {}  # of generation, and of --sample-prompts
        categories = {**self.state_titles, **CATEGORIES, **more, **self.tracked.titles}
        total = dict.fromkeys((*categories.values(), "Other"), 0)
        own = {name for name, ref in self.weights.items() if ref.origin.value_in == MASTER}
        for ref in self.persistent.values():
            if ref.home == home:
                is_weight = ref.space == MASTER and ref.name in own
                total["Weights" if is_weight else categories.get(ref.space, "Other")] += aligned(stored_bytes(ref))
        total["Activations"] = self.arena_bytes(home)
        return total

    @property
    def state_titles(self) -> dict[str, str]:
        """What the table calls the optimizer's states, by space: the last one first."""
        return {kind.name: kind.title for kind in reversed(self.spec.hyper.rule.states)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole parameter."""
        return next(row.shape for row in self.rows if row.name == name)

    @property
    def held_base(self) -> HeldBase:
        """How the run holds a frozen model."""
        base, forms = self.spec.base, {row.name: row.stored for row in self.rows if row.stored is not None}
        single = (name for name, form in forms.items() if form.dtype == "e4m3" and form.scaling != "tilewise")
        return HeldBase(base if base in HELD_FORMS else None, self.spec.precision.model, frozenset(single))

    def held(self, name: str) -> Ref:
        """Where the value of a parameter is: its master, or the weight itself, in its form, where it is frozen."""
        return self.moments[name][MASTER] if name in self.moments else self.weights[name]

    def known_scales(self, held: Ref) -> list[Ref]:
        """The single scales of the fp8 copies that programs make of a frozen row, which is `held` in another form."""
        names = (scale_cell(held, dtype) for dtype in LARGEST)
        cells = [self.persistent.get(f"scale:{name}") for name in names]
        return [ref for ref in cells if ref is not None and held.form is not None and not held.form.is_measured]

    def state(self) -> dict[str, Ref]:
        """Storages that a checkpoint holds: masters, moments, and the state of persistent scales. Frozen rows are
        loaded again."""
        held = [ref for ref in self.weights.values() if ref.form is not None]
        # Made again from the frozen rows when these are loaded.
        remade = {name for one in held for name in (scale_name(one), *map(storage_name, self.known_scales(one)))}
        scales = sorted(name for name, ref in self.persistent.items() if ref.space == "scale" and name not in remade)
        seen = (self.cells.norm, self.cells.last_norm) if self.spec.hyper.clips_by_last else ()
        norms = [storage_name(cell) for cell in seen]
        chosen = [storage_name(self.tracked.cells[name]) for name in self.tracked.saved]
        return {name: self.persistent[name] for name in (*self._states, *scales, *norms, *chosen)}

    @property
    def loaded_anew(self) -> tuple[Row, ...]:
        """The rows that no checkpoint holds."""
        return tuple(row for row in self.rows if not row.trainable)

    @cached_property
    def _states(self) -> Mapping[str, str]:
        """The row that each storage of an optimizer state, or of the scales that it is held with, is of."""
        found = {}
        for name, state in self.moments.items():
            for one in (*state.values(), *self.tracked.refs.get(name, ())):
                found[storage_name(one)] = name
                if one.form is not None:
                    found[storage_name(own_scales(one))] = name
        return found

    def saved(self) -> dict[str, SavedSlice]:
        """What this rank writes of a checkpoint, by storage: its rows of what is shared out, or could be; the rest is
        the first rank's."""
        found, size, rank = {}, self.spec.sharding.size, self.spec.sharding.rank
        for name, ref in self.state().items():
            row, dtype = self._states.get(name), ref.form.dtype if ref.form is not None else ref.dtype
            if size == 1 or row is None:
                if rank == 0:
                    found[name] = SavedSlice(ref.shape, (0,) * len(ref.shape), ref.shape, dtype)
            elif count := self.shards.count(row):
                # A vector's scale has no rows of its own to cut.
                leading, is_scale = self.shape(row)[:-1], ref.name != row
                whole = (*(leading or (1,) * is_scale), ref.shape[-1])
                start = (self.shards.bounds[row][rank],) if len(whole) > 1 else ()
                shape = self.shards.share_shape(row, whole)
                found[name] = SavedSlice(whole, (*start, 0), shape, dtype)
                assert math.prod(shape) == count * whole[-1]
        return found

    @property
    def moment_names(self) -> frozenset[str]:
        """The storages of the optimizer's states, of their scales, and of what a method keeps beside them."""
        found = {*spaces(self.spec.hyper.rule)[1:], *self.tracked.titles}
        return frozenset(name for name in self._states if self.persistent[name].space in found)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that the run allocates on the device."""
        return sum(self.table().values())

    @property
    def host_bytes(self) -> int:
        """Bytes that the run allocates in host memory."""
        return sum(self.table("host").values())


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, no cycles of garbage are looked for: of a plan's many objects, that takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@uncollected()
def make_plan(spec: Spec, scratch_bytes: Scratch | None = None) -> Plan:
    """Decides everything for one rank. `scratch_bytes` is the backend's: what a call needs beside its arguments.

    UsageError if a recompute flag frees no byte.
    """
    recordings = Recordings(spec)
    # Recorded apart only where the first micro-step differs: where its forward pass gathers weights.
    firsts = (False,) if recordings.weights.first is recordings.weights else (False, True)
    recorded = {(f, last): prune(recordings.train(first=f, last=last)) for f in firsts for last in (False, True)}
    # One decision for all: they differ only in how weights come, and what is done with gradients in the end.
    fates, kept = _fates(spec.memory, recorded[False, False])
    fated = {at: prune(apply(calls, fates)) for at, calls in recorded.items()}
    decoding = completions_of(spec)
    writing = None if decoding is None else DecodingRecordings(decoding, recordings.weights)
    written = {} if writing is None else writing.programs()
    read = {"evaluate": recordings.evaluate(), **written}
    # What only reads comes first: the forms that it reads of weights are what the others have to write.
    reading = {name: forms(prune(calls), {}) for name, calls in read.items()}
    measured, readers = (
        observed(fated[False, False], recordings.values(), recordings.piece) if spec.observe else ([], {})
    )
    if readers:
        reading["observe"] = forms(measured, {}, fates.offloaded)
    # Programs that write weights, first ones and those that update them in backward, know what others read of them.
    writers = {at for at in fated if at[0] or (at[1] and spec.memory.fused)}
    training = {at: forms(calls, {}, fates.offloaded) for at, calls in fated.items() if at not in writers}
    weights = reads_of_weights([*training.values(), *(reading[name] for name in read)])
    counted = _counted([*training.values(), *reading.values()])
    training |= {at: forms(fated[at], weights, [*fates.offloaded, *counted]) for at in fated if at in writers}
    # Before the update is: it writes a form only if some program reads it, and gathering is a reader, too.
    gather = forms(recordings.gather(), weights)
    weights = reads_of_weights([*training.values(), gather, *(reading[name] for name in read)])
    allocate = {name: finished(name, forms(calls, weights)) for name, calls in recordings.allocate().items()}
    publish = forms(recordings.publish(), weights, counted)
    programs = {
        **({"gather": finished("gather", gather)} if gather else {}),
        **_micro_steps(training, fates.offloaded),
        **{name: finished(name, calls, offloaded=fates.offloaded) for name, calls in reading.items()},
        "publish": finished("publish", publish),
        "publish_counted": finished("publish_counted", publish, collects=True),
        **allocate,
    }
    # `update` and `calibrate` take the vectors of scales whole, so these are counted first, and must not grow then.
    scales = _delayed_cells(programs.values())
    cells = {**recordings.cells, **_scale_cells(len(scales)), **({} if writing is None else writing.cells)}
    # Both write scales, so they are made when all that have scales are known.
    later = {
        "update": finished("update", forms(recordings.update(cells), weights, counted), collects=True),
        "calibrate": finished("calibrate", forms(recordings.calibrate(cells), {})),
    }
    assert set(_delayed_cells(later.values())) <= set(scales)
    programs |= later
    frozen = [recordings.weights.refs[row.name] for row in recordings.rows if not row.trainable]
    persistent = persistent_storages(programs.values(), frozen, scratch_bytes)
    if readers:
        cells["quantization_error"] = errors_cell(len(readers))
    handles = recordings.handles(cells)
    refs = (recordings.weights.refs, recordings.grads[True].refs, recordings.moments.refs)
    about = (scales, fates, kept, readers, handles, *refs, recordings.tracked)
    return Plan(spec, recordings.rows, programs, persistent, *about)


def persistent_storages(
    programs: Collection[Program], frozen: Iterable[Ref], scratch_bytes: Scratch | None
) -> dict[str, Ref]:
    """Every storage outside the arenas: what programs touch, frozen weights, and the scratch of calls."""
    held = tuple(frozen)
    # Loading sets frozen rows, and the scales of those held in a form, and perhaps no program reads them.
    loaded = (*held, *(scale_ref(ref) for ref in held if ref.form is not None))
    found = _persistent(programs) | {storage_name(ref): ref for ref in loaded}
    return found if scratch_bytes is None else found | _scratch(programs, scratch_bytes)


def kept_storages(refs: Mapping[str, Ref], fates: Fates) -> dict[str, int]:
    """Bytes of every storage that stays on the device from forward to backward."""
    kept = {}
    for name, form in fates.kept:
        ref = replace(refs[name], form=form)
        owned = [own_scales(ref)] if form is not None and form.owns_scales else []
        kept.update({storage_name(part): aligned(stored_bytes(part)) for part in (ref, *owned)})
    return kept


def _fates(memory: Memory, train: Sequence[Call]) -> tuple[Fates, dict[str, int]]:
    """What happens to each slot, and the bytes that are kept. UsageError if a flag of `memory` changes nothing."""
    refs = {result.ref.name: result.ref for call in train for result in call.outputs if result is not None}

    def kept_bytes(roles: Iterable[str]) -> int:
        return sum(kept_storages(refs, decide(train, roles)).values())

    # A flag without effect is an error: its user would count on memory that is not freed.
    without = kept_bytes(()) if memory.flags else 0
    if idle := [flag for flag in memory.flags if kept_bytes(ROLES[flag]) >= without]:
        flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in idle)
        raise UsageError(f"{flags} frees no memory in this run: leave it out")
    fates = decide(train, memory.roles, memory.drop, memory.offload)
    return fates, kept_storages(refs, fates)


def _counted(programs: Iterable[Sequence[Call]]) -> frozenset[Item]:
    """The copies that the update makes for their scales and statistics: one of each weight whose copies are remade."""
    read = {
        ref for calls in programs for call in calls for ref in call.inputs if ref is not None and ref.origin.is_remade
    }
    found = ((ref.origin.cell, ref.form) for ref in read if ref.form is not None and ref.form.layout == "row")
    return frozenset((f"{COUNTED}/{name}", form) for name, form in found if form.has_cell or form.is_measured)


def _micro_steps(training: Mapping[tuple[bool, bool], list[Call]], offloaded: Collection[Item]) -> dict[str, Program]:
    """The programs of a micro-step that is the only, the first, a middle or the last one of its step; `training` has
    the calls of those that are (first, last); a first one may be like the others."""
    begins = {last: training.get((True, last), training[False, last]) for last in (False, True)}
    train: dict[str, Any] = {"collects": True, "offloaded": offloaded}
    first = finished("first", begins[False], **train)
    middle = finished("middle", training[False, False], first=False, **train)
    # Equal calls make one program, which is placed, bound and captured once.
    if training[False, True] == training[False, False]:
        return {"only": first, "first": first, "middle": middle, "last": middle}
    only = finished("only", begins[True], **train)
    last = finished("last", training[False, True], first=False, **train)
    return {"only": only, "first": first, "middle": middle, "last": last}


def finished(
    name: str, calls: Sequence[Call], *, first: bool = True, collects: bool = False, offloaded: Collection[Item] = ()
) -> Program:
    """Calls with their forms through all the passes that are left."""
    made = accumulate(join(casts(calls)), first=first)
    made = collect(made) if collects else made
    return place(name, lanes(transfers(made, offloaded)))


def _scale_cells(count: int) -> dict[str, Ref]:
    if not count:
        return {}
    count *= SCALE_STRIDE
    shapes = {"scales": (count,), "amax": (count,), "limits": (count,), "history": (HISTORY, count)}
    return {name: Ref(name, "scale", shape, "fp32") for name, shape in shapes.items()}


def _distinct(programs: Iterable[Program]) -> list[Program]:
    return list({id(program): program for program in programs}.values())


def _refs(programs: Iterable[Program]) -> Iterator[Ref]:
    """Everything that a program reads or writes."""
    for program in _distinct(programs):
        for call in program.calls:
            yield from (ref for ref in call.inputs if ref is not None)
            yield from call.written


def _delayed_cells(programs: Iterable[Program]) -> tuple[str, ...]:
    """Cells of the delayed scales that the programs use, in order."""
    copies = (ref for ref in _refs(programs) if ref.form is not None and ref.form.has_cell)
    return tuple(sorted({scale_cell(ref, ref.form.dtype) for ref in copies if ref.form is not None}))


def _persistent(programs: Iterable[Program]) -> dict[str, Ref]:
    """Every storage outside the arenas that a program touches, whole."""
    found: dict[str, Ref] = {}
    for ref in _refs(programs):
        if (known := known_scale(ref)) is not None:
            found[storage_name(known)] = known
        is_master = ref.form is None and ref.origin.value_in is not None
        if ref.space == "activation" or is_master:  # the optimizer's Ref of the same bytes says that it is a master
            continue
        whole = ref.entire
        found[storage_name(ref)] = whole
        if ref.form is not None and ref.form.owns_scales:
            owned = own_scales(whole)
            found[storage_name(owned)] = owned
    return found


def _scratch(programs: Iterable[Program], scratch_bytes: Scratch) -> dict[str, Ref]:
    """Scratch of each lane: as much as the call that needs most."""
    sizes: dict[str, int] = {}
    for program in _distinct(programs):
        for call in program.calls:
            # Calls of a lane run one after the other, so the largest need serves them all.
            sizes[call.lane] = max(sizes.get(call.lane, 0), scratch_bytes(call))
    refs = {lane: Ref(f"scratch.{lane}", "workspace", (size,), "uint8") for lane, size in sizes.items() if size}
    return {scratch_storage(lane): ref for lane, ref in refs.items()}
