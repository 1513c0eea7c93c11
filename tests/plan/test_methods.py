"""What holds for every method of adaptation: gradients, what only moves or repeats work, packs, plans for a GPU."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from test_adapters import UNTIED, adapters, warm
from tiny_engines import BF16, EVERY, FP8, FP64, B, T, batch, bits, plan_of, tiny

from llmq.adapters.adalora import AdaLora, Budget, with_triplets
from llmq.adapters.ia3 import Gains, scaled
from llmq.adapters.targets import chosen, targets
from llmq.adapters.virtual_tokens import Prefix, Prompt
from llmq.backends.planned import PlannedBackend
from llmq.blocks.packed import Packing
from llmq.data.batches.batch import Batch
from llmq.model.optimizer import Hyperparameters
from llmq.plan.memory import Memory

COUNT = 3  # virtual tokens
CONFIG = tiny(hidden_size=64, head_dim=16, intermediate_size=128)  # nf4 has blocks of 64 numbers
WIRINGS = {
    "tied, biased": tiny(),
    "windows": tiny(windows=(None, 6)),
    "qk-norm": tiny(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False, tie_embeddings=False),
}
BUDGET = Budget(2, warmup=1, final=1, interval=1, total=4)


def triplets(config, base=None):
    """Adapters whose ranks are chosen after the third step."""
    every = with_triplets(targets(chosen("all", config), 4, 6.0, rslora=False))
    return AdaLora(4, 6.0, every, dropout=0.2, schedule=BUDGET, base=base)


METHODS = {
    "lora": lambda config, base=None: adapters("all", config, dropout=0.2, bias="all", base=base),
    "dora": lambda config, base=None: adapters("all", config, dora=True, dropout=0.2, also="embed_tokens", base=base),
    "adalora": lambda config, base=None: triplets(config, base),
    "ia3": lambda config, base=None: Gains(scaled(chosen("all", config)), base=base),
    "prompt": lambda config, base=None: Prompt(COUNT, base=base),
    "prefix": lambda config, base=None: Prefix(COUNT, base=base),
}
VIRTUAL = ("prompt", "prefix")
PARTS = {"attention.qkv": "qkv", "attention.o": "o", "mlp.up": ("gate", "up"), "mlp.down": ("down",)}


_LOW = [("recompute_ffn", "recompute_norm", "recompute_qkv")]
_VIRTUAL = [("recompute_qkv",), ("recompute_att",)]
RECOMPUTED = {  # beside the block
    **dict.fromkeys(("lora", "dora", "adalora"), _LOW),
    **dict.fromkeys(VIRTUAL, _VIRTUAL),
    "ia3": [("recompute_ffn", "recompute_qkv")],
}


def given(method, index=1):
    """A batch whose rows begin with a method's virtual tokens, and are one document each."""
    one, count = batch(index), method.num_virtual
    tokens, targets = one.tokens.copy(), one.targets.copy()
    tokens[:, :count], targets[:, :count] = 0, -100
    return Batch(tokens, targets, num_virtual=count, places=np.array([2**33 + 5, 17]) + 2 * index)


def trained(engine):
    return [row.name for row in engine.plan.rows if row.trainable]


def steps(engine, count=3, micro_steps=2):
    """Losses of steps."""
    losses, method = [], engine.plan.spec.adapters
    for step in range(1, count + 1):
        engine.start_step(step, 1e-1)
        engine.plan.tracked.before_step(engine, step)
        for n in range(micro_steps):
            engine.micro_step(given(method, 10 * step + n), first=n == 0, last=n == micro_steps - 1)
        losses.append(engine.update(step, 1e-1).loss)
        engine.plan.tracked.after_update(engine, step)
    return losses


def gradient_cases():
    """Methods with the wirings that they depend on."""
    yield "all", tiny(), adapters()
    yield "some", tiny(), adapters("q_proj,v_proj,up_proj", rslora=True)
    yield "dropout", tiny(), adapters("all,lm_head", dropout=0.3, bias="all")
    yield "head", UNTIED, adapters("lm_head,k_proj", UNTIED, dropout=0.1)
    yield "full", tiny(), adapters("attention", ranks={"q_proj": 2, "layers.1.*": 5}, also="embed_tokens,down_proj")
    yield "ia3", tiny(), Gains(scaled(chosen("q_proj,up_proj,o_proj,down_proj", tiny())))
    for method in VIRTUAL:
        yield from ((f"{method}, {name}", config, METHODS[method](config)) for name, config in WIRINGS.items())


