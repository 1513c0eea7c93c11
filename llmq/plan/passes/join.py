"""One call for SwiGLU's gradient and what the adapters of gate and up make of it: their value need not reach memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from llmq.changed import changed
from llmq.ops.record import Call
from llmq.plan.names import storage_name
from llmq.tensor import Form, Ref

MAKER, READER, BOTH = "swiglu_backward", "low_rank_backward", "swiglu_low_rank_backward"


def join(calls: Sequence[Call]) -> list[Call]:
    """The calls with `swiglu_low_rank_backward` in place of `swiglu_backward` and a `low_rank_backward` of each half.

    Where the gradient is read in rows alone, and the adapters have one rank. It stands where `swiglu_backward` stood.
    """
    if not any(call.op == READER for call in calls):
        return list(calls)
    reads = Counter(_key(ref) for call in calls for ref in call.inputs if ref is not None and ref.form is None)
    made = list(calls)
    taken: set[int] = set()
    for at, call in enumerate(calls):
        result = call.outputs[0]
        if call.op != MAKER or result is None or not all(form is None or _is_row(form) for form in result.forms):
            continue
        halves = _halves(calls, at, result.ref)
        if halves is None or not _may_move(calls, at, halves):
            continue
        gate, up = (calls[place] for place in halves)
        is_read = reads[_key(result.ref)] > len(halves)
        rows = changed(result, forms=tuple(form for form in result.forms if form is not None or is_read))
        outputs = (rows, gate.outputs[0], up.outputs[0], gate.outputs[1], up.outputs[1])
        factors = (gate.inputs[1], up.inputs[1], gate.inputs[2], up.inputs[2])
        numbers = {"gate_alpha": gate.numbers["alpha"], "up_alpha": up.numbers["alpha"]}
        made[at] = changed(call, op=BOTH, outputs=outputs, inputs=(*call.inputs, *factors), numbers=numbers)
        taken.update(halves)
    return [call for at, call in enumerate(made) if at not in taken]


def _is_row(form: Form) -> bool:
    """Whether a copy is fp8 rows of one scale."""
    return form.layout == "row" and form.has_cell


def _halves(calls: Sequence[Call], at: int, d_gate_up: Ref) -> tuple[int, int] | None:
    """Where the gradients of the adapters of gate and of up, of one rank, are made of d_gate_up."""
    width = d_gate_up.shape[-1] // 2
    spans = [d_gate_up.columns(start, width).span for start in (0, width)]
    found: dict[int, int] = {}
    for place in range(at + 1, len(calls)):
        call = calls[place]
        if call.op == READER and (ref := call.inputs[0]) is not None and _key(ref) == _key(d_gate_up):
            if ref.span not in spans or spans.index(ref.span) in found or None in call.outputs:
                return None
            found[spans.index(ref.span)] = place
            if len(found) == len(spans):
                break
    if len(found) < len(spans):
        return None
    ranks = {ref.shape[-1] for place in found.values() if (ref := calls[place].inputs[1]) is not None}
    return (found[0], found[1]) if len(ranks) == 1 else None


def _may_move(calls: Sequence[Call], to: int, places: Collection[int]) -> bool:
    """Whether calls may be made together with the one at `to`, before what stands between: nothing there touches what
    they write, nor writes what they read."""
    moved, others = [calls[place] for place in places], range(to + 1, max(places))
    between = [calls[place] for place in others if place not in places]
    reads = {name for call in moved for name in _names(call.inputs)}
    writes = {name for call in moved for name in _names(call.written)}
    return all(
        writes.isdisjoint(_names(call.inputs)) and (reads | writes).isdisjoint(_names(call.written)) for call in between
    )


def _names(refs: Iterable[Ref | None]) -> list[str]:
    return [storage_name(ref) for ref in refs if ref is not None]


def _key(ref: Ref) -> tuple[str, bool]:
    return ref.owner, ref.again
