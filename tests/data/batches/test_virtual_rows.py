"""Rows with virtual tokens: the same text in less room, each document after positions of its own."""

import numpy as np
import pytest
from packed_rows import taken_apart

from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import eval_batches, open_data
from llmq.data.batches.named_data import StreamedRows
from llmq.data.batches.packing import Packs
from llmq.data.batches.rows import PACKED, WINDOWS, RowForm, Rows, Windows
from llmq.data.tokens.pipeline import TokenSpan
from llmq.data.tokens.token_file import TokenFile, TokenWriter
from llmq.errors import UsageError
from llmq.options.parse import Options

N, VOCAB = 3, 99


@pytest.fixture
def file(tmp_path):
    """Documents of 2 to 20 tokens, a third of which are not trained."""
    rng = np.random.default_rng(0)
    with TokenWriter(tmp_path / "a.bin", vocab_size=VOCAB, has_masks=True) as writer:
        for length in rng.integers(2, 21, 60):
            ids = rng.integers(1, VOCAB, length).astype(np.int32)
            writer.append(ids, rng.random(length) < 2 / 3, stops=[length])
    return TokenFile.open(tmp_path / "a.bin")


@pytest.mark.parametrize("with_tails", [False, True])
def test_windows_are_those_of_shorter_rows(file, with_tails):
    plain = Windows([file], RowForm(8, VOCAB), with_tails=with_tails)
    found = Windows([file], RowForm(8 + N, VOCAB, num_virtual=N), with_tails=with_tails)
    assert found.num_windows == plain.num_windows
    order = np.random.default_rng(1).permutation(plain.num_windows)
    for one, other, filler in zip(found.read(order)[:2], plain.read(order)[:2], (0, -100), strict=True):
        np.testing.assert_array_equal(one[:, N:], other)
        assert (one[:, :N] == filler).all()


@pytest.mark.parametrize("max_docs", [1, 3, None])
def test_packs_hold_the_same_documents(file, max_docs):
    """Also those that are cut, as they have less room."""
    pieces = Packs([file], RowForm(12, VOCAB, PACKED, 0, 1))
    packs = Packs([file], RowForm(12 + N, VOCAB, PACKED, 0, max_docs, N))
    rows = packs.read(np.arange(packs.num_windows))
    found = taken_apart(rows, N)
    assert found == taken_apart(pieces.read(np.arange(pieces.num_windows)))
    assert packs.num_trained == pieces.num_trained
    if max_docs != 1:
        assert packs.limits == (packs.form.docs, max(len(ids) for ids, _ in found) + N) and packs.form.docs > 1
        assert max_docs is None or packs.form.docs == max_docs
    one = Batch(*rows, num_virtual=N)
    assert one.num_real == int(pieces.index.lengths.sum())
    assert one.num_tokens == packs.num_windows * (12 + N) - N * len(pieces.index.lengths)


def test_empty_rows_and_rows_without_virtual_tokens_are_counted(file):
    windows = Windows([file], RowForm(8 + N, VOCAB, num_virtual=N), with_tails=True)
    *_, last = eval_batches(windows, windows.num_windows - 1)
    assert last.tokens.any(axis=1).sum() == 1 and last.num_virtual == N
    assert last.num_tokens == 8 * len(last.tokens) and 0 < last.num_real <= 8
    plain = Batch(last.tokens, last.targets)
    assert plain.num_tokens == last.tokens.size and plain.num_real == last.num_real + N


@pytest.mark.parametrize("max_docs", [None, 1, 3])
def test_a_stream_has_the_same_text_and_resumes(max_docs):
    rng = np.random.default_rng(2)
    documents = [rng.integers(1, VOCAB, length) for length in rng.integers(2, 15, 9)]

    def tokens(begun, position):
        for n in range(position[1] if position else 0, len(documents)):
            yield (0, n + 1, n + 1), TokenSpan(documents[n], None, np.array([len(documents[n])]))

    def rows_of(num_virtual, count, state=None):
        form = RowForm(10 + num_virtual, VOCAB, PACKED if max_docs else WINDOWS, 0, max_docs, num_virtual)
        found = StreamedRows(tokens, form, "it").read(state or ())
        states, rows = zip(*(next(found) for _ in range(count)), strict=True)
        return states, Rows.stacked(rows)

    (states, rows), (_, plain) = rows_of(N, 6), rows_of(0, 6)
    assert not rows.tokens[:, :N].any() and (rows.targets[:, :N] == -100).all() and rows.tokens.shape[1] == 10 + N
    if max_docs is None or max_docs == 1:
        np.testing.assert_array_equal(rows.tokens[:, N:], plain.tokens)
        np.testing.assert_array_equal(rows.targets[:, N:], plain.targets)
    np.testing.assert_array_equal(rows_of(N, 3, states[2])[1].tokens, rows.tokens[3:])
    if max_docs == 3:
        assert {tuple(ids) for ids, _ in taken_apart(rows, N)} <= {tuple(d[:10]) for d in documents} | {
            tuple(d[9:]) for d in documents
        }


def test_data_gives_batches_with_virtual_tokens(file, tmp_path):
    path = str(tmp_path / "a.bin")
    given = {"model": "m", "train_file": path, "eval_file": path, "seq_len": 8 + N, "batch_size": 2}
    data = open_data(Options.parse(given).data, VOCAB, 0, num_virtual=N)
    assert data.train.num_virtual == data.eval.num_virtual == N and data.tokens_per_row == 8
    assert data.facts()["virtual tokens"] == "3 before each document"
    with data.loader() as loader:
        one = loader.next()
    assert one.num_virtual == N and one.num_tokens == one.num_real == 16
    with pytest.raises(UsageError, match=r"--seq-len 11 counts the 10 virtual tokens .*: use at least 12"):
        open_data(Options.parse(given).data, VOCAB, 0, num_virtual=10)
    mixed = Options.parse({**given, "train_file": [f"{path}"], "packing": True}).data
    assert open_data(mixed, VOCAB, 0, num_virtual=N).limits[1] <= 8 + N
