"""Token embedding on the GPU; see cuda/embedding.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmq.ops.cuda.launch import access, adds, launch, plain, pointer, rows_of, type_of
from llmq.ops.cuda.scratch import take
from llmq.tensor import Output, Tensor

THREADS, PIECE, SORT_TILE, SORT_THREADS = 128, 64, 1024, 256  # embedding.cu


def embedding_forward(res: Output, /, tokens: Tensor, weight: Tensor) -> None:
    """res (B,T,C) <- tokens (B,T) int32, weight (Vp,C)."""
    if not res.wanted:
        return
    kind, columns, count = type_of(weight), weight.shape[-1], rows_of(res.shape)
    assert type_of(res) == kind, "the embedding is copied"
    constants = _constants(kind, kind, columns, weight.shape[0])
    blocks = -(-count * (columns // int(constants["N"])) // (4 * THREADS))
    arguments = (plain(res), pointer(tokens), pointer(weight), np.int64(count))
    launch("embedding", "embedding_forward", blocks, THREADS, arguments, constants)


def embedding_backward(d_weight: Output, /, d_res: Tensor, tokens: Tensor) -> None:
    """d_weight (Vp,C) <- d_res (B,T,C), tokens (B,T) int32, in the order of positions; absent tokens get zero."""
    if not d_weight.wanted:
        return
    target, ids, (vocab, columns) = plain(d_weight), pointer(tokens), d_weight.shape
    count = rows_of(d_res.shape)
    constants = _constants(type_of(d_res), type_of(d_weight), columns, vocab)
    if not d_weight.accumulate:
        array: Any = d_weight.tensors[0].array
        array.data.memset_async(0, array.nbytes)
    sizes = _scratch_sizes(d_res.shape, vocab)
    first, second, counts, edges = np.cumsum([take(sum(sizes)), *sizes[:-1]]).tolist()
    bits, num_tiles = int(constants["BITS"]), -(-count // SORT_TILE)
    bins = num_tiles << bits
    for order, placed, shift in ((0, first, 0), (first, second, bits)):
        sizes_32 = (np.int32(shift), np.int32(count))
        launch("embedding", "sort_count", num_tiles, SORT_THREADS, (counts, ids, order, *sizes_32), constants)
        launch("embedding", "sort_scan", 1, 1024, (counts, np.int32(bins)), constants)
        launch("embedding", "sort_place", num_tiles, SORT_THREADS, (placed, counts, ids, order, *sizes_32), constants)
    grid = (-(-columns // (THREADS * int(constants["N"]))), -(-count // PIECE))
    entry = "embedding_add" if d_weight.accumulate else "embedding_write"
    launch("embedding", entry, grid, THREADS, (target, edges, pointer(d_res), ids, second, np.int32(count)), constants)
    last = (target, edges, ids, second, np.int32(count), adds(d_weight))
    launch("embedding", "embedding_join", grid, THREADS, last, constants)


def embedding_backward_scratch(d_weight: tuple[int, ...], d_res: tuple[int, ...]) -> int:
    """Bytes of scratch for these shapes."""
    return sum(_scratch_sizes(d_res, d_weight[0]))


def _scratch_sizes(d_res: tuple[int, ...], vocab: int) -> list[int]:
    """Bytes of: positions sorted by the low digit, by both; counts of the sort; edges of pieces."""
    count = rows_of(d_res)
    counts = (-(-count // SORT_TILE) << _bits(vocab)) * 4
    return [-(-size // 256) * 256 for size in (count * 4, count * 4, counts, -(-count // PIECE) * 2 * d_res[-1] * 4)]


def _bits(vocab: int) -> int:
    """Bits of a digit, two of which hold every token."""
    return max(4, -(-(vocab - 1).bit_length() // 2))


def _constants(kind: str, gradient: str, columns: int, vocab: int) -> dict[str, int | str]:
    number = access(columns, kind, gradient)
    return {"T": kind, "G": gradient, "C": columns, "N": number, "BITS": _bits(vocab), "PIECE": PIECE}
