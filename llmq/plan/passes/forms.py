"""Which forms of its results each call has to write: those that are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from llmq.ops.record import Call
from llmq.ops.seam import record
from llmq.plan.passes.fates import Item
from llmq.tensor import Form, Ref

Forms = frozenset[Form | None]
Weights = Mapping[str, Forms]  # the forms of each parameter that any program reads


def forms(calls: Sequence[Call], weights: Weights, offloaded: Iterable[Item] = ()) -> list[Call]:
    """Every call with the wanted forms of its results; what leaves none is not made.

    A copy (`OpRecord.copies`) makes each form from the same form, so it becomes a call for each. `offloaded` are forms
    that the host keeps, beyond what is read on the device.
    """
    wanted: dict[tuple[str, bool], set[Form | None]] = defaultdict(set)
    for name, form in offloaded:
        wanted[name, False].add(form)
    made: list[Call] = []
    # From the end: what a copy has to write is known before what it reads.
    for call in reversed(calls):
        outputs = tuple(
            result and replace(result, forms=_wanted(result.ref, wanted, weights)) for result in call.outputs
        )
        if not any(result is not None and result.forms for result in outputs):
            continue
        found = [replace(call, outputs=outputs)]
        if record(call.op).copies:
            found = [_in_form(call, form) for result in outputs if result is not None for form in result.forms]
        for one in found:
            for ref in one.inputs:
                if ref is not None and ref.space == "activation":
                    wanted[ref.owner, ref.again].add(ref.form)
        made += found[::-1]
    return made[::-1]


def _wanted(ref: Ref, wanted: Mapping[tuple[str, bool], set[Form | None]], weights: Weights) -> tuple[Form | None, ...]:
    names = (ref.name, ref.owner)  # an entry's copies are known by its own name, its value by that of the stack
    if ref.space == "activation":
        found: Iterable[Form | None] = {form for name in names for form in wanted.get((name, ref.again), ())}
    elif ref.space == "weight":
        # The value of a weight that is its own master is the master's to write.
        read = {form for name in names for form in weights.get(name, ())}
        found = {form for form in read if form is not None or ref.value_in is None}
    else:
        found = {None}
    return tuple(sorted(found, key=lambda form: form.key if form else ""))


def _in_form(call: Call, form: Form | None) -> Call:
    (result,), (source,) = call.outputs, call.inputs
    assert result is not None and source is not None
    return replace(call, outputs=(replace(result, forms=(form,)),), inputs=(source.in_form(form),))


def reads_of_weights(programs: Iterable[Sequence[Call]]) -> Weights:
    """The forms of each parameter that any of the programs reads."""
    found: dict[str, set[Form | None]] = defaultdict(set)
    for calls in programs:
        for call in calls:
            for ref in call.inputs:
                if ref is not None and ref.space == "weight":
                    found[ref.owner].add(ref.form)
    return {name: frozenset(read) for name, read in found.items()}
