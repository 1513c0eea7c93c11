"""What a call waits for on other lanes, derived from what it reads and writes.

A call waits for the last writer of what it reads, and for the last writer and the readers of what it overwrites, where
they are on another lane. Two rules keep memory safe that storages take one after the other, since lifetimes count in
the order of recording. A call off the main lane that is the first to write a slot also waits for the main-lane call
recorded before it. And after a call off the main lane some main-lane call waits for it, until which the slots that it
reads live (llmq/plan/passes/place.py): the first one two layers on. By then the copy has had a layer's time, and slots
live no longer for it than that, however deep the model is. A copy to the host may be waited for earlier, by the call
that waits for a copy to the device recorded after it: so the pieces of an update take the memory of each other.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmq.ops.record import Call
from llmq.plan.names import scale_name, storage_name
from llmq.plan.passes.transfers import layer_of
from llmq.tensor import Ref, changed

MAIN, TO_HOST, TO_DEVICE = "main", "to_host", "to_device"
SCALES, AMAX = "scale:scales", "scale:amax"  # the vectors of delayed scales and of their amax
Clock = dict[str, int]  # by lane, the index of the last call that is known to be done


def lanes(calls: Sequence[Call]) -> list[Call]:
    """The calls with their waits, as few as the order within lanes leaves necessary."""
    if all(call.lane == MAIN for call in calls):
        return list(calls)
    last: dict[str, int] = {}  # the last call of each lane so far
    touched = _Touched()
    clocks: list[Clock] = []  # what is done when a call is
    made = []
    for index, (call, block) in enumerate(zip(calls, blocks(calls), strict=True)):
        read, written = reads(call), writes(call)
        needed = touched.needed(call, read, written, block, last.get(MAIN))
        # What the lane's last call has waited for is done, and needs no wait: each is an event.
        clock = dict(clocks[last[call.lane]]) if call.lane in last else {}
        waits = []
        for other in sorted(needed, reverse=True):  # the latest first: what it has waited for is done as well
            lane = calls[other].lane
            if lane != call.lane and clock.get(lane, -1) < other:
                waits.append(other)
                clock = merged(clock, clocks[other])
        clocks.append({**clock, call.lane: index})
        touched.note(call, read, written, index, block)
        last[call.lane] = index
        made.append(changed(call, waits=tuple(sorted(waits))) if waits else call)
    return made


@dataclass
class _Touched:
    """Who wrote each storage last, who has read it since, which calls off the main lane it has not waited for, the last
    copy to the host, and for each copy to the device the one before it."""

    writers: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)
    pending: deque[tuple[int, int]] = field(default_factory=deque)  # index, block
    stored: int | None = None
    stored_before: dict[int, int] = field(default_factory=dict)

    def needed(self, call: Call, read: Sequence[str], written: Sequence[str], block: int, main: int | None) -> set[int]:
        """Calls that must be done before this one, which touches these storages; `main` is the last one on the main
        lane."""
        found = {self.writers[name] for name in (*read, *written) if name in self.writers}
        for name in written:
            found.update(self.readers.get(name, ()))
        if call.lane == MAIN:
            found.update([self.stored_before[other] for other in found if other in self.stored_before])
            # Two layers on: earlier, the main lane would wait for a copy; later, slots would live too long.
            while self.pending and self.pending[0][1] + 2 <= block:
                found.add(self.pending.popleft()[0])
        # A new slot may lie where one of the main lane's has just died: lifetimes order no lanes.
        elif main is not None and any(name not in self.writers for name in written):
            found.add(main)
        return found

    def note(self, call: Call, read: Sequence[str], written: Sequence[str], index: int, block: int) -> None:
        """This call has been recorded."""
        for name in written:
            self.writers[name], self.readers[name] = index, []
        for name in read:
            self.readers.setdefault(name, []).append(index)
        if call.lane != MAIN:
            self.pending.append((index, block))
        if call.lane == TO_HOST:
            self.stored = index
        elif call.lane == TO_DEVICE and self.stored is not None:
            self.stored_before[index] = self.stored


def blocks(calls: Sequence[Call]) -> list[int]:
    """For each call, how often the layer that main-lane calls work on has changed up to it."""
    found, count, layer = [], 0, None
    for call in calls:
        now = layer_of(call) if call.lane == MAIN else layer
        count, layer = count + (now != layer), now
        found.append(count)
    return found


def joined(calls: Sequence[Call]) -> dict[int, int]:
    """For each call off the main lane, the main-lane call from which on it is known to be done, or the end."""
    found: dict[int, int] = {}
    open_calls: dict[str, deque[int]] = defaultdict(deque)  # by lane
    clocks: list[Clock] = []
    last: dict[str, Clock] = {}
    for index, call in enumerate(calls):
        clock = last.get(call.lane, {})
        if call.waits:
            clock = merged(clock, *(clocks[other] for other in call.waits))
        last[call.lane] = {**clock, call.lane: index}
        clocks.append(last[call.lane])
        if call.lane != MAIN:
            open_calls[call.lane].append(index)
            continue
        for lane, others in open_calls.items():
            while others and others[0] <= clock.get(lane, -1):
                found[others.popleft()] = index
    return found | dict.fromkeys((other for others in open_calls.values() for other in others), len(calls))


def merged(*clocks: Clock) -> Clock:
    """What is done when all of these are: by lane, the latest call."""
    found = dict(clocks[0])
    for clock in clocks[1:]:
        for lane, index in clock.items():
            if index > found.get(lane, -1):
                found[lane] = index
    return found


def reads(call: Call) -> list[str]:
    """Storages that a call reads: its inputs with their scales, the scales that its copies are written with, and what
    it adds to."""
    refs = [ref for ref in call.inputs if ref is not None]
    copies = [ref for ref in (*refs, *call.written) if ref.form is not None]
    scales = [scale for ref in copies if (scale := _scales(ref)) is not None]
    sums = [storage_name(r.ref) for r in call.outputs if r is not None and r.accumulate]
    return [*map(storage_name, refs), *scales, *sums]


def writes(call: Call) -> list[str]:
    """Storages that a call writes: all forms of its results, the scales that copies own, and the vector of amax."""
    own = [scale for ref in call.written if ref.form is not None and ref.form.owns_scales and (scale := _scales(ref))]
    amax = [AMAX] if any(result is not None and result.amax for result in call.outputs) else []
    return [*map(storage_name, call.written), *own, *amax]


def _scales(ref: Ref) -> str | None:
    """Where the scales of a copy are: cells are parts of one vector."""
    return SCALES if ref.form is not None and ref.form.has_cell else scale_name(ref)
