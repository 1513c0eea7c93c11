"""Virtual tokens in the plan: gradients, recompute, packed documents, bases in few bits, what is written with them."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import BF16, FP8, FP32, FP64, B, T, batch, engine_of, next_logits, parameters, plan_of, spec_of, tiny

from llmq.adapters.virtual_tokens import VIRTUAL, Prefix, Prompt
from llmq.backends.host import HostBackend
from llmq.blocks.cached import Sampling
from llmq.data.batches.batch import Batch
from llmq.engine.generate import Generator, generate, open_generator
from llmq.plan.decoding import Decoding
from llmq.plan.memory import Memory
from llmq.plan.spec import Completions

COUNT = 3
OFTEN = [("fp32", "int8"), ("bf16", "nf4"), ("delayed", "mxfp4"), ("rowwise", "e4m3")]
METHODS = pytest.mark.parametrize("method", ["prefix", "prompt"])
WIRINGS = {
    "tied, biased": tiny(),
    "windows": tiny(windows=(None, 6)),
    "qk-norm": tiny(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False, tie_embeddings=False),
}


def adapters(method, **about):
    return {"prompt": Prompt, "prefix": Prefix}[method](COUNT, **about)


def led(index=1):
    """A batch of one document to a row."""
    one = batch(index)
    tokens, targets = one.tokens.copy(), one.targets.copy()
    tokens[:, :COUNT], targets[:, :COUNT] = 0, -100
    return Batch(tokens, targets, num_virtual=COUNT, places=np.arange(B))


def steps(engine, count=2):
    """Losses of steps of two micro-steps."""
    losses = []
    for step in range(1, count + 1):
        for micro_step in range(2):
            engine.micro_step(led(10 * step + micro_step), first=micro_step == 0, last=micro_step == 1)
        losses.append(engine.update(step, 1e-1).loss)
    return losses


def trained(engine):
    return [row.name for row in engine.plan.rows if row.trainable]


@pytest.mark.sample
@METHODS
@pytest.mark.parametrize(
    ("kind", "base"),
    [
        pytest.param(kind, base, marks=() if (kind, base) in OFTEN else pytest.mark.slow)
        for kind in ("fp32", "bf16", "delayed", "rowwise")
        for base in ("e4m3", "int8", "nf4", "mxfp4")
    ],
)
def test_a_base_in_few_bits_is_what_it_stands_for(method, base, kind):
    precision = {"fp32": FP32, "bf16": BF16}.get(kind) or FP8["e4m3", kind]
    engine = engine_of(plan_of(precision, adapters=adapters(method, base=base)))
    plain = engine_of(plan_of(precision, adapters=adapters(method)))
    plain.load([(row, engine.parameter(row.name)) for row in plain.plan.rows])
    found, wide = steps(engine), steps(plain)
    assert found == wide if kind in ("fp32", "bf16") else found == pytest.approx(wide, rel=1e-2)


@METHODS
def test_nothing_depends_on_the_tokens_at_their_places(method):
    engine = engine_of(plan_of(FP32, adapters=adapters(method)))
    one = led()
    other = replace(one, tokens=np.where(np.arange(T) < COUNT, 42, one.tokens).astype(np.int32))
    assert engine.evaluate(one) == engine.evaluate(other)
    assert engine.evaluate(one) != engine_of(plan_of(FP32)).evaluate(one)
    gradients = []
    for found in (one, other):
        engine.micro_step(found)
        gradients.append([engine.gradient(name) for name in trained(engine)])
    assert all(np.array_equal(a, b) for a, b in zip(*gradients, strict=True))


@METHODS
def test_batches_and_chunks_add_up(method):
    about = {"adapters": adapters(method)}
    whole = engine_of(plan_of(FP64, **about))
    split = engine_of(plan_of(FP64, Memory(head_chunks=2), batch_size=1, **about))
    one = led()
    whole.micro_step(one)
    for row in range(B):
        piece = Batch(one.tokens[row : row + 1], one.targets[row : row + 1])
        split.micro_step(piece, first=row == 0, last=row == B - 1)
    for name in trained(whole):
        np.testing.assert_allclose(split.gradient(name), whole.gradient(name), rtol=1e-10, atol=1e-14)


def test_nothing_else_is_computed_for_a_prefix():
    """The gradient of the first layer's input is read by nothing, so that its qkv has no backward pass."""
    plan = plan_of(FP32, adapters=adapters("prefix"))
    ops = [call.op for call in plan.programs["only"].calls]
    assert ops.count("virtual_tokens_forward") == ops.count("virtual_tokens_backward") == 2
    assert ops.count("rope_backward") == 1 and "linear_wgrad" not in ops and "embedding_backward" not in ops
    shared = [c for c in plan.programs["only"].calls if c.op == "virtual_tokens_forward"]
    places = plan.programs["only"].places
    names = [(c.outputs[0].ref.name, c.inputs[0].name) for c in shared]
    assert len(names) == 2 and all(places[out] is places[given] for out, given in names)


PROMPTS = [[5, 17, 3], [9], [1, 2, 3, 4], [42, 42]]


def texts(generator):
    found = [[] for _ in PROMPTS]
    prompts = [[VIRTUAL] * COUNT + prompt for prompt in PROMPTS]
    for index, token, _ in generate(generator, prompts, max_tokens=5):
        found[index].append(token)
    return found


@pytest.mark.sample
@METHODS
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_greedy_tokens_are_those_of_the_whole_forward(wiring, packed, method):
    about = {"config": WIRINGS[wiring], "adapters": adapters(method)}
    engine = engine_of(plan_of(FP64, **about))
    decoding = Decoding(spec_of(FP64, batch_size=3, **about), Sampling(), (T,), packed)
    generator = open_generator(decoding, HostBackend(), parameters)
    for prompt, text in zip(PROMPTS, texts(generator), strict=True):
        tokens = [0] * COUNT + prompt
        for token in text:
            assert token == next_logits(engine, np.array(tokens)).argmax()
            tokens.append(token)


@METHODS
def test_a_trainer_writes_with_them(method):
    about = {"adapters": adapters(method)}
    engine = engine_of(plan_of(FP32, completions=Completions(4, T, 64, packed=True), **about))
    before = texts(Generator.beside(engine))
    for _ in range(4):
        steps(engine, 3)
    assert texts(Generator.beside(engine)) != before
