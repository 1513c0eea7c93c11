"""Which is faster between these GPUs, NCCL or copy engines: both are timed once, when a run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llmq.comm.peer_copies import Copying

if TYPE_CHECKING:
    from llmq.comm.nccl import NcclWorld

Work = Callable[["NcclWorld", int, int, dict[str, Any]], None]
TIMED_BYTES = 128 << 20  # that all ranks have together, as the weights of a layer
PIECES = 4  # of each rank, as the matrices of a layer
TIMES = 5


def fastest(world: NcclWorld, copying: Copying) -> Copying:
    """What copy engines move, where that is left to timing. All ranks ask."""
    works = {"gathers": _gather, "exchanges": _exchange}
    left = {name: work for name, work in works.items() if getattr(copying, name) is None}
    times = timed(world, left)
    return replace(copying, **{name: times[name, True] < times[name, False] for name in left})


def timed(world: NcclWorld, works: Mapping[str, Work]) -> dict[tuple[str, bool], float]:
    """Seconds of each work by copies (True) and by NCCL, on the slowest rank."""
    import cupy
    from cupy.cuda import runtime

    size = TIMED_BYTES // (world.size * PIECES) // 256 * 256
    memory = int(runtime.malloc(2 * TIMED_BYTES))
    found = {}
    try:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for name, work in works.items():
                for by_copies in (False, True):
                    world.copies = Copying(by_copies, by_copies)
                    seconds = _seconds(stream, partial(work, world, memory, size))
                    found[name, by_copies] = max(world.gather(seconds))  # by then none has the memory open
    finally:
        runtime.free(memory)
    return found


def _gather(world: NcclWorld, memory: int, size: int, known: dict[str, Any]) -> None:
    """Every rank's pieces to all."""
    with world.group(known):
        for piece in range(PIECES):
            for root in range(world.size):
                at = memory + (piece * world.size + root) * size
                world.broadcast(at, at, size, root)


def _exchange(world: NcclWorld, memory: int, size: int, known: dict[str, Any]) -> None:
    """Other pieces of every rank to each."""
    with world.group(known):
        for piece in range(PIECES):
            for other in range(world.size):
                if other != world.rank:
                    at = memory + (piece * world.size + other) * size
                    world.send(at, size, other)
                    world.receive(at + TIMED_BYTES, size, other)


def _seconds(stream: Any, work: Callable[[dict[str, Any]], None]) -> float:
    """Of one call, the mean of a few in a graph."""
    from cupy.cuda import Event, get_elapsed_time

    known: dict[str, Any] = {}
    work(known)
    stream.begin_capture()
    for _ in range(TIMES):
        work(known)
    graph = stream.end_capture()
    start, end = Event(), Event()
    graph.launch(stream)
    start.record(stream)
    graph.launch(stream)
    end.record(stream)
    end.synchronize()
    return 1e-3 * get_elapsed_time(start, end) / TIMES
