"""Token files: the exact bytes of each version, what is refused, and that nothing half-written is ever seen."""

import struct
import zlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_files import bits_of, legacy_bytes, verified, write_tokens

from llmq.data.tokens import token_file
from llmq.data.tokens.token_file import BLOCK_BYTES, TokenFile, TokenWriter
from llmq.errors import DataError, LlmqError, StorageError

SHA = "0123456789abcdef" * 4


def current_bytes(
    tokens: list[int], vocab_size: int, mask: list[bool] | None = None, starts: list[int] | None = None, sha: str = ""
) -> bytes:
    """Version 3, written independently with struct and loops."""
    size, letter = (2, "H") if vocab_size <= 65536 else (4, "I")
    body = struct.pack(f"<{len(tokens)}{letter}", *tokens) + bits_of(mask or [])
    body += bytes(-len(body) % 8)
    starts = starts or ([0, len(tokens)] if tokens else [0])
    body += struct.pack(f"<{len(starts)}q", *starts)
    table = b"".join(struct.pack("<I", zlib.crc32(body[at : at + 65536])) for at in range(0, len(body), 65536))
    head = b"BIN.TOK\n" + struct.pack("<iiQQII", 3, size, len(tokens), len(starts) - 1, vocab_size, mask is not None)
    head += bytes.fromhex(sha or "00" * 32) + struct.pack("<I", zlib.crc32(table))
    head += bytes(1020 - len(head))
    return head + struct.pack("<I", zlib.crc32(head)) + body + table


@pytest.mark.parametrize("sha", [SHA, None])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_the_bytes_are_those_of_the_format_and_ids_take_two_where_the_vocabulary_fits(
    tmp_path: Path, vocab_size: int, dtype: type, sha: str | None
) -> None:
    path, tokens = tmp_path / "a.bin", [0, vocab_size - 1, 3]
    write_tokens(path, np.array(tokens), vocab_size=vocab_size, tokenizer_sha256=sha)
    assert path.read_bytes() == current_bytes(tokens, vocab_size, sha=sha or "")
    file = verified(path, vocab_size)
    assert (file.tokens.dtype, file.tokens.tolist(), file.header.tokenizer_sha256) == (dtype, tokens, sha)
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), size=st.integers(0, 70), masked=st.booleans(), version=st.sampled_from([1, 2, 3, 3]))
def test_a_file_of_any_version_is_read_and_pieces_write_the_same_file_as_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int, masked: bool, version: int
) -> None:
    tokens = data.draw(st.lists(st.integers(0, 999), min_size=size, max_size=size))
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) if masked and version > 1 else None
    path = tmp_path_factory.mktemp("t") / "a.bin"
    starts = [0, size] if size else [0]
    if version < 3:
        path.write_bytes(legacy_bytes(tokens, 1000, mask, version))
    else:
        cuts = [0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=4))), size]
        ends = data.draw(st.sets(st.sampled_from(cuts)))
        starts = sorted({0, size, *ends})
        with TokenWriter(path, vocab_size=1000, has_masks=mask is not None) as writer:
            for start, stop in pairwise(cuts):
                part = np.array(tokens[start:stop], np.int64)
                stops = [part.size] if part.size and stop in ends else []
                writer.append(part, None if mask is None else np.array(mask[start:stop], bool), stops=stops)
        assert path.read_bytes() == current_bytes(tokens, 1000, mask, starts)
        assert (writer.num_tokens, writer.num_documents) == (size, len(starts) - 1)
        assert writer.num_trained == (size if mask is None else sum(mask))
    file = verified(path, 1000)
    assert (file.num_tokens, file.header.vocab_size) == (size, None if version == 1 else 1000)
    np.testing.assert_array_equal(file.tokens, tokens)
    assert file.document_starts.tolist() == starts and file.num_documents == len(starts) - 1
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert file.trained(start, stop).tolist() == (mask if mask is not None else [True] * size)[start:stop]


def word(at: int, layout: str, value: int) -> Callable[[bytes], bytes]:
    """A change of one number of the header; in version 3 the header's checksum is made right again."""

    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        struct.pack_into(layout, changed, at, value)
        if changed[8] == 3:
            struct.pack_into("<I", changed, 1020, zlib.crc32(changed[:1020]))
        return bytes(changed)

    return change


