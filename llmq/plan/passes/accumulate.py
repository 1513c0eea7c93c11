"""Which writes are added to what is there, and which calls collect the largest magnitude for delayed scales."""

from collections.abc import Callable, Sequence

from llmq.ops.record import Call, Result
from llmq.ops.seam import record
from llmq.plan.names import scale_cell, storage_name
from llmq.tensor import View, changed


def accumulate(calls: Sequence[Call], *, first: bool) -> list[Call]:
    """The first write of a gradient or a sum in a step overwrites, the others add; all do after the `first` program.

    Gradients that live on as their sums over ranks (`Ref.again`) are replaced by these. What is fetched from the host
    to be added to is not fetched where nothing was written to it.
    """
    written: set[tuple[str, View | None]] = set()  # storages, and the pieces of them

    def marked(result: Result | None) -> Result | None:
        if result is None or result.ref.again or not (result.ref.space in ("grad", "sum") or result.ref.is_sum):
            return result
        place = storage_name(result.ref), result.ref.view
        # A slot is new in every program; storage outlasts it, and holds what earlier micro-steps have added.
        adds = (not first and not result.ref.is_sum) or place in written
        written.add(place)
        return changed(result, accumulate=adds) if adds != result.accumulate else result

    made: list[Call] = []
    sent: set[str] = set()  # gradients on the host that this program has written
    for call in calls:
        (result, *_), op = call.outputs, record(call.op)
        if result is None or not op.copies or op.gathers:
            made.append(_with(call, marked))
        elif result.ref.is_sum:
            (source,) = call.inputs
            # The first micro-step overwrites: what the host has is of the last step.
            if source is not None and (not first or storage_name(source) in sent):
                made.append(_with(call, marked))
        else:
            sent.add(storage_name(result.ref))
            made.append(call)
    return made


def collect(calls: Sequence[Call]) -> list[Call]:
    """Every first write of a copy with a delayed scale collects its amax; what is made again, or of another copy of the
    value, was counted before, and a weight that is remade by the update."""

    def counted(result: Result | None) -> Result | None:
        if result is None or result.ref.again or result.ref.origin.is_remade:
            return result
        dtypes = sorted({form.dtype for form in result.forms if form is not None and form.has_cell})
        return changed(result, amax=tuple(scale_cell(result.ref, dtype) for dtype in dtypes)) if dtypes else result

    # A copy of a copy has been rounded and cut off: its amax says nothing of the value's.
    return [call if _copies_a_copy(call) else _with(call, counted) for call in calls]


def _with(call: Call, change: Callable[[Result | None], Result | None]) -> Call:
    outputs = tuple(map(change, call.outputs))
    return call if outputs == call.outputs else changed(call, outputs=outputs)


def _copies_a_copy(call: Call) -> bool:
    op = record(call.op)
    read = dict(zip(op.inputs, call.inputs, strict=True))
    sources = (read.get(source) for source in (*op.cast_from.values(), *(op.inputs if op.copies else ())))
    return any(ref is not None and ref.form is not None for ref in sources)
