"""Adapters on the GPU: the gradients of the NumPy reference, and the same bits whatever is recomputed."""

from functools import partial

import numpy as np
import pytest
from tiny_engines import BF16, FP8, FP32, bits, placed_batch, plan_of, tiny
from tiny_engines import engine_of as loaded

from llmq.adapters.adalora import AdaLora, with_triplets
from llmq.adapters.ia3 import Gains, scaled
from llmq.adapters.importance import KEPT, Budget
from llmq.adapters.lora import Lora
from llmq.adapters.targets import chosen, targets
from llmq.adapters.virtual_tokens import Prefix, Prompt
from llmq.backends.host import HostBackend
from llmq.model import held
from llmq.plan.memory import Memory
from llmq.plan.names import scale_ref, storage_name

pytestmark = pytest.mark.gpu
CONFIG = tiny(hidden_size=256, head_dim=64, intermediate_size=384, vocab_size=1000)
SIZES = {"batch_size": 4, "seq_len": 128}
placed = partial(placed_batch, b=4, t=128, vocab=1000)
PRECISIONS = {"fp32": FP32, "bf16": BF16, **{f"{g}-{s}": p for (g, s), p in FP8.items() if g == "e4m3"}}
CASES = [(name, base) for name in PRECISIONS for base in (None, "e4m3", "nf4")]
CASES += [(name, base) for name in ("bf16", "e4m3-current") for base in ("int8", "mxfp4")]
# Two sums of the same products in e4m3 round some values apart; the reference in e4m3 and in fp32: a cosine of 0.88.
FOLLOWS = {"fp32": 0.99999, "bf16": 0.99}
KINDS = {
    "ia3": {"text": "k_proj,v_proj,up_proj,down_proj", "make": Gains},
    "dora": {"text": "q_proj,v_proj,mlp", "dropout": 0.2, "dora": True},
    "adalora": {"text": "q_proj,v_proj,mlp", "dropout": 0.2, "schedule": Budget(8, total=4)},
    "all": {"text": "all"},
    # as a pattern, EVA or the first gradients may choose them; alpha / rank of 32 would make bf16 differ from fp32
    "odd ranks": {
        "text": "all",
        "alpha": 4.0,
        "ranks": {"q_proj": 3, "k_proj": 1, "up_proj": 5, "o_proj": 7, "down_proj": 33},
    },
    "prefix": {"make": Prefix},
    "prompt": {"make": Prompt},
    "some": {"text": "q_proj,up_proj,lm_head", "dropout": 0.2},
}


def engine_of(backend, precision, base, memory=None, *, text="all", alpha=32.0, ranks=None, make=Lora, **more):
    """An engine with settled scales."""
    every = targets(chosen(text, CONFIG), 16, alpha, rslora=False, ranks=ranks)
    if make is Gains:
        about = Gains(scaled(chosen(text, CONFIG)), base=base)
    elif make is not Lora:
        about = make(5, base=base)
    elif "schedule" in more:
        about = AdaLora(16, alpha, with_triplets(every), bias="all", base=base, **more)
    else:
        about = Lora(16, alpha, every, bias="all", base=base, **more)
    plan = plan_of(precision, memory, CONFIG, scratch_bytes=backend.scratch_bytes, adapters=about, **SIZES)
    return loaded(plan, backend=backend, warm=placed(0))


def gradients(engine):
    """Of one micro-batch, as one vector, with the loss."""
    engine.micro_step(placed(1))
    found = [engine.gradient(row.name).astype(np.float64).ravel() for row in engine.plan.rows if row.trainable]
    return np.concatenate(found), engine.update(1, 0.0).loss


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "base"), CASES)
def test_gradients_are_those_of_the_reference(backend, name, base, kind):
    precision = PRECISIONS[name]
    ours, right = (gradients(engine_of(one, precision, base, **KINDS[kind])) for one in (backend, HostBackend()))
    cosine = ours[0] @ right[0] / (np.linalg.norm(ours[0]) * np.linalg.norm(right[0]))
    assert cosine > FOLLOWS.get(name, 0.97)
    assert ours[1] == pytest.approx(right[1], rel=1e-4 if name == "fp32" else 2e-2)


@pytest.mark.parametrize("name", ["bf16", "e4m3-current", "e4m3-delayed", "e4m3-rowwise"])
@pytest.mark.parametrize("base", ["e4m3", "int8", "nf4", "mxfp4"])
def test_what_is_held_has_the_bytes_that_the_host_makes(backend, monkeypatch, name, base):
    """With its scales, and those of fp8 copies of it; each row in several slices."""
    monkeypatch.setattr(held, "SLICE_BYTES", 2**17)
    engines = [engine_of(one, PRECISIONS[name], base) for one in (backend, HostBackend())]
    plan, found = engines[0].plan, []
    for engine in engines:
        refs = [ref for ref in plan.weights.values() if ref.form is not None]
        refs += [cell for ref in refs for cell in (scale_ref(ref), *plan.known_scales(ref))]
        found.append({storage_name(ref): engine.read(ref).tobytes() for ref in refs})
    assert found[0] == found[1] and len(found[0]) >= 16


@pytest.mark.parametrize("kind", ["some", "odd ranks", "dora", "ia3", "adalora", "prefix", "prompt"])
@pytest.mark.parametrize(("name", "base"), CASES)
def test_recomputing_changes_no_bit(backend, name, base, kind):
    found = []
    for memory in (Memory(), Memory(("recompute_block",))):
        engine = engine_of(backend, PRECISIONS[name], base, memory, **KINDS[kind])
        losses = []
        for step in range(1, 4):
            for micro_step in range(2):
                engine.micro_step(placed(2 * step + micro_step), first=micro_step == 0, last=micro_step == 1)
            losses.append(engine.update(step, 1e-2).loss)
        found.append((losses, bits(engine)))
    assert found[0] == found[1]


def test_singular_values_score_as_on_the_reference_and_are_masked(backend):
    found = []
    for one in (backend, HostBackend()):
        engine = engine_of(one, FP32, None, **KINDS["adalora"])
        for step in range(1, 4):
            engine.micro_step(placed(step))
            engine.update(step, 1e-3)
        engine.run("measure")
        importance = engine.plan.tracked
        found.append(importance.scores(engine.read(importance.total)))
        flags = np.arange(importance.num_triplets) % 3 > 0
        engine.write(importance.cells[KEPT], importance.cell_of(flags))
        engine.change("mask")
        assert np.array_equal(importance.kept(engine), flags)
        values = np.concatenate([engine.parameter(row.name) for row in importance.values])
        assert np.array_equal(values != 0, flags)
    ours, right = found
    assert ours @ right > 0.999 * np.linalg.norm(ours) * np.linalg.norm(right)
