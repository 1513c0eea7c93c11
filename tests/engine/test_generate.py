"""Tokens after a prompt: the likeliest one, or drawn in proportion, addressed by the seed."""

import numpy as np

from llmq.engine.generate import complete


class Counter:
    """A model whose next token is mostly one more than the last, modulo 5, and 2 in 10 times the same again."""

    def next_logits(self, tokens):
        """Logits (5,) f32."""
        logits = np.full(5, -np.inf, np.float32)
        logits[tokens[-1]], logits[(tokens[-1] + 1) % 5] = np.log(0.2), np.log(0.8)
        return logits


def test_temperature_zero_takes_the_likeliest():
    assert complete(Counter(), [0, 3], 4, temperature=0, seed=0) == [4, 0, 1, 2]


def test_the_end_token_ends_the_text_and_is_left_out():
    assert complete(Counter(), [0], 10, temperature=0, seed=0, stop=3) == [1, 2]


def test_tokens_are_drawn_in_proportion_and_by_seed():
    """2000 draws: four standard deviations of the share of repeats (0.2) are 0.036; at temperature 0.5 it is 1/17."""
    for temperature, expected, bound in ((1.0, 0.2, 0.036), (0.5, 1 / 17, 0.022)):
        tokens = [0, *complete(Counter(), [0], 2000, temperature=temperature, seed=1)]
        repeats = np.mean(np.array(tokens[1:]) == np.array(tokens[:-1]))
        assert abs(repeats - expected) < bound
    one, same, other = (complete(Counter(), [0], 50, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
