"""Hand-made calls, a handful of which say what one pass does."""

from dataclasses import replace

from llmq.ops.record import Call, Result
from llmq.ops.seam import record
from llmq.tensor import Form, Ref

ROW, COL = Form("e4m3", "row", "delayed"), Form("e4m3", "col", "delayed")


def slot(name: str, layer: int | None = None, **more: object) -> Ref:
    """A bf16 intermediate (2,4,8) of a layer."""
    return Ref(name, "activation", (2, 4, 8), "bf16", layer, **more)


def weight(name: str, **more: object) -> Ref:
    """A bf16 parameter (8,8)."""
    return Ref(name, "weight", (8, 8), "bf16", **more)


def grad(name: str) -> Ref:
    """Its gradient."""
    return Ref(name, "grad", (8, 8), "bf16")


def wanting(ref: Ref, *forms: Form | None) -> Result:
    """A result of which these forms are read."""
    return Result(ref, forms)


def written(ref: Ref | Result | None) -> Result | None:
    """A Ref as the result of a call that writes it in its form."""
    return Result(replace(ref, form=None), (ref.form,)) if isinstance(ref, Ref) else ref


def recorded(
    op: str, outputs: tuple[Ref | None, ...], inputs: tuple[Ref | None, ...], phase: str = "forward", **more: object
) -> Call:
    """A call before the pass `forms`; outputs and inputs that are not given are absent."""
    known = record(op)
    results = tuple(None if ref is None else Result(ref) for ref in (*outputs, *[None] * len(known.outputs)))
    given = (*inputs, *[None] * len(known.inputs))
    about = {"lane": known.lane, **more}
    return Call(op, results[: len(known.outputs)], given[: len(known.inputs)], {}, phase, **about)


def formed(
    op: str,
    outputs: tuple[Ref | Result | None, ...],
    inputs: tuple[Ref | None, ...],
    phase: str = "forward",
    **more: object,
) -> Call:
    """A call after the pass `forms`: a Ref is written in its form, a Result in those that it has."""
    call = recorded(op, (), inputs, phase, **more)
    results = (*map(written, outputs), *call.outputs)
    return replace(call, outputs=results[: len(call.outputs)])
