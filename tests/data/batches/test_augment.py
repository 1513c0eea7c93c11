"""Augmentation: what changes and how often, what never does, and that it is a function of the place alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import write_tokens

from llmq.data.batches.augment import SPAN, open_augmentation
from llmq.data.batches.loader import Loader, RankBatches, eval_batches
from llmq.data.batches.packing import Packs
from llmq.data.batches.rows import PACKED, RowForm, Rows, Windows
from llmq.data.tokens.token_file import TokenFile, TokenWriter
from llmq.errors import UsageError

V = 50_000


def noised(text: str, tokens: np.ndarray, borders: np.ndarray | None = None, seed: int = 0) -> Rows:
    """Rows of `tokens` (n,T+1) as of the places 0..n-1, with noise."""
    augment = open_augmentation(text, V, seed)
    assert augment is not None
    return augment(Rows(tokens[:, :-1].copy(), tokens[:, 1:].copy(), borders), np.arange(len(tokens)))


def ascending(count: int, length: int) -> np.ndarray:
    """(count, length + 1) int32, every token another."""
    return np.arange(count * (length + 1), dtype=np.int32).reshape(count, -1)


def test_dropout_replaces_the_asked_part_by_tokens_from_everywhere() -> None:
    tokens = np.full((200, 501), 7, np.int32)
    rows = noised("token-dropout=0.05", tokens)
    changed = rows.tokens != 7
    # 100,000 draws: 4 standard deviations of the share are 0.0028.
    assert abs(changed.mean() - 0.05) < 0.0028
    drawn = rows.tokens[changed]
    assert 0 <= drawn.min() < 50 and V - 50 < drawn.max() < V and abs(drawn.mean() / V - 0.5) < 0.02
    np.testing.assert_array_equal(rows.targets, 7)
    assert noised("token-dropout=1", tokens).tokens.mean() > 20_000


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65])
def test_shuffling_moves_tokens_within_spans_only(length: int) -> None:
    tokens = ascending(300, length)
    rows = noised("span-shuffle=1", tokens)
    np.testing.assert_array_equal(np.sort(rows.tokens, axis=1), tokens[:, :-1])
    moved = np.abs(rows.tokens - tokens[:, :-1])
    assert moved.max() == min(SPAN, length) - 1
    if length >= 64:
        assert 0.6 < (moved > 0).mean() < 0.76  # 3/4, less at the ends of rows


def test_the_asked_part_of_the_spans_is_shuffled() -> None:
    tokens = ascending(1000, 400)
    all_of_them = (noised("span-shuffle=1", tokens).tokens != tokens[:, :-1]).mean()
    # 100,000 spans: 4 standard deviations of the share are 0.004, and as much for the share that moves.
    assert abs((noised("span-shuffle=0.1", tokens).tokens != tokens[:, :-1]).mean() / all_of_them - 0.1) < 0.006


@settings(max_examples=40, deadline=None)
@given(length=st.integers(2, 40), seed=st.integers(0, 999))
def test_no_target_stands_where_it_could_be_copied_and_only_those_are_not_trained(length: int, seed: int) -> None:
    tokens = ascending(4, length)
    rows = noised("span-shuffle=0.7", tokens, seed=seed)
    for inputs, targets, plain in zip(rows.tokens.tolist(), rows.targets.tolist(), tokens[:, 1:].tolist(), strict=True):
        for at, target in enumerate(plain):
            assert targets[at] == (-100 if target in inputs[: at + 1] else target)


def test_spans_end_at_the_borders_of_documents() -> None:
    tokens = ascending(200, 24)
    borders = np.array([[0, 5, 6, 15, 24, 24]] * 200, np.int32)
    rows = noised("span-shuffle=1", tokens, borders)
    for start, stop in ((0, 5), (5, 6), (6, 15), (15, 24)):
        np.testing.assert_array_equal(np.sort(rows.tokens[:, start:stop], 1), tokens[:, start:stop])
    assert (rows.tokens != tokens[:, :-1]).mean() > 0.4
    assert rows.borders is borders


@pytest.mark.parametrize("max_docs", [1, 3])
def test_padding_stays_after_the_documents(tmp_path: Path, max_docs: int) -> None:
    with TokenWriter(tmp_path / "a.bin", vocab_size=V) as writer:
        for number in range(200):
            writer.append(np.arange(100, 107 + number % 3), stops=[7 + number % 3])
    packs = Packs([TokenFile.open(tmp_path / "a.bin")], RowForm(32, V, PACKED, 0, max_docs))
    rows = packs.read(np.arange(packs.num_windows))
    augment = open_augmentation("span-shuffle=1", V, 0)
    assert augment is not None
    noisy = augment(rows, np.arange(packs.num_windows))
    assert (rows.tokens[:, -1] == 0).all() and (noisy.tokens != rows.tokens).any()
    np.testing.assert_array_equal(noisy.tokens == 0, rows.tokens == 0)


def test_masks_stay() -> None:
    tokens = ascending(50, 60)
    augment = open_augmentation("token-dropout=0.5,span-shuffle=0.5", V, 0)
    assert augment is not None
    masked = np.where(tokens[:, 1:] % 3, tokens[:, 1:], -100)
    rows = augment(Rows(tokens[:, :-1], masked, None), np.arange(50))
    assert (rows.targets[masked == -100] == -100).all()
    kept = rows.targets != -100
    np.testing.assert_array_equal(rows.targets[kept], masked[kept])
    np.testing.assert_array_equal(masked, np.where(tokens[:, 1:] % 3, tokens[:, 1:], -100))  # what came in is as it was


def test_it_depends_on_seed_and_place_alone() -> None:
    tokens = ascending(40, 33)
    for text in ("token-dropout=0.3", "span-shuffle=0.4", "span-shuffle=0.4,token-dropout=0.3"):
        augment = open_augmentation(text, V, 1)
        assert augment is not None
        places = np.array([10**13 + 7 * n for n in range(40)])
        whole = augment(Rows(tokens[:, :-1], tokens[:, 1:], None), places)
        for part in (slice(3, 4), slice(10, 30)):
            again = augment(Rows(tokens[part, :-1], tokens[part, 1:], None), places[part])
            np.testing.assert_array_equal(again.tokens, whole.tokens[part])
            np.testing.assert_array_equal(again.targets, whole.targets[part])
        same = np.tile(tokens[:1], (40, 1))
        assert len({tuple(row) for row in augment(Rows(same[:, :-1], same[:, 1:], None), places).tokens.tolist()}) == 40
        other = open_augmentation(text, V, 2)
        assert (
            other is not None
            and (other(Rows(tokens[:, :-1], tokens[:, 1:], None), places).tokens != whole.tokens).any()
        )
    text = "token-dropout=0.3,span-shuffle=0.4"
    assert open_augmentation(text, V, 1) == open_augmentation(" span-shuffle = 0.4 , token-dropout = 0.3", V, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("token-drop=0.1", "there is no 'token-drop': there are span-shuffle and token-dropout"),
        ("", "there is no ''"),
        ("token-dropout", "token-dropout= is not a probability above 0 and up to 1, such as token-dropout=0.1"),
        ("token-dropout=1.5", "token-dropout=1.5 is not"),
        ("token-dropout=0", "token-dropout=0 is not"),
        ("token-dropout=nan", "token-dropout=nan is not"),
        ("token-dropout=x,shuffle=1", "token-dropout=x is not.*; there is no 'shuffle'"),
        ("span-shuffle=0.1,span-shuffle=0.2", "span-shuffle is there twice"),
    ],
)
def test_what_cannot_be_is_named_with_what_there_is(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_augmentation(text, V, 0)


def test_it_is_in_training_and_never_in_evaluation(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", np.arange(81) % 9, vocab_size=9)
    windows = Windows([TokenFile.open(tmp_path / "a.bin")], RowForm(8, 9))
    augment = open_augmentation("token-dropout=1", 9, 0)
    assert augment is not None
    with (
        Loader(RankBatches(windows, 2, 0, augment=augment)) as loader,
        Loader(RankBatches(windows, 2, 0)) as plain,
    ):
        one, other = loader.next(), plain.next()
    np.testing.assert_array_equal(one.targets, other.targets)
    np.testing.assert_array_equal(one.tokens, augment(Rows(other.tokens, other.targets, None), np.arange(2)).tokens)
    assert (one.tokens != other.tokens).any()
    (first, *_) = eval_batches(windows, 2)
    np.testing.assert_array_equal(first.tokens, windows.read(np.arange(2)).tokens)
