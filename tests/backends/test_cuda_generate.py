"""Generation on the GPU: the reference's tokens in fp32, the same bits each time, captured or not."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import BF16, FP32, parameters, spec_of, tiny

from llmq.backends.opening import open_backend
from llmq.blocks.cached import Sampling
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.engine.generate import Generator, generate, open_generator
from llmq.plan.decoding import Decoding
from llmq.plan.plan import make_plan
from llmq.plan.precision import Precision
from llmq.plan.spec import Completions

pytestmark = pytest.mark.gpu

LENGTH = 200  # several pieces of the cache
PROMPTS = [[5, 17, 3] * 40, [9], list(range(90)), [42, 42], [1, 2, 3, 4, 5, 6]]
WIRINGS = {
    "tied, biased": tiny(head_dim=16, max_position=LENGTH),
    "windows": tiny(head_dim=16, max_position=LENGTH, windows=(None, 70)),
    "qk-norm": tiny(architecture="Qwen3ForCausalLM", head_dim=16, max_position=LENGTH, qk_norm=True, qkv_bias=False),
}
SAMPLED = Sampling(0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=7)


def drawn(device, config=WIRINGS["tied, biased"], precision=FP32, sampling=None, batch_size=5, packed=True, **options):
    """What follows each prompt: tokens, and log p of each."""
    spec = spec_of(precision, config=config, batch_size=batch_size, seq_len=LENGTH)
    decoding = Decoding(spec, sampling or Sampling(), (128, 256), packed)
    generator = open_generator(decoding, open_backend(device, **options), parameters)
    generator.warm_up()
    found = [[] for _ in PROMPTS]
    for index, *token in generate(generator, PROMPTS, max_tokens=70):
        found[index].append(token)
    return found


def texts(*about, **more):
    """The tokens alone."""
    return [[token for token, _ in text] for text in drawn(*about, **more)]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [2, 5])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_the_tokens_are_those_of_the_reference_in_fp32(wiring, batch_size, sampling):
    """With products of our own (up to four sequences) and of cuBLASLt."""
    ours = texts("cuda", WIRINGS[wiring], sampling=sampling, batch_size=batch_size)
    assert ours == texts("cpu", WIRINGS[wiring], sampling=sampling, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [2, 5])
def test_log_p_is_that_of_the_reference_and_changes_no_token(batch_size):
    """Of logits in fp32, which are sums of other orders."""
    scored = {"sampling": replace(SAMPLED, logprobs=True), "batch_size": batch_size}
    ours, reference = (np.array(drawn(device, **scored)) for device in ("cuda", "cpu"))
    np.testing.assert_array_equal(ours[..., 0], reference[..., 0])
    np.testing.assert_allclose(ours[..., 1], reference[..., 1], rtol=0, atol=1e-4)
    assert ours[..., 0].tolist() == texts("cuda", sampling=SAMPLED, batch_size=batch_size)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_tokens_are_repeatable_and_the_same_without_graphs(packed):
    """In bf16, prompts by cuDNN."""
    one, same, eager = (
        texts("cuda", precision=BF16, sampling=SAMPLED, packed=packed, use_graphs=graphs)
        for graphs in (True, True, False)
    )
    assert one == same == eager and all(len(text) == 70 for text in one)


def fp8(scaling: str, **more: str) -> Precision:
    return Precision("bf16", "e4m3", scaling=scaling, **more)


@pytest.mark.parametrize(
    "precision",
    [BF16, fp8("delayed", head="e4m3"), fp8("current"), fp8("rowwise"), fp8("blockwise")],
    ids=["bf16", "delayed", "current", "rowwise", "blockwise"],
)
def test_a_trainer_completes_prompts_between_steps_and_keeps_its_bits(precision):
    """By the matmuls of its recipe; four prompts at a time, with as many rows as a scale per block needs."""
    spec = spec_of(precision, config=WIRINGS["tied, biased"], batch_size=2, seq_len=64)
    states, found = [], []
    for completions in (None, Completions(4, LENGTH, 256, packed=True)):
        backend = open_backend("cuda")
        plan = make_plan(replace(spec, completions=completions), backend.scratch_bytes)
        engine = Engine(plan, backend)
        engine.load(parameters(plan))
        for step in (1, 2, 3):
            tokens = np.random.default_rng(step).integers(0, 97, (2, 64)).astype(np.int32)
            if step == 1:
                engine.warm_up(Batch(tokens, tokens))
            engine.micro_step(Batch(tokens, tokens))
            engine.update(step, 1e-2)
            if completions is not None:
                found.append([token for _, token, _ in generate(Generator.beside(engine), PROMPTS, max_tokens=8)])
        states.append({name: value.tobytes() for name, value in engine.state()})
    assert states[0] == states[1]
    assert all(len(tokens) == 8 * len(PROMPTS) for tokens in found) and found[0] != found[2]
