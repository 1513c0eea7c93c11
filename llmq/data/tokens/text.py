"""Text files as documents: which part is which split, and pieces of bounded size that tokenize like the whole."""

from __future__ import annotations

import codecs
import mmap
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from llmq.data.tokens.cache import content_hash
from llmq.disk import reading
from llmq.errors import DataError, all_problems, noted

BLOCK_BYTES = 1 << 16  # read at once; a piece is about as long, and the pieces of a batch are tokenized in parallel

# Where text can be cut: before a space after a visible character, and after a single line break between such. There
# each pattern below ends a match, and none looks back, so the words on both sides are those of the whole text.
_CUT = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=[^\s/])")

# The word patterns of GPT-2 (which is also what ByteLevel does by itself), of Qwen2, of Llama 3 and cl100k, and of
# GPT-4o. They match a space only first in a word or in white space, and a line break only in white space or, with
# GPT-4o's slash, last after punctuation.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT4O_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_PATTERNS = (GPT2_PATTERN, QWEN2_PATTERN, LLAMA3_PATTERN, GPT4O_PATTERN)


@dataclass(frozen=True)
class Document:
    """Bytes [start, stop) of a text file in UTF-8."""

    path: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Texts:
    """Text files as data."""

    documents: tuple[Document, ...]

    @property
    def num_bytes(self) -> int:
        return sum(document.num_bytes for document in self.documents)

    def identity(self) -> Any:
        """What the tokens depend on, as JSON; reads the files whole."""
        return [[content_hash(document.path), document.start, document.stop] for document in self.documents]


def open_documents(paths: Sequence[Path]) -> list[Document]:
    """One document per file, without the empty ones; one DataError for all that cannot be read, or if all are empty."""
    documents = []
    with all_problems() as problems:
        for path in paths:
            with noted(problems), reading(path), path.open("rb") as file:
                start = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0  # which is no text
                documents.append(Document(path, start, file.seek(0, 2)))
    filled = [document for document in documents if document.num_bytes]
    if not filled:
        names = ", ".join(str(path) for path in paths[:5]) + " ..." * (len(paths) > 5)
        raise DataError(f"there is no text in {names} (0 bytes): give files with text")
    return filled


def split(documents: Sequence[Document], eval_fraction: float) -> tuple[list[Document], list[Document], str]:
    """The training documents, the evaluation documents, and in words how they were chosen.

    Whole documents go to the evaluation, spread evenly, as long as they are at most `eval_fraction` of the bytes up to
    there. If none fits (as with a single file), the end of the largest document does, from the start of a line.
    Raises DataError if that has no line break to be cut at.
    """
    fraction = Fraction(str(eval_fraction))
    if not fraction:
        return list(documents), [], "all of it is training data"
    train: list[Document] = []
    evaluation: list[Document] = []
    seen = taken = 0
    for document in documents:
        seen += document.num_bytes
        if taken + document.num_bytes <= fraction * seen:
            taken += document.num_bytes
            evaluation.append(document)
        else:
            train.append(document)
    if evaluation:
        rule = f"whole documents, spread evenly, up to {eval_fraction:g} of the bytes, are for evaluation"
        return train, evaluation, rule
    at = max(range(len(documents)), key=lambda index: documents[index].num_bytes)
    whole = documents[at]
    # The largest is larger than the fraction of all bytes, else it or a later one would have fitted.
    border = _line_border(whole, whole.stop - max(int(fraction * seen), 1))
    train[at] = replace(whole, stop=border)
    rule = (
        f"the end of {whole.path.name}, from the first line that starts in its last {eval_fraction:g} of the bytes (at "
        f"byte {border}), is for evaluation; both parts are documents"
    )
    return train, [replace(whole, start=border)], rule


def _line_border(document: Document, at: int) -> int:
    """The first start of a line at or after byte `at`, or the last one before it."""
    start, stop = document.start, document.stop
    with document.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        border = content.find(b"\n", at - 1, stop - 1) + 1 or content.rfind(b"\n", start, at) + 1
    if not border:
        raise DataError(
            f"{document.path} has no line break within, so no part of it can be kept for evaluation: "
            "give several files, or --eval-fraction 0"
        )
    return border


def tokenizes_in_pieces(tokenizer: Mapping[str, Any]) -> bool:
    """Whether text cut at `pieces`' places has the same ids as the whole, for a tokenizer.json as read.

    True for byte-level tokenizers with a word pattern that is known here and no normalizer but NFC.
    """
    normalizer = tokenizer.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        return False
    rule = tokenizer.get("pre_tokenizer") or {}
    parts = rule.get("pretokenizers", []) if rule.get("type") == "Sequence" else [rule]
    splits_words = False
    for part in parts:
        match part:
            case {"type": "ByteLevel", "add_prefix_space": False}:
                splits_words |= part.get("use_regex", True)
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                if pattern not in KNOWN_PATTERNS:
                    return False
                splits_words = True
            case {"type": "Digits"}:
                pass
            case _:
                return False
    # Added tokens are taken out of the text first, some with the white space around them; special ones are left in it.
    ordinary = [token for token in tokenizer.get("added_tokens", []) if not token.get("special")]
    plain = all(not (t["lstrip"] or t["rstrip"] or re.search(r"\s", t["content"])) for t in ordinary)
    return splits_words and plain and not (tokenizer.get("model") or {}).get("dropout")


def pieces(document: Document, cut: bool) -> Iterator[str]:
    """The text of `document`, whole, or with `cut` in pieces of about BLOCK_BYTES; line ends do not change.

    Raises DataError, with the byte's place, if it is not UTF-8.
    """
    return _cut(_decoded(document)) if cut else iter(["".join(_decoded(document))])


def pieces_of(text: str) -> list[str]:
    """`text` in pieces of about BLOCK_BYTES characters, which tokenize like the whole (see `tokenizes_in_pieces`)."""
    return list(_cut(text[at : at + BLOCK_BYTES] for at in range(0, len(text), BLOCK_BYTES)))


def _cut(blocks: Iterable[str]) -> Iterator[str]:
    """The text of `blocks` again, cut once in each block that has a place for it."""
    pending: list[str] = []
    for block in blocks:
        if found := _CUT.search(block):
            yield "".join([*pending, block[: found.end()]])
            pending = [block[found.end() :]]
        else:
            pending.append(block)
    yield "".join(pending)


def _decoded(document: Document) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = document.start
    try:
        with reading(document.path, "check the file and the disk"), document.path.open("rb") as file:
            file.seek(at)
            while block := file.read(min(BLOCK_BYTES, document.stop - at)):
                held = len(decoder.getstate()[0])
                yield decoder.decode(block)
                at += len(block)
            held = len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        place = at - held + error.start
        byte = error.object[error.start]
        raise DataError(
            f"{document.path} is not UTF-8: byte {place} is 0x{byte:02x} ({error.reason}): "
            "convert it, for example with iconv -f latin1 -t utf-8"
        ) from None
