"""Documents as a person sees them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from chat_cases import chat_tokenizer
from rich.console import Console
from rich.text import Text
from small_tokenizers import save

from llmq.data.chat.encode import MAX_TOKENS, STYLES, show
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


def test_trained_tokens_are_coloured_and_neighbours_differ(tokenizer):
    title, body = show([document(tokenizer, "the ok</s>", [3, 4])], tokenizer, 3).renderables
    assert isinstance(title, Text) and isinstance(body, Text)
    assert title.plain == "rows.jsonl:7: 6 tokens, 2 trained"
    assert body.plain == "the ok</s>"
    drawn = [(body.plain[span.start : span.end], str(span.style)) for span in body.spans]
    assert drawn == [
        ("t", STYLES[False][0]), ("he", STYLES[False][1]), (" ", STYLES[False][0]), ("o", STYLES[True][1]),
        ("k", STYLES[True][0]), ("</s>", STYLES[False][1]),
    ]  # fmt: skip


def test_without_colors_what_is_trained_stands_in_marks(tokenizer):
    shown = [document(tokenizer, "the ok</s>", trained) for trained in ([3, 4], [0, 5], [], None)]
    bodies = show(shown, tokenizer, 4, marks=True).renderables[1::2]
    assert [body.plain for body in bodies] == ["the [[ok]]</s>", "[[t]]he ok[[</s>]]", "the ok</s>", "[[the ok</s>]]"]


def test_a_character_of_several_tokens_is_one_piece(tokenizer):
    whole = show([document(tokenizer, "\U0001f600!")], tokenizer, 1).renderables[1]
    assert whole.plain == "\U0001f600!" and len(whole.spans) == 2
    torn = show([document(tokenizer, "\U0001f600", [0, 1])], tokenizer, 1).renderables[1]
    assert len(torn.spans) == 4 and "\ufffd" not in torn.plain


def test_no_text_moves_the_cursor(tokenizer):
    console = Console(force_terminal=False, width=200)
    with console.capture() as captured:
        console.print(show([document(tokenizer, "a\x1b[2J\x07\r\u202eb\nc")], tokenizer, 1))
    assert captured.get().splitlines()[1:] == ["a\\x1b[2J\\x07\\r\\u202eb\\n", "c"]


def test_as_many_as_asked_for_and_long_ones_are_cut(tokenizer):
    some = [document(tokenizer, "a" * (MAX_TOKENS + 5)) for _ in range(3)]
    shown = show(some, tokenizer, 2).renderables
    assert len(shown) == 4
    assert shown[0].plain.endswith(f"{MAX_TOKENS + 5} tokens, {MAX_TOKENS + 5} trained")
    assert shown[1].plain.endswith(" ... and 5 more tokens")
    assert show([], tokenizer, 3).renderables == []
