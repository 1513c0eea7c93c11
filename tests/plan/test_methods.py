"""What holds for every method of adaptation: gradients, what moves or repeats work, bases, packs, plans for a GPU."""

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from test_adapters import UNTIED, adapters, placed, steps, warm
from tiny_engines import BF16, EVERY, FP8, FP32, FP64, SCALINGS, B, T, batch, bits, plan_of, tiny

from llmq.adapters.adalora import AdaLora, with_triplets
from llmq.adapters.ia3 import Gains, scaled
from llmq.adapters.importance import Budget
from llmq.adapters.method import NO_ADAPTERS
from llmq.adapters.targets import chosen, targets
from llmq.adapters.virtual_tokens import Prefix, Prompt
from llmq.backends.planned import PlannedBackend
from llmq.blocks.packed import Packing
from llmq.data.batches.batch import Batch
from llmq.model.optimizer import Hyperparameters
from llmq.plan.memory import Memory
from llmq.plan.spec import Regularization
from llmq.tensor import stored_bytes

COUNT = 3  # virtual tokens
NOISE = Regularization(neftune_alpha=5.0)
CONFIG = tiny(hidden_size=64, head_dim=16, intermediate_size=128)  # nf4 has blocks of 64 numbers
WIRINGS = {
    "tied, biased": tiny(),
    "windows": tiny(windows=(None, 6)),
    "qk-norm": tiny(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False, tie_embeddings=False),
    "learned positions": tiny(architecture="GPT2LMHeadModel", num_kv_heads=4),
}
BUDGET = Budget(2, warmup=1, final=1, interval=1, total=4)


def triplets(config, base=None, text="all", budget=BUDGET, dropout=0.2):
    """Adapters whose ranks are chosen after the second and the third step."""
    every = with_triplets(targets(chosen(text, config), 4, 6.0, rslora=False))
    return AdaLora(4, 6.0, every, dropout=dropout, schedule=budget, base=base)


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


def trained(engine):
    return [row.name for row in engine.plan.rows if row.trainable]


def apart(p):
    """How far the rows of a matrix are from orthonormal."""
    return np.linalg.norm(p @ p.T - np.eye(len(p)))


def regulariser(values, method):
    """What AdaLoRA adds to the mean loss, of parameters by name."""
    total = 0.0
    for site, its in method.by_site.items():
        for index, target in enumerate(its):
            total += apart(values[f"{site}.lora_a"][index * method.rank : (index + 1) * method.rank])
            total += apart(values[f"{site}.lora_b.{target.module.key}"].T)
    return method.schedule.orth_reg * total / (2 * len(method.targets))


def gradient_cases():
    """Methods with the wirings that they depend on, and noise, which gradients pass."""
    yield "all", tiny(), {"adapters": adapters()}
    yield "some", tiny(), {"adapters": adapters("q_proj,v_proj,up_proj", rslora=True)}
    yield "dropout", tiny(), {"adapters": adapters("all,lm_head", dropout=0.3, bias="all")}
    yield "head", UNTIED, {"adapters": adapters("lm_head,k_proj", UNTIED, dropout=0.1)}
    full = {"ranks": {"q_proj": 2, "layers.1.*": 5}, "also": "embed_tokens,down_proj"}
    yield "full", tiny(), {"adapters": adapters("attention", **full)}
    yield "adalora", tiny(), {"adapters": triplets(tiny(), text="q_proj,up_proj,lm_head")}
    yield "ia3", tiny(), {"adapters": Gains(scaled(chosen("q_proj,up_proj,o_proj,down_proj", tiny())))}
    yield "noise", UNTIED, {"regularization": NOISE}
    for method in VIRTUAL:
        wirings = WIRINGS.items()
        yield from ((f"{method}, {name}", config, {"adapters": METHODS[method](config)}) for name, config in wirings)


@pytest.mark.parametrize(
    ("config", "about"),
    [pytest.param(*one, id=name, marks=pytest.mark.slow if name == "some" else ()) for name, *one in gradient_cases()],
)
def test_gradients_are_those_of_finite_differences(config, about):
    engine = warm(plan_of(FP64, Memory(head_chunks=2), config, **about))
    values, method = {row.name: engine.parameter(row.name) for row in engine.plan.rows}, engine.plan.spec.adapters
    rng, step, parts = np.random.default_rng(0), 1e-5, 1 + isinstance(method, AdaLora)

    def loss(name, change):
        now = {key: value + (change if key == name else 0) for key, value in values.items()}
        engine.load([(row, now[row.name]) for row in engine.plan.rows])
        for part in range(parts):
            engine.micro_step(placed(part, method.num_virtual), first=part == 0, last=part == parts - 1)
        result = engine.update(1, 0.0)
        return result.num_tokens * (result.loss + (regulariser(now, method) if isinstance(method, AdaLora) else 0))

    loss("", 0)
    found = {name: engine.gradient(name) for name in trained(engine) if ".0." not in name or ".lora" not in name}
    assert found
    for name, gradient in found.items():
        direction = rng.standard_normal(gradient.shape)
        slope = (loss(name, step * direction) - loss(name, -step * direction)) / (2 * step)
        assert slope == pytest.approx(float(np.sum(gradient * direction)), rel=2e-6), name


