"""Copies between the homes of a tensor, bit for bit, and collectives: what ranks make of all their tensors.

Each direction of a copy has a lane of its own: a link moves both at once. A bench fills its weights with one block of
numbers, over and over.

Of collectives each rank calls the same in the same order. Rows of a tensor, seen as (rows, last axis), are shared out
by `bounds` (R + 1 numbers): those from bounds[r] up to bounds[r + 1] are rank r's; it may have none. The backend gives
`world`; alone, an op makes of one rank's tensors what it says of all.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmq.comm.world import ALONE, World
from llmq.operands import Output, Tensor
from llmq.ops.seam import op


@op(family="copies", lane="to_host", copies=True)
def copy_to_host(out: Output, /, x: Tensor) -> None:
    """out <- x, in the one form that both have, with the scales of a form that owns its scales."""
    _copy(out, x)


@op(family="copies", lane="to_device", copies=True)
def copy_to_device(out: Output, /, x: Tensor) -> None:
    """out <- x, in the one form that both have, with the scales of a form that owns its scales."""
    _copy(out, x)


def _copy(out: Output, x: Tensor) -> None:
    for target in out.tensors:
        alike = (target.form, target.array.shape, target.array.dtype) == (x.form, x.array.shape, x.array.dtype)
        assert alike and not out.accumulate and not out.amax, f"{out.name} is no plain copy of {x.name}"
        target.array[...] = x.array
        if x.form is not None and x.form.owns_scales:
            assert target.scale is not None and x.scale is not None
            target.scale[...] = x.scale


@op(family="copies")
def repeat(out: Output, /, block: Tensor, *, first: int) -> None:
    """out (any shape) <- block (n,): its flat element i is element (first + i) mod n of the block."""
    values, start = block.read(), first % block.shape[0]
    out.write(np.resize(np.roll(values, -start) if start else values, out.shape))


@op(family="collectives", lane="comm", gathers=True, copies=True, is_collective=True)
def all_gather(out: Output, /, x: Tensor | None, *, bounds: tuple[int, ...], world: World = ALONE) -> None:
    """out (...,K) <- x (n,K) or None: each rank's rows of out, in the form of both, with its scales.

    x may be these rows of out itself.
    """
    for target in out.tensors:
        assert x is None or x.form == target.form, f"{out.name} in {target.form} is gathered from its own form"
        _exchange(world, [x] * world.size, [_rows(target, bounds, rank) for rank in range(world.size)])


@op(family="collectives", lane="comm", is_collective=True)
def reduce_scatter(out: Output, /, x: Tensor, *, bounds: tuple[int, ...], world: World = ALONE) -> None:
    """out (n,K), these rows of x <- x (...,K): the sum over ranks, in order, of this rank's rows.

    Every partial sum is rounded to the dtype of x, as on its way from rank to rank.
    """
    total = None
    for piece in _received(x, bounds, world):
        total = piece if total is None else replace(piece, array=(total.read() + piece.read()).astype(x.array.dtype))
    if total is not None:
        out.write(total.read().reshape(out.shape))


@op(family="collectives", lane="comm", copies=True, is_collective=True)
def all_to_all(pieces: Output, /, x: Tensor, *, bounds: tuple[int, ...], world: World = ALONE) -> None:
    """pieces (R-1,m,K) <- x (...,K): this rank's n rows of every other rank's x, in the form of both.

    m is n, or n rounded up to whole tiles where each has a scale; rows beyond n are left unchanged.
    """
    mine = _share(bounds, world.rank)
    for target in pieces.tensors:
        apart = target.shape[1]
        out: list[Tensor | None] = [None] * world.size
        into: list[Tensor | None] = [None] * world.size
        for place, rank in enumerate(rank for rank in range(world.size) if rank != world.rank):
            out[rank], into[rank] = _rows(x, bounds, rank), target.chunk(place * apart, mine) if mine else None
        _exchange(world, out, into)


@op(family="collectives", lane="comm")
def sum_pieces(out: Output, /, own: Tensor, pieces: Tensor | None, *, rank: int) -> None:
    """out (n,K) <- own (n,K), pieces (R-1,m,K) or None: f32 sum of n rows of each, own in place `rank`.

    out may be the memory of own. m is n, or more, as all_to_all leaves pieces.
    """
    values: list[np.ndarray] = []
    if pieces is not None and (count := math.prod(own.shape[:-1])):
        starts = range(0, math.prod(pieces.shape[:-1]), pieces.shape[1])
        values = [pieces.chunk(start, count).read().reshape(own.shape) for start in starts]
    values.insert(rank, own.read())
    total = values[0].copy()
    for value in values[1:]:
        total += value
    out.write(total.reshape(out.shape))


@op(family="collectives", lane="comm", is_collective=True)
def all_reduce(out: Output, /, x: Tensor, *, largest: bool = False, world: World = ALONE) -> None:
    """out (n,) <- x (n,): the sum over ranks, or the `largest`, number by number; for a few numbers."""
    mine = np.ascontiguousarray(x.read())
    all_of_them = [np.empty_like(mine) for _ in range(world.size)]
    world.exchange([mine] * world.size, all_of_them)
    total = all_of_them[0]
    for other in all_of_them[1:]:
        total = np.maximum(total, other) if largest else total + other
    out.write(total)


def _share(bounds: tuple[int, ...], rank: int) -> int:
    return bounds[rank + 1] - bounds[rank]


def _rows(whole: Tensor, bounds: tuple[int, ...], rank: int) -> Tensor | None:
    """A rank's rows of a tensor; None if it has none."""
    count = _share(bounds, rank)
    return whole.chunk(bounds[rank], count) if count else None


def _received(x: Tensor, bounds: tuple[int, ...], world: World) -> list[Tensor]:
    """This rank's rows of every rank's x; nothing where it has none."""
    mine = _rows(x, bounds, world.rank)
    into: list[Tensor | None] = [None] * world.size
    if mine is not None:
        into = [Tensor(x.name, np.empty_like(mine.array), mine.shape) for _ in range(world.size)]
    _exchange(world, [_rows(x, bounds, rank) for rank in range(world.size)], into)
    return [piece for piece in into if piece is not None]


def _exchange(world: World, outgoing: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
    """Bytes, and after them the scales that copies own."""
    world.exchange(*([_bytes(t.array if t else None) for t in side] for side in (outgoing, incoming)))
    if any(t is not None and t.form is not None and t.form.owns_scales for t in (*outgoing, *incoming)):
        world.exchange(*([_bytes(t.scale if t else None) for t in side] for side in (outgoing, incoming)))


def _bytes(array: np.ndarray | None) -> np.ndarray:
    return np.empty(0, np.uint8) if array is None else array.reshape(-1).view(np.uint8)
