"""What lives on the host, on a GPU: copied on lanes of its own, read in place, write-combined, or made for each use."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import BF16, FP8, FP8_HEAD, FP32, batch, bits, engine_of, plan_of, streams, tiny, train_steps

from llmq.errors import UsageError
from llmq.model.optimizer import Hyperparameters
from llmq.plan.memory import Memory

pytestmark = pytest.mark.gpu
CONFIG = tiny(hidden_size=256, head_dim=64, intermediate_size=384, num_layers=6, vocab_size=1000)
SLOTS = (*streams(CONFIG), "0/2.mlp.gate_up", "0/3.mlp.x", "0/1.attention.att")
STATES = ("master", "m", "v")
EVERYTHING = Memory(("recompute_block",), offload=("residual",), host=(*STATES, "grad", "weight"))
IN_PLACE = replace(EVERYTHING, zero_copy=True)
PRECISIONS = {
    "fp32": FP32,
    "bf16": BF16,
    "bf16, fp32 masters": replace(BF16, master="fp32", m="fp32"),
    "8 bits": replace(BF16, m="int8", v="e4m3", master="fp32"),
    "head": FP8_HEAD,
    **{scaling: FP8["e4m3", scaling] for scaling in ("delayed", "current", "rowwise", "blockwise")},
}
KINDS = {
    "streamed weights": Memory(host=("master", "weight")),
    "quants": Memory(host=("quant",)),
    "gradients": Memory(host=("grad",)),
    "everything": EVERYTHING,
    "moments": Memory(host=("m", "v")),
    "states in pieces": Memory(host=STATES, piece_bytes=1),
    "residuals, states": Memory(("recompute_block",), offload=("residual",), host=STATES),
    "slots": Memory(offload=SLOTS),
    "streams, recompute": Memory(("recompute_block",), offload=streams(CONFIG)),
    "moments in place": Memory(host=("m", "v"), zero_copy=True),
    "states and gradients in place": Memory(host=(*STATES, "grad"), zero_copy=True),
    "everything in place": IN_PLACE,
    "write-combined": replace(EVERYTHING, write_combined=True),
    "write-combined in place": replace(IN_PLACE, write_combined=True),
}
REMADE = {
    "made": Memory(persistent_quants=False),
    "made of masters on the host": Memory(("recompute_block",), host=STATES, persistent_quants=False),
    "made of masters in place": Memory(host=(*STATES, "weight"), persistent_quants=False, zero_copy=True),
}
SIZES = {"batch_size": 4, "seq_len": 128}


def planned(backend, precision, memory, **more):
    return plan_of(precision, memory, CONFIG, scratch_bytes=backend.scratch_bytes, **SIZES, **more)


def result_of(backend, precision, memory, **more):
    """Losses, and everything that four steps change, with poisoned memory."""
    engine = engine_of(planned(backend, precision, memory, **more), backend=backend)
    return train_steps(engine, steps=4), bits(engine)


@pytest.mark.parametrize("name", PRECISIONS)
def test_what_lives_on_the_host_changes_no_bit(either_backend, name):
    precision = PRECISIONS[name]
    expected = result_of(either_backend, precision, Memory())
    for kind, memory in {**KINDS, **(REMADE if precision.matmul == "e4m3" else {})}.items():
        assert result_of(either_backend, precision, memory) == expected, kind


def test_updates_in_backward_change_no_bit(either_backend):
    found = []
    precision, host = FP8["e4m3", "current"], {"host": STATES, "zero_copy": True, "write_combined": True}
    for more in ({}, host, {"persistent_quants": False}, {**host, "persistent_quants": False}):
        plan = planned(either_backend, precision, Memory(fused=True, **more), hyper=Hyperparameters(clips_by_last=True))
        engine = engine_of(plan, backend=either_backend)
        for step in range(1, 5):
            engine.start_step(step, 1e-3)
            engine.micro_step(batch(step, b=4, t=128, vocab=CONFIG.vocab_size))
            engine.update(step, 1e-3)
        found.append({name: array.tobytes() for name, array in engine.state()})
    assert found[0] == found[1] == found[2] == found[3]


def test_write_combined_memory_is_read_by_way_of_the_gpu(either_backend):
    """In as many pieces as the arena asks for, into memory of its own or given."""
    engine = engine_of(planned(either_backend, BF16, KINDS["write-combined"]), backend=either_backend)
    train_steps(engine, steps=2)
    memory = engine._memory
    assert memory.host.is_combined and memory.host.unpinned_bytes == 0 and "write-combined" in either_backend.allocated
    plain = {name: memory.array(name).copy() for name, ref in engine.plan.persistent.items() if ref.home == "host"}
    for size in (memory._arena_bytes, 256, 4096 + 16):
        memory._arena_bytes = size
        for name, expected in plain.items():
            assert memory.read(name).tobytes() == expected.tobytes(), name
            given = np.empty_like(expected)
            assert memory.read(name, given) is given and given.tobytes() == expected.tobytes()


def test_a_system_without_write_combined_memory_has_ordinary(monkeypatch):
    from cupy.cuda import runtime

    from llmq.backends import cuda

    def refuse(num_bytes, flags):
        raise runtime.CUDARuntimeError(801)

    expected = result_of(cuda.CudaBackend(), BF16, Memory())
    monkeypatch.setattr(runtime, "hostAlloc", refuse)
    backend = cuda.CudaBackend()
    assert result_of(backend, BF16, KINDS["write-combined"]) == expected
    assert any("refuses write-combined memory" in text for text in backend.notices)


def test_memory_that_is_not_locked_is_not_read_by_kernels(monkeypatch):
    from llmq.backends import cuda, cuda_memory

    monkeypatch.setattr(cuda_memory, "_lock", lambda piece, stream: False)
    backend = cuda.CudaBackend()
    with pytest.raises(UsageError, match=r"--use-zero-copy: .* refuses to lock .* leave it out"):
        engine_of(planned(backend, BF16, IN_PLACE), backend=backend)
