"""Calls of routines on arrays: results allocated, what depends on shapes alone worked out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmq.errors import UsageError
from llmq.ops import on_host
from llmq.ops.exchange import Operand, empty, operand
from llmq.ops.routines import Given, Routine, Written

Allocate = Callable[[int], Any] | None
MOST_PLANS = 4096  # that are kept: shapes may never repeat

_plans: dict[Any, _Plan] = {}


@dataclass(frozen=True, eq=False)
class _Plan:
    """What calls of equal shapes share: their results (None: unwanted), and what runs them by how their memory lies."""

    results: dict[str, Written | None]
    bound: dict[Any, Callable[[list[Any], list[Any], Allocate], None]]


def call(
    routine: Routine,
    inputs: Mapping[str, Any],
    numbers: Mapping[str, Any],
    out: Any,
    allocate: Allocate,
    wanted: frozenset[str] | None = None,
) -> Any:
    """Runs a routine on arrays: a tuple of its results, None for those that are not `wanted`, or the only one."""
    found = {name: x if isinstance(x, Given) else given(x, name) for name, x in inputs.items() if x is not None}
    into = (None,) * len(routine.outputs) if out is None else out if isinstance(out, tuple | list) else (out,)
    places = [None if x is None else operand(x, "out") for x in into]
    facts = tuple([(name, x.shape, x.dtype, x.form, x.data[1:], x.scale and x.scale[1:]) for name, x in found.items()])
    key = (routine, tuple(numbers.values()), wanted, facts, tuple([None if x is None else x[1:] for x in places]))
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _Plan(_results(routine, found, numbers, places, wanted), {})
    device = next(iter(found.values())).data.device
    read: list[Any] = []
    written: list[Any] = []
    results: list[Any] = []
    for x in found.values():
        read.append(x.data.place)
        if x.scale is not None:
            read.append(x.scale.place)
    for result, array, place in zip(plan.results.values(), into, places, strict=True):
        if result is None:
            results.append(None)
            continue
        if place is None:
            array = empty(result.shape, result.dtypes[0], device)
            place = operand(array, "out")
        results.append(array)
        written.append(place.place)
    if device is not None:
        raise UsageError(f"{routine.name}: the functions of llmq.ops take arrays of the CPU, not of GPU {device}")
    run = plan.bound.get(None)
    if run is None:
        run = plan.bound[None] = on_host.bind(routine, found, plan.results, numbers)
    run(read, written, allocate)
    return tuple(results) if len(results) > 1 else results[0]


def _results(
    routine: Routine,
    given: Mapping[str, Given],
    numbers: Mapping[str, Any],
    places: list[Operand | None],
    wanted: frozenset[str] | None,
) -> dict[str, Written | None]:
    """What a call writes, in the dtypes of the memory that it is given; UsageError for what does not fit."""
    operands = [*((name, x.data) for name, x in given.items()), *(("out", x) for x in places if x is not None)]
    operands += [(f"the scale of {name}", x.scale) for name, x in given.items() if x.scale is not None]
    devices = {x.device: f"{name} on {_shown(x.device)}" for name, x in operands}
    if len(devices) > 1:
        raise UsageError(f"{routine.name}: {' and '.join(devices.values())}: move them to one device")
    possible = routine.results(given, numbers)
    if len(places) != len(possible):
        raise UsageError(f"{routine.name}: out has {len(places)} arrays, not {len(possible)}: {', '.join(possible)}")
    found: dict[str, Written | None] = {}
    for (name, result), place in zip(possible.items(), places, strict=True):
        found[name] = None if wanted is not None and name not in wanted else result
        if place is None or found[name] is None:
            continue
        if place.shape != result.shape or place.dtype not in result.dtypes:
            fits = f"{result.shape} in {' or '.join(result.dtypes)}"
            raise UsageError(f"{routine.name}: out for {name} is {place.shape} in {place.dtype}, not {fits}")
        routine.check_place(f"out for {name}", place)
        found[name] = result._replace(dtypes=(place.dtype,))
    return found


def given(x: Any, name: str) -> Given:
    """An input that is values."""
    data = operand(x, name)
    return Given(data, data.shape, data.dtype)


def _shown(device: int | None) -> str:
    return "the CPU" if device is None else f"GPU {device}"
