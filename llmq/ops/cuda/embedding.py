"""Token embedding on the GPU; see cuda/embedding.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.ops.cuda.launch import (
    GRID_SIDE,
    access,
    capability,
    launch,
    plain,
    pointer,
    rows_of,
    shared_bytes_limit,
    type_of,
)
from llmq.ops.cuda.scratch import take
from llmq.tensor import Output, Tensor

THREADS, PIECE, SORT_TILE, SORT_THREADS = 128, 64, 1024, 256  # embedding.cu
CLUSTER = 8  # blocks that sort together
CLUSTER_KEYS = CLUSTER * 1024  # one to a thread


def embedding_forward(res: Output, /, tokens: Tensor, weight: Tensor) -> None:
    """res (B,T,C) <- tokens (B,T) int32, weight (Vp,C)."""
    if not res.wanted:
        return
    kind, columns, count = type_of(weight), weight.shape[-1], rows_of(res.shape)
    assert type_of(res) == kind, "the embedding is copied"
    constants = _constants(kind, kind, columns, weight.shape[0], 0)
    blocks = -(-count * (columns // int(constants["N"])) // (4 * THREADS))
    arguments = (plain(res), pointer(tokens), pointer(weight), np.int64(count))
    launch("embedding", "embedding_forward", blocks, THREADS, arguments, constants)


def embedding_backward(d_weight: Output, /, d_res: Tensor, tokens: Tensor) -> None:
    """d_weight (Vp,C) <- d_res (B,T,C), tokens (B,T) int32, in the order of positions; absent tokens get zero."""
    if not d_weight.wanted:
        return
    target, ids, (vocab, columns) = plain(d_weight), pointer(tokens), d_weight.shape
    count = rows_of(d_res.shape)
    refuse_tokens(count)
    constants = _constants(type_of(d_res), type_of(d_weight), columns, vocab, count)
    if not d_weight.accumulate:
        array: Any = d_weight.tensors[0].array
        array.data.memset_async(0, array.nbytes)
    sizes = _scratch_sizes(d_res.shape, vocab)
    first, order, keys, counts, arrived, edges = np.cumsum([take(sum(sizes)), *sizes[:-1]]).tolist()
    grid = (-(-columns // (THREADS * int(constants["N"]))), -(-count // PIECE))
    cells = np.int32(math.prod(grid))
    arguments: tuple[Any, ...] = (order, keys, arrived, ids, np.int32(count), cells)
    if constants["KEYS"]:
        shared = _sorting_bytes(vocab, int(constants["KEYS"]))
        launch("embedding", "sort_cluster", CLUSTER, 1024, arguments, constants, shared_bytes=shared)
    else:
        bits, num_tiles = int(constants["BITS"]), -(-count // SORT_TILE)
        for before, after, shift in ((0, first, 0), (first, order, bits)):
            sizes_32, last = (np.int32(shift), np.int32(count)), keys if shift else 0
            launch("embedding", "sort_count", num_tiles, SORT_THREADS, (counts, ids, before, *sizes_32), constants)
            launch("embedding", "sort_scan", 1, 1024, (counts, np.int32(num_tiles << bits)), constants)
            arguments = (after, last, arrived, counts, ids, before, *sizes_32, cells)
            launch("embedding", "sort_place", num_tiles, SORT_THREADS, arguments, constants)
    entry = "embedding_add" if d_weight.accumulate else "embedding_write"
    arguments = (target, edges, arrived, pointer(d_res), order, keys, np.int32(count))
    launch("embedding", entry, grid, THREADS, arguments, constants)


def embedding_backward_scratch(d_weight: tuple[int, ...], d_res: tuple[int, ...]) -> int:
    """Bytes of scratch for these shapes."""
    return sum(_scratch_sizes(d_res, d_weight[0]))


def refuse_tokens(count: int) -> None:
    """UsageError for more tokens than one launch adds."""
    if count > GRID_SIDE * PIECE:
        raise UsageError(
            f"a micro-batch of {count} tokens is more than the {GRID_SIDE * PIECE} for which the GPU adds the "
            "embedding's gradient at once: use a smaller --batch-size with more --grad-accumulation"
        )


def _scratch_sizes(d_res: tuple[int, ...], vocab: int) -> list[int]:
    """Bytes of: positions by the low digit, by both; their tokens; counts of the sort, of pieces; edges of pieces."""
    count, columns = rows_of(d_res), d_res[-1]
    counts, pieces = (-(-count // SORT_TILE) << _bits(vocab)) * 4, -(-count // PIECE)
    sizes = (count * 4, count * 4, count * 4, counts, pieces * -(-columns // THREADS) * 4, pieces * 2 * columns * 4)
    return [-(-size // 256) * 256 for size in sizes]


def _bits(vocab: int) -> int:
    """Bits of a digit, two of which hold every token."""
    return max(4, -(-(vocab - 1).bit_length() // 2))


def _sorting_bytes(vocab: int, keys: int) -> int:
    """Of shared memory: struct Sorting of embedding.cu."""
    return keys * 1024 * 8 + (CLUSTER * 4 + 4 + 64 << _bits(vocab)) + 128


def _constants(kind: str, gradient: str, columns: int, vocab: int, count: int) -> dict[str, int | str]:
    """The kernels for these sizes; `count` tokens are to be sorted."""
    number, keys = access(columns, kind, gradient), -(-count // CLUSTER_KEYS)
    clustered = capability() >= 90 and _sorting_bytes(vocab, keys) <= shared_bytes_limit()
    sizes = {"C": columns, "N": number, "BITS": _bits(vocab), "PIECE": PIECE}
    sizes |= {"KEYS": keys if clustered else 0, "CLUSTER": CLUSTER if clustered else 1}
    return {"T": kind, "G": gradient, **sizes}