@pytest.mark.sample("sweep")  # every method with every kind of scaling is among the bases below
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
    losses = steps(engine, 3)
    assert len(set(losses)) == 3 and all(np.array_equal(engine.parameter(row), was) for row, was in before.items())
    for flags in (("recompute_block",), *RECOMPUTED[name]):
        other = warm(plan_of(precision, Memory(flags), adapters=method))
        assert steps(other, 3) == losses and bits(other) == bits(engine), flags


OF_BASES = {"fp32": FP32, "bf16": BF16, **{scaling: FP8["e4m3", scaling] for scaling in SCALINGS}}
FEW_BITS = ("e4m3", "int8", "nf4", "mxfp4")
OFTEN_BASES = (("lora", "bf16", "nf4"), ("ia3", "current", "e4m3"), ("prompt", "delayed", "mxfp4"))
OFTEN_BASES += (("prefix", "fp32", "int8"), ("adalora", "rowwise", "nf4"))


@pytest.mark.sample("sweep", by=2)
@pytest.mark.parametrize(
    ("name", "kind", "base"),
    [
        pytest.param(*one, marks=() if one in OFTEN_BASES else pytest.mark.slow)
        for one in product(METHODS, OF_BASES, FEW_BITS)
    ],
)
def test_a_base_in_few_bits_is_held_once_and_is_what_it_means(name, kind, base):
    """A run on the values that it means has the same bits: fp8 copies are made of them, with the same scales."""
    precision = OF_BASES[kind]
    plan, plain = (plan_of(precision, adapters=METHODS[name](tiny(), one)) for one in (base, None))
    held = {row.name: row.stored for row in plan.rows if row.stored}
    frozen = {row.name for row in plain.rows if row.layer is not None and row.name.endswith("weight")}
    assert set(held) == frozen
    stores = [ref for ref in plan.persistent.values() if ref.space == "weight" and ref.name in held]
    assert {ref.name: ref.form for ref in stores} == held and len(stores) == len(held)
    assert {ref.form.dtype for ref in stores} == {base}
    a_byte = 1 if base in ("e4m3", "int8") else 2  # numbers of it
    assert all(stored_bytes(ref) * a_byte == math.prod(plan.shape(ref.name)) for ref in stores)
    assert not [key for key in plan.state() if any(row in key for row in held)]
    engine = warm(plan)
    losses = steps(engine)
    block = warm(plan_of(precision, Memory(("recompute_block",)), adapters=plan.spec.adapters))
    assert steps(block) == losses and bits(block) == bits(engine)
    wide = steps(warm(plain))
    assert (losses != wide or base == "e4m3") and losses == pytest.approx(wide, rel=0.03)
    same = steps(warm(plain, {row: engine.parameter(row) for row in held}))
    # Delayed scales of activations settle in other passes where those of weights are known from the beginning, and
    # bytes of e4m3 that are read directly have scales of their own.
    is_near = kind == "delayed" or (base == "e4m3" and precision.matmul == "e4m3")
    assert same == (pytest.approx(losses, rel=1e-2) if is_near else losses)


SPLIT = {name: {"adapters": method(tiny())} for name, method in METHODS.items()}
SPLIT |= {"head": {"adapters": adapters("all,lm_head", dropout=0.3)}, "noise": {"regularization": NOISE}}


@pytest.mark.parametrize("name", SPLIT)
def test_a_batch_is_the_sum_of_its_samples_in_any_split(name):
    """Dropout, noise and the regulariser go by sample and token, not by the batch or the chunk that these are in."""
    whole, split = (
        warm(plan_of(FP64, Memory(head_chunks=chunks), batch_size=size, **SPLIT[name]))
        for chunks, size in ((1, 2), (4, 1))
    )
    one = placed(1, whole.plan.spec.adapters.num_virtual)
    whole.micro_step(one)
    for row in range(B):
        cut = slice(row, row + 1)
        piece = Batch(one.tokens[cut], one.targets[cut], places=one.places[cut])
        split.micro_step(piece, first=row == 0, last=row == B - 1)
    for row in trained(whole):
        np.testing.assert_allclose(split.gradient(row), whole.gradient(row), rtol=1e-8, atol=1e-12)
    assert split.update(1, 0.0).loss == pytest.approx(whole.update(1, 0.0).loss, rel=1e-12)


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
    yield from (("recomputed", "noise", None, kind) for kind in ("bf16", "delayed"))


