"""Calls of routines on arrays: results allocated, what depends on shapes alone worked out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmq.errors import UsageError
from llmq.ops import on_host
from llmq.ops.exchange import DeviceArray, Operand, empty, operand
from llmq.ops.routines import Given, Routine, Written

Allocate = Callable[[int], Any] | None
TAKEN = (Given, Operand, DeviceArray)  # inputs as they are; the first fields of the last two are the same
MOST_PLANS = 4096  # that are kept: shapes may never repeat

_plans: dict[Any, _Plan] = {}


@dataclass(frozen=True, eq=False)
class _Plan:
    """What calls of equal shapes share: their results (None: unwanted), and what runs them by how their memory lies."""

    device: int | None
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
    found = {name: x if type(x) in TAKEN else operand(x, name) for name, x in inputs.items() if x is not None}
    if out is None:
        into: Any = (None,) * len(routine.outputs)
    else:
        into = (out,) if type(out) is DeviceArray or not isinstance(out, tuple | list) else out
    places = [x if x is None or type(x) is DeviceArray else operand(x, "out") for x in into]
    facts = [x.facts if type(x) is Given else x[1:5] for x in found.values()]
    key = (routine, (*numbers.values(),), wanted, (*found,), (*facts,), *[x and x[1:5] for x in places])
    plan = _plans.get(key)
    if plan is None:
        plan = _planned(key, routine, found, numbers, places, wanted)
    device = plan.device
    read: list[Any] = []
    for x in found.values():
        read += x.places if type(x) is Given else x[:1]
    backend: Any = on_host if device is None else _on_cuda()
    with backend.on(device):
        made: list[Any] = []
        written: list[Any] = []
        for result, array, place in zip(plan.results.values(), into, places, strict=True):
            if result is None:
                made.append(None)
                continue
            if place is None:
                array = empty(result.shape, result.dtypes[0], device)
                place = operand(array, "out")
            made.append(array)
            written.append(place[0])
        layout = backend.layout(read, written)
        run = plan.bound.get(layout)
        if run is None:
            run = plan.bound[layout] = backend.bind(routine, _given(found), plan.results, numbers, layout)
        run(read, written, allocate)
    return tuple(made) if len(made) > 1 else made[0]


def _planned(
    key: Any,
    routine: Routine,
    found: Mapping[str, Any],
    numbers: Mapping[str, Any],
    places: list[Any],
    wanted: frozenset[str] | None,
) -> _Plan:
    """The plan of a new kind of call."""
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    inputs = _given(found)
    into = [x if x is None else operand(x, "out") for x in places]
    results = _results(routine, inputs, numbers, into, wanted)
    plan = _plans[key] = _Plan(next(iter(inputs.values())).data.device, results, {})
    return plan


def _given(found: Mapping[str, Any]) -> dict[str, Given]:
    """Inputs as routines have them."""
    return {name: x if type(x) is Given else given(x, name) for name, x in found.items()}


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
        found[name] = result._replace(dtypes=(place.dtype,), strides=place.strides)
    return found


def given(x: Any, name: str) -> Given:
    """An input that is values."""
    data = operand(x, name)
    return Given(data, data.shape, data.dtype)


def _shown(device: int | None) -> str:
    return "the CPU" if device is None else f"GPU {device}"


def _on_cuda() -> Any:
    """What runs routines on a GPU; CuPy is imported with it."""
    from llmq.ops import on_cuda

    return on_cuda
