"""Token files: the exact bytes of each version, what is refused, and that nothing half-written is ever seen."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.data.tokens import token_file
from llmq.data.tokens.token_file import TokenFile, TokenWriter, partial_name
from llmq.data.tokens.token_format import BLOCK_BYTES
from llmq.errors import DataError, LlmqError, StorageError, UsageError

SHA = "0123456789abcdef" * 4


def bits_of(mask: list[bool]) -> bytes:
    bits = bytearray(-(-len(mask) // 8))
    for i, trained in enumerate(mask):
        bits[i // 8] |= trained << (i % 8)
    return bytes(bits)


def legacy_bytes(tokens: list[int], vocab_size: int, mask: list[bool] | None = None, version: int = 2) -> bytes:
    """Versions 1 and 2, written independently with struct and loops."""
    head = b"BIN.TOK\n" + struct.pack("<3i", version, 4, len(tokens))
    if version == 2:
        head += struct.pack("<2i", vocab_size, 0 if mask is None else 1)
    body = struct.pack(f"<{len(tokens)}i", *tokens)
    return head + b"*" * (1023 - len(head)) + b"\n" + body + bits_of(mask or [])


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


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    tokens = [1, 70000, 3]
    for version in (1, 2):
        TokenFile.write(path, np.array(tokens), vocab_size=100000, version=version)
        assert path.read_bytes() == legacy_bytes(tokens, 100000, version=version)
    TokenFile.write(path, np.array(tokens), vocab_size=100000, tokenizer_sha256=SHA)
    assert path.read_bytes() == current_bytes(tokens, 100000, sha=SHA)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_ids_take_two_bytes_where_the_vocabulary_fits(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    TokenFile.write(tmp_path / "a.bin", np.array([0, vocab_size - 1]), vocab_size=vocab_size)
    file = TokenFile.open(tmp_path / "a.bin", vocab_size=vocab_size)
    assert file.tokens.dtype == dtype and file.tokens.tolist() == [0, vocab_size - 1]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), size=st.integers(0, 70), masked=st.booleans(), version=st.sampled_from([1, 2, 3]))
def test_pieces_make_the_same_file_as_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int, masked: bool, version: int
) -> None:
    masked = masked and version > 1
    tokens = data.draw(st.lists(st.integers(0, 999), min_size=size, max_size=size))
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) if masked else None
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=4))), size]
    ends = data.draw(st.sets(st.sampled_from(cuts)))
    path = tmp_path_factory.mktemp("t") / "a.bin"
    with TokenWriter(path, vocab_size=1000, has_masks=masked, version=version) as writer:
        for start, stop in pairwise(cuts):
            writer.append(np.array(tokens[start:stop], np.int64), None if mask is None else np.array(mask[start:stop]))
            if stop in ends:
                writer.end_document()
    starts = sorted({0, size, *ends}) if version == 3 or not size else [0, size]
    want = current_bytes(tokens, 1000, mask, starts) if version == 3 else legacy_bytes(tokens, 1000, mask, version)
    assert path.read_bytes() == want
    file = TokenFile.open(path, vocab_size=1000)
    file.verify()
    assert (file.num_tokens, file.vocab_size) == (size, None if version == 1 else 1000)
    np.testing.assert_array_equal(file.tokens, tokens)
    assert file.document_starts.tolist() == starts and file.num_documents == len(starts) - 1
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert file.trained(start, stop).tolist() == (mask if mask is not None else [True] * size)[start:stop]


def test_the_tokens_are_mapped_and_read_only(tmp_path: Path) -> None:
    TokenFile.write(tmp_path / "a.bin", np.arange(5), vocab_size=5)
    tokens = TokenFile.open(tmp_path / "a.bin").tokens
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_the_tokenizer_is_named_by_its_hash(tmp_path: Path) -> None:
    for sha in (SHA, None):
        TokenFile.write(tmp_path / "a.bin", np.arange(5), vocab_size=5, tokenizer_sha256=sha)
        assert TokenFile.open(tmp_path / "a.bin").tokenizer_sha256 == sha


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
        (2, word(12, "<i", 2), "2 bytes per token"),
        (2, word(16, "<i", -1), "-1 tokens"),
        (2, word(16, "<i", 2**31 - 1), "truncated"),
        (2, word(20, "<i", 0), "vocabulary of 0"),
        (2, word(24, "<i", 2), "2 for has-masks"),
        (2, word(24, "<i", 0), "extra bytes"),
        (2, lambda b: b[:12] + struct.pack("<3i", 2, -5, 0) + b[24:], "2 bytes per token.*-5 tokens.*vocabulary of 0"),
        (1, word(12, "<i", 2), "2 bytes per token"),
        (1, lambda b: b + b"\0", "extra bytes"),
        (3, lambda b: b[:-1], "truncated: 1067 bytes, but 10 tokens and 2 bytes of masks and 1 documents make 1068"),
        (3, lambda b: b[:300] + b"x" + b[301:], "a checksum that is not its own"),
        (3, word(12, "<i", 4), "4 bytes per token, but 10 ids need 2"),
        (3, word(16, "<Q", 2**63), "truncated"),
        (3, word(24, "<Q", 2**63), "9223372036854775808 documents for 10 tokens"),
        (3, word(24, "<Q", 0), "0 documents for 10 tokens"),
        (3, word(32, "<I", 0), "vocabulary of 0"),
        (3, word(36, "<I", 2), "2 for has-masks"),
        (3, lambda b: b[:-1] + b"x", "table of checksums is damaged"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, version: int, change: Callable[[bytes], bytes], says: str
) -> None:
    path = tmp_path / "a.bin"
    mask = np.ones(10, bool) if version > 1 else None
    TokenFile.write(path, np.arange(10), vocab_size=10, mask=mask, version=version)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=says) as caught:
        TokenFile.open(path)
    assert str(path) in str(caught.value)


def test_a_damaged_block_is_found_when_it_is_first_read(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    per_block = BLOCK_BYTES // 2
    with TokenWriter(path, vocab_size=9, has_masks=True) as writer:
        for _ in range(4):
            writer.append(np.full(per_block, 3), np.ones(per_block, bool))
            writer.end_document()
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
        file.verify()
    last = damaged(len(good) - 30)  # among the documents, in one block with the masks
    last.check_ids(9)
    for read in (lambda: last.document_starts, lambda: last.trained(5, 9)):
        with pytest.raises(DataError, match="damaged"):
            read()


@pytest.mark.parametrize("starts", [[0, 5, 5, 10], [1, 4, 6, 10], [0, 4, 6, 9], [0, 7, 4, 10]])
def test_documents_that_do_not_rise_are_refused(tmp_path: Path, starts: list[int]) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(current_bytes(list(range(10)), 10, starts=starts))
    with pytest.raises(DataError, match="do not rise from token 0 to 10"):
        TokenFile.open(path).verify()


def test_ids_beyond_the_files_own_vocabulary_are_found_by_verify(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(current_bytes([1, 2, 12, 3], 10))
    with pytest.raises(DataError, match="token 2 has the id 12, but the vocabulary has 10"):
        TokenFile.open(path).verify()


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
    path.write_bytes(legacy_bytes(tokens.tolist(), 50))
    with pytest.raises(DataError, match=f"token {place} has the id {bad}, but the vocabulary has 50 ids"):
        TokenFile.open(path, vocab_size=50)
    TokenFile.open(path)  # nobody asked
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


def try_mutations(path: Path, count: int) -> None:
    """Mutated files open or give a DataError that names them; in version 3 only the header can change unnoticed."""
    rng = np.random.default_rng(0)
    good = []
    for version in (1, 2, 3, 3):
        mask = np.arange(40) % 3 == 0 if version > 1 else None
        vocab_size = 7 if len(good) < 3 else 70000
        TokenFile.write(path, np.arange(40) % 7, vocab_size=vocab_size, mask=mask, version=version)
        good.append(path.read_bytes())
    refused = 0
    for number in range(count):
        content = mutate(good[number % 4], rng)
        path.write_bytes(content)
        try:
            file = TokenFile.open(path, vocab_size=7 if number % 4 < 3 else 70000)
            file.verify()
            assert file.trained(0, file.num_tokens).shape == file.tokens.shape == (file.num_tokens,)
            assert file.document_starts[-1] == file.num_tokens
        except LlmqError as error:
            assert isinstance(error, DataError) and str(path) in str(error)
            refused += 1
        else:
            assert file.header.version < 3 or content[1024:] == good[number % 4][1024:]
    assert refused > count // 2


def test_mutated_files_give_our_errors_or_open(tmp_path: Path) -> None:
    try_mutations(tmp_path / "a.bin", 800)


@pytest.mark.slow
def test_twenty_thousand_mutated_files_give_our_errors_or_open(tmp_path: Path) -> None:
    try_mutations(tmp_path / "a.bin", 20_000)


def test_the_writer_refuses_what_the_format_cannot_hold(tmp_path: Path, monkeypatch) -> None:
    for bad in (-1, 10, 2**40):
        with (
            pytest.raises(DataError, match=f"the id {bad} is outside"),
            TokenWriter(tmp_path / "a", vocab_size=10) as w,
        ):
            w.append(np.array([3, bad], np.int64))
    monkeypatch.setattr(token_file, "MAX_LEGACY_TOKENS", 5)
    for version in (1, 2):
        with (
            pytest.raises(DataError, match="more than 5 tokens"),
            TokenWriter(tmp_path / "a", vocab_size=10, version=version) as writer,
        ):
            writer.append(np.zeros(5, np.int32))
            writer.append(np.zeros(1, np.int32))
    with pytest.raises(UsageError, match="version 1 have no masks"):
        TokenWriter(tmp_path / "a", vocab_size=10, version=1, has_masks=True)
    assert list(tmp_path.iterdir()) == []
    TokenFile.write(tmp_path / "a", np.zeros(6, int), vocab_size=10)


@pytest.mark.parametrize("version", [2, 3])
def test_an_interrupted_writer_leaves_the_old_file_alone(tmp_path: Path, version: int) -> None:
    path = tmp_path / "a.bin"
    TokenFile.write(path, np.arange(3), vocab_size=3)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), TokenWriter(path, vocab_size=3, has_masks=True, version=version) as writer:
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


@settings(max_examples=25, deadline=None)
@given(data=st.data(), masked=st.booleans(), version=st.sampled_from([2, 3]))
def test_a_writer_that_is_stopped_anywhere_and_goes_on_makes_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, masked: bool, version: int
) -> None:
    folder = tmp_path_factory.mktemp("t")
    path = folder / "a.bin"
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    tokens = np.arange(sum(sizes)) % 1000
    mask = tokens % 3 == 0
    starts = [0, *np.cumsum(sizes).tolist()]
    about = {"vocab_size": 1000, "has_masks": masked, "version": version, "tokenizer_sha256": SHA}

    def write(writer: TokenWriter, documents: range) -> None:
        for n in documents:
            part = slice(starts[n], starts[n + 1])
            writer.append(tokens[part], mask[part] if masked else None)
            if n % 2:
                writer.end_document()

    with TokenWriter(path, **about) as writer:
        write(writer, range(len(sizes)))
    want = path.read_bytes()
    path.unlink()
    writer = TokenWriter(path, **about, resumable=True)
    at = 0
    for _ in range(data.draw(st.integers(1, 4))):
        stop = data.draw(st.integers(at, len(sizes)))
        write(writer, range(at, stop))
        state, at = json.loads(json.dumps(writer.state())), stop
        assert (state["tokens"], state["documents"]) == (starts[stop], stop // 2)
        how = data.draw(st.sampled_from(["killed", "raised", "sealed"]))
        with pytest.raises(KeyboardInterrupt), writer:
            write(writer, range(at, data.draw(st.integers(at, len(sizes)))))  # lost
            if how == "sealed":
                writer.seal()
            if how == "killed":
                for file in writer._files.values():
                    file.flush()
            raise KeyboardInterrupt
        assert not path.exists() and partial_name(path).exists()
        writer = TokenWriter.resume(path, state)
    with writer:
        write(writer, range(at, len(sizes)))
    assert path.read_bytes() == want and list(folder.iterdir()) == [path]


def test_a_writer_cannot_go_on_from_what_is_gone_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    writer = TokenWriter(path, vocab_size=9, resumable=True)
    writer.append(np.arange(9))
    state = writer.state()
    writer.close()
    with pytest.raises(DataError, match="lacks bytes, documents: start over"):
        TokenWriter.resume(path, {name: x for name, x in state.items() if name not in ("bytes", "documents")})
    partial_name(path).write_bytes(b"short")
    with pytest.raises(DataError, match=r"\.partial has 5 of 1042 bytes"):
        TokenWriter.resume(path, state)
    writer.discard()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match=r"is gone.*start over"):
        TokenWriter.resume(path, state)


def test_what_the_disk_refuses_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        TokenWriter(tmp_path / "file" / "a.bin", vocab_size=3)
    if Path("/dev/full").exists():
        with (
            pytest.raises(StorageError, match="No space left"),
            TokenWriter(tmp_path / "a.bin", vocab_size=3) as writer,
        ):
            writer._files[""].close()
            writer._files[""] = open("/dev/full", "wb")  # noqa: SIM115
            writer.append(np.zeros(100_000, np.int32))
        assert list(tmp_path.iterdir()) == [tmp_path / "file"]