@pytest.mark.quick(
    "streamed-lora*",
    "fused-dora*",
    "residual-ia3*",
    "recomputed-prefix*",
    "states-prompt*",
    "tiles-prompt*",
    "fused-prefix*",
)
@pytest.mark.sample("sweep", by=2)
@pytest.mark.parametrize(
    ("move", "name", "base", "kind"),
    [
        pytest.param(*one, marks=() if one in OFTEN or one[1] in (*VIRTUAL, "noise") else pytest.mark.slow)
        for one in moved()
    ],
)
def test_what_moves_bytes_changes_no_bit(move, name, base, kind):
    config = tiny() if move == "tiles" else CONFIG
    own, found = {"regularization": NOISE} if name == "noise" else {"adapters": METHODS[name](config, base)}, []
    for memory in (Memory(), {**MOVES, "tiles": Memory(seq_tiles=2)}[move]):
        about = {"hyper": Hyperparameters(grad_clip=0.0), "config": config, **own}
        engine = warm(plan_of(PRECISIONS[kind], memory, **about))
        found.append((steps(engine, 3, 1, rate=1e-1), [engine.parameter(row).tobytes() for row in trained(engine)]))
    assert found[0] == found[1] and len(set(found[0][0])) == 3


PACKED = [(name, wiring) for name in METHODS for wiring in (WIRINGS if name in VIRTUAL else ["tied, biased"])]
PACKED += [("none", wiring) for wiring in WIRINGS]


@pytest.mark.quick("lora-*", "adalora-*", "ia3-*", "prompt-tied*", "prefix-windows")
@pytest.mark.parametrize(("name", "wiring"), PACKED)
def test_a_pack_is_the_sum_of_its_documents(name, wiring):
    """Each begins with the virtual tokens, and sees those alone."""
    config = WIRINGS[wiring]
    method = NO_ADAPTERS if name == "none" else METHODS[name](config).without_dropout()
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
    whole, losses, number = packed.evaluate(Batch(tokens, targets, borders)), np.zeros(3), 0
    for row, marks in enumerate(borders):
        for start, stop in pairwise(marks):
            if start < stop:
                rows, aims = np.zeros((B, T), np.int32), np.full((B, T), -100, np.int32)
                rows[0, : stop - start], aims[0, : stop - start] = tokens[row, start:stop], targets[row, start:stop]
                losses += alone.evaluate(Batch(rows, aims))
                alone.micro_step(Batch(rows, aims), first=number == 0)
                number += 1
    assert number == 5 and whole == pytest.approx(tuple(losses), rel=1e-14)
    mixed = alone.evaluate(Batch(tokens, targets))[0]
    assert abs(mixed - whole[0]) > 1e-3 * whole[0], "documents that see each other have another loss"
    for row in trained(alone):
        expected = alone.gradient(row)
        bound = 1e-13 if name in (*VIRTUAL, "none") else 1e-12
        assert np.linalg.norm(packed.gradient(row) - expected) <= bound * np.linalg.norm(expected), row


@pytest.mark.quick("*0-lora", "*1-adalora", "*3-prefix")
@pytest.mark.sample("sweep")
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


@pytest.mark.parametrize("name", VIRTUAL)
def test_nothing_depends_on_the_tokens_at_virtual_places(name):
    engine, one = warm(plan_of(FP32, adapters=METHODS[name](tiny()))), placed(1, COUNT)
    other = replace(one, tokens=np.where(np.arange(T) < COUNT, 42, one.tokens).astype(np.int32))
    assert engine.evaluate(one) == engine.evaluate(other) != warm(plan_of(FP32)).evaluate(one)
    gradients = []
    for found in (one, other):
        engine.micro_step(found)
        gradients.append([engine.gradient(row) for row in trained(engine)])
    assert all(np.array_equal(a, b) for a, b in zip(*gradients, strict=True))


def test_nothing_else_is_computed_for_a_prefix():
    """The gradient of the first layer's input is read by nothing, so that its qkv has no backward pass."""
    program = plan_of(FP32, adapters=Prefix(COUNT)).programs["only"]
    ops = [call.op for call in program.calls]
    assert ops.count("virtual_tokens_forward") == ops.count("virtual_tokens_backward") == 2
    assert ops.count("rope_backward") == 1 and "linear_wgrad" not in ops and "embedding_backward" not in ops
    shared = [c for c in program.calls if c.op == "virtual_tokens_forward"]
    names = [(c.outputs[0].ref.name, c.inputs[0].name) for c in shared]
    assert len(names) == 2 and all(program.places[out] is program.places[given] for out, given in names)
