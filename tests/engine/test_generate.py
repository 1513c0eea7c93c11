"""Generation: a cache gives the logits of the whole forward, whatever lies in the batch; ends, seeds, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from in_process import run_ranks
from ranks import CONFIG, LEVELS
from tiny_engines import (
    BF16,
    FP8,
    FP8_HEAD,
    FP32,
    FP64,
    T,
    batch,
    engine_of,
    next_logits,
    parameters,
    plan_of,
    spec_of,
    tiny,
)

from llmq.adapters.method import NO_ADAPTERS
from llmq.adapters.virtual_tokens import VIRTUAL, Prefix, Prompt
from llmq.backends.host import HostBackend
from llmq.blocks.cached import Sampling
from llmq.data.batches.batch import Batch
from llmq.engine.advice import Limits, refuse_if_too_large
from llmq.engine.engine import Engine
from llmq.engine.generate import Generator, Pace, generate, open_generator, plan_generation
from llmq.errors import MemoryLimitError, UsageError
from llmq.plan.decoding import Decoding
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.spec import Completions
from llmq.stores.sharding import Sharding
from llmq.tensor import stored_bytes

WIRINGS = {
    "tied, biased": tiny(),
    "windows": tiny(windows=(None, 3)),
    "qk-norm": tiny(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False, tie_embeddings=False),
    "learned positions": tiny(architecture="GPT2LMHeadModel", num_kv_heads=4),
}
METHODS = {"none": NO_ADAPTERS, "prefix": Prefix(3), "prompt": Prompt(3)}
PROMPTS = [[5, 17, 3], [9], [1, 2, 3, 4, 5, 6, 7, 8], [42, 42]]


def opened(config=None, sampling=None, precision=FP32, batch_size=3, packed=True, lengths=(T,), **more) -> Generator:
    """A generator with the weights of `tiny_engines`."""
    spec = spec_of(precision, config=config, batch_size=batch_size, seq_len=T, **more)
    decoding = Decoding(spec, sampling or Sampling(), lengths, packed)
    return open_generator(decoding, HostBackend(), parameters)


def texts(generator, prompts=PROMPTS, max_tokens=6, **more) -> list[list[int]]:
    """What follows each prompt."""
    found: list[list[int]] = [[] for _ in prompts]
    for index, token, _ in generate(generator, prompts, max_tokens=max_tokens, **more):
        found[index] += [] if token is None else [token]
    return found


@pytest.mark.sample
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_greedy_tokens_are_those_of_the_whole_forward(wiring, packed, method):
    """Prompts of four lengths in batches of three, read as one row and one by one, with rows of several lengths."""
    config, adapters = WIRINGS[wiring], METHODS[method]
    whole = engine_of(plan_of(FP64, config=config, adapters=adapters))
    generator = opened(config, precision=FP64, packed=packed, lengths=(8, T), adapters=adapters)
    prompts = [[VIRTUAL] * adapters.num_virtual + prompt for prompt in PROMPTS]
    for prompt, text in zip(prompts, texts(generator, prompts, 5), strict=True):
        tokens = [max(token, 0) for token in prompt]
        for token in text:
            assert token == next_logits(whole, np.array(tokens)).argmax()
            tokens.append(token)
        assert len(text) == 5


def test_a_sequence_has_the_same_tokens_in_any_batch():
    """In bf16, which sums nothing in another order either, with every cut and the penalty. Up to four are fused."""
    sampling = Sampling(0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seed=4)
    batches = [texts(opened(sampling=sampling, precision=BF16, batch_size=size)) for size in (1, 4, 5)]
    assert batches[0] == batches[1] == batches[2]


def test_a_token_of_stop_ends_a_text_alone_and_is_left_out():
    whole = texts(opened())
    stop = whole[2][3]
    expected = [text[: text.index(stop)] if stop in text else text for text in whole]
    assert texts(opened(), stop={stop}) == expected != whole
    events = list(generate(opened(), PROMPTS, max_tokens=6, stop={stop}))
    assert [index for index, token, _ in events if token is None] == [i for i, text in enumerate(whole) if stop in text]


def test_the_seed_decides_what_is_drawn_and_the_number_of_a_prompt():
    one, same, other = (texts(opened(sampling=Sampling(1.0, seed=seed))) for seed in (1, 1, 2))
    assert one == same != other
    apart = texts(opened(sampling=Sampling(1.0, seed=1)), [[5, 6], [5, 6]])
    assert apart[0] != apart[1]
    later = texts(opened(sampling=Sampling(1.0, seed=1)), [[5, 6]], numbers=[1])
    assert later[0] == apart[1]


def test_an_index_in_over_ends_a_text_alone_after_its_token():
    whole, over = texts(opened(batch_size=2)), set()
    found: list[list[int]] = [[] for _ in PROMPTS]
    for index, token, _ in generate(opened(batch_size=2), PROMPTS, max_tokens=6, over=over):
        found[index].append(token)
        if index != 1 and len(found[index]) == index + 1:
            over.add(index)
    assert found == [whole[0][:1], whole[1], whole[2][:3], whole[3][:4]]


@pytest.mark.parametrize("precision", [FP64, BF16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("batch_size", [1, 5], ids=["fused", "not fused"])
def test_log_p_is_that_of_the_whole_forward_before_penalty_temperature_and_cuts(precision, batch_size):
    """In bf16 a logit is rounded by up to 1/512 of itself, in each of the two; twice that for what precedes it."""
    sampling = Sampling(0.7, top_k=30, top_p=0.9, repetition_penalty=1.3, seed=5)
    whole = engine_of(plan_of(precision))
    generator = opened(sampling=replace(sampling, logprobs=True), precision=precision, batch_size=batch_size)
    found: list[list[int]] = [[] for _ in PROMPTS]
    for index, token, logprob in generate(generator, PROMPTS, max_tokens=6):
        logits = next_logits(whole, np.array([*PROMPTS[index], *found[index]])).astype(np.float64)
        expected = logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        bound = 1e-9 if precision == FP64 else 4 * np.abs(logits).max() / 256
        assert logprob == pytest.approx(expected, abs=bound)
        found[index].append(token)
    assert found == texts(opened(sampling=sampling, precision=precision, batch_size=batch_size))


def test_without_log_p_a_step_makes_none():
    spec = spec_of(config=tiny(), seq_len=64, batch_size=2)
    silent, scored = (plan_generation(Decoding(spec, Sampling(logprobs=on), (64,))) for on in (False, True))
    calls = [[call.op for call in plan.programs["decode"].calls] for plan in (silent, scored)]
    assert [*calls[0], "cross_entropy"] == calls[1] and "cross_entropy" not in calls[0]
    assert {name for name in scored.persistent if name not in silent.persistent} == {"batch:decode.loss"}
    assert [drawn.logprob for drawn in generate(opened(), PROMPTS[:1], max_tokens=2)] == [None, None]


def test_tokens_are_drawn_in_proportion():
    """2000 first tokens after one prompt: five standard deviations of the share of each."""
    shares = np.zeros(97)
    generator = opened(sampling=Sampling(0.5, seed=3), precision=FP64, batch_size=40)
    for text in texts(generator, [[7, 8, 9]] * 2000, 1):
        shares[text[0]] += 1 / 2000
    logits = next_logits(engine_of(plan_of(FP64)), np.array([7, 8, 9])) / 0.5
    expected = np.exp(logits - logits.max())
    expected /= expected.sum()
    assert (np.abs(shares - expected) <= 5 * np.sqrt(expected * (1 - expected) / 2000) + 1e-3).all()


def test_a_large_penalty_never_repeats_a_token():
    for prompt, text in zip(PROMPTS, texts(opened(sampling=Sampling(repetition_penalty=1e6))), strict=True):
        found = [*prompt[-1:], *text]
        assert len(set(found)) == len(found) and not set(text) & set(prompt)


def test_prompts_that_are_empty_or_too_long_are_refused():
    with pytest.raises(UsageError, match="prompt 2 has no tokens"):
        texts(opened(), [[1], []])
    with pytest.raises(UsageError, match=r"prompt 1 has 12 tokens, which with 5 new ones is more than the 16 of"):
        texts(opened(), [[1] * 12], 5)
    assert len(texts(opened(), [[1] * 12], 4)[0]) == 4


def test_the_course_counts_what_was_made():
    course, generator = Pace(), opened()
    texts(generator, course=course)
    assert (course.prompt_tokens, course.new_tokens, course.steps) == (14, 24, 10)
    config = tiny()
    head = 128 * config.hidden_size * 4
    assert head < generator.weight_bytes < sum(ref.shape[0] * 4 * 200 for ref in generator.plan.weights.values())
    assert "14 prompt tokens, 24 new" in course.line(generator.weight_bytes)


def test_a_plan_holds_weights_a_cache_and_little_else():
    spec = spec_of(config=tiny(), seq_len=64, batch_size=2)
    plan = plan_generation(Decoding(spec, Sampling(), (64,)))
    config = tiny()
    assert plan.table()["Completions"] == 2 * 2 * 64 * 2 * config.num_kv_heads * config.head_dim * 4
    assert {ref.space for ref in plan.persistent.values()} == {"weight", "cache", "batch", "const"}
    refuse_if_too_large(plan, Limits(plan.total_bytes))
    with pytest.raises(MemoryLimitError, match=r"(?s)1\.0 MiB are missing\nUse a smaller .*Weights .*Completions "):
        refuse_if_too_large(plan, Limits(plan.total_bytes - 2**20))


OTHERS = [FP32, BF16, FP8_HEAD, FP8["e4m3", "current"], FP8["e4m3", "rowwise"]]  # with masters of their own


@pytest.mark.parametrize(
    "precision",
    [
        BF16,
        replace(FP8["e4m3", "blockwise"], master="fp32"),
        *(pytest.param(replace(other, master="fp32"), marks=pytest.mark.slow) for other in OTHERS),
    ],
)
def test_what_a_trainer_writes_costs_a_cache_and_changes_nothing(precision):
    """Between steps: the same weights, moments, scales and losses; no weight is there twice, in any form."""
    spec = spec_of(precision, batch_size=2)
    spec = replace(spec, completions=Completions(4, T, 64, packed=True))
    silent, writing = (make_plan(one, HostBackend().scratch_bytes) for one in (replace(spec, completions=None), spec))
    own = {key: ref for key, ref in writing.persistent.items() if key not in silent.persistent}
    assert {ref.space for ref in own.values()} == {"cache", "batch", "const"}
    assert writing.table()["Completions"] == sum(stored_bytes(ref) for ref in own.values() if ref.space == "cache")
    others = silent.table().keys() - {"Other", "Activations", "Workspace"}
    assert all(writing.table()[key] == silent.table()[key] for key in others)
    engines = [Engine(plan, HostBackend(), poison=True) for plan in (silent, writing)]
    rng = np.random.default_rng(1)
    found = []
    for engine in engines:
        engine.load(parameters(engine.plan))
    for step in (1, 2):
        tokens = rng.integers(0, 97, (2, T)).astype(np.int32)
        for engine in engines:
            engine.micro_step(Batch(tokens, tokens, places=np.arange(2)))
            engine.update(step, 1e-2)
        found.append(texts(Generator.beside(engines[1])))
    for key, value in engines[0].state():
        np.testing.assert_array_equal(value.view(np.uint8), dict(engines[1].state())[key].view(np.uint8), key)
    assert found[0] != found[1] and all(len(text) == 6 for text in found[0])


@pytest.mark.parametrize("adapters", [*METHODS.values(), *(Prefix(3, base=base) for base in ("e4m3", "int8"))])
def test_a_trainer_writes_what_a_generator_of_its_weights_writes(adapters):
    engine = engine_of(plan_of(FP32, completions=Completions(3, T, 64, packed=False), adapters=adapters))
    prompts = [[VIRTUAL] * adapters.num_virtual + prompt for prompt in PROMPTS]
    written = texts(Generator.beside(engine), prompts, 5)
    assert written == texts(opened(adapters=adapters), prompts, 5)


@pytest.mark.quick("3-host")
@pytest.mark.sample
@pytest.mark.parametrize("host", [(), ("weight", "master")], ids=["device", "host"])
@pytest.mark.parametrize("level", [1, 3])
def test_ranks_that_share_out_weights_write_what_one_alone_does(level, host):
    """Level 1 gathers weights before the first text after an update, level 3 whenever they are read."""
    completions = Completions(4, T, 64, packed=True)

    def work(world):
        sharding = Sharding(world.rank, world.size, **LEVELS[level])
        engine = engine_of(
            plan_of(FP32, Memory(host=host), CONFIG, sharding=sharding, completions=completions),
            backend=HostBackend(world=world),
        )
        engine.micro_step(batch())  # of every rank alike, so that no sum of theirs is rounded
        engine.update(1, 1e-2)
        return texts(Generator.beside(engine))

    (alone,) = run_ranks(1, work)
    assert run_ranks(2, work) == [alone, alone]
