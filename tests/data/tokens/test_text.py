"""Documents, the evaluation split, and cuts after which the pieces tokenize like the whole."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from llmq.data.tokens import text
from llmq.data.tokens.text import Document, open_documents, pieces, split, tokenizes_in_pieces
from llmq.errors import DataError

VARIANTS = {
    "gpt2": byte_level(),
    "digits": byte_level(digits=True, added=("<tool>", "e,", "s1")),
    **{f"pattern{n}": byte_level(pattern) for n, pattern in enumerate(text.KNOWN_PATTERNS)},
}
NASTY = st.lists(
    st.sampled_from(
        [
            *"aZs 1\n\r\t'\",./-\u00e9\u0301\u00a0\u2003\u4e2d\x1c\uff0c\u3002\u304b\u3099\ud55c",
            *(" ", " ", "   ", "\n", "e", "<tool>", "\r\n", "\n\n", "\u4e2d", "\u6587"),
        ]
    ),
    max_size=120,
).map("".join)


def words(tokenizer: Tokenizer, content: str) -> list[str]:
    """What the BPE sees: more telling than ids, which can agree by chance where no merge joins two words."""
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(content))]


@pytest.mark.quick("gpt2", "digits", "pattern0")
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=60, deadline=None)
@given(content=NASTY, block=st.integers(1, 24))
@example(content="a \n b\n\nc  d \r\n e' 's-\n/x \n", block=4)
@example(content="-\n/a", block=4)
@example(content='1,\n  23,1 , 1",\n    "a",\n\n \t 1\n b   <tool>  <tool> a', block=3)
def test_pieces_tokenize_like_the_whole(
    tmp_path_factory: pytest.TempPathFactory, variant: str, content: str, block: int
) -> None:
    tokenizer = VARIANTS[variant]
    assert tokenizes_in_pieces(json.loads(tokenizer.to_str()))
    path = tmp_path_factory.mktemp("p") / "a.txt"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BLOCK_BYTES", block)
        cut = list(pieces(Document(path, 0, len(content.encode())), cut=True))
        assert list(pieces(Document(path, 0, len(content.encode())), cut=False)) == [content]
    assert "".join(cut) == content
    assert [word for piece in cut for word in words(tokenizer, piece)] == words(tokenizer, content)
    ids = [code for piece in cut for code in tokenizer.encode(piece, add_special_tokens=False).ids]
    assert ids == tokenizer.encode(content, add_special_tokens=False).ids


def test_long_text_is_cut_into_pieces_of_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content in ("some words and lines\n" * 20_000, "\u4e2d\u6587\n" * 80_000, '{\n\t"a": 10,\r\n\n' * 50_000):
        path.write_text(content)
        sizes = [len(piece.encode()) for piece in pieces(Document(path, 0, path.stat().st_size), cut=True)]
        assert len(sizes) > 5 and max(sizes) < 1.1 * text.BLOCK_BYTES


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "normalizer", normalizers.NFKC()),
        lambda t: setattr(t, "normalizer", normalizers.Prepend("_")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split("a", "isolated")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Digits()),
        lambda t: t.add_tokens([AddedToken("[x]", lstrip=True)]),
        lambda t: t.add_tokens([AddedToken("a b")]),
        lambda t: setattr(t.model, "dropout", 0.1),
        lambda t: setattr(t, "pre_tokenizer", None),
    ],
)
def test_tokenizers_that_look_across_a_cut_are_not_cut(change) -> None:
    tokenizer = byte_level()
    assert tokenizes_in_pieces(json.loads(tokenizer.to_str()))
    change(tokenizer)
    assert not tokenizes_in_pieces(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("at", [0, 5, 99, 100, 101, 250])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xe2\x82"])
def test_broken_utf8_is_named_with_its_place(tmp_path: Path, monkeypatch, at: int, bad: bytes) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 10)
    path = tmp_path / "a.txt"
    before = ("\u00e9" * at).encode()[:at] if at % 2 == 0 else b"y" * at
    for after in (b"x" * 50, b""):  # at the end it may be half a character
        path.write_bytes(before + bad + after)
        with pytest.raises(DataError, match=rf"a\.txt is not UTF-8: byte {at} is 0x{bad[0]:02x}"):
            list(pieces(Document(path, 0, path.stat().st_size), cut=True))


def test_unreadable_and_empty_files_are_data_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "full.txt").write_text("x")
    assert open_documents([tmp_path / "empty.txt", tmp_path / "full.txt"]) == [Document(tmp_path / "full.txt", 0, 1)]
    with pytest.raises(DataError, match=r"no text in .*empty\.txt"):
        open_documents([tmp_path / "empty.txt"])
    with pytest.raises(DataError) as caught:
        open_documents([tmp_path / "gone.txt", tmp_path])
    assert "gone.txt: cannot be read (No such file" in str(caught.value) and "Is a directory" in str(caught.value)


@given(
    sizes=st.lists(st.integers(10, 1000), min_size=2, max_size=60),
    fraction=st.sampled_from([0.01, 0.05, 0.1, 1 / 3, 0.5, 0.9]),
)
@settings(max_examples=100, deadline=None)
def test_evaluation_takes_whole_documents_up_to_its_share(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], fraction: float
) -> None:
    path = tmp_path_factory.mktemp("s") / "a.txt"
    path.write_text("line\n" * 200)
    documents = [Document(path, 0, size) for size in sizes]
    train, evaluation, _ = split(documents, fraction)
    assert train and evaluation
    taken = sum(document.num_bytes for document in evaluation)
    assert taken + sum(document.num_bytes for document in train) == sum(sizes)
    if len(train) + len(evaluation) == len(sizes):
        assert taken <= fraction * sum(sizes) + 1e-6
    else:
        assert len(evaluation) == 1 and evaluation[0].start in {document.stop for document in train}


def test_equal_documents_are_spread_evenly() -> None:
    documents = [Document(Path(f"{number:03d}"), 0, 50) for number in range(100)]
    train, evaluation, rule = split(documents, 0.1)
    assert [int(document.path.name) for document in evaluation] == list(range(9, 100, 10)) and len(train) == 90
    assert "whole documents" in rule


def test_a_single_file_is_cut_at_the_start_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    lines = b"".join(b"line %03d\n" % number for number in range(100))
    for content, fraction, border in ((lines, 0.1, 810), (lines, 0.095, 819), (b"one\n" + b"x" * 96, 0.1, 4)):
        path.write_bytes(content)
        (train,), (evaluation,), rule = split([Document(path, 0, len(content))], fraction)
        assert (train, evaluation) == (Document(path, 0, border), Document(path, border, len(content)))
        assert f"byte {border}" in rule and "".join(pieces(evaluation, cut=True)) == content[border:].decode()
    path.write_bytes(b"x" * 99 + b"\n")
    with pytest.raises(DataError, match=r"no line break within.*--eval-fraction 0"):
        split([Document(path, 0, 100)], 0.1)
    assert split([Document(path, 0, 100)], 0)[1] == []
