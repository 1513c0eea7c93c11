"""Philox against its published answers, bits by address, and unbiased stochastic rounding."""

import ml_dtypes
import numpy as np
import pytest

from llmq.ops.reference.random import MASTER, M, V, philox4x32, random_bits, stochastic_round_bf16

ZEROS, ONES = "00000000 " * 4 + "00000000 00000000", "ffffffff " * 4 + "ffffffff ffffffff"
PI = "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0"


@pytest.mark.parametrize(
    ("rounds", "address", "answer"),
    [
        (7, ZEROS, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, ONES, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
        (10, ZEROS, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, ONES, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(rounds, address, answer):
    """kat_vectors of the Random123 distribution, philox4x32: counter and key."""
    address, answer = ([int(word, 16) for word in words.split()] for words in (address, answer))
    block = np.array(address[:4], np.uint32)[:, None]
    words = philox4x32(np.repeat(block, 3, axis=1), tuple(address[4:]), rounds)
    np.testing.assert_array_equal(words, np.array([answer] * 3).T)


def halves_of(block: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Low and high halves of the words of a block at seed 0x1234567_89ABCDEF, step 77, stream 0x55."""
    words = philox4x32(np.array([[block], [0], [77], [last]], np.uint32), (0x89ABCDEF, 0x1234567 ^ 0x55))[:, 0]
    return words & 0xFFFF, words >> 16


def test_an_element_is_half_a_word_of_the_block_at_its_address():
    address = (0x1234567_89ABCDEF, 77, 0x55)
    m, v, master = (random_bits(*address, purpose, 16) for purpose in (M, V, MASTER))
    assert m.dtype == v.dtype == master.dtype == np.uint16
    for block in range(4):
        low, high = halves_of(block, 0)
        np.testing.assert_array_equal(m[4 * block : 4 * block + 4], low)
        np.testing.assert_array_equal(v[4 * block : 4 * block + 4], high)
    for block in range(2):
        np.testing.assert_array_equal(master[8 * block : 8 * block + 8], np.concatenate(halves_of(block, 1)))
    words = philox4x32(np.array([[0], [1], [0], [0]], np.uint32), (0, 0))[:, 0]  # the high half of the counter
    np.testing.assert_array_equal(random_bits(0, 0, 0, M, 4, 2**34), words & 0xFFFF)


@pytest.mark.parametrize("purpose", [M, V, MASTER])
@pytest.mark.parametrize("first", [0, 1, 4, 6, 2**34 - 3, 2**35 - 3])
def test_a_slice_has_the_bits_of_the_whole(first, purpose):
    """2^34 or 2^35 elements: the counter's high word is reached."""
    whole = random_bits(1, 2, 3, purpose, 30, first)
    for start, count in [(0, 30), (1, 1), (3, 9), (8, 22)]:
        got = random_bits(1, 2, 3, purpose, count, first + start)
        np.testing.assert_array_equal(got, whole[start : start + count])


def test_every_part_of_the_address_matters_and_nothing_else():
    """Of 64 draws of 16 bits, one or two may be the same by chance."""
    base = {"seed": 1, "step": 2, "stream": 3, "purpose": M}
    draws = {"": random_bits(**base, count=64)}
    for name, other in {"seed": 2, "step": 3, "stream": 4}.items():
        draws[name] = random_bits(**{**base, name: other}, count=64)
    draws["high seed"] = random_bits(**{**base, "seed": 1 + 2**32}, count=64)
    for purpose in (V, MASTER):
        draws[purpose] = random_bits(**{**base, "purpose": purpose}, count=64)
    for name, bits in draws.items():
        assert all(np.count_nonzero(bits == other) < 3 for key, other in draws.items() if key != name), name
    np.testing.assert_array_equal(random_bits(**base, count=64), draws[""])
    assert len(np.unique(draws[""])) >= 62


@pytest.mark.parametrize("purpose", [M, V, MASTER])
def test_bits_are_fair(purpose):
    """Each of the 16 bits over n draws is a binomial: within 5 sigma = 5 sqrt(n) / 2 of n / 2."""
    n = 1 << 16
    bits = random_bits(3, 1, 4, purpose, n)
    for bit in range(16):
        ones = np.count_nonzero(bits >> np.uint16(bit) & np.uint16(1))
        assert abs(ones - n / 2) <= 5 * np.sqrt(n) / 2


def test_bits_of_one_element_are_independent():
    """Bits of m, v and master and of neighbours agree as often as not: a binomial again, over all pairs of 16 bits."""
    n = 1 << 14
    m, v, master = (random_bits(3, 1, 4, purpose, n + 1) for purpose in (M, V, MASTER))
    for a, b in [(m[:n], v[:n]), (m[:n], master[:n]), (v[:n], master[:n]), (m[:n], m[1:]), (master[:n], master[1:])]:
        for shift in range(16):
            turned = b << np.uint16(shift) | b >> np.uint16((16 - shift) % 16)
            agree = 16 * n - np.count_nonzero(np.unpackbits((a ^ turned).view(np.uint8)))
            assert abs(agree - 8 * n) <= 5 * np.sqrt(16 * n) / 2


def test_rounding_goes_to_a_neighbour_and_keeps_the_mean():
    """A draw's variance is p (1 - p) g^2 <= g^2 / 4 with g the gap: the mean of n is within 5 g / (2 sqrt n)."""
    n = 20000
    values = np.random.default_rng(0).standard_normal(40).astype(np.float32) * np.float32(10.0) ** np.arange(-20, 20)
    values = values.astype(np.float32)
    bits = random_bits(9, 1, 1, MASTER, n * values.size).reshape(n, values.size)
    rounded = stochastic_round_bf16(np.broadcast_to(values, bits.shape), bits).astype(np.float64)
    down = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    up = ((values.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    assert ((rounded == down) | (rounded == up)).all()
    assert (np.ptp(rounded, axis=0) > 0).mean() > 0.9
    gap = np.abs(up - down)
    assert (np.abs(rounded.mean(axis=0) - values) <= 5 * gap / (2 * np.sqrt(n))).all()


def test_a_bf16_value_is_exact_whatever_the_bits():
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    for bits in (0, 1, 0xFFFF):
        with np.errstate(invalid="ignore"):  # signalling NaNs are among the 65536
            rounded = stochastic_round_bf16(values, np.full(values.shape, bits, np.uint16)).astype(np.float32)
        np.testing.assert_array_equal(rounded, values)


def test_the_extremes_of_the_bits_are_down_and_up():
    value = np.array([1 + 2**-23, -1 - 2**-23], np.float32)  # one unit of f32 away from a bf16 value
    np.testing.assert_array_equal(stochastic_round_bf16(value, np.uint16([0, 0])).astype(np.float32), [1, -1])
    up = stochastic_round_bf16(value, np.uint16([0xFFFF, 0xFFFF])).astype(np.float32)
    np.testing.assert_array_equal(up, [1 + 2**-7, -1 - 2**-7])


def test_infinity_and_nan_pass_through():
    values = np.array([np.inf, -np.inf, np.nan], np.float32)
    rounded = stochastic_round_bf16(values, np.full(3, 0xFFFF, np.uint16)).astype(np.float32)
    np.testing.assert_array_equal(rounded, values)
