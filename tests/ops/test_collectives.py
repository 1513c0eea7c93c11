"""Collectives among threads: whose rows come from where, in which order they are added, and where they are rounded."""

from dataclasses import replace

import numpy as np
import pytest
from in_process import run_ranks

from llmq.operands import Output, Tensor, round_to
from llmq.ops.reference import OPS
from llmq.tensor import DTYPES, Form

from .cuda_build import Device

BOUNDS = {1: (0, 300), 2: (0, 128, 300), 3: (0, 128, 128, 300), 4: (0, 128, 256, 300, 300)}
SIZES = pytest.mark.parametrize("size", BOUNDS)
K = 6
TILES = Form("e4m3", "row", "tilewise")


def tensor(values, dtype="fp32", form=None, scale=None):
    array = values.astype(DTYPES[form.dtype if form else dtype])
    return Tensor("x", array, values.shape, form, scale)


def output(of, dtype="fp32"):
    return Output("out", of.shape, dtype, (of,))


def whole(rank, rows=300):
    """What a rank has of all rows."""
    return np.random.default_rng(rank).standard_normal((rows, K)).astype(np.float32)


def mine(bounds, rank):
    return slice(bounds[rank], bounds[rank + 1])


@SIZES
@pytest.mark.parametrize("in_place", [False, True])
def test_gathered_rows_are_those_of_the_rank_that_has_them(size, in_place):
    bounds = BOUNDS[size]

    def work(world):
        out = tensor(np.full((300, K), np.nan, np.float32))
        count = bounds[world.rank + 1] - bounds[world.rank]
        x = out.chunk(bounds[world.rank], count) if in_place and count else tensor(whole(world.rank)[:count])
        if count:
            x.array[...] = whole(world.rank)[:count]
        OPS["all_gather"](output(out), x if count else None, bounds=bounds, world=world)
        return out.array

    for found in run_ranks(size, work):
        for rank in range(size):
            part = found[mine(bounds, rank)]
            np.testing.assert_array_equal(part, whole(rank)[: len(part)])


def test_a_gathered_copy_comes_with_the_scales_of_its_tiles():
    form = Form("e4m3", "row", "tilewise")

    def work(world):
        out = tensor(np.zeros((256, K), np.float32), form=form, scale=np.zeros((2, 4), np.float32))
        x = tensor(whole(world.rank, 128), form=form, scale=np.full((1, 4), 2.0 + world.rank, np.float32))
        OPS["all_gather"](output(out), x, bounds=(0, 128, 256), world=world)
        return out.read()

    expected = [(2 + rank) * tensor(whole(rank, 128), form=Form("e4m3")).array.astype(np.float32) for rank in range(2)]
    for found in run_ranks(2, work):
        np.testing.assert_array_equal(found, np.concatenate(expected))


@SIZES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sums_on_their_way_are_rounded_at_each_rank(size, dtype):
    bounds = BOUNDS[size]

    def work(world):
        x = tensor(whole(world.rank), dtype)
        out = x.chunk(bounds[world.rank], bounds[world.rank + 1] - bounds[world.rank])
        OPS["reduce_scatter"](output(out, dtype), x, bounds=bounds, world=world)
        return out.array.astype(np.float32)

    total = round_to(whole(0), dtype).astype(np.float32)
    for rank in range(1, size):
        total = round_to(total + round_to(whole(rank), dtype).astype(np.float32), dtype).astype(np.float32)
    for rank, found in enumerate(run_ranks(size, work)):
        np.testing.assert_array_equal(found, total[mine(bounds, rank)])


