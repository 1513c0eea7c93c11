"""What generation computes on the GPU.

See cached_attention.cu, cache_write.cu, token_linear.cu, penalize.cu and sample.cu in cuda/.
"""

import math
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.activation import number_of
from llmq.ops.cuda.compile import Constants
from llmq.ops.cuda.norms import offset_of
from llmq.ops.seam import Arguments

ATTENTION_THREADS, MOST_SHARED = 256, 98 * 1024  # cached_attention.cu
MOST_HEAD_BYTES = 1024
WARPS, MOST_TOKENS = 8, 4  # token_linear.cu
MOST_ACCESSES = 8  # of 16 bytes that a lane has under way
ENOUGH_WARPS = 32768  # to keep the memory of an H200 busy
RESIDENT = 4  # blocks to a multiprocessor
SAMPLE_THREADS, CLUSTER = 1024, 8  # sample.cu


def cache_write(
    cache: Output, /, rot: Tensor, positions: Tensor, sequences: Tensor, *, num_heads: int, num_kv_heads: int
) -> None:
    """cache (B,S,2*Hkv*Hd) <- rot (R,T,(Hq+2Hkv)*Hd), positions, sequences (R,T) int32; the rest of cache stays."""
    kind, width, kept = gpu.type_of(rot, cache), rot.shape[-1], cache.shape[-1]
    constants: Constants = {"T": kind, "WIDTH": width, "KEPT": kept, "N": gpu.access(math.gcd(width, kept), kind)}
    arguments = (cache, rot, positions, sequences, np.int64(cache.shape[1]))
    gpu.launch("cache_write", "cache_write", gpu.rows_of(rot.shape), 128, arguments, constants)


def _cache_facts(call: Arguments) -> tuple[str, int, int, int, int]:
    """Type, head_dim, query heads per key head, sequences and length of a call's cache."""
    cache, kv_heads = call.reads["cache"], call.numbers["num_kv_heads"]
    batch, length, kept = cache.shape
    kind = gpu.kind_of(cache.dtype, cache.name)
    return kind, kept // (2 * kv_heads), call.numbers["num_heads"] // kv_heads, batch, length


def _refuse_heads(call: Arguments, capability: int) -> None:
    """UsageError for what the kernels do not take."""
    kind, head_dim, group, batch, _ = _cache_facts(call)
    if head_dim * gpu.size_of(kind) > MOST_HEAD_BYTES or _shared_bytes(kind, head_dim, group) > MOST_SHARED:
        raise UsageError(
            f"generation on the GPU has no room in shared memory for {group} query heads of {head_dim} per key head: "
            "use --device cpu"
        )
    gpu.at_most(gpu.GRID_SIDE, batch, "sequences", "generation", "a smaller --batch-size")
    gpu.cap_bits(call.numbers.get("softcap"))


def _parts_bytes(call: Arguments) -> int:
    kind, head_dim, _, batch, length = _cache_facts(call)
    return 4 * batch * int(call.numbers["num_heads"]) * _pieces(kind, head_dim, length) * (head_dim + 2)


@gpu.asks(_parts_bytes, _refuse_heads)
def attention_cached(
    *operands: Any,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    softmax_scale: float,
    softcap: float | None = None,
    scratch: Any = None,
) -> None:
    """att (B,1,Hq*Hd), new_cache (B,S,2*Hkv*Hd) <- qkv (B,1,(Hq+2Hkv)*Hd), cache like new_cache, table (S,Hd) fp32,
    positions (B,1) int32. Of a cache that is not in the memory of the new one, all is copied."""
    att, new_cache, qkv, cache, table, positions = operands
    kind, (batch, length, kept) = gpu.type_of(qkv, att, new_cache), cache.shape
    head_dim, group = kept // (2 * num_kv_heads), num_heads // num_kv_heads
    assert gpu.type_of(table) == "float"
    assert att.wanted and new_cache.wanted, f"{att.name}: a token's attention is made together with its cache"
    copied = gpu.plain(new_cache) != gpu.pointer(cache)
    if copied:
        new_cache.tensors[0].array[...] = cache.array
    sizes: Constants = {"HD": head_dim, "GROUP": group, "KV_HEADS": num_kv_heads, "KEYS": _keys(kind, head_dim)}
    constants: Constants = {"T": kind, **sizes, "N": gpu.access(head_dim, kind), "PLACES": batch * num_kv_heads}
    constants = {**constants, "CAP": gpu.cap_bits(softcap)}
    pieces = _pieces(kind, head_dim, length)
    parts = gpu.room(scratch, 4 * batch * num_heads * pieces * (head_dim + 2))
    numbers = (np.int32(length), np.int32(min(window or length, length)), np.float32(softmax_scale))
    arguments = (att, new_cache, parts, qkv, table, positions, *numbers)
    where = ("cached_attention", "attend", (pieces, num_kv_heads, batch), ATTENTION_THREADS)
    # What it reads early are the positions, which a step leaves for the next one, and what earlier steps cached.
    shared = _shared_bytes(kind, head_dim, group)
    gpu.launch(*where, arguments, constants, shared_bytes=shared, early=not copied)


