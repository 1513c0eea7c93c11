"""A training program that also measures how far its fp8 copies are from their values.

It is the training recording with a call after every value that is read in fp8, and one before for every
weight; the planner then keeps value and copy together for as long as that takes. What it finds goes into one cell per
copy: six numbers, as the op `quantization_error` gives them.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from llmq.ops.record import Call, Result
from llmq.ops.seam import record
from llmq.plan.names import scale_cell
from llmq.plan.passes.transfers import moved
from llmq.tensor import Form, Ref, changed

FIELDS, STRIDE = 6, 8  # numbers of a cell, and from one cell to the next


def observed(
    calls: Sequence[Call], values: Mapping[str, Ref], piece: Callable[[Ref], Ref] = lambda weight: weight
) -> tuple[list[Call], dict[str, tuple[str, ...]]]:
    """The calls with measurements between them, and by cell, in order, the sites that read the copy.

    `values` are those of weights by name, or of this rank's `piece` of each; one that has none there is not measured.
    """
    forms: dict[str, tuple[Ref, Form]] = {}
    sites: dict[str, dict[str, None]] = {}
    for call in (call for call in calls if record(call.op).is_linear):
        for ref in call.inputs:
            if ref is None or ref.form is None or ref.form.scaling is None:
                continue
            # A copy of a weight that has no value to compare it with.
            if ref.origin.held is not None or (ref.space == "weight" and ref.name not in values):
                continue
            # Columns have the same numbers with the same scale, so rows stand for both.
            if ref.form.layout == "row":
                forms.setdefault(ref.name, (ref, ref.form))
            sites.setdefault(scale_cell(ref, ref.form.dtype), {}).setdefault(_site(call))
    cells = {cell: index for index, cell in enumerate(sites)}
    whole = errors_cell(len(cells))

    def measured(value: Ref, ref: Ref, form: Form, phase: str) -> Call:
        cell = whole.flat(cells[scale_cell(ref, form.dtype)] * STRIDE, FIELDS)
        return Call("quantization_error", (Result(cell),), (cell, value, changed(ref, form=form)), {}, phase)

    def compared(name: str, ref: Ref, form: Form, phase: str) -> list[Call]:
        """Of the weight of a name, which `ref` is, or has been fetched or gathered from."""
        if not math.prod((value := values[name]).shape):  # a share may have no rows
            return []
        rows = changed(piece(changed(ref, name=name)), name=ref.name)
        if value.home == "device":
            return [measured(value, rows, form, phase)]
        slot = Ref(f"observed/{name}", "activation", value.shape, value.dtype, value.layer)
        return [moved("copy_to_device", slot, value), measured(slot, rows, form, phase)]

    found = []
    for ref, form in forms.values():
        found += compared(ref.name, ref, form, "forward") if ref.space == "weight" else []
    waiting: list[Call] = []  # until all collectives of a layer are together
    seen: set[str] = set()  # weights, which backward fetches once more
    for call in calls:
        # Nothing may come between collectives that are made as one.
        if not record(call.op).gathers:
            found += waiting
            waiting = []
        found.append(call)
        made = [r.ref for r in call.outputs if r is not None and r.ref.space == "activation" and not r.ref.again]
        for ref, form in ((ref, forms[ref.name][1]) for ref in made if ref.name in forms):
            if record(call.op).copies and ref.origin.cell is not None and ref.origin.cell in values:
                waiting += [] if ref.origin.cell in seen else compared(ref.origin.cell, ref, form, call.phase)
                seen.add(ref.origin.cell)
            else:
                found.append(measured(ref, ref, form, call.phase))
    return found, {cell: tuple(names) for cell, names in sites.items()}


def errors_cell(count: int) -> Ref:
    """Where the numbers of `count` copies are."""
    return Ref("quantization_error", "cell", (count * STRIDE,), "fp32")


def _site(call: Call) -> str:
    """Name of the site that makes a call: that of its weight, or of the head where it is the embedding's."""
    refs = [*(result.ref for result in call.outputs if result is not None), *(ref for ref in call.inputs if ref)]
    refs = [ref.origin.held or ref for ref in refs]
    names = [
        ref.origin.cell or ref.name for ref in refs if ref.space in ("weight", "grad") or ref.origin.cell is not None
    ]
    name = next(site for site, found, _ in (name.rpartition(".weight") for name in names) if found)
    return "head" if name == "embed" else name
