"""Token embedding on the GPU; see cuda/embedding.cu."""

from typing import Any

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.seam import Arguments

THREADS, RANKERS = 128, 8  # embedding.cu
PIECE, WARPS, STAGES = 64, 4, 8  # positions that a warp adds, warps of a block, rows that a warp has under way
BUCKET_BITS = 7  # of the blocks that group positions: as many as large cards have multiprocessors, or more
BIN_BITS = 11  # of the tokens that such a block owns, at most
HELD = 8192  # positions that such a block lists in shared memory
MOST_TOKENS = RANKERS << 32 - BIN_BITS  # of a micro-batch: a position's rank in its warp's share is beside its bin


def embedding_forward(res: Output, /, tokens: Tensor, weight: Tensor) -> None:
    """res (B,T,C) <- tokens (B,T) int32, weight (Vp,C)."""
    kind, columns, count = gpu.type_of(weight, res), weight.shape[-1], gpu.rows_of(res.shape)
    constants = _constants(kind, kind, columns, weight.shape[0], 0)
    blocks = -(-count * (columns // int(constants["N"])) // (4 * THREADS))
    arguments = (res, tokens, weight, np.int64(count))
    gpu.launch("embedding", "embedding_forward", blocks, THREADS, arguments, constants)


def _refuse_tokens(call: Arguments, capability: int) -> None:
    gpu.at_most(MOST_TOKENS, gpu.rows_of(call.reads["d_res"].shape), "tokens", "the embedding's gradient")


@gpu.asks(lambda call: sum(_scratch_sizes(call.reads["d_res"].shape)), _refuse_tokens)
def embedding_backward(d_weight: Output, /, d_res: Tensor, tokens: Tensor, *, scratch: Any = None) -> None:
    """d_weight (Vp,C) <- d_res (B,T,C), tokens (B,T) int32, in the order of positions; absent tokens get zero."""
    target, ids, (vocab, columns) = d_weight, tokens, d_weight.shape
    count = gpu.rows_of(d_res.shape)
    constants = _constants(gpu.type_of(d_res), gpu.type_of(d_weight), columns, vocab, count)
    if not d_weight.accumulate:
        gpu.zero(gpu.plain(d_weight), d_weight.tensors[0].array.nbytes)
    sizes = _scratch_sizes(d_res.shape)
    rows, borders, arrived, listed, edges = np.cumsum([gpu.room(scratch, sum(sizes)), *sizes[:-1]]).tolist()
    chunks, pieces = -(-columns // (32 * int(constants["N"]))), -(-count // PIECE)
    arguments: tuple[Any, ...] = (rows, borders, arrived, listed, ids, np.int32(count), np.int32(pieces * chunks))
    buckets, shared = (int(constants[name]) for name in ("BUCKET_BITS", "GROUPING_BYTES"))
    gpu.launch("embedding", "embedding_group", 1 << buckets, 1024, arguments, constants, shared_bytes=shared)
    entry = "embedding_add" if d_weight.accumulate else "embedding_write"
    arguments = (target, edges, arrived, d_res, rows, borders, np.int32(count))
    gpu.launch("embedding", entry, -(-pieces * chunks // WARPS), 32 * WARPS, arguments, constants)


def _scratch_sizes(d_res: tuple[int, ...]) -> list[int]:
    """Bytes of: the list and its borders, how many have come to each, long lists of blocks, edges of pieces."""
    count, columns = gpu.rows_of(d_res), d_res[-1]
    pieces = -(-count // PIECE)
    sizes = (count * 8, pieces * 32, pieces * -(-columns // 32) * 4, count * 8, pieces * 2 * columns * 4)
    return [-(-size // 256) * 256 for size in sizes]


def _constants(kind: str, gradient: str, columns: int, vocab: int, count: int) -> dict[str, int | str]:
    """The kernels for these sizes; the gradients of `count` tokens are to be added."""
    bits, words = max(11, (vocab - 1).bit_length()), -(-count // 2**15) * 1024
    bucket_bits, votes = max(BUCKET_BITS, bits - BIN_BITS), words if words <= 2048 else 0
    held, bins = HELD if gpu.shared_bytes_limit() >= 160 * 1024 else 2048, 1 << bits - bucket_bits
    grouping = RANKERS * bins + bins + 4 + 96 + max(1, votes) + 2 * held  # words of the struct in embedding.cu
    sizes = {"C": columns, "N": gpu.access(columns, kind, gradient), "PIECE": PIECE, "WARPS": WARPS, "STAGES": STAGES}
    sizes |= {"BITS": bits, "BUCKET_BITS": bucket_bits, "HELD": held, "VOTES": votes}
    return {"T": kind, "G": gradient, **sizes, "GROUPING_BYTES": 4 * grouping, "MOST_TOKENS": MOST_TOKENS}
