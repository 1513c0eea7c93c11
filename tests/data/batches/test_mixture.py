"""The order of samples: permutations of epochs; mixtures with exact shares, one sequence for every start and world."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sample_files import write_tokens

from llmq.data.batches import mixture as mixture_module
from llmq.data.batches.loader import open_data
from llmq.data.batches.mixture import Mixture, assignment, whole_parts
from llmq.data.batches.packing import Packs
from llmq.data.batches.rows import PACKED, RowForm, Windows, sample_order
from llmq.data.tokens.token_file import TokenFile, TokenWriter
from llmq.errors import DataError, UsageError
from llmq.options.data import DataOptions

T = 4
WEIGHTS = st.lists(st.sampled_from([0.1, 0.25, 0.3, 0.7, 1, 2, 3.5, 5, 0.05, 17]), min_size=1, max_size=6)


def options(*files: object, **more: Any) -> DataOptions:
    small: dict[str, Any] = {"batch_size": 2, "seq_len": T, "grad_accumulation": 1}
    return DataOptions(train_file=tuple(map(str, files)), **{**small, **more})


def write(path: Path, number: int, num_windows: int) -> Path:
    """A token file of which each window's first token is 1000 * number + the window's number."""
    tokens = np.repeat(1000 * number + np.arange(num_windows + 1), T)[: num_windows * T + 1]
    write_tokens(path, tokens, vocab_size=10_000, mask=np.arange(tokens.size) % 3 > 0 if number % 2 else None)
    return path


def make(folder: Path, sizes: list[int], weights: list[float]) -> Mixture:
    sources = []
    for number, size in enumerate(sizes):
        file = TokenFile.open(write(folder / f"{number}.bin", number, size))
        sources.append(Windows([file], RowForm(T, 10_000)))
    return Mixture(sources, weights, [str(size) for size in sizes])


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS)
def test_after_any_number_of_places_every_source_is_within_one_of_its_share(weights: list[float]) -> None:
    parts = whole_parts(weights)
    period = sum(parts)
    exact = [Fraction(str(weight)) for weight in weights]
    assert [Fraction(part, period) for part in parts] == [weight / sum(exact) for weight in exact]
    chosen = assignment(parts)
    for source, part in enumerate(parts):
        had = np.cumsum(chosen == source)
        off = had * period - np.arange(1, period + 1) * part
        assert (abs(off) < period).all() and off[-1] == 0
        if len(parts) > 1:  # Tijdeman's bound: 1 - 1 / (2k - 2)
            assert (abs(off) * (2 * len(parts) - 2) <= period * (2 * len(parts) - 3)).all()


@settings(max_examples=15, deadline=None)
@given(data=st.data(), weights=WEIGHTS, seed=st.integers(0, 99))
def test_shares_are_exact_and_every_source_goes_through_permuted_epochs(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, weights: list[float], seed: int
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(weights), max_size=len(weights)))
    mixture = make(tmp_path_factory.mktemp("m"), sizes, weights)
    assert mixture.num_windows == sum(sizes)
    count = data.draw(st.integers(1, 200))
    first = mixture.read(mixture.order(np.arange(count), seed)).tokens[:, 0]
    shares = mixture.shares(count)
    for number, share in enumerate(shares):
        mine = first[first // 1000 == number] % 1000
        assert share.samples == len(mine) and share.share == len(mine) / count
        assert abs(share.samples - count * Fraction(str(weights[number])) / sum(map(Fraction, map(str, weights)))) < 1
        assert share.epochs == len(mine) / sizes[number]
        for at in range(0, len(mine) - sizes[number] + 1, sizes[number]):
            assert sorted(mine[at : at + sizes[number]]) == list(range(sizes[number]))


def test_it_is_the_same_sequence_from_any_place_on_and_another_for_each_seed_and_source(tmp_path: Path) -> None:
    mixture = make(tmp_path, [7, 40, 3], [0.3, 0.5, 0.2])
    whole = mixture.order(np.arange(1000), 5)
    far = np.arange(10**12, 10**12 + 3)
    for places, order in ((np.arange(1000), whole), (far, mixture.order(far, 5))):
        for start in range(0, len(places), 13):
            np.testing.assert_array_equal(mixture.order(places[start:][:10], 5), order[start:][:10])
    assert (mixture.order(np.arange(1000), 6) != whole).any()
    order = make(tmp_path, [50, 50], [1, 1]).order(np.arange(100), 9)
    first, second = order[order < 50], order[order >= 50] - 50
    assert first.tolist() != second.tolist() != sample_order(np.arange(50), 50, 9).tolist()


@settings(max_examples=24, deadline=None)
@given(
    weight=st.sampled_from([None, (0.3, 0.6, 0.1)]),
    batch_size=st.integers(1, 5),
    world=st.integers(1, 4),
    skip=st.integers(0, 30),
)
def test_loaders_of_any_world_and_start_read_the_same(
    tmp_path_factory: pytest.TempPathFactory, weight, batch_size: int, world: int, skip: int
) -> None:
    folder = tmp_path_factory.mktemp("m")
    files = [write(folder / f"{n}.bin", n, 5 + 9 * n) for n in range(3)]
    data = open_data(options(*files, weight=weight, batch_size=batch_size), 10_000, 3)
    places = np.arange((skip + 2) * batch_size * world)
    assert isinstance(data.train, Mixture if weight else Windows)
    want = data.train.read(data.train.order(places, 3))
    for rank in range(world):
        with replace(data, world=world).loader(rank, skip * batch_size * world) as loader:
            for step in (skip, skip + 1):
                batch, at = loader.next(), (step * world + rank) * batch_size
                np.testing.assert_array_equal(batch.tokens, want.tokens[at : at + batch_size])
                np.testing.assert_array_equal(batch.targets, want.targets[at : at + batch_size])
                assert batch.position == (step + 1) * batch_size * world
                assert batch.places is not None and batch.places.tolist() == list(range(at, at + batch_size))
                assert batch.epoch == batch.position / data.train.num_windows


def test_borders_of_all_sources_come_together(tmp_path: Path) -> None:
    """A row without borders is one document, which counts among the longest."""
    sources = []
    for name, lengths in (("short", [5, 7, 9] * 40), ("long", [64] * 20)):
        with TokenWriter(tmp_path / f"{name}.bin", vocab_size=99) as writer:
            for length in lengths:
                writer.append(np.arange(1, length + 1), stops=[length])
        sources.append(Packs([TokenFile.open(tmp_path / f"{name}.bin")], RowForm(64, 99, PACKED)))
    short, long = sources
    assert short.limits is not None and short.limits[1] == 9 and long.limits is None
    mixture = Mixture(sources, [1, 1], ["short", "long"])
    assert mixture.limits == (short.limits[0], 64)
    rows, one = mixture.read(np.array([short.num_windows, 2])), short.read(np.array([2]))
    assert rows.borders is not None and one.borders is not None
    assert rows.borders[0].tolist() == [0] + [64] * short.limits[0]
    np.testing.assert_array_equal(rows.borders[1], one.borders[0])
    np.testing.assert_array_equal(rows.tokens[1], one.tokens[0])


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([0.5, 0.0], "weight 0.0 is not"), ([1, -1], "-1"), ([1, float("inf")], "inf"), ([1, float("nan")], "nan"),
        ([0.123456788, 1e-9], r"exact only every 123456789 samples.*fewer digits"),
    ],
)  # fmt: skip
def test_weights_that_are_none_or_never_repeat_are_refused(weights: list[float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        whole_parts(weights)


def test_a_run_is_opened_from_weights(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.bin", 0, 5), write(tmp_path / "b.bin", 1, 9)
    one = open_data(options(a, b, weight=(0.25, 0.75)), 10_000, 0)
    two = open_data(options(a, b, weight=(1.0, 3.0)), 10_000, 0)
    assert isinstance(one.train, Mixture) and isinstance(two.train, Mixture)
    np.testing.assert_array_equal(one.train.order(np.arange(99), 0), two.train.order(np.arange(99), 0))
    assert [(s.name, s.samples, s.share) for s in two.shares(100)] == [(str(a), 25, 0.25), (str(b), 75, 0.75)]
    files = {"training files": [TokenFile.open(file).fingerprint for file in (a, b)]}
    known = {"seq_len": T, "training samples": 14, **files}
    assert one.identity() == two.identity() == {**known, "mixture": [[5, 1], [9, 3]]}
    plain = open_data(options(a, b), 10_000, 0)
    assert plain.shares(100) == [] and plain.identity() == known


def test_a_mixture_that_cannot_be_is_refused(tmp_path: Path) -> None:
    a = str(write(tmp_path / "a.bin", 0, 5))
    empty = str(write(tmp_path / "b.bin", 1, 0))
    with pytest.raises(DataError, match=r"b\.bin: no sample of seq_len 4"):
        open_data(options(a, empty, weight=(1.0, 1.0)), 10_000, 0)
    with pytest.raises(DataError, match=r"a\.bin is in 2 sources"):
        open_data(options(a, a, weight=(1.0, 1.0)), 10_000, 0)


def test_weights_are_as_they_are_written_and_the_largest_table_is_made() -> None:
    assert whole_parts([0.1, 0.2, 0.3]) == (1, 2, 3)
    assert whole_parts([1e-4, 1 - 1e-4]) == (1, 9999)
    parts = (1, 2, 3, mixture_module.LARGEST_PERIOD - 6)
    assert np.bincount(assignment(parts)).tolist() == list(parts)


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 3000) | st.sampled_from([4096, 4097, 65535, 65536]),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 10**6),
)
@example(size=1_000_003, seed=7, epoch=0)
@pytest.mark.slow
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = sample_order(epoch * size + np.arange(size), size, seed)
    assert np.array_equal(np.sort(order), np.arange(size))


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 10**12), place=st.integers(0, 10**15), seed=st.integers(-(2**63), 2**64 - 1))
def test_a_place_alone_has_the_sample_that_it_has_among_others(size: int, place: int, seed: int) -> None:
    many = sample_order(place + np.arange(5), size, seed)
    alone = [int(sample_order(np.array([place + i]), size, seed)[0]) for i in range(5)]
    assert many.tolist() == alone and (many >= 0).all() and (many < size).all()


def test_epochs_and_seeds_differ_and_are_no_shifts_of_each_other() -> None:
    n = 1000
    base = sample_order(np.arange(n), n, 1)
    for places, seed in [
        (n + np.arange(n), 1),
        (2 * n + np.arange(n), 1),
        (np.arange(n), 2),
        (np.arange(n), 2**32 + 1),
    ]:
        other = sample_order(places, n, seed)
        # Of two independent permutations, 1 place in expectation agrees (Poisson: > 8 has probability 1e-6), whatever
        # the shift; over 1000 shifts, > 10 has 1e-5.
        assert max(np.count_nonzero(np.roll(base, shift) == other) for shift in range(n)) <= 10


def test_all_orders_of_four_are_equally_likely() -> None:
    orders = sample_order(np.arange(4 * 24_000), 4, 11).reshape(-1, 4)
    _, counts = np.unique(orders @ [64, 16, 4, 1], return_counts=True)
    assert len(counts) == 24 and ((counts - 1000) ** 2 / 1000).sum() < 23 + 5 * np.sqrt(46)


@pytest.mark.parametrize("size", [3, 5, 23])
def test_every_sample_comes_equally_often_at_every_place(size: int) -> None:
    orders = sample_order(np.arange(4000 * size), size, 3).reshape(4000, size)
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    freedom = (size - 1) ** 2
    chi2 = ((counts - 4000 / size) ** 2 / (4000 / size)).sum()
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom) + 5


def test_neighbours_are_thrown_apart() -> None:
    n = 100_003
    order = sample_order(np.arange(n), n, 5)
    steps = np.diff(order)
    # Steps between neighbours of a random permutation: |difference| has mean n / 3; few are the same number twice.
    assert abs(np.abs(steps).mean() / n - 1 / 3) < 0.01
    assert np.count_nonzero(np.abs(steps) == 1) < 15  # expected 2
    assert np.unique(steps, return_counts=True)[1].max() < 15  # expected at most 1 on average
    position = np.arange(n)
    assert abs(np.corrcoef(position, order)[0, 1]) < 0.02  # 1 / sqrt(n) = 0.003
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    for half in (order % 2, order < n / 2, order % 317 < 158):
        runs = np.count_nonzero(np.diff(half.astype(int))) / n
        assert abs(runs - 0.5) < 0.01
