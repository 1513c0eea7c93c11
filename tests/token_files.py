"""Token files for tests: written at once, checked as a whole, and as llm.q writes them (versions 1 and 2)."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmq.data.tokens.token_file import TokenFile, TokenWriter


def write_tokens(path: str | Path, tokens: np.ndarray, *, mask: np.ndarray | None = None, **about: Any) -> None:
    """Writes `tokens` (n,) and, if given, `mask` (n,) bool as a whole file of one document."""
    with TokenWriter(path, has_masks=mask is not None, **about) as writer:
        writer.append(tokens, mask)


def verified(path: str | Path, vocab_size: int | None = None) -> TokenFile:
    """The file, of which all is read: tokens, whose ids are below `vocab_size` or that of the file, masks, documents.

    DataError for what is damaged.
    """
    file = TokenFile.open(path)
    if (bound := vocab_size or file.header.vocab_size) is not None:
        file.check_ids(bound)
    file.trained(0, file.num_tokens)
    assert len(file.document_starts) == file.num_documents + 1
    return file


def legacy_bytes(tokens: Sequence[int], vocab_size: int, mask: Sequence[bool] | None = None, version: int = 2) -> bytes:
    """The bytes of a file that llmq only reads, written independently with struct and loops."""
    head = b"BIN.TOK\n" + struct.pack("<3i", version, 4, len(tokens))
    if version == 2:
        head += struct.pack("<2i", vocab_size, 0 if mask is None else 1)
    body = struct.pack(f"<{len(tokens)}i", *tokens)
    return head + b"*" * (1023 - len(head)) + b"\n" + body + bits_of(mask or [])


def bits_of(mask: Sequence[bool]) -> bytes:
    """One bit a token, least significant first."""
    bits = bytearray(-(-len(mask) // 8))
    for i, trained in enumerate(mask):
        bits[i // 8] |= trained << (i % 8)
    return bytes(bits)
