"""Small states on the GPU: moments and weights in 8 bits train, are the same wherever they live, and in backward."""

from dataclasses import replace

import pytest
from tiny_engines import BF16, FP8, batch, engine_of, plan_of, tiny

from llmq.backends.host import HostBackend
from llmq.model.optimizer import Hyperparameters
from llmq.plan.memory import Memory

pytestmark = pytest.mark.gpu
CONFIG = tiny(hidden_size=256, head_dim=64, intermediate_size=384, num_layers=2, vocab_size=1000)
HYPER = Hyperparameters(clips_by_last=True)
EIGHT = {"m": "int8", "v": "e4m3"}
PRECISIONS = {
    "8 bits": replace(BF16, **EIGHT, master="fp32"),
    "e4m3 and int8": replace(BF16, m="e4m3", v="int8"),
    "no masters": replace(BF16, **EIGHT, master="none"),
    "fp8": replace(FP8["e4m3", "current"], **EIGHT),
    "fp8 without masters": replace(FP8["e4m3", "current"], **EIGHT, master="none"),
}
MEMORIES = {
    "on the host": Memory(("recompute_block",), host=("m", "v"), piece_bytes=1),
    "in backward": Memory(fused=True),
    "both": Memory(("recompute_block",), offload=("residual",), host=("m", "v"), piece_bytes=1, fused=True),
}


def trained(backend, precision, memory):
    """Losses of four steps on one batch, and the state after them."""
    scratch = backend.scratch_bytes if backend.takes_scratch else None
    plan = plan_of(precision, memory, CONFIG, HYPER, scratch_bytes=scratch, batch_size=2, seq_len=64)
    engine = engine_of(plan, backend=backend)
    losses = []
    for step in range(1, 5):
        engine.start_step(step, 1e-3)
        engine.micro_step(batch(1, b=2, t=64, vocab=CONFIG.vocab_size))
        losses.append(engine.update(step, 1e-3).loss)
    return losses, {name: array.tobytes() for name, array in engine.state()}


@pytest.mark.parametrize("name", PRECISIONS)
def test_small_states_train_and_are_the_same_wherever_they_live(backend, name):
    expected = trained(backend, PRECISIONS[name], Memory())
    for kind, memory in MEMORIES.items():
        assert trained(backend, PRECISIONS[name], memory) == expected, kind
    losses, _ = trained(HostBackend(), PRECISIONS[name], Memory())
    assert expected[0] == pytest.approx(losses, rel=0.02) and losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("precision", [BF16, FP8["e4m3", "delayed"]], ids=["bf16", "fp8"])
def test_the_mlp_in_tiles_trains_as_the_whole_and_is_made_again_with_the_same_bits(backend, precision):
    tiled = Memory(seq_tiles=4)
    losses, state = trained(backend, precision, tiled)
    for memory in (replace(tiled, flags=("recompute_block",), offload=("residual",)), replace(tiled, host=("grad",))):
        assert trained(backend, precision, memory) == (losses, state)
    assert losses == pytest.approx(trained(backend, precision, Memory())[0], rel=0.02)
