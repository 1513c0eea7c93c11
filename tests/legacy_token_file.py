"""Token files of versions 1 and 2, as llm.q writes them: llmq only reads them."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def legacy_bytes(tokens: Sequence[int], vocab_size: int, mask: Sequence[bool] | None = None, version: int = 2) -> bytes:
    """The bytes of a file, written independently with struct and loops."""
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
