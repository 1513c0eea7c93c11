"""Token files for tests: written at once, and checked as a whole."""

from __future__ import annotations

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
