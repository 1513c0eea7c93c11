"""Two GPUs that write each other's memory: a run has the bits that it has by NCCL, and none waits for ever."""

import faulthandler
import gc
import os
import time
import traceback
from dataclasses import replace

import pytest
from ranks import LEVELS, Run, join, on_two_gpus, same, train
from tiny_engines import FP8

from llmq.comm.world import Copying
from llmq.tensor import Form

pytestmark = pytest.mark.gpu
RUNS = {
    "bf16": Run(steps=3, micro_steps=3),
    "fp8-blockwise": Run(FP8["e4m3", "blockwise"], steps=3),
    "exchanged": Run(how={"all_to_all": True}, steps=3, micro_steps=2),
    "compressed": Run(how={"all_to_all": True, "compressed": Form("e4m3", "row", "tilewise")}, steps=3),
}
EAGER = ("bf16", "exchanged")
ALL, NONE = Copying(True, True), Copying(False, False)
LIMIT_S = 100
LEFT = 6  # exit code of a rank that leaves while its GPU waits


def rank_process(rank, port, results):
    """One rank: all runs at all levels, then what hangs."""
    try:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # of what waits for ever
        import cupy

        from llmq.backends.cuda import CudaBackend
        from llmq.comm import nccl

        nccl.LEAST_BYTES = 0
        cupy.cuda.Device(rank).use()
        host = join(rank, port)
        worlds = {copying: nccl.NcclWorld(host, copying) for copying in (NONE, ALL)}
        for name, run in RUNS.items():
            for level in LEVELS:
                for copying, use_graphs in ((NONE, True), (ALL, True), (ALL, False)):
                    if use_graphs or name in EAGER:
                        world = worlds[copying]
                        backend = CudaBackend(use_graphs=use_graphs, world=world)
                        values = train(replace(run, level=level), world, backend)
                        results.put((rank, (name, level, copying.gathers, use_graphs), values))
        began = time.monotonic()
        chosen = nccl.NcclWorld(host, Copying()).copies
        results.put((rank, "timed", (chosen.gathers, chosen.exchanges, time.monotonic() - began)))
        results.put((rank, "moved", moved(worlds[ALL], rank)))
        gc.collect()  # memory of engines is closed when the GPU has nothing to do
        results.put((rank, "left", waited(worlds[ALL], host, rank)))
        alone = nccl.NcclWorld(host, ALL)
        launched = gather(alone, rank)
        host.gather("all have copied")
        results.put((rank, "done", None))
        results.close()
        results.join_thread()
        if rank == 0:
            launched()
        os._exit(LEFT)
    except BaseException:
        results.put((rank, "error", traceback.format_exc()))


def gather(world, rank, count=1 << 20):
    """Makes a gather of two pieces, of `count` numbers each, once; a function that makes it again."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        whole = cupy.zeros((2, count), cupy.int32)
    known, graphs = {}, []

    def made():
        with world.group(known):
            for root in range(2):
                at = whole[root].data.ptr
                world.broadcast(at, at, 4 * count, root)

    def run(value=1, use_graph=False):
        with stream:
            if use_graph and not graphs:
                stream.begin_capture()
                made()
                graphs.append(stream.end_capture())
            whole[rank] = value
            if use_graph:
                graphs[0].launch(stream)
            else:
                made()
        return whole, stream

    run()
    stream.synchronize()
    return run


def moved(world, rank):
    """How many of many gathers, in and out of a graph, have numbers of another turn."""
    import cupy

    run = gather(world, rank)
    wrong = 0
    for turn in range(50):
        whole, stream = run(2 * turn + rank, use_graph=turn % 3 > 0)
        with stream:
            wrong += int((whole != cupy.asarray([[2 * turn], [2 * turn + 1]], cupy.int32)).any())
    return wrong


def waited(world, host, rank):
    """Whether the GPU of rank 0 waits for the other one, and whether it goes on when its rank leaves."""
    run = gather(world, rank)
    host.gather("all have copied")
    waits = goes_on = True
    if rank == 0:
        _, stream = run()
        time.sleep(0.5)
        waits = not stream.done
        world._copies.close()
        goes_on = stream.done
    host.gather("the other one has left")
    return waits, goes_on


@pytest.fixture(scope="module")
def found():
    """What both ranks return, by rank; and their exit codes."""
    by_rank, codes = on_two_gpus(rank_process, LIMIT_S + 10)
    return *by_rank, codes


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", RUNS)
def test_copies_have_the_bits_of_nccl(found, name, level):
    for rank in range(2):
        by_nccl, copied = (found[rank][name, level, copies, True] for copies in (False, True))
        assert same(by_nccl, copied)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", EAGER)
def test_copies_in_graphs_have_the_bits_of_eager_ones(found, name, level):
    for rank in range(2):
        assert same(found[rank][name, level, True, True], found[rank][name, level, True, False])


def test_every_turn_has_its_own_numbers(found):
    assert [found[rank]["moved"] for rank in range(2)] == [0, 0]


def test_what_is_faster_is_timed_and_agreed(found):
    (*chosen, seconds), (*other, _) = (found[rank]["timed"] for rank in range(2))
    print(f"copied as timed: gathers, exchanges {chosen}, after {seconds:.2f} s with NCCL's own beginning")
    assert chosen == other and seconds < 10


def test_a_gpu_waits_for_the_other_one_until_its_rank_leaves(found):
    assert found[0]["left"] == (True, True)


def test_a_rank_ends_while_its_gpu_waits(found):
    assert found[2] == [LEFT, LEFT]
