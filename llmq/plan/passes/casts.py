"""Copies that a producer cannot write in its own pass: they are cast, or quantized, after it.

What is held in 8 bits for the optimizer is cast to its value first: no kernel makes other copies of it.

A copy that owns its scales is made by `quantize`, with them; a current scale is measured by that call in passing, or
by one of its own, before the copy is cast. fp8 columns whose rows the producer writes, or a cast reads, are made from
the rows: the same numbers with the same scales.
"""

from collections.abc import Iterable, Sequence

from llmq.ops.record import Call, Result
from llmq.ops.seam import record
from llmq.plan.names import known_scale, scale_ref, storage_name
from llmq.tensor import LARGEST, Form, Ref, changed


def casts(calls: Sequence[Call]) -> list[Call]:
    """Every call with the forms that it writes itself, and after it the calls that make the others."""
    made: list[Call] = []
    written: set[str] = set()
    gathered: list[Call] = []  # made of what other ranks send: after all that they send at a time
    for call in calls:
        # Collectives that follow each other are made as one, so no cast may come between them.
        if not record(call.op).gathers:
            made += gathered
            gathered = []
        if all(_writes(call, name, form) for name, result in _results(call) if result for form in result.forms):
            made += _in_each_form(call)
            continue
        outputs: list[Result | None] = []
        after: list[Call] = []
        turns: list[Call] = []
        for name, result in _results(call):
            if result is None or not result.forms:
                outputs.append(result)
                continue
            now, turned, later = _split(call, name, result)
            outputs.append(changed(result, forms=now))
            source = _source(call, name, later)
            after += _made(result.ref, source, later, call.phase, written) if later else []
            turns += [_turned(result.ref, form, _source(call, name), call.phase) for form in turned]
        if any(result is not None and result.forms for result in outputs):
            made += _in_each_form(changed(call, outputs=tuple(outputs)))
        if record(call.op).gathers:  # on their lane, where the next layer's are made ahead of time
            gathered += [changed(one, lane=call.lane) for one in (*after, *turns)]
        else:
            made += [*after, *turns]
    return made + gathered


def _in_each_form(call: Call) -> list[Call]:
    """A copy (`OpRecord.copies`) makes each form from the same form, so it becomes a call for each."""
    if not record(call.op).copies:
        return [call]
    (result,), (source,) = call.outputs, call.inputs
    assert result is not None
    return [
        changed(call, outputs=(changed(result, forms=(form,)),), inputs=(source and changed(source, form=form),))
        for form in result.forms
    ]


def _results(call: Call) -> Iterable[tuple[str, Result | None]]:
    return zip(record(call.op).outputs, call.outputs, strict=True)


def _writes(call: Call, output: str, form: Form | None) -> bool:
    """Whether a call writes a form of an output in its own pass."""
    return record(call.op).writes(output, form) and (form is None or not _reads_states(call, output))


def _reads_states(call: Call, output: str) -> bool:
    """Whether the copies of an output would be made of an optimizer state in 8 bits."""
    op = record(call.op)
    source = dict(zip(op.inputs, call.inputs, strict=True)).get(op.cast_from.get(output, ""))
    form = source.form if source is not None else None
    return form is not None and form.scaling is not None and form.scales.is_of_states


def _split(call: Call, output: str, result: Result) -> tuple[tuple[Form | None, ...], list[Form], list[Form]]:
    """The forms that a call writes, those that are turned from fp8 rows, and those made of the value."""
    ref = result.ref
    later = [form for form in result.forms if form is not None and not _writes(call, output, form)]
    now = [form for form in result.forms if form not in later]
    # Turning bytes moves one byte a number, making columns of the value reads two or four.
    rows = {*now, _source(call, output).form}
    turned = [form for form in later if form.layout == "col" and form.turns and changed(form, layout="row") in rows]
    later = [form for form in later if form not in turned]
    if later and ref.space == "activation" and None not in now and _source(call, output, later) == ref:
        now.insert(0, None)  # what the others are made of
    return tuple(now), turned, later


def _source(call: Call, output: str, later: Sequence[Form] = ()) -> Ref:
    """The value that copies of an output are made of: itself, what a cast reads, or another output of the same call.

    Where a cast reads what is itself scaled, copies of `later` that own scales come from its value.
    """
    op = record(call.op)
    found = dict(zip(op.outputs, (result.ref if result else None for result in call.outputs), strict=True))
    found |= dict(zip(op.inputs, call.inputs, strict=True))
    source, value = found[output if _reads_states(call, output) else op.cast_from.get(output, output)], found[output]
    assert source is not None and value is not None
    is_scaled = source.form is not None and source.form.scaling is not None
    return value if is_scaled and any(form.owns_scales for form in later) else source


def _made(ref: Ref, source: Ref, forms: list[Form], phase: str, written: set[str]) -> list[Call]:
    """The calls that make copies of a value, and the current scale that some of them have."""
    calls: list[Call] = []
    # Sorted: all ranks make the same calls in the same order.
    for dtype in sorted({form.dtype for form in forms}):
        own = [form for form in forms if form.dtype == dtype and form.owns_scales]
        current = [form for form in forms if form.dtype == dtype and form.is_measured]
        copy = changed(ref, form=current[0]) if current else ref
        shared = scale_ref(copy) if current and known_scale(copy) is None else None
        # Measured once in a program: forward's scale serves backward's copies of the same value.
        scale = Result(shared, (None,)) if shared is not None and storage_name(shared) not in written else None
        numbers = {"limit": LARGEST.get(dtype)}
        if own:
            calls.append(Call("quantize", (Result(ref, tuple(own)), scale), (source,), numbers, phase))
        elif scale is not None:
            calls.append(Call("amax_scale", (scale,), (source,), numbers, phase))
    if rest := tuple(form for form in forms if not form.owns_scales):
        calls.append(Call("cast", (Result(ref, rest),), (source,), {}, phase))
    written.update(storage_name(one) for call in calls for one in call.written)
    return calls


def _turned(ref: Ref, form: Form, source: Ref, phase: str) -> Call:
    """fp8 columns from the rows: those that a call has written, or what it reads."""
    rows = changed(form, layout="row")
    read = source if source.form == rows else changed(ref, form=rows)
    return Call("cast", (Result(ref, (form,)),), (read,), {}, phase)
