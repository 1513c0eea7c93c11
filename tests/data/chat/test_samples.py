"""Documents as a person sees them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from chat_cases import chat_tokenizer
from rich.console import Console
from small_tokenizers import save

from llmq.data.chat.encode import MOST, STYLES, show
from llmq.data.chat.encoded import Encoded
from llmq.data.tokens.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    folder: Path = tmp_path_factory.mktemp("samples")
    return TextTokenizer.open(str(save(chat_tokenizer(), folder, {"eos_token": "</s>"})))


def document(tokenizer: TextTokenizer, text: str, trained: list[int] | None = None) -> Encoded:
    """The tokens of a text, of which those at the places `trained` are trained."""
    tokenizer.encoder.encode_special_tokens = False
    ids = np.array(tokenizer.encoder.encode(text, add_special_tokens=False).ids, np.int32)
    return Encoded("rows.jsonl:7", ids, None if trained is None else np.isin(np.arange(len(ids)), trained))


def test_trained_text_is_coloured_and_stands_in_marks_without_colors(tokenizer):
    shown = [document(tokenizer, "the ok</s>", trained) for trained in ([3, 4], [0, 5], [], None)]
    title, body = show(shown, tokenizer, 1).renderables
    assert title.plain == "rows.jsonl:7: 6 tokens, 2 trained"
    drawn = [(body.plain[span.start : span.end], str(span.style)) for span in body.spans]
    assert drawn == [("the ", STYLES[False]), ("ok", STYLES[True]), ("</s>", STYLES[False])]
    bodies = show(shown, tokenizer, 4, marks=True).renderables[1::2]
    assert [body.plain for body in bodies] == ["the [[ok]]</s>", "[[t]]he ok[[</s>]]", "the ok</s>", "[[the ok</s>]]"]


def test_no_text_moves_the_cursor(tokenizer):
    console = Console(force_terminal=False, width=200)
    with console.capture() as captured:
        console.print(show([document(tokenizer, "a\x1b[2J\x07\r\u202eb\nc")], tokenizer, 1))
    assert captured.get().splitlines()[1:] == ["a\\x1b[2J\\x07\\r\\u202eb\\n", "c"]


def test_as_many_as_asked_for_and_long_ones_are_cut(tokenizer):
    some = [document(tokenizer, "a" * (MOST + 5)) for _ in range(3)]
    shown = show(some, tokenizer, 2).renderables
    assert len(shown) == 4
    assert shown[0].plain.endswith(f"{MOST + 5} tokens, {MOST + 5} trained")
    assert shown[1].plain.endswith(" ... and 5 more tokens")
    assert show([], tokenizer, 3).renderables == []
