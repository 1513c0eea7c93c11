"""Which intermediates are kept for backward, which are dropped and made again, and which wait on the host.

A slot of a layer is dropped when one of its roles is; what backward reads of it is then made again by its producer,
whose inputs are needed in turn. A copy (a quantized form) whose value is there anyway is dropped as well: casting it
again costs less than keeping it. An offloaded slot is read in backward from its second life, as a dropped one is, but
comes from the host.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llmq.ops.record import Call, Result, call_of
from llmq.ops.seam import record
from llmq.tensor import Form, Ref, changed

Item = tuple[str, Form | None]  # a slot in a form


@dataclass(frozen=True)
class Fates:
    """What backward reads of each slot: `kept` from forward, `offloaded` to the host and fetched, or made again: the
    `dropped` forms by slot, of which those of slots in `copies` are cast from the value."""

    kept: frozenset[Item] = frozenset()
    offloaded: frozenset[Item] = frozenset()
    dropped: Mapping[str, frozenset[Form | None]] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()


def decide(calls: Sequence[Call], roles: Iterable[str], drop: Iterable[str] = (), offload: Iterable[str] = ()) -> Fates:
    """Fates of all layer intermediates when `roles`, and the slots named in `drop`, are recomputed.

    `calls` is a recording of forward and backward; slots named in `offload`, and those with a role that it names which
    are not dropped, go to the host.
    """
    active, named, hosted = frozenset(roles), frozenset(drop), frozenset(offload)
    producers: dict[str, list[tuple[Call, str]]] = defaultdict(list)  # every call that writes a slot, or adds to it
    slots: dict[str, Ref] = {}
    needed: set[Item] = set()
    pending: list[Item] = []
    for call in calls:
        if call.phase == "forward" and not record(call.op).copies:
            for name, result in zip(record(call.op).outputs, call.outputs, strict=True):
                ref = result.ref if result is not None else None
                # A weight that is cast for its layer is cast again by the backward walk, whatever is dropped.
                if ref is None or ref.origin.is_remade or ref.origin.held is not None:
                    continue
                if ref.space == "activation" and ref.layer is not None:
                    producers[ref.name].append((call, name))
                    slots[ref.name] = ref
        # What forward reads is there when it reads it: only reads of backward need a fate.
        elif call.phase == "backward":
            pending += [(ref.name, ref.form) for ref in call.inputs if ref is not None and ref.name in producers]

    def is_dropped(name: str) -> bool:
        return name not in hosted and (name in named or not active.isdisjoint(slots[name].roles))

    def is_hosted(name: str) -> bool:
        return name in hosted or not hosted.isdisjoint(slots[name].roles)

    while pending:
        item = pending.pop()
        if item in needed:
            continue
        needed.add(item)
        name, form = item
        # Transitive: the producer of what is dropped runs again, and its inputs may have been dropped, too.
        if is_dropped(name):
            for call, output in producers[name]:
                pending += [(ref.name, ref.form) for ref in call.inputs if ref is not None and ref.name in producers]
                if not record(call.op).writes(output, form):  # it will be cast from the value
                    pending.append((name, None))
    dropped: dict[str, set[Form | None]] = defaultdict(set)
    copies = set()
    for name, form in needed:
        if is_dropped(name):
            dropped[name].add(form)
        # The value is kept anyway: a cast in backward is cheaper than a copy that is kept until then.
        elif form is not None and (name, None) in needed:
            dropped[name].add(form)
            copies.add(name)
    there = {(name, form) for name, form in needed if form not in dropped.get(name, ())}
    offloaded = frozenset((name, form) for name, form in there if is_hosted(name))
    forms = {name: frozenset(found) for name, found in dropped.items()}
    return Fates(frozenset(there) - offloaded, offloaded, forms, frozenset(copies))


def apply(calls: Sequence[Call], fates: Fates) -> list[Call]:
    """Of the replayed calls those that make something again, which is then read in its second life."""
    # A second life has storage of its own: the bytes of the first are free in between.
    second = {name: set(forms) for name, forms in fates.dropped.items()}
    for name, form in fates.offloaded:
        second.setdefault(name, set()).add(form)

    def read(ref: Ref | None) -> Ref | None:
        return changed(ref, again=True) if ref is not None and ref.form in second.get(ref.name, ()) else ref

    written = (result.ref for call in calls for result in call.outputs if result is not None)
    uncast = {ref.name: ref.entire for ref in written if ref.name in fates.copies}

    def cast(names: Iterable[str]) -> list[Call]:
        # The value is there, so its producer need not run again for a copy.
        values = [uncast.pop(name) for name in names if name in uncast]
        return [call_of("cast", (changed(value, again=True),), (read(value),), {}, "replay") for value in values]

    found: list[Call] = []
    for call in calls:
        if call.phase == "forward" or not second:
            # Replayed calls were recorded for this decision alone; where nothing is dropped, none of them runs.
            found += [call] if call.phase != "replay" else []
            continue
        inputs = tuple(read(ref) for ref in call.inputs)
        # At the latest here, if its producer is in a layer that goes back later.
        found += cast(ref.name for ref in inputs if ref is not None and ref.again and ref.form is not None)
        if call.phase == "backward":
            found.append(call if inputs == call.inputs else changed(call, inputs=inputs))
            continue
        outputs: list[Result | None] = []
        for result in call.outputs:
            remade = result is not None and result.ref.name in fates.dropped
            again = Result(changed(result.ref, again=True)) if result is not None and remade else None
            if again is not None and again.ref.name in fates.copies:
                found += cast([again.ref.name])
                again = None
            outputs.append(again)
        if any(outputs):
            found.append(changed(call, outputs=tuple(outputs), inputs=inputs))
    return found
