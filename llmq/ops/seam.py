"""The contract of an op: one record beside its reference function, with what its signature says and what it cannot say.

The reference backend's functions are the definition; other backends have functions of the same names and signatures.
Outputs are left of `/`, inputs right of it, plain numbers right of `*`. Planner, backends, bench and speed of light
look everything else up in the record: nothing asks how an op's name begins.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from llmq.tensor import DTYPES, Form, Ref, scale_shape, stored_bytes

if TYPE_CHECKING:
    from llmq.ops.record import Call
    from llmq.ops.temporaries import Temporaries

Function = TypeVar("Function", bound=Callable[..., None])
LANES = ("main", "to_host", "to_device", "comm")
GIVEN = "world"  # keyword that the backend gives to collectives: no number of a call


@dataclass(frozen=True)
class Arguments:
    """What one call reads and writes, by the names of its op's signature; an absent input is left out.

    `writes` has a Ref for every form that is written, none for an unwanted output. FLOPs, bytes, scratch and refusals
    of a call follow from this.
    """

    reads: Mapping[str, Ref]
    writes: Mapping[str, tuple[Ref, ...]]
    numbers: Mapping[str, Any]
    added: frozenset[str] = frozenset()  # outputs that are added to what is there
    in_place: frozenset[str] = frozenset()  # outputs whose value is written where the input lies that they may share
    different_tokens: float | None = None  # of the batch: rows of an embedding table that are touched; None: all

    @classmethod
    def of(cls, call: Call) -> Arguments:
        """Those of a call of a program."""
        op = record(call.op)
        reads = {name: ref for name, ref in zip(op.inputs, call.inputs, strict=True) if ref is not None}
        results = {name: result for name, result in zip(op.outputs, call.outputs, strict=True) if result is not None}
        writes = {name: result.refs for name, result in results.items()}
        added = frozenset(name for name, result in results.items() if result.accumulate)
        return cls(reads, writes, call.numbers, added)

    @property
    def writes_columns(self) -> bool:
        """Whether a quantized copy is written transposed."""
        forms = [ref.form for refs in self.writes.values() for ref in refs]
        return any(form is not None and form.layout == "col" for form in forms)


@dataclass(frozen=True)
class OpRecord:
    """All that is known of an op without running it. Names of `outputs`, `inputs` and `numbers` are in order."""

    name: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    numbers: tuple[str, ...]
    family: str  # that bench's ladder counts its time in
    shares: Mapping[str, str] = field(default_factory=dict)  # output -> input whose memory it may take at its last read
    forms: Set[str] = frozenset()  # outputs that it writes in quantized and column-sum forms in the same pass
    sums: bool = True  # whether column sums are among these forms
    rows: Set[str] = frozenset()  # outputs whose fp8 rows it can write in the same pass, but nothing else
    held: Set[str] = frozenset()  # outputs that it writes in whatever form they are held in
    cast_from: Mapping[str, str] = field(default_factory=dict)  # output -> what else has its value: forms come from it
    copies: bool = False  # makes each form of its output from the same form of its input
    gathers: bool = False  # a copy from many ranks: only of forms that are made of shards as they are of the whole
    is_collective: bool = False  # the backend gives it the world
    is_python: bool = False  # may run any Python: no CUDA graph has it
    lane: str = "main"  # where calls run, but those that are given another one
    is_linear: bool = False  # multiplies with a weight, or makes a weight's gradient: what a site is made of
    takes_columns: bool = False  # operands and results may be columns of a wider matrix
    for_each_row: bool = False  # the optimizer calls it for every row, many of which take no longer than a launch
    products: int = 0  # matrix products, each of `multiply_adds`
    remade: int = 0  # of these, which another op has made before: time lost to speed of light
    multiply_adds: Callable[[Arguments], int] = lambda call: 0
    untouched: Callable[[Arguments], int] = lambda call: 0  # bytes of a call's arguments that it leaves alone
    temporaries: Callable[[Temporaries], int] = lambda call: 0  # bytes that NumPy needs beside them, if not in slices

    def writes(self, output: str, form: Form | None) -> bool:
        """Whether the op writes `form` of its output in its own pass, so that nothing is put after it."""
        if form is None or output in self.held or (self.copies and not self.gathers):
            return True
        if self.gathers:
            return form.is_sharded
        if form.is_measured or form.owns_scales or (form.layout == "colsum" and not self.sums):
            return False
        is_row = form.layout == "row" and form.has_cell
        return output in self.forms or (is_row and output in self.rows)

    def read_for(self, form: Form | None) -> Form | None:
        """The form of its input that a copy makes a form of its output from."""
        if form is None or self.writes("", form):
            return form
        rows = replace(form, layout="row")
        return rows if form.turns and rows.is_sharded else None

    def flops(self, call: Arguments) -> int:
        """Floating-point operations of a call's matrix products."""
        return 2 * self.products * self.multiply_adds(call)

    def rate_dtype(self, call: Arguments) -> str:
        """The dtype whose rate bounds the products: e5m2 multiplies as fast as e4m3."""
        if not self.products:
            return "fp32"
        first = call.reads[self.inputs[0]]
        dtype = first.form.dtype if first.form else first.dtype
        return "e4m3" if dtype == "e5m2" else dtype

    def num_bytes(self, call: Arguments) -> int:
        """Bytes that a call moves at least: every operand once, with its own scales; an output added to, twice."""
        read = {(ref.space, ref.name, ref.again, ref.form, ref.view): ref for ref in call.reads.values()}
        total = sum(_moved(ref) for ref in read.values())
        for name, refs in call.writes.items():
            total += sum(_moved(ref) for ref in refs) * (2 if name in call.added else 1)
        return total - self.untouched(call)


def op(**facts: Any) -> Callable[[Function], Function]:
    """Attaches the record of an op to its reference function, and leaves the function unchanged."""

    def attached(function: Function) -> Function:
        vars(function)["record"] = OpRecord(function.__name__, *parse(function), **facts)
        return function

    return attached


def parse(function: Callable[..., None]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names of a function's outputs, inputs and numbers, in order."""
    p = inspect.Parameter
    parameters = inspect.signature(function).parameters.items()
    outputs, inputs, numbers = (
        tuple(name for name, parameter in parameters if parameter.kind == kind and name != GIVEN)
        for kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )
    return outputs, inputs, numbers


@cache
def record(op: str) -> OpRecord:
    """What is known of the op called `op`; KeyError if there is none."""
    from llmq.ops import reference  # its modules take `op` from here

    found: OpRecord = vars(reference.OPS[op])["record"]
    return found


def _moved(ref: Ref) -> int:
    """Bytes of an operand, with its scales where it has many."""
    form = ref.form
    if form is None or not form.owns_scales:
        return stored_bytes(ref)
    return stored_bytes(ref) + math.prod(scale_shape(ref.shape, form)) * DTYPES[form.scales.dtype].itemsize
