"""Packs: every token once, nothing trained across a border; files that do not say where documents end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legacy_token_file import legacy_bytes
from small_tokenizers import sidecar
from token_files import write_tokens

from llmq.data.batches import packing
from llmq.data.batches.loader import eval_batches
from llmq.data.batches.packing import Packs
from llmq.data.batches.permutation import sample_order
from llmq.data.batches.row_layout import PACKED, RowForm
from llmq.data.tokens.token_file import TokenFile, TokenWriter
from llmq.errors import DataError, UsageError

EOS, VOCAB = 2, 99


def write(path: Path, lengths: list[int], *, masked: bool = False, seed: int = 0) -> TokenFile:
    """A file of documents of so many tokens, each with EOS at its end and nowhere else."""
    rng = np.random.default_rng(seed)
    with TokenWriter(path, vocab_size=VOCAB, has_masks=masked) as writer:
        for length in lengths:
            ids = np.append(rng.integers(3, VOCAB, length - 1), EOS).astype(np.int32)
            writer.append(ids, rng.integers(0, 2, length).astype(bool) if masked else None, stops=[length])
    return TokenFile.open(path)


def packs_of(files: list[TokenFile], seq_len: int, seed: int = 0, max_docs: int | None = None) -> Packs:
    return Packs(files, RowForm(seq_len, VOCAB, PACKED, seed, max_docs))


def expected_pieces(files: list[TokenFile], seq_len: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and targets of every piece of every document, by hand."""
    found = []
    for file in files:
        trained = file.trained(0, file.num_tokens)
        for start, stop in zip(file.document_starts[:-1].tolist(), file.document_starts[1:].tolist(), strict=True):
            for first in range(start, max(stop - 1, start + 1), seq_len - 1):
                last = min(first + seq_len, stop)
                ids = file.tokens[first:last].tolist()
                targets = [t if trained[first + 1 + n] else -100 for n, t in enumerate(ids[1:])]
                found.append((ids, [*targets, -100]))
    return found


