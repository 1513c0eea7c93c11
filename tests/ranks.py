"""A tiny run on several ranks: each level of sharing, on whatever world and backend it is given."""

import multiprocessing
from dataclasses import dataclass, field

import numpy as np
import pytest
from in_process import run_ranks
from tiny_engines import BF16, engine_of, plan_of, tiny

from llmq.backends.host import HostBackend
from llmq.comm.store import StoreServer
from llmq.comm.tcp import TcpWorld
from llmq.data.batches.batch import Batch
from llmq.plan.memory import Memory
from llmq.plan.precision import Precision
from llmq.stores.sharding import Sharding

# long enough that each of eight ranks has rows of some matrix, wide enough for the GPU
CONFIG = tiny(vocab_size=1000, hidden_size=64, head_dim=16, intermediate_size=320)
TOKEN = "a token"
LEVELS = {
    0: {},
    1: {"states": True},
    2: {"states": True, "gradients": True},
    3: {"states": True, "gradients": True, "weights": True},
}


@dataclass(frozen=True)
class Run:
    """What is trained: `micro_steps` batches of each rank in each of `steps` steps."""

    precision: Precision = BF16
    level: int = 1
    memory: Memory | None = None
    steps: int = 2
    micro_steps: int = 1
    how: dict = field(default_factory=dict)  # further fields of the sharding
    more: dict = field(default_factory=dict)  # further fields of the spec


def rank_batch(run, step, micro_step, rank):
    """What a rank trains on."""
    from tiny_engines import B, batch, packed_batch

    make = packed_batch if "packing" in run.more else batch
    found = make(1000 * step + 100 * micro_step + rank)
    assert len(found.tokens) == B
    return found


def whole_batch(run, step, micro_step, size=2):
    """The batches of `size` ranks as one."""
    parts = [rank_batch(run, step, micro_step, rank) for rank in range(size)]
    fields = ([getattr(part, name) for part in parts] for name in ("tokens", "targets", "borders"))
    return Batch(*(None if values[0] is None else np.concatenate(values) for values in fields))


def train(run, world, backend):
    """Results of all steps, and the parameters after them, on one rank."""
    sharding = Sharding(world.rank, world.size, **{**LEVELS[run.level], **run.how})
    scratch = backend.scratch_bytes if backend.takes_scratch else None
    plan = plan_of(run.precision, run.memory, CONFIG, scratch_bytes=scratch, sharding=sharding, **run.more)
    engine = engine_of(plan, backend=backend)
    results = []
    for step in range(1, run.steps + 1):
        plan.tracked.before_step(engine, step)
        for micro_step in range(run.micro_steps):
            batch = rank_batch(run, step, micro_step, world.rank)
            engine.micro_step(batch, first=micro_step == 0, last=micro_step == run.micro_steps - 1)
        results.append(engine.update(step, 1e-2, request=world.rank))
        plan.tracked.after_update(engine, step)
    evaluated = engine.evaluate(rank_batch(run, 0, 0, world.rank))
    return results, [evaluated, *(engine.parameter(row.name) for row in plan.rows)]


def on_ranks(run, size=2):
    """What `train` returns on each of some ranks, which are threads of this process."""
    return run_ranks(size, lambda world: train(run, world, HostBackend(world=world)))


def on_two_gpus(rank_process, limit_s):
    """What the processes of two ranks, on a GPU each, find, by rank, and their exit codes. Skips without two GPUs.

    `rank_process(rank, port, results)` joins the store at `port`, and puts (rank, what, value) into the queue `results`
    at least every `limit_s` seconds: "done" as its last, or "error" with a traceback.
    """
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    server = StoreServer("127.0.0.1", 0, 2, TOKEN, 60.0)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=rank_process, args=(rank, server.port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found, done = ({}, {}), 0
    try:
        while done < 2:
            rank, what, value = results.get(timeout=limit_s)
            assert what != "error", value
            done += what == "done"
            found[rank][what] = value
        for process in processes:
            process.join(20)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
        server.close()
    return found, codes


def join(rank, port):
    """What a process of `on_two_gpus` talks with the other one through, over sockets."""
    return TcpWorld("127.0.0.1", port, rank, 2, TOKEN, 60.0)


def same(one, other):
    """Whether two runs have the same bits, by what `train` returns."""
    (results, values), (other_results, other_values) = one, other
    bits = [np.asarray(value).tobytes() for value in values]
    return results == other_results and bits == [np.asarray(value).tobytes() for value in other_values]
