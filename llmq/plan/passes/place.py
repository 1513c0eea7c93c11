"""How long every tensor lives, and where in the arena of its home it lies."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmq.ops.record import Call, together
from llmq.ops.seam import record
from llmq.plan.arena import Lifetime, lay_out, live_peak
from llmq.plan.names import own_scales, scale_name, storage_name
from llmq.plan.passes.lanes import MAIN, joined
from llmq.tensor import Ref, stored_bytes


@dataclass(frozen=True)
class Placement:
    """Bytes in the arena of a home."""

    offset: int
    size: int
    home: str = "device"


@dataclass(frozen=True)
class Program:
    """Calls, and where their slots lie. `births` and `deaths` are the storages that begin and end per call; arenas and
    the most bytes alive at a time go by home."""

    name: str
    calls: tuple[Call, ...]
    places: Mapping[str, Placement]
    arena_bytes: Mapping[str, int]
    live_bytes: Mapping[str, int]
    births: Mapping[int, tuple[str, ...]]
    deaths: Mapping[int, tuple[str, ...]]


@dataclass
class _Slot:
    """A storage in the making: its home, its bytes, the calls that touch it first and last."""

    home: str
    size: int
    first: int
    last: int


def place(name: str, calls: Sequence[Call]) -> Program:
    """A program with every decision made."""
    slots = _lives(calls)
    roots = _shared(calls, slots)
    lives: dict[str, _Slot] = {}
    for storage, slot in slots.items():
        root = roots.get(storage, storage)
        known = lives.get(root, slot)
        # Storages of one root are one lifetime, from the first write of any to the last read of any.
        size, first, last = max(known.size, slot.size), min(known.first, slot.first), max(known.last, slot.last)
        lives[root] = _Slot(slot.home, size, first, last)
    by_root: dict[str, Placement] = {}
    arenas: dict[str, int] = {"device": 0, "host": 0}
    peaks: dict[str, int] = dict(arenas)
    for home in arenas:
        mine = {root: Lifetime(s.size, s.first, s.last) for root, s in lives.items() if s.home == home}
        offsets, arenas[home] = lay_out(list(mine.values()))
        peaks[home] = live_peak(list(mine.values()))
        for (root, life), offset in zip(mine.items(), offsets, strict=True):
            by_root[root] = Placement(offset, life.size, home)
    births, deaths = defaultdict(list), defaultdict(list)
    for root, slot in lives.items():
        births[slot.first].append(root)
        deaths[slot.last].append(root)
    return Program(
        name,
        tuple(calls),
        {storage: by_root[roots.get(storage, storage)] for storage in slots},
        arenas,
        peaks,
        {index: tuple(found) for index, found in births.items()},
        {index: tuple(found) for index, found in deaths.items()},
    )


def _lives(calls: Sequence[Call]) -> dict[str, _Slot]:
    """Every slot of a program from its first touch to its last. One that another lane reads lives until the main lane
    has waited for that: in the order of recording, the bytes may be another's at once. What collectives touch that
    are made as one lives while they are."""
    slots: dict[str, _Slot] = {}
    ends = joined(calls) if any(call.lane != MAIN for call in calls) else {}
    spans = {index: (group[0], group[-1]) for group in together(calls) for index in group}

    def touch(ref: Ref, index: int, *, reads: bool) -> None:
        begin, last = spans[index]
        end = max(last, ends.get(index, index))
        scale = scale_name(ref) if ref.form is not None else None
        if ref.space == "activation":
            storage = storage_name(ref)
            assert not reads or storage in slots, f"{storage} is read before it is written"
            if storage not in slots:
                slots[storage] = _Slot(ref.home, stored_bytes(ref.entire), begin, end)
            slots[storage].last = max(slots[storage].last, end)
            if ref.form is not None and ref.form.owns_scales:
                touch(own_scales(ref), index, reads=reads)
        if scale in slots:  # a scale measured in this program; cells outlast it
            slots[scale].last = max(slots[scale].last, end)

    for index, call in enumerate(calls):
        for ref in call.inputs:
            if ref is not None:
                touch(ref, index, reads=True)
        for ref in call.written:
            touch(ref, index, reads=False)
    return slots


def _shared(calls: Sequence[Call], slots: Mapping[str, _Slot]) -> dict[str, str]:
    """Storages that take over the memory of an input at its last read, by the root whose place they share."""
    roots: dict[str, str] = {}
    for index, call in enumerate(calls):
        op = record(call.op)
        if not op.shares:
            continue
        given = dict(zip(op.inputs, call.inputs, strict=True))
        for output, result in zip(op.outputs, call.outputs, strict=True):
            source = given.get(op.shares.get(output, ""))
            # Copies have other widths or layouts than the value, so only the value can take its input's bytes.
            if result is None or None not in result.forms or source is None or source.space != "activation":
                continue
            # A piece of a larger slot has neighbours that may still be read.
            plain = source.form is None and source.view is None and result.ref.view is None
            made, read = storage_name(result.ref), storage_name(source)
            begins = slots[made].first == index  # a piece of it may have been written before
            if plain and begins and slots[read].last == index and slots[made].size == slots[read].size:
                roots[made] = roots.get(read, read)
    return roots
