"""Two GPUs: every level has the bits of the others, in graphs as well, and follows the reference on two ranks."""

import faulthandler
import traceback
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from in_process import run_ranks
from ranks import LEVELS, Run, join, on_two_gpus, same, train
from tiny_engines import BF16, FP8, FP8_HEAD

from llmq.blocks.packed import Packing
from llmq.plan.memory import RESIDUAL, Memory
from llmq.tensor import Form

pytestmark = pytest.mark.gpu
RUNS = {
    "bf16": Run(steps=3, micro_steps=3),
    "fp8": Run(FP8_HEAD, steps=3, micro_steps=3),
    "fp8-current": Run(FP8["e5m2", "current"], steps=3),
    "fp8-blockwise": Run(FP8["e4m3", "blockwise"], steps=3),
    "fp32-master": Run(replace(BF16, master="fp32", grad="fp32"), steps=3),
    "recompute": Run(memory=Memory(flags=frozenset({"recompute_block"})), steps=3),
    "packed": Run(more={"packing": Packing(5, 16)}, steps=3),
    "exchanged": Run(how={"all_to_all": True}, steps=3, micro_steps=3),
    "wire": Run(replace(BF16, grad="fp32"), how={"reduce_dtype": "bf16"}, steps=3),
    "compressed": Run(how={"all_to_all": True, "compressed": Form("e4m3", "row", "tilewise")}, steps=3),
}
ALL = ("master", "m", "v", "grad", "weight")
# By what lives on the host, which changes no bit of these runs at any level.
HOSTED = {
    f"{name}-{'-'.join(host)}": (name, replace(RUNS[name], memory=Memory(host=host, offload=offload, piece_bytes=1)))
    for name, host, offload in (
        ("bf16", ALL, (RESIDUAL,)),
        ("fp8", ALL, (RESIDUAL,)),
        ("fp8", ("quant", "grad"), ()),
        ("fp8-current", ("weight", "master"), ()),
        ("fp8-blockwise", ("quant",), ()),
        ("compressed", ("grad",), ()),
    )
}
FOLLOWS = {"fp8": 3e-2, "fp8-current": 3e-2, "fp8-blockwise": 3e-2}


def rank_process(rank, port, results, *, runs):
    """One rank: all runs at all levels, some with graphs and without."""
    try:
        faulthandler.dump_traceback_later(150, exit=True)  # of what waits for ever
        import cupy

        from llmq.backends.cuda import CudaBackend
        from llmq.comm.nccl import NcclWorld

        cupy.cuda.Device(rank).use()
        world = NcclWorld(join(rank, port))
        for name, run in runs.items():
            for level in LEVELS:
                for use_graphs in (True, False) if name in ("bf16", "fp8") else (True,):
                    backend = CudaBackend(use_graphs=use_graphs, world=world)
                    results.put((rank, (name, level, use_graphs), train(replace(run, level=level), world, backend)))
        results.put((rank, "done", None))
        world.gather("done")
        world.close()
    except BaseException:
        results.put((rank, "error", traceback.format_exc()))


@pytest.fixture(scope="module")
def found():
    """What both ranks return, by rank; of each by run, level and whether graphs were used."""
    return on_two_gpus(partial(rank_process, runs=RUNS), 160)[0]


@pytest.fixture(scope="module")
def found_hosted():
    """The same of runs with something on the host."""
    return on_two_gpus(partial(rank_process, runs={name: run for name, (_, run) in HOSTED.items()}), 160)[0]


@pytest.mark.parametrize("name", HOSTED)
@pytest.mark.parametrize("level", LEVELS)
def test_what_lives_on_the_host_changes_no_bit(found, found_hosted, name, level):
    for rank in range(2):
        assert same(found_hosted[rank][name, level, True], found[rank][HOSTED[name][0], level, True])


@pytest.mark.parametrize("name", RUNS)
def test_every_level_has_the_bits_of_the_others(found, name):
    pairs = [(0, 1), (2, 3)] if RUNS[name].micro_steps > 1 else [(0, 1), (1, 2), (2, 3)]
    for one, other in pairs:
        for rank in range(2):
            assert same(found[rank][name, one, True], found[rank][name, other, True]), (one, other)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
@pytest.mark.parametrize("level", LEVELS)
def test_graphs_have_the_bits_of_eager_runs(found, name, level):
    assert same(found[0][name, level, True], found[0][name, level, False])


@pytest.mark.parametrize("name", RUNS)
def test_both_ranks_agree(found, name):
    for level in LEVELS:
        (results, values), (others, other_values) = (found[rank][name, level, True] for rank in range(2))
        one, other = ([replace(result, sent_error=None) for result in each] for each in (results, others))
        assert one == other
        assert all(np.array_equal(a, b) for a, b in zip(values[1:], other_values[1:], strict=True))


@pytest.mark.parametrize("name", ["bf16", "fp8", "exchanged", "compressed"])
def test_two_gpus_follow_the_reference(found, name):
    from llmq.backends.host import HostBackend

    (results, _), _ = run_ranks(2, lambda world: train(RUNS[name], world, HostBackend(world=world)))
    losses = [[one.loss for one in run] for run in (results, found[0][name, 1, True][0])]
    assert np.allclose(*losses, rtol=FOLLOWS.get(name, 1e-2))
