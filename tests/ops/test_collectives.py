"""Copies between homes: every byte and owned scale arrives. Collectives among threads: whose rows come from where, in
which order they are added, and where they are rounded.
"""

from dataclasses import replace

import numpy as np
import pytest
from in_process import run_ranks

from llmq.operands import Output, Tensor, round_to
from llmq.ops.reference import OPS
from llmq.tensor import DTYPES, Form

from .build import output, poisoned, run, tensor
from .cases import OWN_SCALES
from .cuda_build import Device, on_both

FORMS = [None, Form("bf16", "col"), *(Form("e4m3", layout, "delayed") for layout in ("row", "col"))]
FORMS += [Form("e4m3", layout, scaling) for scaling in OWN_SCALES for layout in ("row", "col")]
EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.key if form else "value")
BOTH = pytest.mark.parametrize("op", ["copy_to_host", "copy_to_device"])
SHAPE = (3, 43, 76)


def source_of(form):
    x = np.random.default_rng(3).standard_normal(SHAPE)
    return tensor(x, None if form else "bf16", form, 0.01 if form and form.scaling == "delayed" else None)


def check(got, x):
    assert got.array.tobytes() == x.array.tobytes()
    if x.form is not None and x.form.owns_scales:
        assert got.scale.tobytes() == x.scale.tobytes()


@BOTH
@EVERY_FORM
def test_every_byte_is_copied_and_every_owned_scale(op, form):
    x, out = source_of(form), output(SHAPE, "bf16", (form,), scale=7.0)
    OPS[op](out, x)
    check(out.tensors[0], x)
    if form is not None and form.scaling == "delayed":
        assert out.tensors[0].scale == 7, "a scale that others share is not the copy's"


@BOTH
def test_bits_that_are_no_number_are_copied(op):
    x = Tensor("x", poisoned((5, 3), "bf16"), (5, 3))
    out = output((5, 3), "bf16", start=np.zeros((5, 3)))
    out.accumulate = False
    OPS[op](out, x)
    assert out.tensors[0].array.tobytes() == b"\xff" * 30


@BOTH
def test_another_form_shape_or_dtype_is_no_copy(op):
    x = source_of(None)
    for wrong in (output(SHAPE, "fp32"), output((3, 43, 75), "bf16"), output(SHAPE, "bf16", (FORMS[1],))):
        with pytest.raises(AssertionError, match="no plain copy"):
            OPS[op](wrong, x)
    with pytest.raises(AssertionError, match="no plain copy"):
        OPS[op](output(SHAPE, "bf16", start=np.zeros(SHAPE)), x)


@pytest.mark.gpu
@EVERY_FORM
def test_the_gpu_copies_to_pinned_memory_and_back(form):
    """In a captured graph, on a stream of its own: the bytes of the host when it runs are those that arrive."""
    import cupy

    from llmq.ops import cuda

    def pinned(array):
        memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(array.nbytes), np.uint8, array.nbytes)
        memory[...] = 0xFF
        return memory.view(array.dtype).reshape(array.shape)

    def on_host(like):
        owns = form is not None and form.owns_scales
        scale = pinned(like.scale) if owns else like.scale
        return replace(like, array=pinned(like.array), scale=scale)

    device, x = Device(), source_of(form)
    away, back = on_host(x), output(SHAPE, "bf16", (form,), scale=7.0)
    given, returned = device.tensor(x), device.output(back)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        cuda.OPS["copy_to_host"](replace(returned, tensors=(away,)), given)
        cuda.OPS["copy_to_device"](returned, away)
        graph = stream.end_capture()
        assert away.array.tobytes() == b"\xff" * away.array.nbytes, "a capture runs nothing"
        graph.launch(stream)
        stream.synchronize()
    check(away, x)
    arrived = back.tensors[0]
    scale = device.host(arrived.scale) if form is not None and form.owns_scales else None
    check(replace(arrived, array=device.host(arrived.array), scale=scale), x)


def test_a_block_goes_on_where_it_ends():
    block = np.array([1.0, 2.0, 3.0])
    assert run("repeat", [(2, 4)], block, first=0)[0].tolist() == [[1, 2, 3, 1], [2, 3, 1, 2]]
    assert run("repeat", [(2, 4)], block, first=5)[0].tolist() == [[3, 1, 2, 3], [1, 2, 3, 1]]
    assert run("repeat", [(2,)], block, first=2**40 * 3 + 1)[0].tolist() == [2, 3]


BOUNDS = {1: (0, 300), 2: (0, 128, 300), 3: (0, 128, 128, 300), 4: (0, 128, 256, 300, 300)}
SIZES = pytest.mark.parametrize("size", BOUNDS)
K = 6
TILES = Form("e4m3", "row", "tilewise")


def stored(values, dtype="fp32", form=None, scale=None):
    array = values.astype(DTYPES[form.dtype if form else dtype])
    return Tensor("x", array, values.shape, form, scale)


def over(of, dtype="fp32"):
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
        out = stored(np.full((300, K), np.nan, np.float32))
        count = bounds[world.rank + 1] - bounds[world.rank]
        x = out.chunk(bounds[world.rank], count) if in_place and count else stored(whole(world.rank)[:count])
        if count:
            x.array[...] = whole(world.rank)[:count]
        OPS["all_gather"](over(out), x if count else None, bounds=bounds, world=world)
        return out.array

    for found in run_ranks(size, work):
        for rank in range(size):
            part = found[mine(bounds, rank)]
            np.testing.assert_array_equal(part, whole(rank)[: len(part)])


