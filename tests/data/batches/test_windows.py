"""Rows: which layout they have and why; windows of several files, with masks; which files a pattern names."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_files import legacy_bytes, write_tokens

from llmq.data.batches import loader
from llmq.data.batches.loader import open_samples, require_one_tokenizer
from llmq.data.batches.rows import PACKED, PADDED, WINDOWS, RowForm, RowLayout, Samples, Windows
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenizer import Sidecar, TokenizerNote, sidecar_name, tokenizer_hash
from llmq.errors import DataError, UsageError


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    seq_len=st.integers(1, 20),
    masked=st.booleans(),
    with_tails=st.booleans(),
)
def test_windows_are_consecutive_with_shifted_targets(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seq_len: int, masked: bool, with_tails: bool
) -> None:
    """With tails, every token but the first of a file is a target once."""
    folder, rng = tmp_path_factory.mktemp("w"), np.random.default_rng(len(sizes))
    want, files = [], []
    for number, size in enumerate(sizes):
        tokens = rng.integers(1, 99, size)
        mask = rng.integers(0, 2, size).astype(bool) if masked else None
        write_tokens(folder / f"{number}.bin", tokens, vocab_size=99, mask=mask)
        files.append(TokenFile.open(folder / f"{number}.bin"))
        aims = np.where(True if mask is None else mask, tokens, -100)
        for start in range(0, size - (1 if with_tails else seq_len), seq_len):
            ids, targets = tokens[start : start + seq_len].tolist(), aims[start + 1 : start + seq_len + 1].tolist()
            ids = ids[: len(targets)]  # a file's last token is a target only
            padding = seq_len - len(ids)
            want.append((ids + [0] * padding, targets + [-100] * padding))
    windows = Windows(files, RowForm(seq_len, 99), with_tails=with_tails)
    assert windows.num_windows == len(want) and windows.num_tokens == sum(sizes)
    order = rng.permutation(len(want))
    tokens, targets, borders = windows.read(order)
    assert borders is None
    assert tokens.dtype == targets.dtype == np.int32 and tokens.shape == (len(want), seq_len)
    assert list(zip(tokens.tolist(), targets.tolist(), strict=True)) == [want[i] for i in order]


def write(path: Path, tokens: list[int] | np.ndarray, vocab_size: int = 100) -> Path:
    write_tokens(path, np.asarray(tokens), vocab_size=vocab_size)
    return path


def open_windows(patterns: list[str], seq_len: int, vocab_size: int) -> Samples:
    return open_samples(patterns, RowForm(seq_len, vocab_size))


def test_patterns_are_files_sorted_within_a_glob_and_no_sidecars(tmp_path: Path) -> None:
    for name in ("b2.bin", "b1.bin", "a.bin", "c[1].bin"):
        write(tmp_path / name, [1, 2, 3])
    (tmp_path / "b1.json").write_text("{}")
    found = open_windows([str(tmp_path / name) for name in ("b*", "a.bin", "c[1].bin")], 1, 9).token_files
    assert [file.path.name for file in found] == ["b1.bin", "b2.bin", "a.bin", "c[1].bin"]


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    good = write(tmp_path / "good.bin", [1, 2, 3])
    (tmp_path / "bad.bin").write_bytes(b"hello")
    patterns = [str(good), str(good), str(tmp_path / "bad.bin"), str(tmp_path / "*.none"), str(tmp_path / "gone.bin")]
    with pytest.raises(DataError) as caught:
        open_windows(patterns, 1, 9)
    for says in ("named twice", "not a token file", "no file matches", "gone.bin: cannot be read"):
        assert says in str(caught.value)


def test_foreign_ids_are_found_at_the_start_or_within_a_large_file_when_read(tmp_path: Path, monkeypatch) -> None:
    paths = [str(write(tmp_path / f"{i}.bin", [1, 2, 99, 3])) for i in range(2)]
    with pytest.raises(DataError) as caught:
        open_windows(paths, 1, 99)
    assert str(caught.value).count("token 2 has the id 99") == 2
    monkeypatch.setattr(loader, "CHECKED_ENDS", 4)
    tokens = np.ones(20, int)
    tokens[12] = 50
    windows = open_windows([str(write(tmp_path / "a.bin", tokens))], 3, 50)
    windows.read(np.array([0, 1, 2, 5]))
    for sample in (3, 4):  # it is the last target of one and the first token of the other
        with pytest.raises(DataError, match="token 12 has the id 50"):
            windows.read(np.array([0, sample]))
    tokens[18] = 50
    with pytest.raises(DataError, match="token 18 has the id 50"):
        open_windows([str(write(tmp_path / "b.bin", tokens))], 3, 50)


def tokenizer_folder(folder: Path, content: dict[str, object]) -> Path:
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def with_sidecar(path: Path, folder: Path) -> TokenFile:
    """A token file whose sidecar and header tell of the tokenizer in `folder`, which lies beside it."""
    sha256 = tokenizer_hash(folder)
    write_tokens(path, np.arange(7), vocab_size=9, tokenizer_sha256=sha256)
    note = TokenizerNote(
        source="me/mine", revision=None, sha256=sha256, folder=folder.name, vocab_size=9, eos_token="e", eos_token_id=1
    )
    about = {"document_rule": "", "text": ("t",), "end_token_ids": (1,), "tokenizer": note}
    Sidecar(num_tokens=7, num_documents=1, **about).write(path)
    return TokenFile.open(path)


def test_ids_of_another_tokenizer_than_the_models_are_refused(tmp_path: Path) -> None:
    merges = ["a b", "b c"]
    mine = tokenizer_folder(tmp_path / "mine", {"model": {"vocab": {"a": 0}, "merges": merges}, "padding": None})
    file = with_sidecar(tmp_path / "a.bin", mine)
    require_one_tokenizer([file], mine)
    require_one_tokenizer([file], tmp_path)  # a model without a tokenizer
    pairs = [pair.split() for pair in merges]
    resaved = {"padding": {"length": 8}, "normalizer": None, "model": {"merges": pairs, "vocab": {"a": 0}}}
    require_one_tokenizer([file], tokenizer_folder(tmp_path / "resaved", resaved))
    other = tokenizer_folder(tmp_path / "other", {"model": {"vocab": {"a": 0}, "merges": merges[::-1]}})
    with pytest.raises(DataError, match=r"a\.bin is of another tokenizer \(me/mine\).*--tokenizer .*other"):
        require_one_tokenizer([file], other)
    sidecar_name(file.path).unlink()
    with pytest.raises(DataError, match=r"a\.bin is of another tokenizer \(sha256 [0-9a-f]{12}\.\.\.\)"):
        require_one_tokenizer([file], other)
    file.path.write_bytes(legacy_bytes(range(7), 9))
    require_one_tokenizer([TokenFile.open(file.path)], other)  # which version 2 does not name


def test_a_sidecar_of_another_file_and_files_of_two_tokenizers_are_noticed(tmp_path: Path) -> None:
    file = with_sidecar(tmp_path / "a.bin", tokenizer_folder(tmp_path / "mine", {}))
    other = with_sidecar(tmp_path / "b.bin", tokenizer_folder(tmp_path / "other", {"model": {}}))
    with pytest.raises(DataError, match=r"of different tokenizers: .*a\.bin \(me/mine\), .*b\.bin.*: tokenize"):
        require_one_tokenizer([file, other])
    write_tokens(file.path, np.arange(7), vocab_size=9, tokenizer_sha256="ab" * 32)
    with pytest.raises(DataError, match=r"a\.bin and its sidecar name different tokenizers"):
        require_one_tokenizer([TokenFile.open(file.path)])


WHY_NOT = "packed rows in bf16 need a GPU of compute capability 9.0 or later, and A100 has 8.0"


@pytest.mark.parametrize(
    ("packing", "has_rows", "cannot_pack", "kind", "why"),
    [
        (None, True, None, PACKED, "the data is rows, which stay whole; --packing=windows cuts them"),
        (None, True, WHY_NOT, PADDED, f"the data is rows, which stay whole, and {WHY_NOT}"),
        (None, False, None, WINDOWS, "text and token files run on across documents; --packing keeps these whole"),
        (None, False, WHY_NOT, WINDOWS, "text and token files run on across documents; --packing keeps these whole"),
        (True, False, None, PACKED, "by --packing"),
        (False, True, WHY_NOT, PADDED, "by --no-packing"),
        ("windows", True, None, WINDOWS, "by --packing=windows"),
    ],
)
def test_the_data_decides_what_the_options_leave_open(packing, has_rows, cannot_pack, kind, why):
    assert RowLayout.choose(packing, None, has_rows=has_rows, cannot_pack=cannot_pack) == RowLayout(kind, why)


def test_packing_that_was_asked_for_is_never_replaced():
    with pytest.raises(UsageError, match=r"--packing: packed rows .* A100 has 8.0: use --no-packing, .*--model-dtype"):
        RowLayout.choose(True, None, has_rows=True, cannot_pack=WHY_NOT)
    with pytest.raises(UsageError, match="--max-docs 3 is for packed rows: leave it out"):
        RowLayout.choose(None, 3, has_rows=True, cannot_pack=WHY_NOT)
    with pytest.raises(UsageError, match="--max-docs 3 is for packed rows: add --packing, or leave it out"):
        RowLayout.choose(None, 3, has_rows=False)
    assert RowLayout.choose(None, 3, has_rows=True).kind == PACKED


@pytest.mark.parametrize(
    ("saved", "kind", "fix"),
    [(PADDED, PACKED, "--no-packing"), (WINDOWS, PADDED, "--packing=windows"), (PACKED, WINDOWS, "--packing")],
)
def test_a_checkpoint_of_another_layout_is_refused_with_the_option_that_continues_it(saved, kind, fix):
    with pytest.raises(UsageError, match=f"would train on {kind} .by default.: add {fix} to continue it"):
        RowLayout(kind, "by default").refuse_other({"row_layout": saved})
    RowLayout(saved, "by default").refuse_other({"row_layout": saved})
