"""Documents as a person can check them: trained tokens in colour, and the borders of tokens visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.text import Text

from llmq.data.chat.encoded import Encoded
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenizer import TextTokenizer

# By whether the token is trained, then by turns, so that neighbours differ.
STYLES = {True: ("black on green3", "black on spring_green2"), False: ("default on grey15", "default on grey27")}
MAX_TOKENS = 2000  # shown of a document
MAX_JOINED = 8  # tokens that may share one character
SAMPLE_TOKENS = 512  # at most, of the sample in the log of a run


def show(encoded: Sequence[Encoded], tokenizer: TextTokenizer, count: int, *, marks: bool = False) -> Group:
    """The first `count` documents, each under its place and numbers; trained tokens are green, the others grey.

    With `marks`, for where there are no colors, what is trained also stands in [[ ]].
    Control characters are shown as escapes, so that no text moves the cursor; line breaks also break the line.
    """
    shown: list[Text] = []
    for document in encoded[:count]:
        trained = np.ones(len(document.ids), bool) if document.trained is None else document.trained
        shown.append(Text(f"{document.place}: {len(document.ids)} tokens, {int(trained.sum())} trained", style="bold"))
        body, inside = Text(), False
        for number, (text, is_trained) in enumerate(_pieces(document.ids[:MAX_TOKENS], trained, tokenizer)):
            if marks and is_trained != inside:
                body.append("[[" if is_trained else "]]")
            inside = is_trained
            body.append(printable(text).replace("\n", "\\n\n"), style=STYLES[is_trained][number % 2])
        body.append("]]" if marks and inside else "")
        if len(document.ids) > MAX_TOKENS:
            body.append(f" ... and {len(document.ids) - MAX_TOKENS} more tokens", style="italic")
        shown.append(body)
    return Group(*shown)


def sample_text(files: Sequence[TokenFile], tokenizer_folder: Callable[[], Path | None]) -> str | None:
    """The first document of masked data as text, with what is trained in marks; None where all is trained."""
    masked = next((file for file in files if file.mask_bits is not None and file.num_documents), None)
    folder = tokenizer_folder() if masked is not None else None
    if masked is None or folder is None:
        return None
    stop = int(masked.document_starts[1])
    ids, trained = np.asarray(masked.tokens[: min(stop, SAMPLE_TOKENS)]), masked.trained(0, min(stop, SAMPLE_TOKENS))
    document = Encoded(masked.path.name, ids, trained)
    _, body = show([document], TextTokenizer.open(str(folder)), 1, marks=True).renderables
    more = f" ... ({stop - SAMPLE_TOKENS} more tokens)" if stop > SAMPLE_TOKENS else ""
    return f"[Sample] of {masked.path.name}, with what is trained in [[ ]]:\n{body}{more}"


def _pieces(ids: np.ndarray, trained: np.ndarray, tokenizer: TextTokenizer) -> Iterator[tuple[str, bool]]:
    """Text and mask of each token; tokens with parts of one character are shown together, where masks agree."""
    at = 0
    while at < len(ids):
        stop, text = at, "\ufffd"
        while "\ufffd" in text and stop < min(len(ids), at + MAX_JOINED) and trained[stop] == trained[at]:
            stop += 1
            text = tokenizer.encoder.decode(ids[at:stop].tolist(), skip_special_tokens=False)
        if "\ufffd" in text:  # no character comes of it: one token by itself
            stop, text = at + 1, tokenizer.encoder.id_to_token(int(ids[at])) or f"<{ids[at]}>"
        yield text, bool(trained[at])
        at = stop


def printable(text: str) -> str:
    """Text without characters that a terminal obeys, but for line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
