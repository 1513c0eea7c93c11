"""The MLP in tiles of tokens: what it computes and what it takes."""

from dataclasses import replace

import numpy as np
import pytest
from test_adapters import adapters
from test_methods import METHODS, triplets
from tiny_engines import BF16, FP8, FP64, batch, engine_of, packed_batch, plan_of, tiny

from llmq.blocks.packed import Packing
from llmq.plan.memory import Memory

CONFIG = tiny(intermediate_size=176)
SLOW = pytest.mark.slow


def engines(precision, *memories, **more):
    return [engine_of(plan_of(precision, memory, CONFIG, **more)) for memory in memories]


PACKED = {"packing": Packing(5, 16)}
DORA = {"adapters": adapters(config=CONFIG, dora=True)}  # its gains follow from weights alone, as those of IA3
IA3 = {"adapters": METHODS["ia3"](CONFIG)}
TRIPLETS = {"adapters": triplets(CONFIG, dropout=0.0)}  # their regulariser counts once


@pytest.mark.parametrize(
    ("flags", "tiles", "about"),
    [
        *(pytest.param((), n, {}, marks=() if n == 2 else SLOW) for n in (2, 8)),
        *(pytest.param(("recompute_block",), n, {}, marks=() if n == 2 else SLOW) for n in (2, 8)),
        *(pytest.param(("recompute_swiglu",), n, {}, marks=SLOW) for n in (2, 8)),
        (("recompute_block",), 4, PACKED),
        ((), 2, DORA),
        ((), 2, IA3),
        ((), 4, TRIPLETS),
    ],
)
def test_gradients_are_those_of_the_whole(flags, tiles, about):
    """In f64, where the order of sums over tiles is all that differs."""
    given = packed_batch if about is PACKED else batch
    plain = Memory(() if about is PACKED else flags)
    whole, tiled = engines(FP64, plain, Memory(flags, seq_tiles=tiles), **about)
    for engine in (whole, tiled):
        engine.micro_step(given(3))
    for row in (row for row in whole.plan.rows if row.trainable):
        found, expected = tiled.gradient(row.name), whole.gradient(row.name)
        assert np.linalg.norm(found - expected) <= 1e-12 * np.linalg.norm(expected), row.name
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 if "adapters" in about else 1e-14)
    assert whole.evaluate(given(4)) == pytest.approx(tiled.evaluate(given(4)), rel=1e-13)


@pytest.mark.parametrize("precision", [BF16, pytest.param(FP8["e4m3", "delayed"], marks=SLOW)], ids=["bf16", "fp8"])
def test_only_gradients_of_the_tiled_weights_are_rounded_otherwise(precision):
    """They are added up in their dtype, tile by tile; the loss and all others have the same bits."""
    whole, tiled = engines(precision, Memory(), Memory(seq_tiles=2))
    for engine in (whole, tiled):
        engine.micro_step(batch(3))
    others = {
        row.name for row in whole.plan.rows if whole.gradient(row.name).tobytes() != tiled.gradient(row.name).tobytes()
    }
    assert all(".mlp." in name for name in others)
    assert whole.evaluate(batch(4)) == tiled.evaluate(batch(4))


def test_the_mlp_takes_the_memory_of_a_tile():
    """What is alive at a time, with the block recomputed: about a tile's part of gate, up and their gradients."""
    config = replace(CONFIG, intermediate_size=4096)
    sizes = {"batch_size": 1, "seq_len": 512}
    whole, tiled = (
        plan_of(BF16, Memory(("recompute_block",), seq_tiles=n), config, **sizes).programs["only"].live_bytes["device"]
        for n in (1, 8)
    )
    assert tiled < whole / 4
