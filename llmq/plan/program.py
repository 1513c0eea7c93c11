"""A recording made executable: which forms each call writes, where casts go, and how long every tensor lives.

A `Program` is the list of steps that the engine runs, eagerly or captured as one graph. Nothing is decided after this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmq.arena import Lifetime, lay_out, live_peak
from llmq.ops.record import Call
from llmq.ops.seam import record
from llmq.tensor import LARGEST, Form, Ref, scale_shape, stored_bytes


@dataclass(frozen=True)
class Operand:
    """One storage as a call sees it: `ref` gives shape, form and span; `scale` names the storage or cell of scales."""

    storage: str
    ref: Ref
    scale: str | None = None


@dataclass(frozen=True)
class Result:
    """What a call writes: one operand per wanted form, none if nobody reads it; `amax` names cells to collect in."""

    ref: Ref
    operands: tuple[Operand, ...]
    accumulate: bool = False
    amax: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """A call with everything decided."""

    op: str
    outputs: tuple[Result | None, ...]
    inputs: tuple[Operand | None, ...]
    numbers: dict[str, Any]
    phase: str


@dataclass(frozen=True)
class Placement:
    """Bytes in the activation arena."""

    offset: int
    size: int


@dataclass(frozen=True)
class Program:
    """Steps, and where their activations lie. `births` and `deaths` are the storages that begin and end per step."""

    name: str
    steps: tuple[Step, ...]
    places: Mapping[str, Placement]
    activation_bytes: int
    live_bytes: int
    births: Mapping[int, tuple[str, ...]]
    deaths: Mapping[int, tuple[str, ...]]


def scale_cell(ref: Ref, dtype: str) -> str:
    """Name of the persistent scale of a tensor's copies in `dtype`: one for all programs and micro-steps."""
    name = ref.name.split("/", 1)[-1].split("#")[0] if ref.space == "activation" else ref.name
    return f"{name}@{dtype}"


def own_scales(ref: Ref) -> Ref:
    """The scales of a copy that owns them: one more tensor, which lives as long as the copy's bytes."""
    assert ref.form is not None and ref.form.owns_scales
    name, shape = f"{ref.name}@scale/{ref.form.key}", scale_shape(ref.whole or ref.shape, ref.form)
    return replace(ref, name=name, shape=shape, dtype="fp32", form=None)


def storage_name(ref: Ref) -> str:
    """Unique name of the bytes that a Ref stands for."""
    name = ref.name if ref.space == "activation" else f"{ref.space}:{ref.name}"
    return name + ("~" if ref.again else "") + (f"@{ref.form.key}" if ref.form else "")


def reads_of_weights(recordings: Sequence[Sequence[Call]]) -> dict[str, frozenset[Form | None]]:
    """The forms of each parameter that any program reads."""
    forms: dict[str, set[Form | None]] = defaultdict(set)
    for calls in recordings:
        for call in calls:
            for ref in call.inputs:
                if ref is not None and ref.space == "weight":
                    forms[ref.name].add(ref.form)
    return {name: frozenset(found) for name, found in forms.items()}


