"""Random plans on the GPU: they change no bit, and take the memory that was planned."""

import gc

import pytest
from random_plans import drawn
from tiny_engines import batch, bits, engine_of, plan_of, tiny, train_steps

from llmq.engine.engine import Engine
from llmq.engine.measure import random_parameters
from llmq.model.presets import preset

pytestmark = pytest.mark.gpu
MIB = 2**20
CONFIG = tiny(hidden_size=256, head_dim=64, intermediate_size=384, num_layers=4, vocab_size=1000)
LARGE = {"batch_size": 8, "seq_len": 1024}


@pytest.mark.parametrize("seed", range(10))
def test_random_combinations_are_bit_equal(backend, seed):
    """With poisoned arenas."""
    precision, plain, hosted = drawn(seed)

    def result(memory):
        sizes = {"batch_size": 4, "seq_len": 128, "scratch_bytes": backend.scratch_bytes}
        engine = engine_of(plan_of(precision, memory, CONFIG, **sizes), backend=backend)
        return train_steps(engine, steps=3), bits(engine)

    assert result(hosted) == result(plain)


@pytest.mark.parametrize("seed", range(20))
def test_the_driver_counts_what_was_planned(seed):
    """Of half a billion parameters, during steps of two micro-steps: within 1%, or 200 MiB."""
    from llmq.backends.cuda import CudaBackend
    from llmq.hardware import nvml
    from llmq.hardware.device import pick

    uuid = pick("cuda").gpu.uuid
    config = preset("Qwen2.5-0.5B")
    precision, _, memory = drawn(seed)
    backend = CudaBackend()
    about = {"scratch_bytes": backend.scratch_bytes, **LARGE}
    plan = plan_of(precision, memory, config, **about)
    empty_pools()
    before = nvml.read(uuid).used_bytes
    engine = Engine(plan, backend)
    engine.load(random_parameters(plan, seed))
    one = batch(1, *LARGE.values(), vocab=config.vocab_size)
    engine.warm_up(one)
    most = 0
    for step in (1, 2, 3):  # eagerly, captured, replayed
        for micro_step in (0, 1):
            engine.micro_step(one, first=micro_step == 0, last=micro_step == 1)
        assert engine.update(step, 1e-4).applied
        most = max(most, nvml.read(uuid).used_bytes)
    del engine, backend
    empty_pools()
    assert abs(most - before - plan.total_bytes) <= max(0.01 * plan.total_bytes, 200 * MIB), plan.table()


def empty_pools():
    """What earlier runs left goes back to the driver."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
