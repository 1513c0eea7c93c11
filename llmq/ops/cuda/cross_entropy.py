"""Cross-entropy and the sum of losses on the GPU; see cuda/cross_entropy.cu and cuda/loss_sum.cu."""

from typing import Any

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu

THREADS = (256, 512)  # of a block; the smaller ones, four to a multiprocessor, overlap their reads and writes better
HELD = 10  # accesses of 16 bytes that a thread holds: 40 of its 64 registers
CLUSTER = 8  # blocks of a cluster at most, which every card with clusters has
FINISHED = 32 * 8192  # leaves of the tree that one block adds up (loss_sum.cu)


def cross_entropy(
    d_logits: Output, loss: Output, hits: Output, /, logits: Tensor, targets: Tensor, *, vocab_size: int, z_loss: float
) -> None:
    """d_logits (M,Vp), loss, hits (M,) <- logits (M,Vp), targets (M,) int32; d_logits may be in logits' memory."""
    rows, columns = logits.shape
    wanted, outputs = gpu.forms(d_logits)
    assert not int(wanted["FORMS"]) & ~(gpu.VALUE | gpu.ROW | gpu.AMAX), (
        f"{d_logits.name}: written as values and fp8 rows only"
    )
    constants = {**constants_of(gpu.type_of(logits), vocab_size, columns), **wanted, "HITS": int(hits.wanted)}
    blocks = rows * int(constants["CLUSTER"])
    arguments = (*outputs, loss, hits, logits, targets, np.float32(z_loss))
    gpu.launch("cross_entropy", "cross_entropy", blocks, int(constants["THREADS"]), arguments, constants)


def constants_of(kind: str, vocab: int, columns: int) -> dict[str, int | str]:
    """The kernel for rows this wide: the smallest cluster whose registers hold a row, or one block that reads twice."""
    number = gpu.access(columns, kind)
    clusters = (1, 2, 4, CLUSTER) if gpu.capability() >= 90 else (1,)
    shapes = ((threads, cluster) for threads in THREADS for cluster in clusters)
    fits = (shape for shape in shapes if columns <= number * HELD * shape[0] * shape[1])
    threads, cluster = next(fits, (1024, 0))
    held = -(-columns // (number * threads * cluster)) if cluster else 0
    sizes = {"V": vocab, "VP": columns, "N": number, "THREADS": threads, "CLUSTER": max(1, cluster), "HELD": held}
    return {"T": kind, **sizes}


def own_loss(
    d_logits: Output, loss: Output, /, logits: Tensor, targets: Tensor, *, function: Any, vocab_size: int
) -> None:
    """d_logits (M,Vp), loss (M,) <- logits (M,Vp), targets (M,), by a Python function on CuPy's arrays and pool."""
    import cupy

    losses, gradient = function(cupy, logits.array[:, :vocab_size], targets.array)
    for written in loss.tensors:
        written.array[...] = losses
    for written in d_logits.tensors:
        written.array[:, :vocab_size] = gradient
        written.array[:, vocab_size:] = 0


@gpu.asks(lambda call: _scratch_bytes(call.reads["loss"].shape))
def loss_sum(
    loss_total: Output,
    num_tokens: Output,
    num_hits: Output,
    /,
    loss: Tensor,
    targets: Tensor,
    hits: Tensor | None,
    *,
    scratch: Any = None,
) -> None:
    """loss_total, num_tokens, num_hits (1,) <- loss (...) fp32, targets, hits (...) int32, as the reference."""
    values: Tensor | int = loss
    count, level = int(loss.array.size), 0
    size = _leaves(count)
    while size > FINISHED:
        size //= 32
        level = level + size * 32 * 4 if level else gpu.room(scratch, _scratch_bytes(loss.shape))
        gpu.launch("loss_sum", "fold", -(-size // 256), 256, (level, values, np.int64(size), np.int64(count)), {})
        values, count = level, size
    counts = (np.int32(size), np.int64(count), np.int64(targets.array.size))
    sums = (loss_total, num_tokens, num_hits)
    gpu.launch("loss_sum", "finish", 1, 1024, (*sums, values, targets, hits, *counts, *map(gpu.adds, sums)), {})


def _scratch_bytes(loss: tuple[int, ...]) -> int:
    """Bytes of scratch for this shape: what is left of the tree after each five levels."""
    size, total = _leaves(int(np.prod(loss))), 0
    while size > FINISHED:
        size //= 32
        total += size * 4
    return total


def _leaves(count: int) -> int:
    return 1 << (count - 1).bit_length()
