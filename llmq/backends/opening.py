"""Which backend runs a job: NumPy, the GPU, or a GPU that is not here."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from llmq.backends import Backend
from llmq.backends.host import BLAS_THREADS, HostBackend
from llmq.comm.world import ALONE, World
from llmq.hardware.cores import use_blas_threads

if TYPE_CHECKING:
    from llmq.comm.world import GpuWorld


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
    if device == "cuda":
        from llmq.backends.cuda import CudaBackend

        given = None if algorithms and BLAS_THREADS in algorithms else algorithms  # of a run that began on the CPU
        gpus = cast("GpuWorld", world)
        return CudaBackend(use_graphs=use_graphs, deterministic=deterministic, given=given, world=gpus)
    if device == "planned":
        from llmq.backends.planned import ANY_CARD, PlannedBackend

        return cast("Backend", PlannedBackend(deterministic=deterministic, capability=capability or ANY_CARD))
    assert device == "cpu", device
    threads = use_blas_threads((algorithms or {}).get(BLAS_THREADS))
    return HostBackend({BLAS_THREADS: threads} if threads else {}, world=world)