def pieces_of(rows, seq_len: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and targets of every document of the rows, and that the padding is tokens 0 which are not trained."""
    found = []
    for tokens, targets, marks in zip(rows.tokens, rows.targets, rows.borders, strict=True):
        assert marks[0] == 0 and marks[-1] == seq_len and (np.diff(marks) >= 0).all()
        assert (np.diff(marks) > 0)[: int(np.searchsorted(marks, seq_len))].all()
        for start, stop in zip(marks[:-1].tolist(), marks[1:].tolist(), strict=True):
            if start < seq_len:
                ids, aims = tokens[start:stop].tolist(), targets[start:stop].tolist()
                while ids[-1] == 0:  # no document of these files has a token 0
                    assert aims.pop() == -100 and ids.pop() == 0 and stop == seq_len
                found.append((ids, aims))
    return found


@pytest.mark.parametrize("epoch", range(3))
def test_an_epoch_does_not_go_from_full_rows_to_less_full_ones(tmp_path: Path, epoch: int) -> None:
    """Packs are made from the longest documents to the shortest; the run's seed, which packs them, also orders them."""
    lengths = np.random.default_rng(1).integers(2, 33, 4000).tolist()
    packs = packs_of([write(tmp_path / "a.bin", lengths)], 32, epoch, 3)
    count = packs.num_windows
    drawn = packs.index.ends[sample_order(np.arange(count) + epoch * count, count, epoch)]
    longest = packs.index.lengths[drawn]
    # Of independent numbers, a correlation of 5 / sqrt(n) comes up once in two million times.
    assert abs(np.corrcoef(longest, np.arange(count))[0, 1]) < 5 / np.sqrt(count)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 50), max_size=25), min_size=1, max_size=3),
    seq_len=st.integers(2, 30),
    max_docs=st.one_of(st.none(), st.integers(2, 6)),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_token_is_in_one_row_and_predicts_within_its_document(
    tmp_path_factory: pytest.TempPathFactory, sizes, seq_len: int, max_docs: int | None, masked: bool, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("packs")
    files = [write(folder / f"{n}.bin", part, masked=masked and n != 1, seed=n) for n, part in enumerate(sizes)]
    packs = packs_of(files, seq_len, seed, max_docs)
    expected = expected_pieces(files, seq_len)
    assert packs.num_tokens == sum(map(sum, sizes))
    assert packs.num_trained == sum(sum(t != -100 for t in targets) for _, targets in expected)
    # Every token that the mask leaves is a target once, but for the first of each document.
    targets = [file.tokens[n] for file in files for n in np.flatnonzero(file.trained(0, file.num_tokens)).tolist()
               if n not in file.document_starts]  # fmt: skip
    assert sorted(targets) == sorted(t for _, part in expected for t in part if t != -100)
    order = np.random.default_rng(seed).permutation(packs.num_windows)
    rows = packs.read(order)
    assert rows.tokens.shape == rows.targets.shape == (packs.num_windows, seq_len)
    if packs.limits is None:
        assert max_docs is None and rows.borders is None
        return
    docs, longest = packs.limits
    assert rows.borders.shape == (packs.num_windows, docs + 1) and docs == (max_docs or docs)
    assert longest == max((len(ids) for ids, _ in expected), default=1)
    assert sorted(pieces_of(rows, seq_len)) == sorted(expected)
    again = packs_of(files, seq_len, seed, max_docs).read(order)
    for one, other in zip(rows, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_document_to_a_row_has_no_borders(tmp_path: Path) -> None:
    file = write(tmp_path / "a.bin", [3, 9, 1, 8])
    packs = packs_of([file], 8, 0, 1)
    rows = packs.read(np.arange(packs.num_windows))
    assert packs.num_windows == 5 and packs.limits is None and rows.borders is None
    found = sorted(row[row != 0].tolist() for row in rows.tokens)
    assert found == sorted(ids for ids, _ in expected_pieces([file], 8))
    assert all((targets[-1:] == -100).all() and (tokens[0] != 0) for tokens, targets in zip(*rows[:2], strict=True))
    assert packs.fill == 22 / 40 and packs.num_trained == 21 - 4


def test_the_end_of_a_document_is_trained_and_predicts_nothing(tmp_path: Path) -> None:
    """Also where it is the token after a cut."""
    for length in (4, 15, 16, 29):
        packs = packs_of([write(tmp_path / "a.bin", [length])], 8, 0, 1)
        rows = packs.read(np.arange(packs.num_windows))
        assert (rows.targets == EOS).sum() == 1 and (rows.targets != -100).sum() == length - 1
        assert (rows.targets[rows.tokens == EOS] == -100).all()


def test_rows_of_one_token_are_refused() -> None:
    with pytest.raises(UsageError, match="--seq-len 1: a document of one token has no target: use 2 or more"):
        RowForm(1, VOCAB, PACKED)


def test_files_of_version_2_end_their_documents_with_their_tokenizer_s_end_token(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(packing, "READ_AT_ONCE", 4)
    lengths = [1, 3, 4, 2, 6]
    tokens = write(tmp_path / "new.bin", lengths).tokens.tolist()
    (tmp_path / "old.bin").write_bytes(legacy_bytes(tokens, VOCAB))
    file = TokenFile.open(tmp_path / "old.bin")
    with pytest.raises(DataError, match=r"old\.bin is of version 2.*tokenize-data, or leave out --packing"):
        packs_of([file], 8)
    about = sidecar()
    about.model_copy(update={"num_tokens": 16}).write(file.path)
    assert packing.document_lengths([file]).tolist() == lengths
    cut = tmp_path / "cut.bin"
    cut.write_bytes(legacy_bytes(tokens[:-1], VOCAB))
    about.model_copy(update={"num_tokens": 15}).write(cut)
    assert packing.document_lengths([TokenFile.open(cut)]).tolist() == [1, 3, 4, 2, 5]


def test_a_file_of_one_document_whose_sidecar_tells_of_several_is_cut_at_end_tokens(tmp_path: Path) -> None:
    several = write(tmp_path / "several.bin", [3, 4, 9])
    one = tmp_path / "one.bin"
    write_tokens(one, several.tokens.astype(np.int32), vocab_size=VOCAB)
    assert packing.document_lengths([TokenFile.open(one)]).tolist() == [16]
    for count, expected in ((1, [16]), (3, [3, 4, 9])):
        sidecar().model_copy(update={"num_tokens": 16, "num_documents": count}).write(one)
        assert packing.document_lengths([TokenFile.open(one)]).tolist() == expected


def test_rows_that_fill_up_an_evaluation_are_one_document(tmp_path: Path) -> None:
    packs = packs_of([write(tmp_path / "a.bin", [5, 7, 3, 9, 4])], 10, 0, 3)
    batches = list(eval_batches(packs, 2))
    assert packs.num_windows == 3 and [b.borders.shape for b in batches] == [(2, 4)] * 2
    assert batches[1].borders[1].tolist() == [0, 10, 10, 10] and (batches[1].targets[1] == -100).all()
