"""Backends by name: the CPU's, CUDA's, that of a GPU which is only planned for, and those of plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from llmq.backends import Backend
from llmq.comm.world import ALONE, World
from llmq.hardware.cores import use_blas_threads
from llmq.plugins import Table, table

if TYPE_CHECKING:
    from llmq.comm.nccl import NcclWorld


def open_backend(
    device: str,
    *,
    world: World = ALONE,
    use_graphs: bool = True,
    deterministic: bool = True,
    algorithms: Mapping[str, Any] | None = None,
    capability: tuple[int, int] | None = None,
) -> Backend:
    """The backend of a device: `cpu`, `cuda` on the current GPU, or `planned` for a GPU that is not here; of one of the
    ranks of `world`, or of a run that has no others.

    The CPU is always deterministic. `algorithms` are those of an earlier run, whose bits are then repeated.
    `capability` is that of a GPU that is planned for: (9, 0).
    """
    return cast("Backend", BACKENDS.call(device, Settings(world, use_graphs, deterministic, algorithms, capability)))


def begin_opening(device: str, gpu: int) -> None:
    """Begins, in a thread, what the backend of a device waits for when it is opened: imports, and CUDA's context on the
    GPU of a number. What fails there fails again when it is opened, which says so."""

    def begin() -> None:
        with suppress(Exception):
            cuda = import_module("llmq.backends.cuda")
            cuda.cupy.cuda.Device(gpu).use()
            cuda.runtime.free(0)  # which makes the context

    if device == "cuda":
        Thread(target=begin, name="llmq-cuda").start()


class Settings(NamedTuple):
    """What `open_backend` was asked for."""

    world: World
    use_graphs: bool
    deterministic: bool
    algorithms: Mapping[str, Any] | None
    capability: tuple[int, int] | None


# Backends take their protocols from here, and are imported when they are opened.
def _host(asked: Settings) -> Backend:
    from llmq.backends.host import BLAS_THREADS, HostBackend

    threads = use_blas_threads((asked.algorithms or {}).get(BLAS_THREADS))
    return HostBackend({BLAS_THREADS: threads} if threads else {}, world=asked.world)


def _cuda(asked: Settings) -> Backend:
    from llmq.backends.cuda import CudaBackend
    from llmq.backends.host import BLAS_THREADS

    # None of a run that began on the CPU.
    given = None if asked.algorithms and BLAS_THREADS in asked.algorithms else asked.algorithms
    gpus = cast("NcclWorld", asked.world)
    return CudaBackend(use_graphs=asked.use_graphs, deterministic=asked.deterministic, given=given, world=gpus)


def _planned(asked: Settings) -> Backend:
    from llmq.backends.planned import ANY_CARD, PlannedBackend

    made = PlannedBackend(deterministic=asked.deterministic, capability=asked.capability or ANY_CARD)
    return cast("Backend", made)


BACKENDS: Table[Callable[..., Backend]] = table(
    "backend", {"cpu": _host, "cuda": _cuda, "planned": _planned}, gives=("memory", "program")
)
