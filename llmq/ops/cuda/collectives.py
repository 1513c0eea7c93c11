"""Copies between homes and collectives between GPUs, on the current stream; see cuda/repeat.cu and cuda/sum_pieces.cu.

The driver copies between the GPU's memory and pinned memory of the host, over which an array is NumPy's: from any other
memory the copy would wait, and a graph could not hold it. Collectives are NCCL's or those of copy engines:
`llmq.comm.nccl.NcclWorld` says which.

Shares are unequal, so a gather is a broadcast by each rank and a sum a reduction to each: in one group these are faster
than NCCL's own gather and scatter of equal shares (320 and 309 GB/s against 276 and 249, a layer of 7B in bf16 on two
H200, 2026-11-23).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from llmq.comm.world import ALONE, World
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.tensor import Form

if TYPE_CHECKING:
    from llmq.comm.nccl import NcclWorld

THREADS, RESIDENT = 256, 8  # of a block, blocks to a multiprocessor (sum_pieces.cu)


def copy_to_host(out: Output, /, x: Tensor) -> None:
    """out <- x, in the one form that both have, with the scales of a form that owns its scales."""
    for target in out.tensors:
        alike = (target.form, target.array.shape) == (x.form, x.array.shape)
        assert alike and not out.accumulate and not out.amax, f"{out.name} is no plain copy of {x.name}"
        copy_bytes(target.array, x.array)
        if x.form is not None and x.form.owns_scales:
            copy_bytes(target.scale, x.scale)


copy_to_device = copy_to_host


def copy_bytes(target: Any, source: Any) -> None:
    """target <- source, arrays of the GPU or of the host, on the current stream."""
    import cupy

    assert target.nbytes == source.nbytes and target.flags.c_contiguous and source.flags.c_contiguous
    if not source.nbytes:  # a share may have no rows
        return
    runtime = cupy.cuda.runtime
    stream = cupy.cuda.get_current_stream().ptr
    # the driver sees from the addresses which side is the host
    runtime.memcpyAsync(gpu.address(target), gpu.address(source), source.nbytes, runtime.memcpyDefault, stream)


def repeat(out: Output, /, block: Tensor, *, first: int) -> None:
    """out (any shape) <- block (n,): its flat element i is element (first + i) mod n of the block."""
    count = math.prod(out.shape)
    number = gpu.access(count, gpu.type_of(out))
    arguments = (out, block, np.int64(first % block.shape[0]), np.int64(block.shape[0]))
    constants: Constants = {"X": gpu.type_of(block), "T": gpu.type_of(out), "N": number}
    blocks = -(-count // (THREADS * number))
    gpu.launch("repeat", "repeat", blocks, THREADS, (*arguments, np.int64(count)), constants)


def all_gather(out: Output, /, x: Tensor | None, *, bounds: tuple[int, ...], world: World = ALONE) -> None:
    """out (...,K) <- x (n,K) or None: each rank's rows of out, in the form of both, with its scales."""
    for target in out.tensors:
        assert x is None or x.form == target.form, f"{out.name} in {target.form} is gathered from its own form"
        gpus = cast("NcclWorld", world)
        with gpus.group():
            for rank, rows in _shares(target, bounds):
                for to, source in _storages(rows, x if rank == world.rank else rows):
                    if world.size > 1:
                        gpus.broadcast(gpu.address(source), gpu.address(to), to.nbytes, rank)
                    elif gpu.address(source) != gpu.address(to):
                        copy_bytes(to, source)


def reduce_scatter(out: Output, /, x: Tensor, *, bounds: tuple[int, ...], world: World = ALONE) -> None:
    """out (n,K), these rows of x <- x (...,K): the sum over ranks of this rank's rows."""
    assert not out.accumulate, f"{out.name}: a sum over ranks takes the place of this rank's own"
    gpus = cast("NcclWorld", world)
    with gpus.group():
        for rank, rows in _shares(x, bounds):
            at = gpu.address(rows.array)
            if world.size > 1:
                assert rank != world.rank or at == gpu.plain(out), (
                    f"{out.name} is not the memory of its rows of {x.name}"
                )
                gpus.reduce(at, math.prod(rows.shape), x.array.dtype, rank)
            elif at != gpu.plain(out):
                copy_bytes(out.tensors[0].array, rows.array)


def all_to_all(pieces: Output, /, x: Tensor, *, bounds: tuple[int, ...], world: World = ALONE) -> None:
    """pieces (R-1,m,K) <- x (...,K): this rank's n rows of every other rank's x, in the form of both."""
    for target in pieces.tensors:
        mine, place = bounds[world.rank + 1] - bounds[world.rank], 0
        shares = dict(_shares(x, bounds))
        gpus = cast("NcclWorld", world)
        with gpus.group():
            for rank in range(world.size):
                if rank == world.rank:
                    continue
                if rank in shares:
                    for sent, _ in _storages(shares[rank], shares[rank]):
                        gpus.send(gpu.address(sent), sent.nbytes, rank)
                if mine:
                    piece = target.chunk(place * target.shape[1], mine)
                    for received, _ in _storages(piece, piece):
                        gpus.receive(gpu.address(received), received.nbytes, rank)
                place += 1


def sum_pieces(out: Output, /, own: Tensor, pieces: Tensor | None, *, rank: int) -> None:
    """out (n,K) <- own (n,K), pieces (R-1,m,K) or None: f32 sum of n rows of each, own in place `rank`."""
    count, others = math.prod(own.shape), 0 if pieces is None else pieces.shape[0]
    types, columns = {"O": gpu.type_of(out), "X": gpu.type_of(own)}, own.shape[-1]
    form = None if pieces is None else pieces.form
    if form is None:
        types["P"] = gpu.type_of(own if pieces is None else pieces)
        number = gpu.access(count, *types.values())
    else:
        assert form == Form("e4m3", "row", "tilewise"), f"{out.name}: no kernel adds {form}"
        number = gpu.access(columns, *types.values())  # an access has one scale
        types["P"] = "e4m3"
    constants: Constants = {**types, "N": number, "C": columns}
    apart = 0 if pieces is None else math.prod(pieces.shape[1:])
    numbers = (np.int64(count), np.int64(apart), np.int32(others), np.int32(rank), gpu.adds(out))
    arguments = (out, own, pieces, gpu.scale_of(pieces), *numbers)
    blocks = min(gpu.multiprocessors() * RESIDENT, -(-count // (THREADS * number)))
    gpu.launch("sum_pieces", "sum_pieces", blocks, THREADS, arguments, constants)


def all_reduce(out: Output, /, x: Tensor, *, largest: bool = False, world: World = ALONE) -> None:
    """out (n,) <- x (n,): the sum over ranks, or the `largest`, number by number; for a few numbers."""
    (target,) = out.tensors
    assert not out.accumulate, f"{out.name}: a sum over ranks is not added to"
    if world.size > 1:
        cast("NcclWorld", world).all_reduce(
            gpu.pointer(x), gpu.plain(out), math.prod(x.shape), x.array.dtype, largest=largest
        )
    else:
        copy_bytes(target.array, x.array)


def _shares(whole: Tensor, bounds: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    """Each rank that has rows of a tensor, and these."""
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            yield rank, whole.chunk(start, stop - start)


def _storages(to: Tensor, source: Tensor | None) -> list[tuple[Any, Any]]:
    """Pairs of arrays that are moved: the bytes, and the scales that a copy owns."""
    assert source is not None, f"{to.name}: no rows to send"
    owns = to.form is not None and to.form.owns_scales
    return [(to.array, source.array), *([(to.scale, source.scale)] if owns else [])]