def test_a_gathered_copy_comes_with_the_scales_of_its_tiles():
    form = Form("e4m3", "row", "tilewise")

    def work(world):
        out = stored(np.zeros((256, K), np.float32), form=form, scale=np.zeros((2, 4), np.float32))
        x = stored(whole(world.rank, 128), form=form, scale=np.full((1, 4), 2.0 + world.rank, np.float32))
        OPS["all_gather"](over(out), x, bounds=(0, 128, 256), world=world)
        return out.read()

    expected = [(2 + rank) * stored(whole(rank, 128), form=Form("e4m3")).array.astype(np.float32) for rank in range(2)]
    for found in run_ranks(2, work):
        np.testing.assert_array_equal(found, np.concatenate(expected))


@SIZES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("exchanged", [False, True])
def test_sums_are_rounded_at_each_rank_on_their_way_or_at_the_end_if_pieces_are_exchanged(size, dtype, exchanged):
    """Both in the order of ranks."""
    bounds = BOUNDS[size]

    def work(world):
        x, count = stored(whole(world.rank), dtype), bounds[world.rank + 1] - bounds[world.rank]
        own = x.chunk(bounds[world.rank], count)
        if not exchanged:
            OPS["reduce_scatter"](over(own, dtype), x, bounds=bounds, world=world)
            return own.array
        pieces = stored(np.zeros((size - 1, count, K)), dtype)
        OPS["all_to_all"](over(pieces, dtype), x, bounds=bounds, world=world)
        if count:
            OPS["sum_pieces"](over(own, dtype), own, pieces, rank=world.rank)
        return own.array

    total = np.float32(0)
    for rank in range(size):
        total = total + round_to(whole(rank), dtype).astype(np.float32)
        total = total if exchanged else round_to(total, dtype).astype(np.float32)
    for rank, found in enumerate(run_ranks(size, work)):
        np.testing.assert_array_equal(found, round_to(total[mine(bounds, rank)], dtype))


@pytest.mark.gpu(emulated="bf16-bf16")
@pytest.mark.parametrize(("sum_dtype", "sent"), [("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")])
def test_pieces_are_added_on_the_gpu_as_by_the_reference(sum_dtype, sent):
    """Bit for bit, with and without what is there, and with no pieces."""
    for shape, adds in (((37, 24), False), ((256, 896), True), ((1, 904), True), ((130, 10), False)):
        for others, rank in ((0, 0), (1, 1), (4, 2)):
            rng = np.random.default_rng(others)
            own = stored(rng.standard_normal(shape), sum_dtype)
            pieces = stored(rng.standard_normal((others, *shape)), sent) if others else None
            start = rng.standard_normal(shape)
            out = replace(over(stored(start, sum_dtype), sum_dtype), accumulate=adds)
            ((right, found),) = on_both("sum_pieces", {"out": out}, {"own": own, "pieces": pieces}, rank=rank)
            assert found.array.tobytes() == right.array.tobytes()


@SIZES
@pytest.mark.parametrize("accumulate", [False, True])
def test_compressed_pieces_have_tiles_of_their_own(size, accumulate):
    """Ranks have 128, 172 or no rows: the place of a piece is whole tiles, whose scales are those of its sender."""
    bounds = BOUNDS[size]

    def work(world):
        sent = over(stored(np.zeros((300, K)), form=TILES, scale=np.zeros((3, 4), np.float32)))
        sent.write(whole(world.rank))
        (copy,), count = sent.tensors, bounds[world.rank + 1] - bounds[world.rank]
        places = -(-count // 128) * 128
        scale = np.full(((size - 1) * places // 128, 4), np.nan, np.float32)
        pieces = stored(np.full((size - 1, places, K), np.nan), form=TILES, scale=scale)
        OPS["all_to_all"](over(pieces), copy, bounds=bounds, world=world)
        own, out = (stored(whole(world.rank)).chunk(bounds[world.rank], count), stored(np.ones((count, K), np.float32)))
        OPS["sum_pieces"](replace(over(out), accumulate=accumulate), own, pieces, rank=world.rank)
        return out.array, copy.read()

    found = run_ranks(size, work)
    for rank, (out, _) in enumerate(found):
        parts = [whole(other) if other == rank else copy for other, (_, copy) in enumerate(found)]
        total = sum((part[mine(bounds, rank)] for part in parts), np.float32(0))
        np.testing.assert_array_equal(out, 1 + total if accumulate else total)


@SIZES
def test_all_ranks_agree_on_a_sum_and_on_the_largest(size):
    def work(world):
        x = stored(whole(world.rank)[0])
        sums, largest = (replace(x, array=np.empty_like(x.array)) for _ in range(2))
        OPS["all_reduce"](over(sums), x, world=world)
        OPS["all_reduce"](over(largest), x, largest=True, world=world)
        return sums.array, largest.array

    rows = [whole(rank)[0] for rank in range(size)]
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    for sums, largest in run_ranks(size, work):
        np.testing.assert_array_equal(sums, total)
        np.testing.assert_array_equal(largest, np.max(rows, axis=0))