@pytest.mark.parametrize(
    ("config", "method"),
    [pytest.param(*one, id=name, marks=pytest.mark.slow if name == "some" else ()) for name, *one in gradient_cases()],
)
def test_gradients_are_those_of_finite_differences(config, method):
    engine = warm(plan_of(FP64, Memory(head_chunks=2), config, adapters=method))
    values = {row.name: engine.parameter(row.name) for row in engine.plan.rows}
    rng, step = np.random.default_rng(0), 1e-5

    def loss(name, change):
        engine.load([(row, values[row.name] + (change if row.name == name else 0)) for row in engine.plan.rows])
        engine.micro_step(given(method))
        result = engine.update(1, 0.0)
        return result.loss * result.num_tokens

    loss("", 0)
    found = {name: engine.gradient(name) for name in trained(engine) if ".0." not in name or ".lora" not in name}
    assert found
    for name, gradient in found.items():
        direction = rng.standard_normal(gradient.shape)
        slope = (loss(name, step * direction) - loss(name, -step * direction)) / (2 * step)
        assert slope == pytest.approx(float(np.sum(gradient * direction)), rel=2e-6), name


@pytest.mark.sample
@pytest.mark.parametrize("name", METHODS)
@EVERY
def test_the_base_is_frozen_and_recomputing_changes_no_bit(precision, name):
    method = METHODS[name](tiny())
    plan = plan_of(precision, adapters=method)
    frozen = {row.name for row in plan.rows if not row.trainable}
    also = {row.name for row in plan_of(precision).rows if row.name in method.also}
    also |= {row.name for row in plan.rows if row.name.endswith(".bias") and name == "lora"}
    assert frozen == {row.name for row in plan_of(precision).rows} - also
    for space in ("grad", "master", "m", "v"):
        assert not [key for key, ref in plan.persistent.items() if ref.space == space and ref.name in frozen]
    written = {out.ref.name for call in plan.programs["only"].calls for out in call.outputs if out is not None}
    assert not frozen & written
    engine = warm(plan)
    before = {row: engine.parameter(row) for row in frozen}
    losses = steps(engine)
    assert len(set(losses)) == 3 and all(np.array_equal(engine.parameter(row), was) for row, was in before.items())
    for flags in (("recompute_block",), *RECOMPUTED[name]):
        other = warm(plan_of(precision, Memory(flags), adapters=method))
        assert steps(other) == losses and bits(other) == bits(engine), flags
    if name == "lora":
        for _ in range(6):
            engine.micro_step(given(method))
            last = engine.update(9, 1e-2).loss
        assert last < losses[0]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("dora", [f"{site}.lora_m.{key}_proj" for site, keys in PARTS.items() for key in keys]),
        ("ia3", [f"{site}.ia3.{key}_proj" for site, keys in PARTS.items() if site != "mlp.down" for key in keys]),
        ("prefix", ["attention.prefix"]),
        ("prompt", []),
    ],
)
def test_what_is_trained_beside_the_model_has_a_row(name, keys):
    """Of vectors without weight decay, in the dtype of statistics."""
    plan = plan_of(BF16, adapters=METHODS[name](tiny()))
    own = [row for row in plan.rows if row.trainable and row.file == "adapter" and ".lora_a" not in row.name]
    own = [row for row in own if ".lora_b" not in row.name]
    wanted = {f"layers.{layer}.{key}" for layer in (0, 1) for key in keys} or {"embed.prompt"}
    assert {row.name for row in own if ".down." not in row.name or name == "dora"} == wanted
    if name in ("dora", "ia3"):
        assert not any(row.decay for row in own)
        assert {plan.persistent[f"weight:{row.name}"].dtype for row in own} == {BF16.stat}


MOVES = {
    "recomputed": Memory(("recompute_block",)),
    "residual": Memory(offload=("residual",)),
    "states": Memory(host=("master", "m", "v")),
    "zero copy": Memory(host=("master", "m", "v"), zero_copy=True),
    "gradients": Memory(host=("grad",)),
    "streamed": Memory(host=("weight", "master", "m", "v")),
    "fused": Memory(fused=True),
}
PRECISIONS = {"bf16": BF16, "delayed": FP8["e4m3", "delayed"], "current": FP8["e4m3", "current"]}
OFTEN = (("streamed", "lora", "nf4", "bf16"), ("fused", "dora", None, "bf16"), ("residual", "ia3", "nf4", "bf16"))