@SIZES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exchanged_pieces_are_added_in_f32_in_the_order_of_ranks(size, dtype):
    bounds = BOUNDS[size]

    def work(world):
        x, count = tensor(whole(world.rank), dtype), bounds[world.rank + 1] - bounds[world.rank]
        pieces, own = tensor(np.zeros((size - 1, count, K)), dtype), x.chunk(bounds[world.rank], count)
        OPS["all_to_all"](output(pieces, dtype), x, bounds=bounds, world=world)
        if count:
            OPS["sum_pieces"](output(own, dtype), own, pieces, rank=world.rank)
        return own.array

    total = sum((round_to(whole(rank), dtype).astype(np.float32) for rank in range(size)), np.float32(0))
    for rank, found in enumerate(run_ranks(size, work)):
        np.testing.assert_array_equal(found, round_to(total[mine(bounds, rank)], dtype))


@pytest.mark.gpu(emulated="bf16-bf16")
@pytest.mark.parametrize(("sum_dtype", "sent"), [("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")])
def test_pieces_are_added_on_the_gpu_as_by_the_reference(sum_dtype, sent):
    """Bit for bit, with and without what is there, and with no pieces."""
    for shape, adds in (((37, 24), False), ((256, 896), True), ((1, 904), True), ((130, 10), False)):
        for others, rank in ((0, 0), (1, 1), (4, 2)):
            rng = np.random.default_rng(others)
            own = tensor(rng.standard_normal(shape), sum_dtype)
            pieces = tensor(rng.standard_normal((others, *shape)), sent) if others else None
            start = rng.standard_normal(shape)
            outs = [replace(output(tensor(start, sum_dtype), sum_dtype), accumulate=adds) for _ in range(2)]
            OPS["sum_pieces"](outs[0], own, pieces, rank=rank)
            device = Device()
            device.call("sum_pieces", {"out": outs[1]}, {"own": own, "pieces": pieces}, rank=rank)
            assert device.host(outs[1].tensors[0].array).tobytes() == outs[0].tensors[0].array.tobytes()


@SIZES
@pytest.mark.parametrize("accumulate", [False, True])
def test_compressed_pieces_have_tiles_of_their_own(size, accumulate):
    """Ranks have 128, 172 or no rows: the place of a piece is whole tiles, whose scales are those of its sender."""
    bounds = BOUNDS[size]

    def work(world):
        sent = output(tensor(np.zeros((300, K)), form=TILES, scale=np.zeros((3, 4), np.float32)))
        sent.write(whole(world.rank))
        (copy,), count = sent.tensors, bounds[world.rank + 1] - bounds[world.rank]
        places = -(-count // 128) * 128
        scale = np.full(((size - 1) * places // 128, 4), np.nan, np.float32)
        pieces = tensor(np.full((size - 1, places, K), np.nan), form=TILES, scale=scale)
        OPS["all_to_all"](output(pieces), copy, bounds=bounds, world=world)
        own, out = tensor(whole(world.rank)).chunk(bounds[world.rank], count), tensor(np.ones((count, K), np.float32))
        OPS["sum_pieces"](replace(output(out), accumulate=accumulate), own, pieces, rank=world.rank)
        return out.array, copy.read()

    found = run_ranks(size, work)
    for rank, (out, _) in enumerate(found):
        parts = [whole(other) if other == rank else copy for other, (_, copy) in enumerate(found)]
        total = sum((part[mine(bounds, rank)] for part in parts), np.float32(0))
        np.testing.assert_array_equal(out, 1 + total if accumulate else total)


@SIZES
def test_all_ranks_agree_on_a_sum_and_on_the_largest(size):
    def work(world):
        x = tensor(whole(world.rank)[0])
        sums, largest = (replace(x, array=np.empty_like(x.array)) for _ in range(2))
        OPS["all_reduce"](output(sums), x, world=world)
        OPS["all_reduce"](output(largest), x, largest=True, world=world)
        return sums.array, largest.array

    rows = [whole(rank)[0] for rank in range(size)]
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    for sums, largest in run_ranks(size, work):
        np.testing.assert_array_equal(sums, total)
        np.testing.assert_array_equal(largest, np.max(rows, axis=0))