@dataclass
class Compiler:
    """Turns recordings into programs.

    `weight_forms` as from `reads_of_weights`; `aliases` maps storages that share their bytes with another (a weight
    that is its own master); `masters` are what weights are cast from.
    """

    weight_forms: Mapping[str, frozenset[Form | None]]
    aliases: Mapping[str, str]
    masters: Mapping[str, Ref]
    scales: set[str] = field(default_factory=set)  # cells of delayed scales that any program so far reads

    def program(self, name: str, calls: Sequence[Call], *, statistics: bool, first: bool = True) -> Program:
        """`statistics`: collect amax; `first`: the first write of each gradient overwrites (else all add)."""
        steps = self._steps(calls, statistics, first)
        return _place(name, steps)

    def _steps(self, calls: Sequence[Call], statistics: bool, first: bool) -> list[Step]:
        wanted: dict[tuple[str, bool], set[Form | None]] = defaultdict(set)
        for call in calls:
            for ref in call.inputs:
                if ref is not None and ref.space == "activation":
                    wanted[ref.name, ref.again].add(ref.form)
        steps: list[Step] = []
        written: set[str] = set()
        for call in calls:
            op, inputs = record(call.op), tuple(self._operand(ref) for ref in call.inputs)
            values = dict(zip(op.inputs, call.inputs, strict=True))
            outputs: list[Result | None] = []
            casts: list[tuple[Ref, Ref | None, list[Form]]] = []
            turns: list[Ref] = []
            for output, ref in zip(op.outputs, call.outputs, strict=True):
                if ref is None:
                    outputs.append(None)
                    continue
                forms = self._forms_wanted(ref, wanted)
                later = [form for form in forms if form is not None and not op.writes(output, form)]
                source = op.cast_from.get(output)
                if source and ref.again:  # it reads a scale that was made in forward
                    later = [form for form in later if storage_name(self._scale_ref(ref, form)) not in written]
                now = [form for form in forms if form not in later]
                turned = [form for form in later if form.layout == "col" and replace(form, layout="row") in now]
                later = [form for form in later if form not in turned]
                if later and ref.space == "activation" and not source and None not in now:
                    now.insert(0, None)
                accumulate = ref.space in ("grad", "sum") and (not first or storage_name(ref) in written)
                written.add(storage_name(ref))
                outputs.append(self._result(ref, now, statistics, accumulate))
                if later:
                    value = self.masters[ref.name] if ref.space == "weight" else ref
                    casts.append((ref, values[source] if source else value, later))
                turns += [replace(ref, form=form) for form in turned]
            if any(result is not None and result.operands for result in outputs):
                steps.append(Step(call.op, tuple(outputs), inputs, call.numbers, call.phase))
            for ref, given, later in casts:
                assert given is not None
                made = self._casts(ref, given, later, call.phase, statistics, written)
                written.update(o.storage for step in made for r in step.outputs if r for o in r.operands)
                steps += made
            steps += [self._turn(ref, call.phase) for ref in turns]
        return steps

    def _forms_wanted(self, ref: Ref, wanted: Mapping[tuple[str, bool], set[Form | None]]) -> list[Form | None]:
        if ref.space == "activation":
            forms: set[Form | None] | frozenset[Form | None] = wanted.get((ref.name, ref.again), set())
        elif ref.space == "weight":
            forms = {form for form in self.weight_forms.get(ref.name, ()) if self._own(replace(ref, form=form))}
        else:
            forms = {None}
        return sorted(forms, key=lambda form: form.key if form else "")

    def _own(self, ref: Ref) -> bool:
        return storage_name(ref) not in self.aliases

    def _casts(
        self, ref: Ref, source: Ref, forms: list[Form], phase: str, statistics: bool, written: set[str]
    ) -> list[Step]:
        """Copies of a value that its producer could not write, and the current scale that some of them have."""
        value, steps = (self._operand(source),), []
        for dtype in sorted({form.dtype for form in forms}):
            own = [form for form in forms if form.dtype == dtype and form.owns_scales]
            current = [form for form in forms if form.dtype == dtype and form.scaling == "current"]
            scale = None
            if current and storage_name(shared := self._scale_ref(ref, current[0])) not in written:
                scale = Result(shared, (Operand(storage_name(shared), shared),))
            limit = {"limit": LARGEST.get(dtype)}
            if own:
                outputs = (self._result(ref, own, False, False), scale)
                steps.append(Step("quantize", outputs, value, limit, phase))
            elif scale is not None:
                steps.append(Step("amax_scale", (scale,), value, limit, phase))
        rest = [form for form in forms if not form.owns_scales]
        if rest:
            steps.append(Step("cast", (self._result(ref, rest, statistics, False),), value, {}, phase))
        return steps

    def _turn(self, ref: Ref, phase: str) -> Step:
        """Columns in fp8 from the rows, which have the same scale."""
        columns, rows = self._operand(ref), self._operand(_as_row(ref))
        assert columns is not None
        return Step("cast", (Result(ref, (columns,)),), (rows,), {}, phase)

    def _scale_ref(self, ref: Ref, form: Form) -> Ref:
        """The slot or cell of the scales of a copy whose scales come from its value."""
        if form.owns_scales:
            return own_scales(replace(ref, form=form))
        if ref.space == "activation":
            return Ref(f"{ref.name}@scale/{form.dtype}", "activation", (1,), "fp32", ref.layer)
        return Ref(scale_cell(ref, form.dtype), "scale", (1,), "fp32")

    def _operand(self, ref: Ref | None) -> Operand | None:
        if ref is None:
            return None
        scale = None
        if ref.form is not None and ref.form.scaling == "delayed":
            cell = scale_cell(ref, ref.form.dtype)
            self.scales.add(cell)
            scale = f"scale:{cell}"
        elif ref.form is not None and ref.form.scaling is not None:
            scale = storage_name(self._scale_ref(ref, ref.form))
        name = storage_name(ref)
        return Operand(self.aliases.get(name, name), ref, scale)

    def _result(self, ref: Ref, forms: Sequence[Form | None], statistics: bool, accumulate: bool) -> Result:
        operands = tuple(op for form in forms if (op := self._operand(replace(ref, form=form))) is not None)
        collects = statistics and not ref.again
        dtypes = sorted({form.dtype for form in forms if form is not None and form.scaling == "delayed"})
        amax = tuple(scale_cell(ref, dtype) for dtype in dtypes) if collects else ()
        return Result(ref, operands, accumulate, amax)