def _keys(kind: str, head_dim: int) -> int:
    """Positions of a piece: as many as two tiles of them have room in shared memory."""
    return 64 if head_dim * gpu.size_of(kind) <= MOST_HEAD_BYTES // 2 else 32


def _pieces(kind: str, head_dim: int, length: int) -> int:
    return -(-length // _keys(kind, head_dim))


def _shared_bytes(kind: str, head_dim: int, group: int) -> int:
    keys = _keys(kind, head_dim)
    tiles = 2 * keys * (head_dim + gpu.access(head_dim, kind)) * gpu.size_of(kind)
    return tiles + 4 * group * (head_dim + keys + 2) + 4


def _refuse(call: Arguments, capability: int) -> None:
    """UsageError for rows that cannot be read, and for an offset of the norm's weight that no kernel has."""
    gpu.access_to(call.reads["x"])
    offset_of(call)


@gpu.asks(refuse=_refuse)
def token_linear(
    y: Output, /, *read: Any, eps: float, gated: bool, activation: str = "silu", offset: float = 0.0
) -> None:
    """y (B,1,N) <- x (B,1,K), norm (K,) or None, weight (N,K) or (2N,K), bias (N,) or (2N,) or None, residual (B,1,N)
    or None. What no kernel of a program writes, as the weight, is read before the kernels before it are done."""
    x, norm, weight, bias, residual = read
    kind, tokens, columns, rows = gpu.type_of(x, y, weight), gpu.rows_of(x.shape), x.shape[-1], y.shape[-1]
    assert tokens <= MOST_TOKENS, f"{y.name}: {tokens} tokens"
    number = gpu.access(columns, kind)
    split = _split(rows, -(-columns // (32 * number)), int(gated))
    shape: Constants = {"T": kind, "K": columns, "M": tokens, "N": number, "SPLIT": split}
    parts = {"NORM": norm, "BIAS": bias, "RESIDUAL": residual}
    about: Constants = {"GATED": int(gated), "ACTIVATION": number_of(activation), "OFFSET": int(offset)}
    constants: Constants = {**shape, **about, **{name: int(one is not None) for name, one in parts.items()}}
    arguments = (y, weight, x, norm, bias, residual, np.float32(eps), np.int32(rows))
    shared = tokens * columns * gpu.size_of(kind) if norm is not None else 0
    blocks = _blocks(-(-rows * split // WARPS), RESIDENT * gpu.multiprocessors())
    where = ("token_linear", "token_linear", blocks, 32 * WARPS)
    gpu.launch(*where, arguments, constants, shared_bytes=shared, early=True)


def _blocks(needed: int, resident: int) -> int:
    """Blocks to launch: where a few would be left for a second round, the others take their rows."""
    return resident if resident < needed < 2 * resident else needed


def _split(rows: int, accesses: int, gated: int) -> int:
    """Warps to a row: as few as have all of it under way, or as keep the memory busy. `accesses`: those of a warp."""
    most = MOST_ACCESSES // (1 + gated)
    return next((n for n in (1, 2, 4) if accesses <= most * n or rows * n >= ENOUGH_WARPS), WARPS)


def penalize(out: Output, new_seen: Output, /, logits: Tensor, seen: Tensor, tokens: Tensor, *, penalty: float) -> None:
    """out (B,1,Vp) fp32, new_seen (B,Vp) int32 <- logits (B,1,Vp), seen (B,Vp) int32, tokens (B,1) int32."""
    batch, columns = seen.shape
    assert not out.wanted or gpu.type_of(out) == "float"
    arguments = (out, new_seen, logits, seen, tokens, np.float32(penalty))
    constants: Constants = {"T": gpu.type_of(logits), "VP": columns}
    gpu.launch("penalize", "penalize", (-(-columns // 256), batch), 256, arguments, constants)


def sample(
    *operands: Any, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """next_tokens, next_positions (B,1) int32 <- logits (B,1,Vp), positions (B,1) int32, samples (B,) int32."""
    logits = operands[2]
    kind, (batch, _, columns) = gpu.type_of(logits), logits.shape
    number = gpu.access(columns, kind)
    assert number % 4 == 0, f"{logits.name}: rows of {columns} are not read by fours"
    cuts = {"GREEDY": int(temperature == 0), "TOP_K": int(0 < top_k < vocab_size), "TOP_P": int(top_p < 1)}
    cluster = CLUSTER if gpu.capability() >= 90 and columns > number * SAMPLE_THREADS else 1
    constants: Constants = {"T": kind, "V": vocab_size, "VP": columns, "N": number, "CLUSTER": cluster, **cuts}
    inverse = np.float32(1 / temperature if temperature else 1)
    numbers = (np.float32(top_k), np.float32(top_p), np.float32(math.log(min_p) if min_p else -math.inf))
    arguments = (*operands, *gpu.random_key(seed, 0), inverse, *numbers)
    gpu.launch("sample", "sample", batch * cluster, SAMPLE_THREADS, arguments, constants, early=True)