@pytest.mark.parametrize(
    ("version", "change", "says"),
    [
        (2, lambda b: b[:1000], "truncated: 1000 bytes, of which the header needs 1024"),
        (2, lambda b: b"", "truncated: 0 bytes"),
        (2, lambda b: b"GGUF" + b[4:], "not a token file"),
        (2, lambda b: b[:-1], "truncated: 1065 bytes, but 10 tokens and 2 bytes of masks make 1066"),
        (2, lambda b: b + b"\0", "extra bytes: 1067 bytes"),
        (2, word(8, "<i", 4), "version 4, but only versions 1 to 3"),
        (2, word(8, "<i", -1), "version -1"),
        (2, word(12, "<i", 2), "damaged header of version 2"),
        (2, word(16, "<i", -1), "damaged header of version 2"),
        (2, word(16, "<i", 2**31 - 1), "truncated"),
        (2, word(24, "<i", 0), "extra bytes"),
        (1, word(12, "<i", 2), "damaged header of version 1"),
        (1, lambda b: b + b"\0", "extra bytes"),
        (3, lambda b: b[:-1], "truncated: 1067 bytes, but 10 tokens and 2 bytes of masks and 1 documents make 1068"),
        (3, lambda b: b[:300] + b"x" + b[301:], "damaged header of version 3"),
        (3, word(16, "<Q", 2**63), "truncated"),
        (3, word(24, "<Q", 2**63), "truncated: 1068 bytes, but .* 9223372036854775808 documents"),
        (3, lambda b: b[:-1] + b"x", "table of checksums is damaged"),
        (3, lambda b: current_bytes([1, 2, 12, 3], 10), "token 2 has the id 12, but the vocabulary has 10"),
        *(
            (3, lambda b, starts=starts: current_bytes([1] * 10, 10, starts=starts), "do not rise from token 0 to 10")
            for starts in ([0, 5, 5, 10], [1, 4, 6, 10], [0, 4, 6, 9], [0, 7, 4, 10])
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, version: int, change: Callable[[bytes], bytes], says: str
) -> None:
    path = tmp_path / "a.bin"
    make = current_bytes if version == 3 else partial(legacy_bytes, version=version)
    path.write_bytes(change(make(list(range(10)), 10, [True] * 10 if version > 1 else None)))
    with pytest.raises(DataError, match=says) as caught:
        verified(path)
    assert str(path) in str(caught.value)


def test_a_damaged_block_is_found_when_it_is_first_read(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    per_block = BLOCK_BYTES // 2
    with TokenWriter(path, vocab_size=9, has_masks=True) as writer:
        for _ in range(4):
            writer.append(np.full(per_block, 3), np.ones(per_block, bool), stops=[per_block])
    good = path.read_bytes()

    def damaged(at: int) -> TokenFile:
        path.write_bytes(good[:at] + b"\1" + good[at + 1 :])
        return TokenFile.open(path)

    file = damaged(1024 + 2 * BLOCK_BYTES + 77)
    file.check_ids(9, 0, 2 * per_block)
    assert file.trained(0, 4 * per_block).all() and len(file.document_starts) == 5
    for _ in range(2):
        with pytest.raises(DataError, match=f"damaged between the bytes {1024 + 2 * BLOCK_BYTES} and") as caught:
            file.check_ids(9, 2 * per_block - 1, 2 * per_block + 1)
        assert str(path) in str(caught.value)
    file.check_ids(9, 3 * per_block)
    with pytest.raises(DataError, match="damaged"):
        verified(path)
    last = damaged(len(good) - 30)  # among the documents, in one block with the masks
    last.check_ids(9)
    for read in (lambda: last.document_starts, lambda: last.trained(5, 9)):
        with pytest.raises(DataError, match="damaged"):
            read()


def test_absent_files_and_folders_are_data_errors_and_tokens_are_mapped_and_read_only(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        TokenFile.open(tmp_path / "none.bin")
    with pytest.raises(DataError, match="not a file"):
        TokenFile.open(tmp_path)
    write_tokens(tmp_path / "a.bin", np.arange(5), vocab_size=5)
    tokens = TokenFile.open(tmp_path / "a.bin").tokens
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1])
@pytest.mark.parametrize("place", [0, 1030, 2999])
def test_a_foreign_id_is_found_wherever_it_is(tmp_path: Path, monkeypatch, bad: int, place: int) -> None:
    monkeypatch.setattr(token_file, "CHECKED_AT_ONCE", 1000)
    tokens = np.arange(3000, dtype=np.int32) % 50
    tokens[place] = bad
    path = tmp_path / "a.bin"
    path.write_bytes(legacy_bytes(tokens.tolist(), 50))
    with pytest.raises(DataError, match=f"token {place} has the id {bad}, but the vocabulary has 50 ids"):
        verified(path, 50)
    TokenFile.open(path)  # without vocab_size no id is checked
    TokenFile.open(path).check_ids(50, place + 1)


def mutate(good: bytes, rng: np.random.Generator) -> bytes:
    """`good` with one to three changes: header bytes and words, bits, cuts, additions, moved and repeated pieces."""
    bad = bytearray(good)
    for _ in range(rng.integers(1, 4)):
        match rng.integers(8):
            case 0:
                bad[rng.integers(min(76, len(bad)))] = rng.integers(256)
            case 1:
                bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
            case 2:
                del bad[rng.integers(28, len(bad) + 1) :]
            case 3:
                bad[8 + 4 * (n := rng.integers(17)) : 12 + 4 * n] = rng.bytes(4)
            case 4:
                bad += rng.bytes(rng.integers(1, 9))
            case 5:
                at, size = rng.integers(len(bad)), rng.integers(1, 200)
                bad[at : at + size] = bytes(len(bad[at : at + size]))
            case 6:
                at, to, size = rng.integers(len(bad)), rng.integers(len(bad)), rng.integers(1, 40)
                bad[to:to] = bad[at : at + size]
            case 7:
                struct.pack_into("<I", bad, min(1020, len(bad) - 4), zlib.crc32(bad[:1020]))
    return bytes(bad)


@pytest.mark.parametrize("count", [800, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutated_files_give_our_errors_or_open(tmp_path: Path, count: int) -> None:
    """Mutated files open or give a DataError that names them; in version 3 only the header can change unnoticed."""
    path, rng = tmp_path / "a.bin", np.random.default_rng(0)
    good = []
    for version in (1, 2, 3, 3):
        mask = np.arange(40) % 3 == 0 if version > 1 else None
        vocab_size = 7 if len(good) < 3 else 70000
        make = current_bytes if version == 3 else partial(legacy_bytes, version=version)
        good.append(make((np.arange(40) % 7).tolist(), vocab_size, None if mask is None else mask.tolist()))
    refused = 0
    for number in range(count):
        content = mutate(good[number % 4], rng)
        path.write_bytes(content)
        try:
            file = verified(path, 7 if number % 4 < 3 else 70000)
            assert file.trained(0, file.num_tokens).shape == file.tokens.shape == (file.num_tokens,)
            assert file.document_starts[-1] == file.num_tokens
        except LlmqError as error:
            assert isinstance(error, DataError) and str(path) in str(error)
            refused += 1
        else:
            assert file.header.version < 3 or content[1024:] == good[number % 4][1024:]
    assert refused > count // 2


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_a_writer_that_refuses_an_id_or_is_interrupted_leaves_the_old_file_alone(tmp_path: Path, bad: int) -> None:
    path = tmp_path / "a.bin"
    write_tokens(path, np.arange(3), vocab_size=3)
    before, says = path.read_bytes(), f"the id {bad} is outside the vocabulary \\(0 to 9\\)"
    with pytest.raises(DataError, match=says), TokenWriter(path, vocab_size=10) as writer:
        writer.append(np.array([3, bad], np.int64))
    with pytest.raises(KeyboardInterrupt), TokenWriter(path, vocab_size=3, has_masks=True) as writer:
        writer.append(np.array([1]), np.array([True]))
        assert path.read_bytes() == before
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


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
            writer._file = open("/dev/full", "w+b")  # noqa: SIM115
            writer.append(np.zeros(100_000, np.int32))
        assert list(tmp_path.iterdir()) == [tmp_path / "file"]
