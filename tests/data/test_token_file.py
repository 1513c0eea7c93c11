"""Token files: the exact bytes, what is refused, and that nothing half-written is ever seen."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.data import token_file
from llmq.data.token_file import TokenFile, TokenWriter
from llmq.errors import DataError, LlmqError, StorageError


def expected_bytes(tokens: list[int], vocab_size: int, mask: list[bool] | None = None) -> bytes:
    """The format, written independently with struct and loops."""
    head = b"BIN.TOK\n" + struct.pack("<5i", 2, 4, len(tokens), vocab_size, 0 if mask is None else 1)
    body = struct.pack(f"<{len(tokens)}i", *tokens)
    bits = bytearray(-(-len(tokens) // 8) if mask is not None else 0)
    for i, trained in enumerate(mask or ()):
        bits[i // 8] |= trained << (i % 8)
    return head + b"*" * (1023 - len(head)) + b"\n" + body + bytes(bits)


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    TokenFile.write(path, np.array([1, 70000, 3]), vocab_size=100000)
    assert path.read_bytes() == expected_bytes([1, 70000, 3], 100000)
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(0, 70), masked=st.booleans())
def test_pieces_make_the_same_file_as_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int, masked: bool
) -> None:
    tokens = data.draw(st.lists(st.integers(0, 999), min_size=size, max_size=size))
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) if masked else None
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=4))), size]
    path = tmp_path_factory.mktemp("t") / "a.bin"
    with TokenWriter(path, vocab_size=1000, has_masks=masked) as writer:
        for start, stop in pairwise(cuts):
            writer.append(np.array(tokens[start:stop], np.int64), None if mask is None else np.array(mask[start:stop]))
    assert path.read_bytes() == expected_bytes(tokens, 1000, mask)
    file = TokenFile.open(path, vocab_size=1000)
    assert (file.num_tokens, file.vocab_size) == (size, 1000)
    np.testing.assert_array_equal(file.tokens, tokens)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert file.trained(start, stop).tolist() == (mask if mask is not None else [True] * size)[start:stop]


def test_the_tokens_are_mapped_and_read_only(tmp_path: Path) -> None:
    TokenFile.write(tmp_path / "a.bin", np.arange(5), vocab_size=5)
    tokens = TokenFile.open(tmp_path / "a.bin").tokens
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b[:1000], "truncated: 1000 bytes, of which the header needs 1024"),
        (lambda b: b"", "truncated: 0 bytes"),
        (lambda b: b"GGUF" + b[4:], "not a token file"),
        (lambda b: b[:-1], "truncated: 1065 bytes, but 10 tokens and 2 bytes of masks make 1066"),
        (lambda b: b + b"\0", "extra bytes: 1067 bytes"),
        (lambda b: b[:8] + struct.pack("<i", 3) + b[12:], "version 3, but only version 2"),
        (lambda b: b[:12] + struct.pack("<i", 2) + b[16:], "2 bytes per token"),
        (lambda b: b[:16] + struct.pack("<i", -1) + b[20:], "-1 tokens"),
        (lambda b: b[:16] + struct.pack("<i", 2**31 - 1) + b[20:], "truncated"),
        (lambda b: b[:20] + struct.pack("<i", 0) + b[24:], "vocabulary of 0"),
        (lambda b: b[:24] + struct.pack("<i", 2) + b[28:], "2 for has-masks"),
        (lambda b: b[:24] + struct.pack("<i", 0) + b[28:], "extra bytes"),
        (lambda b: b[:8] + struct.pack("<2i", 1, 2) + b[16:], r"version 1.*; 2 bytes per token"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, change, says: str) -> None:
    path = tmp_path / "a.bin"
    TokenFile.write(path, np.arange(10), vocab_size=10, mask=np.ones(10, bool))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=says) as caught:
        TokenFile.open(path)
    assert str(path) in str(caught.value)


def test_absent_files_and_folders_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        TokenFile.open(tmp_path / "none.bin")
    with pytest.raises(DataError, match="not a file"):
        TokenFile.open(tmp_path)


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1])
@pytest.mark.parametrize("place", [0, 1030, 2999])
def test_a_foreign_id_is_found_wherever_it_is(tmp_path: Path, monkeypatch, bad: int, place: int) -> None:
    monkeypatch.setattr(token_file, "CHECKED_AT_ONCE", 1000)
    tokens = np.arange(3000, dtype=np.int32) % 50
    tokens[place] = bad
    path = tmp_path / "a.bin"
    path.write_bytes(expected_bytes(tokens.tolist(), 50))
    with pytest.raises(DataError, match=f"token {place} has the id {bad}, but the vocabulary has 50 ids"):
        TokenFile.open(path, vocab_size=50)
    TokenFile.open(path)  # nobody asked
    TokenFile.open(path).check_ids(50, place + 1)


def test_mutated_files_give_our_errors_or_open(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "a.bin"
    TokenFile.write(path, np.arange(40) % 7, vocab_size=7, mask=np.arange(40) % 3 == 0)
    good = path.read_bytes()
    refused = 0
    for _ in range(600):
        bad = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            match rng.integers(5):
                case 0:
                    bad[rng.integers(min(28, len(bad)))] = rng.integers(256)
                case 1:
                    bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
                case 2:
                    del bad[rng.integers(28, len(bad)) :]
                case 3:
                    bad[8 + 4 * (word := rng.integers(5)) : 12 + 4 * word] = rng.bytes(4)
                case 4:
                    bad += rng.bytes(rng.integers(1, 9))
        path.write_bytes(bytes(bad))
        try:
            file = TokenFile.open(path, vocab_size=7)
        except LlmqError as error:
            assert isinstance(error, DataError) and str(path) in str(error)
            refused += 1
        else:
            assert (
                file.tokens.shape == (file.num_tokens,) and file.trained(0, file.num_tokens).shape == file.tokens.shape
            )
    assert refused > 400


def test_the_writer_refuses_ids_outside_and_counts_beyond_int32(tmp_path: Path, monkeypatch) -> None:
    for bad in (-1, 10, 2**40):
        with (
            pytest.raises(DataError, match=f"the id {bad} is outside"),
            TokenWriter(tmp_path / "a", vocab_size=10) as w,
        ):
            w.append(np.array([3, bad], np.int64))
    monkeypatch.setattr(token_file, "MAX_TOKENS", 5)
    with pytest.raises(DataError, match="more than 5 tokens"), TokenWriter(tmp_path / "a", vocab_size=10) as writer:
        writer.append(np.zeros(5, np.int32))
        writer.append(np.zeros(1, np.int32))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    TokenFile.write(path, np.arange(3), vocab_size=3)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), TokenWriter(path, vocab_size=3, has_masks=True) as writer:
        writer.append(np.array([1]), np.array([True]))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def test_a_sealed_file_shows_only_when_published(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with TokenWriter(path, vocab_size=3) as writer:
        writer.append(np.array([1, 2]))
        writer.seal()
        assert not path.exists()
        writer.publish()
        assert TokenFile.open(path).tokens.tolist() == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_what_the_disk_refuses_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        TokenWriter(tmp_path / "file" / "a.bin", vocab_size=3)
    if Path("/dev/full").exists():
        with (
            pytest.raises(StorageError, match="No space left"),
            TokenWriter(tmp_path / "a.bin", vocab_size=3) as writer,
        ):
            writer._file.close()
            writer._file = open("/dev/full", "wb")  # noqa: SIM115
            writer.append(np.zeros(100_000, np.int32))
        assert list(tmp_path.iterdir()) == [tmp_path / "file"]
