"""Which calls are made, and which forms of their results they write: those that something reads."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from llmq.ops.record import Call
from llmq.ops.seam import record
from llmq.plan.passes.fates import Item
from llmq.tensor import Form, Ref, changed

Forms = frozenset[Form | None]
Weights = Mapping[tuple[str, str], Forms]  # by space and name, the forms of each parameter that any program reads
WEIGHTS = ("weight", "shard")
OF_ONE_PROGRAM = ("activation", "shard")  # what a program reads of these, it may have written itself
READ = frozenset((*OF_ONE_PROGRAM, *WEIGHTS))  # spaces of which only what is read is made


def prune(calls: Sequence[Call]) -> list[Call]:
    """The calls that something outlasting the program depends on. One sweep from the end finds them all, as reads
    come after writes."""
    read: set[tuple[str, bool]] = set()
    kept = []
    for call in reversed(calls):
        refs = [result.ref for result in call.outputs if result is not None]
        # One read result keeps the whole call; which of its forms are made is decided later, by `forms`.
        if any(ref.space != "activation" or (ref.name, ref.again) in read for ref in refs):
            # The name stays in `read`: pieces of a slot, and sums into it, are written by several calls.
            kept.append(call)
            read.update((ref.name, ref.again) for ref in call.inputs if ref is not None)
    return kept[::-1]


def forms(calls: Sequence[Call], weights: Weights, offloaded: Iterable[Item] = ()) -> list[Call]:
    """Every call with the wanted forms of its results; what leaves none is not made.

    A copy (`OpRecord.copies`) also writes what its other forms are made of. `offloaded` are forms that the host keeps,
    beyond what is read on the device.
    """
    wanted: dict[tuple[str, bool], set[Form | None]] = defaultdict(set)
    for name, form in offloaded:
        wanted[name, False].add(form)
    made: list[Call] = []
    # From the end: what a copy has to write is known before what it reads.
    for call in reversed(calls):
        outputs = tuple(
            result and changed(result, forms=_wanted(result.ref, wanted, weights)) for result in call.outputs
        )
        # All reads come after it in the recording, so a result without a reader by now has none.
        if not any(result is not None and result.forms for result in outputs):
            continue
        read = [(ref, ref.form) for ref in call.inputs if ref is not None]
        # Copies between homes and ranks move bytes: a form needs the same form at the other end, or its rows.
        if (op := record(call.op)).copies:
            (result,) = outputs
            assert result is not None
            made_of = frozenset(map(op.read_for, result.forms))
            outputs = (changed(result, forms=_in_order({*result.forms, *made_of})),)
            read = [(ref, form) for ref, _ in read for form in made_of]
        for ref, form in read:
            if ref.space in OF_ONE_PROGRAM:
                wanted[ref.name, ref.again].add(form)
        made.append(changed(call, outputs=outputs))
    return made[::-1]


def _wanted(ref: Ref, wanted: Mapping[tuple[str, bool], set[Form | None]], weights: Weights) -> tuple[Form | None, ...]:
    found: set[Form | None] = {ref.form}  # that an optimizer state is held in; of others the value
    if ref.space in READ:
        found = set(wanted.get((ref.name, ref.again), ()))
    if ref.space in WEIGHTS:
        # The value of a weight that is its own master is the master's to write.
        found |= weights.get((ref.space, ref.name), frozenset())
        found = {form for form in found if form is not None or ref.origin.value_in is None}
    return _in_order(found)


def _in_order(forms: Iterable[Form | None]) -> tuple[Form | None, ...]:
    # In one order, so that programs which are alike compare equal, and are bound and captured once.
    return tuple(sorted(forms, key=lambda form: form.key if form else ""))


def reads_of_weights(programs: Iterable[Sequence[Call]]) -> Weights:
    """The forms of each parameter that any of the programs reads."""
    found: dict[tuple[str, str], set[Form | None]] = defaultdict(set)
    for calls in programs:
        for call in calls:
            for ref in call.inputs:
                if ref is not None and ref.space in WEIGHTS:
                    found[ref.space, ref.name].update(_read(call, ref))
    return {name: frozenset(read) for name, read in found.items()}


def _read(call: Call, ref: Ref) -> Iterable[Form | None]:
    """The forms that a call reads of one of its inputs: a copy, those that it makes its own of."""
    op = record(call.op)
    if not op.copies:
        return (ref.form,)
    return {op.read_for(form) for result in call.outputs if result is not None for form in result.forms}