def moved():
    """Moves of bytes with methods, bases and precisions; delayed scales are known at the end of a fused step."""
    for move in MOVES:
        for base in (None, "nf4"):
            for kind in PRECISIONS if move != "fused" else ("bf16", "current"):
                yield from ((move, name, base, kind) for name in METHODS if name not in VIRTUAL)
        yield from ((move, name, None, "bf16") for name in VIRTUAL)
    yield from (("tiles", name, None, "bf16") for name in VIRTUAL)


@pytest.mark.sample("sweep", by=2)
@pytest.mark.parametrize(
    ("move", "name", "base", "kind"),
    [pytest.param(*one, marks=() if one in OFTEN or one[1] in VIRTUAL else pytest.mark.slow) for one in moved()],
)
def test_what_moves_bytes_changes_no_bit(move, name, base, kind):
    config = tiny() if move == "tiles" else CONFIG
    method, found = METHODS[name](config, base), []
    for memory in (Memory(), {**MOVES, "tiles": Memory(seq_tiles=2)}[move]):
        about = {"hyper": Hyperparameters(grad_clip=0.0), "adapters": method, "config": config}
        engine = warm(plan_of(PRECISIONS[kind], memory, **about))
        found.append((steps(engine, micro_steps=1), [engine.parameter(row).tobytes() for row in trained(engine)]))
    assert found[0] == found[1] and len(set(found[0][0])) == 3


PACKED = [(name, wiring) for name in METHODS for wiring in (WIRINGS if name in VIRTUAL else ["tied, biased"])]


@pytest.mark.parametrize(("name", "wiring"), PACKED)
def test_a_pack_is_the_sum_of_its_documents(name, wiring):
    """Each begins with the virtual tokens, and sees those alone."""
    config = WIRINGS[wiring]
    method = replace(METHODS[name](config), **({"dropout": 0.0} if hasattr(METHODS[name](config), "dropout") else {}))
    one, borders, about = (
        batch(),
        np.array([[0, 4, 10, T], [0, 9, T, T]], np.int32),
        {"adapters": method, "config": config},
    )
    tokens, targets = one.tokens.copy(), one.targets.copy()
    for row, marks in enumerate(borders):
        targets[row, marks[1:] - 1] = -100
        for start in marks[marks < T]:
            led = slice(start, start + method.num_virtual)
            tokens[row, led], targets[row, led] = 0, -100
    packed, alone = warm(plan_of(FP64, packing=Packing(3, 9), **about)), warm(plan_of(FP64, **about))
    packed.micro_step(Batch(tokens, targets, borders))
    whole, losses, number = packed.evaluate(Batch(tokens, targets, borders)), np.zeros(2), 0
    for row, marks in enumerate(borders):
        for start, stop in pairwise(marks):
            if start < stop:
                rows, aims = np.zeros((B, T), np.int32), np.full((B, T), -100, np.int32)
                rows[0, : stop - start], aims[0, : stop - start] = tokens[row, start:stop], targets[row, start:stop]
                losses += alone.evaluate(Batch(rows, aims))
                alone.micro_step(Batch(rows, aims), first=number == 0)
                number += 1
    assert number == 5 and whole == pytest.approx(tuple(losses), rel=1e-14)
    for row in trained(alone):
        expected = alone.gradient(row)
        bound = 1e-13 if name in VIRTUAL else 1e-12
        assert np.linalg.norm(packed.gradient(row) - expected) <= bound * np.linalg.norm(expected), row


@pytest.mark.sample
@pytest.mark.parametrize("name", [*METHODS, "head"])
@pytest.mark.parametrize("precision", [BF16, FP8["e4m3", "delayed"], FP8["e4m3", "rowwise"], FP8["e5m2", "blockwise"]])
def test_they_can_be_planned_for_a_gpu(precision, name):
    config = tiny(hidden_size=256, head_dim=64, intermediate_size=384)
    low = {"rank": 16, "dropout": 0.1}
    for base in (None, "e4m3", "int8", "nf4", "mxfp4"):
        method = METHODS.get(name, METHODS["lora"])(config, base)
        if name in ("lora", "head"):
            method = adapters("all,lm_head" if name == "head" else "all", config, base=base, **low)
        if name == "dora":
            method = adapters("q_proj,v_proj,mlp", config, dora=True, base=base, **low)
        about = {"packing": Packing(4, T)} if name in VIRTUAL else {}
        plan_of(precision, config=config, adapters=method, scratch_bytes=PlannedBackend().scratch_bytes, **about)