def _as_row(ref: Ref) -> Ref:
    assert ref.form is not None
    return replace(ref, form=replace(ref.form, layout="row"))


def _place(name: str, steps: Sequence[Step]) -> Program:
    firsts: dict[str, int] = {}
    lasts: dict[str, int] = {}
    sizes: dict[str, int] = {}

    def touch(operand: Operand, index: int) -> None:
        if operand.ref.space == "activation":
            firsts.setdefault(operand.storage, index)
            lasts[operand.storage] = index
            if operand.ref.span is None:
                sizes[operand.storage] = stored_bytes(operand.ref)
            if operand.ref.form is not None and operand.ref.form.owns_scales:
                touch(Operand(str(operand.scale), own_scales(operand.ref)), index)
        if operand.scale is not None and operand.scale in lasts:
            lasts[operand.scale] = index

    for index, step in enumerate(steps):
        for operand in step.inputs:
            if operand is not None:
                assert operand.ref.space != "activation" or operand.storage in firsts, (
                    f"{operand.storage} read unwritten"
                )
                touch(operand, index)
        for result in step.outputs:
            for operand in result.operands if result else ():
                touch(operand, index)
    roots = _shared(steps, sizes, lasts)
    lives: dict[str, Lifetime] = {}
    for storage, first in firsts.items():
        root = roots.get(storage, storage)
        life = lives.get(root, Lifetime(0, first, first))
        size = max(life.size, sizes[storage])
        lives[root] = Lifetime(size, min(life.first, first), max(life.last, lasts[storage]))
    offsets, total = lay_out(list(lives.values()))
    by_root = {root: Placement(offset, life.size) for (root, life), offset in zip(lives.items(), offsets, strict=True)}
    births, deaths = defaultdict(list), defaultdict(list)
    for root, life in lives.items():
        births[life.first].append(root)
        deaths[life.last].append(root)
    return Program(
        name,
        tuple(steps),
        {storage: by_root[roots.get(storage, storage)] for storage in firsts},
        total,
        live_peak(list(lives.values())),
        {index: tuple(found) for index, found in births.items()},
        {index: tuple(found) for index, found in deaths.items()},
    )


def _shared(steps: Sequence[Step], sizes: Mapping[str, int], lasts: Mapping[str, int]) -> dict[str, str]:
    """Storages that take over the memory of an input at its last read, by the root whose place they share."""
    roots: dict[str, str] = {}
    for index, step in enumerate(steps):
        op = record(step.op)
        given = dict(zip(op.inputs, step.inputs, strict=True))
        for output, result in zip(op.outputs, step.outputs, strict=True):
            source = given.get(op.shares.get(output, ""))
            if result is None or source is None or source.ref.space != "activation":
                continue
            for operand in result.operands:
                same = operand.ref.form is None and source.ref.form is None
                whole = operand.ref.span is None and source.ref.span is None
                if (
                    same
                    and whole
                    and lasts[source.storage] == index
                    and sizes[operand.storage] == sizes[source.storage]
                ):
                    roots[operand.storage] = roots.get(source.storage, source.storage)
    return roots
