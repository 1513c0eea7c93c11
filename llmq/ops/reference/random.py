"""Random bits by address, and the stochastic rounding that uses them.

A bit is a function of (seed, step, stream, purpose, element), never of the order of calls: whatever slice of a
parameter is updated, in whatever order, on whatever device, its elements get the same bits.
"""

import ml_dtypes
import numpy as np

M, V, MASTER = "m", "v", "master"  # what is rounded
MOMENTS, OF_MASTER, EMBEDDING, SAMPLING, DROPOUT = range(5)  # what words are for: the last word of a block's counter
_WORD = np.uint64(0xFFFFFFFF)


def philox4x32(counter: np.ndarray, key: tuple[int, int], rounds: int = 7) -> np.ndarray:
    """(4,n) uint32 <- counter (4,n) uint32, by Philox4x32.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011: 7 rounds pass BigCrush, 10 are the usual margin.
    """
    even, odd = counter[::2], counter[1::2]  # (2,n) uint32 each: words 0 and 2, 1 and 3
    factors, growth = np.array([[[0xD2511F53], [0xCD9E8D57]], [[0x9E3779B9], [0xBB67AE85]]], np.uint64)
    keys = (np.array([key], np.uint64).T + growth * np.arange(rounds, dtype=np.uint64)).astype(np.uint32)  # (2,rounds)
    for index in range(rounds):
        products = (even * factors)[::-1]
        even = (products >> np.uint64(32)).astype(np.uint32) ^ odd ^ keys[:, index : index + 1]
        odd = products.astype(np.uint32)  # the low halves
    return np.stack([even[0], odd[0], even[1], odd[1]])


def random_words(seed: int, step: int, stream: int, use: int, start: int, stop: int) -> np.ndarray:
    """uint32 (4, stop - start): the words of blocks [start, stop) for the use `use` (see above).

    Block b has the counter (b low, b high, step, use) and the key (seed low, stream xor seed high), modulo 2^32 each.
    """
    blocks = np.arange(start, stop, dtype=np.uint64)
    counter = np.empty((4, blocks.size), np.uint32)
    counter[0], counter[1] = blocks & _WORD, blocks >> np.uint64(32)
    counter[2:] = np.array([[step & 0xFFFFFFFF], [use]], np.uint32)
    return philox4x32(counter, (seed & 0xFFFFFFFF, (stream ^ (seed >> 32)) & 0xFFFFFFFF))


def random_bits(seed: int, step: int, stream: int, purpose: str, count: int, first: int = 0) -> np.ndarray:
    """uint16 (count,): the bits of elements [first, first + count) of a parameter.

    Element i of m has the low half of word i % 4 of block i // 4 for moments, v the high half of that word. A master's
    block serves 8 elements: low halves of its words the first 4, high halves the others.
    """
    use, served = (OF_MASTER, 8) if purpose == MASTER else (MOMENTS, 4)
    words = random_words(seed, step, stream, use, first // served, -(-(first + count) // served))
    halves = {"low": words.astype(np.uint16), "high": (words >> np.uint32(16)).astype(np.uint16)}  # (4,blocks)
    wanted = {M: ["low"], V: ["high"], MASTER: ["low", "high"]}[purpose]
    return np.concatenate([halves[name] for name in wanted]).T.ravel()[first % served :][:count]


def stochastic_round_bf16(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """`values` (f32; f64 is rounded to f32 first) in bf16, up or down with probabilities that keep the mean.

    The random bits (uint16) are added below the kept mantissa, then cut off. Infinities and NaN pass through.
    """
    values = values.astype(np.float32, copy=False)
    raised = (values.view(np.uint32) + bits) & np.uint32(0xFFFF0000)
    finite = np.isfinite(values)
    return np.where(finite, raised.view(np.float32), values).astype(ml_dtypes.bfloat16)
