"""A training program that also measures how well its fp8 copies stand for their values.

It is the training recording with a call put behind every value that somebody reads in fp8, and one in front for every
weight; the planner then keeps value and copy together for as long as that takes. What it finds goes into one cell per
copy: six numbers, as the op `quantization_error` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmq.ops.record import Call, Result
from llmq.ops.seam import record
from llmq.plan.names import scale_cell
from llmq.tensor import Form, Ref

FIELDS, STRIDE = 6, 8  # numbers of a cell, and from one cell to the next


def observed(calls: Sequence[Call], masters: Mapping[str, Ref]) -> tuple[list[Call], dict[str, tuple[str, ...]]]:
    """The calls with measurements between them, and by cell, in order, the sites that read the copy."""
    forms: dict[str, tuple[Ref, Form]] = {}
    sites: dict[str, dict[str, None]] = {}
    for call in calls:
        for ref in call.inputs:
            if ref is None or ref.form is None or ref.form.scaling is None:
                continue
            if ref.form.layout == "row":
                forms.setdefault(ref.name, (ref, ref.form))
            if record(call.op).is_linear:
                sites.setdefault(scale_cell(ref, ref.form.dtype), {}).setdefault(_site(call))
    cells = {cell: index for index, cell in enumerate(sites)}
    whole = errors_cell(len(cells))

    def measured(value: Ref, ref: Ref, form: Form, phase: str) -> Call:
        cell = whole.flat(cells[scale_cell(ref, form.dtype)] * STRIDE, FIELDS)
        return Call("quantization_error", (Result(cell),), (cell, value, replace(ref, form=form)), {}, phase)

    weights = [(ref, form) for ref, form in forms.values() if ref.space == "weight"]
    found = [measured(masters.get(ref.name, replace(ref, form=None)), ref, form, "forward") for ref, form in weights]
    for call in calls:
        found.append(call)
        made = [r.ref for r in call.outputs if r is not None and r.ref.space == "activation" and not r.ref.again]
        found += [measured(ref, ref, forms[ref.name][1], call.phase) for ref in made if ref.name in forms]
    return found, {cell: tuple(names) for cell, names in sites.items()}


def errors_cell(count: int) -> Ref:
    """Where the numbers of so many copies are."""
    return Ref("quantization_error", "cell", (count * STRIDE,), "fp32")


def _site(call: Call) -> str:
    """Name of the site that makes a call: that of its weight, or of the head where it is the embedding's."""
    refs = [*(result.ref for result in call.outputs if result is not None), *(ref for ref in call.inputs if ref)]
    names = [ref.name for ref in refs if ref.space in ("weight", "grad")]
    name = next(name for name in names if name.endswith("weight")).removesuffix(".weight")
    return "head" if name == "embed" else name
