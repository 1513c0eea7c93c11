"""Lanes and homes on the GPU: copies on a stream of their own, from and to pinned memory, give the same bits."""

import pytest
from rooms import adapted, streams
from tiny_engines import BF16, FP8, FP8_HEAD, FP32, bits, engine_of, plan_of, tiny, train_steps

from llmq.plan.memory import Memory

pytestmark = pytest.mark.gpu
PRECISIONS = {
    "fp32": FP32,
    "bf16": BF16,
    "head": FP8_HEAD,
    **{f"{g}-{s}": p for (g, s), p in FP8.items() if g == "e4m3"},
}
CONFIG = tiny(hidden_size=256, head_dim=64, intermediate_size=384, num_layers=6, vocab_size=1000)
SLOTS = (*streams(CONFIG), "0/2.mlp.gate_up", "0/3.mlp.x", "0/1.attention.att")
KINDS = {
    "streamed weights": ({}, Memory(host=("master", "weight"))),
    "host quants": ({}, Memory(host=("quant",))),
    "host gradients": ({}, Memory(host=("grad",))),
    "all": ({}, Memory(("recompute_block",), offload=("residual",), host=("master", "m", "v", "grad", "weight"))),
    "host moments": ({}, Memory(host=("m", "v"))),
    "host states in pieces": ({}, Memory(host=("master", "m", "v"), piece_bytes=1)),
    "host residuals, states": ({}, Memory(("recompute_block",), offload=("residual",), host=("master", "m", "v"))),
    "host slots": ({}, Memory(offload=SLOTS)),
    "host streams, recompute": ({}, Memory(("recompute_block",), offload=streams(CONFIG))),
}


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "eager"])
def backend(request):
    """A backend with graphs, and one without."""
    from llmq.backends.cuda import CudaBackend

    return CudaBackend(use_graphs=request.param)


def result_of(backend, precision, memory, **rooms):
    """Losses, and everything that four steps change, with poisoned memory."""
    sizes = {"batch_size": 8, "seq_len": 128}
    plan = plan_of(precision, memory, CONFIG, scratch_bytes=backend.scratch_bytes, **sizes, **rooms)
    engine = engine_of(plan, backend=backend)
    return train_steps(engine, steps=4), bits(engine)


@pytest.mark.parametrize("name", PRECISIONS)
def test_what_lives_on_the_host_changes_no_bit(backend, name):
    expected = result_of(backend, PRECISIONS[name], Memory())
    for kind, (rooms, memory) in KINDS.items():
        assert result_of(backend, PRECISIONS[name], memory, **rooms) == expected, kind


def test_an_adapter_trains_on_the_gpu(backend):
    for name, precision in PRECISIONS.items():
        losses, _ = result_of(backend, precision, Memory(), sites=adapted)
        block, _ = result_of(backend, precision, Memory(("recompute_block",)), sites=adapted)
        assert losses == block and all(loss < 10 for loss in losses), name
