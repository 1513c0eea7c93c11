"""The order of the samples of an epoch: a permutation that is computed place by place, never stored.

A table of shuffled indices would cost memory and time with every epoch and every resume. A Feistel network gives the
sample at a place directly, so training can start anywhere in O(1). This one is the generalised network of Black and
Rogaway ("Ciphers with Arbitrary Finite Domains", 2002): a number below a * b is a pair (left below a, right below b),
and each round adds to one half a keyed function of the other, modulo that half's size. With a about sqrt(N) and b just
large enough, at most a - 1 of the a * b numbers are no samples; those few walk on through the permutation until they
reach one (cycle walking), which keeps it a permutation.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

ROUNDS = 6  # each of both halves; 4 pass the statistical tests already
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_order(places: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """Which sample (n,) int64 in 0 .. num_samples - 1 is at each of `places` (n,), counted through all epochs.

    Place p lies in epoch p // num_samples; each epoch of each seed has a permutation of its own.
    """
    places = np.asarray(places, np.int64)
    assert num_samples > 0 and (places >= 0).all()
    epochs, x = np.divmod(places, num_samples)
    a = isqrt(num_samples - 1) + 1
    b = -(-num_samples // a)
    keys = _mix(_mix(np.full(len(x), seed % 2**64, np.uint64)) ^ epochs.astype(np.uint64))
    x = _permute(x.astype(np.uint64), keys, a, b)
    while (outside := x >= num_samples).any():
        x[outside] = _permute(x[outside], keys[outside], a, b)
    return x.astype(np.int64)


def mixed(seed: int, *words: int) -> int:
    """A 64-bit seed of its own for `words` (each below 2^64) of `seed`."""
    state = _mix(np.array([seed % 2**64], np.uint64))
    for word in words:
        state = _mix(state ^ np.uint64(word))
    return int(state[0])


def _permute(x: np.ndarray, keys: np.ndarray, a: int, b: int) -> np.ndarray:
    """A keyed permutation of 0 .. a * b - 1, applied to `x` (n,) uint64 with `keys` (n,) uint64."""
    left, right = x // np.uint64(b), x % np.uint64(b)
    for _ in range(ROUNDS):
        keys = keys + _GOLDEN
        left = (left + _mix(_mix(keys) ^ right) % np.uint64(a)) % np.uint64(a)
        keys = keys + _GOLDEN
        right = (right + _mix(_mix(keys) ^ left) % np.uint64(b)) % np.uint64(b)
    return left * np.uint64(b) + right


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which every input bit moves about half of the output bits.

    The output function of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
