"""Host memory on a GPU: locked in pieces, whose number changes no bit."""

from dataclasses import replace

import pytest
from tiny_engines import BF16, FP8, bits, engine_of, plan_of, tiny, train_steps

from llmq.plan.memory import Memory

pytestmark = pytest.mark.gpu
PAGE = 4096
SIZES = (3 * PAGE, 256, 5 * PAGE, 256, 256, 2 * PAGE, 1 << 20)
EVERYTHING = Memory(("recompute_block",), offload=("residual",), host=("master", "m", "v", "grad", "weight"))


def test_pages_are_locked_until_the_last_view_is_gone():
    """cudaPointerGetAttributes: 1 is memory of the host that is registered, 0 what CUDA does not know."""
    import cupy
    from cupy.cuda import runtime

    from llmq.backends.cuda_memory import HostBlock

    found = HostBlock(SIZES, cupy.cuda.Stream(non_blocking=True), piece_bytes=3 * PAGE)
    views = [found.view(sum(SIZES[:index]), size) for index, size in enumerate(SIZES)]
    addresses = [view.ctypes.data for view in views]
    for view in views:
        for at in (0, view.nbytes - 1):
            assert runtime.pointerGetAttributes(view.ctypes.data + at).type == 1
    last = views[-1]
    del found, views, view
    types = [runtime.pointerGetAttributes(address).type for address in addresses]
    assert types == [0, 0, 0, 1, 1, 1, 1] and last.nbytes == SIZES[-1]  # the last piece begins with the fourth array


@pytest.mark.parametrize("change", [1, 1 << 16, "refused"])
@pytest.mark.parametrize("precision", [BF16, FP8["e4m3", "delayed"]], ids=["bf16", "fp8"])
def test_neither_pieces_nor_a_refusal_to_lock_memory_change_a_bit(monkeypatch, precision, change):
    """Where the system refuses, programs run without graphs, and copies wait. Kernels read and write what lies beside
    a border in place, too."""
    from llmq.backends import cuda, cuda_memory

    config = tiny(hidden_size=256, head_dim=64, intermediate_size=384, num_layers=3, vocab_size=1000)

    def result(memory):
        backend = cuda.CudaBackend()
        plan = plan_of(precision, memory, config, scratch_bytes=backend.scratch_bytes, batch_size=4, seq_len=128)
        engine = engine_of(plan, backend=backend)
        found = train_steps(engine, steps=4), bits(engine)
        assert ("Host memory" in backend.allocated) == bool(memory.host)
        return found, any("refuses to lock" in text for text in backend.notices)

    expected = result(Memory())
    assert result(EVERYTHING) == expected
    if change == "refused":
        monkeypatch.setattr(cuda_memory, "_lock", lambda piece, stream: False)
    else:
        monkeypatch.setattr(cuda, "PIECE_BYTES", change)
        assert result(replace(EVERYTHING, zero_copy=True)) == expected
    assert result(EVERYTHING) == (expected[0], change == "refused")
