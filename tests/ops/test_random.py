"""Philox against its published answers, bits by address, and unbiased stochastic rounding."""

import ml_dtypes
import numpy as np
import pytest

from llmq.ops.reference.random import philox4x32, random_bits, stochastic_round_bf16


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter, key, answer):
    """kat_vectors of the Random123 distribution, philox4x32 with 10 rounds."""
    counter, key, answer = ([int(word, 16) for word in words.split()] for words in (counter, key, answer))
    block = np.array(counter, np.uint32)[:, None]
    np.testing.assert_array_equal(philox4x32(np.repeat(block, 3, axis=1), tuple(key)), np.array([answer] * 3).T)


def test_an_element_is_a_word_of_the_block_at_its_address():
    seed, step, stream, purpose = 0x1234567_89ABCDEF, 77, 0x55, 2
    bits = random_bits(seed, step, stream, purpose, 12)
    assert bits.dtype == np.uint32
    for block in range(3):
        counter = np.array([[block], [0], [step], [purpose]], np.uint32)
        words = philox4x32(counter, (0x89ABCDEF, 0x1234567 ^ 0x55))
        np.testing.assert_array_equal(bits[4 * block : 4 * block + 4], words[:, 0])


@pytest.mark.parametrize("first", [0, 1, 4, 6, 2**34 - 3])
def test_a_slice_has_the_bits_of_the_whole(first):
    """2^34 elements: the counter's high word is reached."""
    whole = random_bits(1, 2, 3, 0, 30, first)
    for start, count in [(0, 30), (1, 1), (3, 9), (8, 22)]:
        np.testing.assert_array_equal(random_bits(1, 2, 3, 0, count, first + start), whole[start : start + count])


def test_the_high_half_of_the_counter_is_used():
    high = random_bits(0, 0, 0, 0, 4, 2**34)
    np.testing.assert_array_equal(high, philox4x32(np.array([[0], [1], [0], [0]], np.uint32), (0, 0))[:, 0])


def test_every_part_of_the_address_matters_and_nothing_else():
    base = {"seed": 1, "step": 2, "stream": 3, "purpose": 0}
    draws = {(): random_bits(**base, count=64)}
    for name in base:
        draws[name] = random_bits(**{**base, name: base[name] + 1}, count=64)
    draws["high seed"] = random_bits(**{**base, "seed": 1 + 2**32}, count=64)
    for name, bits in draws.items():
        assert all(np.count_nonzero(bits == other) < 3 for key, other in draws.items() if key != name), name
    np.testing.assert_array_equal(random_bits(**base, count=64), draws[()])
    assert len(np.unique(draws[()])) == 64


def test_bits_are_fair():
    """Each of the 32 bits over n draws is a binomial: within 5 sigma = 5 sqrt(n) / 2 of n / 2."""
    n = 1 << 16
    bits = random_bits(3, 1, 4, 1, n)
    for bit in range(32):
        ones = np.count_nonzero(bits >> np.uint32(bit) & np.uint32(1))
        assert abs(ones - n / 2) <= 5 * np.sqrt(n) / 2


def test_rounding_goes_to_a_neighbour_and_keeps_the_mean():
    """A draw's variance is p (1 - p) g^2 <= g^2 / 4 with g the gap: the mean of n is within 5 g / (2 sqrt n)."""
    n = 20000
    values = np.random.default_rng(0).standard_normal(40).astype(np.float32) * np.float32(10.0) ** np.arange(-20, 20)
    values = values.astype(np.float32)
    bits = random_bits(9, 1, 1, 0, n * values.size).reshape(n, values.size)
    rounded = stochastic_round_bf16(np.broadcast_to(values, bits.shape), bits).astype(np.float64)
    down = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    up = ((values.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    assert ((rounded == down) | (rounded == up)).all()
    assert (np.ptp(rounded, axis=0) > 0).mean() > 0.9
    gap = np.abs(up - down)
    assert (np.abs(rounded.mean(axis=0) - values) <= 5 * gap / (2 * np.sqrt(n))).all()


def test_a_bf16_value_is_exact_whatever_the_bits():
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    for word in (0, 0xFFFF, 0xFFFFFFFF):
        with np.errstate(invalid="ignore"):  # signalling NaNs are among the 65536
            rounded = stochastic_round_bf16(values, np.full(values.shape, word, np.uint32)).astype(np.float32)
        np.testing.assert_array_equal(rounded, values)


def test_the_extremes_of_the_bits_are_down_and_up():
    value = np.array([1 + 2**-23, -1 - 2**-23], np.float32)  # one unit of f32 away from a bf16 value
    np.testing.assert_array_equal(stochastic_round_bf16(value, np.uint32([0, 0])).astype(np.float32), [1, -1])
    up = stochastic_round_bf16(value, np.uint32([0xFFFF, 0xFFFF])).astype(np.float32)
    np.testing.assert_array_equal(up, [1 + 2**-7, -1 - 2**-7])


def test_infinity_and_nan_pass_through():
    values = np.array([np.inf, -np.inf, np.nan], np.float32)
    rounded = stochastic_round_bf16(values, np.full(3, 0xFFFFFFFF, np.uint32)).astype(np.float32)
    np.testing.assert_array_equal(rounded, values)
