"""The first document of masked data as text, for the log of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from llmq.data.chat.samples import printable
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenizer import TextTokenizer

SAMPLE_TOKENS = 512  # at most


def sample_text(files: Sequence[TokenFile], tokenizer_folder: Callable[[], Path | None]) -> str | None:
    """The first document of masked data as text, with what is trained in marks; None where all is trained."""
    masked = next((file for file in files if file.mask_bits is not None and file.num_documents), None)
    folder = tokenizer_folder() if masked is not None else None
    if masked is None or folder is None:
        return None
    stop = int(masked.document_starts[1])
    ids, trained = np.asarray(masked.tokens[: min(stop, SAMPLE_TOKENS)]), masked.trained(0, min(stop, SAMPLE_TOKENS))
    decode = TextTokenizer.open(str(folder)).encoder.decode
    borders = np.flatnonzero(np.diff(trained)) + 1
    parts = []
    for piece, is_trained in zip(np.split(ids, borders), trained[[0, *borders]], strict=True):
        text = printable(decode(piece.tolist(), skip_special_tokens=False))
        parts.append(f"[[{text}]]" if is_trained else text)
    more = f" ... ({stop - SAMPLE_TOKENS} more tokens)" if stop > SAMPLE_TOKENS else ""
    return f"[Sample] of {masked.path.name}, with what is trained in [[ ]]:\n{''.join(parts)}{more}"
