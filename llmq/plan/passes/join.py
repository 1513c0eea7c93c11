"""One call for SwiGLU's gradient and what the adapters of gate and up make of it: their value need not reach memory."""

import math
from collections import Counter
from collections.abc import Sequence

from llmq.ops.record import Call, Result
from llmq.plan.passes.lanes import reads, writes
from llmq.tensor import Ref, changed

MAKER, READER, BOTH = "swiglu_backward", "low_rank_backward", "swiglu_low_rank_backward"


def join(calls: Sequence[Call]) -> list[Call]:
    """The calls with `swiglu_low_rank_backward` in place of `swiglu_backward` and a `low_rank_backward` of each half.

    Where the gradient is read in rows alone, and the adapters of gate and up have one rank. It takes the place of
    `swiglu_backward`.
    """
    if not any(call.op == READER for call in calls):
        return list(calls)
    read = Counter(_key(ref) for call in calls for ref in call.inputs if ref is not None and ref.form is None)
    made: dict[int, Call] = {}
    taken: set[int] = set()
    for at, call in enumerate(calls):
        result = call.outputs[0]
        if call.op != MAKER or result is None:
            continue
        # Columns, or scales of blocks, are read by others: then the gradient has to reach memory after all.
        if any(form is not None and not (form.layout == "row" and form.has_cell) for form in result.forms):
            continue
        places = _halves(calls, at, result.ref)
        if not places or not _may_move(calls, at, places):
            continue
        # Matmuls in bf16 read the plain value, too; those in fp8 read only its rows, and it is not written.
        is_read = read[_key(result.ref)] > len(places)
        rows = changed(result, forms=tuple(form for form in result.forms if form is not None or is_read))
        made[at] = _joined(call, rows, *(calls[place] for place in places))
        taken.update(places)
    return [made.get(at, call) for at, call in enumerate(calls) if at not in taken]


def _joined(call: Call, rows: Result, gate: Call, up: Call) -> Call:
    """SwiGLU's gradient, with what adapters of gate and of up make of that."""
    outputs = (rows, gate.outputs[0], up.outputs[0], gate.outputs[1], up.outputs[1])
    factors = (gate.inputs[1], up.inputs[1], gate.inputs[2], up.inputs[2])
    numbers = {**call.numbers, "gate_alpha": gate.numbers["alpha"], "up_alpha": up.numbers["alpha"]}
    return changed(call, op=BOTH, outputs=outputs, inputs=(*call.inputs, *factors), numbers=numbers)


def _halves(calls: Sequence[Call], at: int, d_gate_up: Ref) -> tuple[int, ...]:
    """Where the gradients of the adapters of gate and of up, of one rank, are made of all of d_gate_up; nowhere if they
    are not."""
    width, every = d_gate_up.shape[-1] // 2, slice(0, math.prod(d_gate_up.shape[:-1]))
    found: dict[int, int] = {}
    for place in range(at + 1, len(calls)):
        call = calls[place]
        if call.op != READER or (ref := call.inputs[0]) is None or _key(ref) != _key(d_gate_up):
            continue
        rows, columns = ref.window
        half, rest = divmod(columns.start, width)
        is_half = rows == every and not rest and columns.stop - columns.start == width
        # The kernel makes both halves at once: anything else, such as ranks that differ, keeps its own calls.
        if not is_half or half in found or None in call.outputs:
            return ()
        found[half] = place
        if len(found) == 2:
            break
    ranks = {low.shape[-1] for place in found.values() if (low := calls[place].inputs[1]) is not None}
    return (found[0], found[1]) if len(found) == 2 and len(ranks) == 1 else ()


def _may_move(calls: Sequence[Call], to: int, places: Sequence[int]) -> bool:
    """Whether calls may be made together with the one at `to`, before the calls between: none of these touches what
    they write, nor writes what they read."""
    for place in places:
        read, written = {*reads(calls[place])}, {*writes(calls[place])}
        for between in (calls[index] for index in range(to + 1, place) if index not in places):
            if not (written.isdisjoint(reads(between)) and (read | written).isdisjoint(writes(between))):
                return False
    return True


def _key(ref: Ref) -> tuple[str, bool]:
    return ref.name, ref.again
