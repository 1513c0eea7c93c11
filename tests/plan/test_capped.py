"""A family's caps of logits and scores, and its multiple of logits: gradients, tokens, readings, an fp8 head."""

import math

import numpy as np
import pytest
from tiny_engines import (
    BF16,
    FP8_HEAD,
    FP64,
    assert_slopes,
    engine_of,
    next_logits,
    parameters,
    plan_of,
    spec_of,
    train_steps,
)

from llmq.backends.host import HostBackend
from llmq.blocks.attention import Heads
from llmq.blocks.cached import Sampling
from llmq.blocks.capped import Capped
from llmq.engine.generate import generate, open_generator
from llmq.engine.reading import ModelReader
from llmq.model.config import FAMILIES, ModelConfig
from llmq.model.families import Family
from llmq.plan.decoding import Decoding
from llmq.plan.reading import plan_reading

CAPS = {"capped": (0.5, 0.75), "multiple": (math.inf, 0.75)}  # of logits, which are up to 3, and a factor


class Other(Family):
    """Scores have a cap, too."""

    cap, factor = CAPS["capped"]

    def heads(self, config):
        return Heads(config.num_heads, config.num_kv_heads, config.head_dim, cap=0.3)

    def reader(self, config, reader):
        return Capped(reader, self.cap, self.factor)


@pytest.fixture(autouse=True, params=CAPS)
def family(request, monkeypatch):
    """That of all models."""
    usual = FAMILIES["Qwen2ForCausalLM"]
    made = Other(usual.model_type, usual.defaults, usual.facts, usual.takes)
    vars(made).update(zip(("cap", "factor"), CAPS[request.param], strict=True))
    monkeypatch.setattr(ModelConfig, "family", made)
    return made


def test_gradients_are_those_of_finite_differences():
    assert_slopes(engine_of(plan_of(FP64)), "layers.0.attention.qkv.weight", "head.norm", "embed.weight")


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_tokens_and_their_log_p_are_those_of_the_capped_logits(penalty, family):
    whole, sampling = engine_of(plan_of(FP64)), Sampling(logprobs=True, repetition_penalty=penalty)
    decoding = Decoding(spec_of(FP64, batch_size=2, seq_len=16), sampling, (8,))
    tokens, seen = [5, 17, 3], 0
    for _, token, logprob in generate(open_generator(decoding, HostBackend(), parameters), [tokens], max_tokens=5):
        logits = next_logits(whole, np.array(tokens))
        assert np.abs(logits).max() < family.cap
        assert logprob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-9)
        seen += token == logits.argmax()
        tokens.append(token)
    assert penalty != 1 or seen == 5


def test_logits_that_are_read_are_the_capped_ones():
    plan = plan_reading(spec_of(FP64))
    reader = ModelReader(plan, HostBackend(), 0)
    reader.load(parameters(plan))
    tokens = np.arange(7, dtype=np.int32)
    read = np.asarray(reader.read_rows("logits", tokens[None]))[0, -1]
    expected = next_logits(engine_of(plan_of(FP64)), tokens)
    np.testing.assert_allclose(read[: len(expected)], expected, atol=1e-12)


def test_an_fp8_head_gets_its_rows_from_the_cap_and_multiples_keep_no_logits(family):
    plan = plan_of(FP8_HEAD)
    calls = plan.programs["only"].calls
    last, loss = (next(call for call in calls if call.op == op) for op in ("softcap_backward", "cross_entropy"))
    assert "e4m3" in {form.dtype for form in last.outputs[0].forms if form} and loss.outputs[0].forms == (None,)
    assert (last.inputs[1] is None) == math.isinf(family.cap)
    fp8, wide = (train_steps(engine_of(plan_of(precision))) for precision in (FP8_HEAD, BF16))
    np.testing.assert_allclose(fp8, wide, rtol=0.02)
