"""Generation on the GPU: the reference's tokens in fp32, the same bits each time, captured or not."""

import pytest
from tiny_engines import BF16, FP32, parameters, spec_of, tiny

from llmq.backends import open_backend
from llmq.blocks.cached import Sampling
from llmq.engine.generate import generate, open_generator
from llmq.plan.decoding import Decoding

pytestmark = pytest.mark.gpu

LENGTH = 200  # several pieces of the cache
PROMPTS = [[5, 17, 3] * 40, [9], list(range(90)), [42, 42], [1, 2, 3, 4, 5, 6]]
WIRINGS = {
    "tied, biased": tiny(head_dim=16, max_position=LENGTH),
    "windows": tiny(head_dim=16, max_position=LENGTH, windows=(None, 70)),
    "qk-norm": tiny(architecture="Qwen3ForCausalLM", head_dim=16, max_position=LENGTH, qk_norm=True, qkv_bias=False),
}
SAMPLED = Sampling(0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=7)


def texts(device, config=WIRINGS["tied, biased"], precision=FP32, sampling=None, batch_size=5, packed=True, **options):
    """What follows each prompt."""
    spec = spec_of(precision, config=config, batch_size=batch_size, seq_len=LENGTH)
    decoding = Decoding(spec, sampling or Sampling(), (128, 256), packed)
    generator = open_generator(decoding, open_backend(device, **options), parameters)
    generator.warm_up()
    found = [[] for _ in PROMPTS]
    for index, token in generate(generator, PROMPTS, max_tokens=70):
        found[index].append(token)
    return found


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [2, 5])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_the_tokens_are_those_of_the_reference_in_fp32(wiring, batch_size, sampling):
    """With products of our own (up to four sequences) and of cuBLASLt."""
    ours = texts("cuda", WIRINGS[wiring], sampling=sampling, batch_size=batch_size)
    assert ours == texts("cpu", WIRINGS[wiring], sampling=sampling, batch_size=batch_size)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_tokens_are_repeatable_and_the_same_without_graphs(packed):
    """In bf16, prompts by cuDNN."""
    one, same, eager = (
        texts("cuda", precision=BF16, sampling=SAMPLED, packed=packed, use_graphs=graphs)
        for graphs in (True, True, False)
    )
    assert one == same == eager and all(len(text) == 70 for text in one)
