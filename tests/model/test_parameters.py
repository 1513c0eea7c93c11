"""The parameter table: which rows are of which file, and how tensor parallelism cuts them."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import tiny

from llmq.model.parameters import parameter_rows, rows_of_file, shard

CONFIG = tiny(tie_embeddings=False)
ROWS = {row.name: row for row in parameter_rows(CONFIG)}


def test_rows_by_file():
    rows = [*ROWS.values(), replace(ROWS["embed.weight"], name="embed.low", file="adapter")]
    assert rows_of_file(rows) == tuple(ROWS.values())
    assert [row.name for row in rows_of_file(rows, "adapter")] == ["embed.low"]


def test_what_is_cut_along_which_axis():
    layer = {name.removeprefix("layers.0."): row.split for name, row in ROWS.items() if row.layer == 0}
    assert layer == {
        "attention.norm": None, "attention.qkv.weight": 0, "attention.qkv.bias": 0, "attention.o.weight": 1,
        "mlp.norm": None, "mlp.up.weight": 0, "mlp.down.weight": 1,
    }  # fmt: skip
    assert [ROWS[name].split for name in ("embed.weight", "head.norm", "head.weight")] == [0, None, 0]


def cut(row, value, rank, world):
    return np.concatenate([value.swapaxes(0, row.split)[piece] for piece in shard(row, rank, world)])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.split is not None])
def test_shards_make_the_whole(name, world):
    row = ROWS[name]
    value = np.arange(np.prod(row.shape)).reshape(row.shape)
    whole = np.full_like(value, -1).swapaxes(0, row.split)
    sizes = set()
    for rank in range(world):
        pieces, start = shard(row, rank, world), 0
        part = cut(row, value, rank, world)
        sizes.add(part.shape)
        for piece in pieces:
            whole[piece] = part[start : start + piece.stop - piece.start]
            start += piece.stop - piece.start
        assert start == len(part)
    np.testing.assert_array_equal(whole.swapaxes(0, row.split), value)
    assert len(sizes) == 1 and sizes.pop()[0] * world == row.shape[row.split]


def test_a_rank_has_its_share_of_all_that_is_fused():
    """Columns of q, k and v, then rows of o; columns of gate and up, then rows of down."""
    q, kv, f = 48, 24, 64
    assert shard(ROWS["layers.0.attention.qkv.weight"], 1, 2) == (
        slice(q // 2, q), slice(q + kv // 2, q + kv), slice(q + kv + kv // 2, q + 2 * kv),
    )  # fmt: skip
    assert shard(ROWS["layers.0.mlp.up.weight"], 0, 2) == (slice(0, f // 2), slice(f, f + f // 2))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 48))
    up, down = (rng.standard_normal(ROWS[f"layers.0.mlp.{name}.weight"].shape) for name in ("up", "down"))

    def mlp(up, down):
        gate, value = np.split(x @ up.T, 2, axis=1)
        return (gate / (1 + np.exp(-gate)) * value) @ down.T

    def part(name, value, rank):
        row = ROWS[f"layers.0.mlp.{name}.weight"]
        return cut(row, value, rank, 2).swapaxes(0, row.split)

    total = sum(mlp(part("up", up, rank), part("down", down, rank)) for rank in range(2))
    np.testing.assert_allclose(total, mlp(up, down), rtol=1e-12, atol=1e-12)


def test_what_cannot_be_cut_evenly_is_refused():
    with pytest.raises(ValueError, match=r"qkv\.weight: 48 along axis 0 cannot be cut evenly for 5 ranks"):
        shard(ROWS["layers.0.attention.qkv.weight"], 0, 5)
