"""Memory that is refused though the plan fitted: because another program took it meanwhile, or a library asks for more.

Backends raise RefusedMemoryError with what they know; here it becomes one error with the numbers of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmq.backends import Backend
from llmq.disk import shown
from llmq.engine.advice import Limits, advice, requests
from llmq.errors import MemoryLimitError, RefusedMemoryError
from llmq.hardware.host_memory import host_memory_bytes
from llmq.plan.plan import Plan

LIBRARY_BYTES = 256 << 20  # room that is advised to be left where a library does not say what it lacks


@contextmanager
def explained(plan: Plan, backend: Backend, *, is_held: bool = False) -> Iterator[None]:
    """Makes memory that is refused within a MemoryLimitError: what was planned, what is free now, what is missing, the
    nearest setting that fits, and what asks for how much. `is_held`: the plan's own memory is allocated."""
    try:
        yield
    except RefusedMemoryError as error:
        raise _explained(plan, backend, error, is_held=is_held) from error
    except MemoryError as error:
        refused = RefusedMemoryError(
            f"the host has no more memory ({error or 'an array was refused'})",
            home="device" if not backend.takes_scratch else "host",
            free_bytes=host_memory_bytes()[1],
        )
        raise _explained(plan, backend, refused, is_held=is_held) from error


def _explained(plan: Plan, backend: Backend, error: RefusedMemoryError, *, is_held: bool) -> MemoryLimitError:
    on_device = error.home == "device"
    planned = plan.total_bytes if on_device else plan.host_bytes
    wanted = error.num_bytes if error.num_bytes is not None else LIBRARY_BYTES if is_held else planned
    missing = max(wanted - error.free_bytes, 0)
    numbers = (
        f"{shown(planned)} were planned{' and are held' if is_held else ''}, {shown(error.free_bytes)} are free now"
    )
    if error.num_bytes is not None or not is_held:
        numbers += f", {shown(missing)} are missing" if missing else ", but not in one piece"
    place = "this GPU" if on_device and backend.takes_scratch else "the host"
    cause = f"another program on {place} may have taken memory since the plan was made: end it"
    left = error.free_bytes + planned - wanted if is_held else error.free_bytes
    free, host = (left, None) if on_device else (plan.total_bytes, left)
    room = Limits(free, backend.scratch_bytes, host_bytes=host, in_one=not backend.takes_scratch)
    table = "\n".join((*advice(plan, room), requests(plan, error.home)))
    return MemoryLimitError(f"{error}: {numbers}; {cause}, or change the run", table)
