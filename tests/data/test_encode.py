"""Rows to tokens and masks: what is trained, what ends a document, what is too long, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmq.data.encode import Encoded, EncodeOptions, Encoder, open_encoder
from llmq.data.records import BadRow, Record
from llmq.data.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def qwen() -> TextTokenizer:
    """The tokenizer of Qwen2.5, which has a ChatML template."""
    folder = Path(__file__).parents[3] / "shared/data/qwen2.5-tokenizer"
    if not folder.exists():
        pytest.skip("no ../shared/data/qwen2.5-tokenizer beside the checkout")
    return TextTokenizer.open(str(folder))


def records(rows: list[dict]) -> list[Record]:
    return [Record(f"rows.jsonl:{number}", row) for number, row in enumerate(rows, 1)]


def gsm8k(path: Path) -> list[Record]:
    return [Record(f"{path.name}:{i}", json.loads(line)) for i, line in enumerate(path.open(encoding="utf-8"), 1)]


def opened(rows: list[Record], tokenizer: TextTokenizer, **options) -> Encoder:
    return open_encoder(rows[:8], tokenizer, EncodeOptions(**options))


def shown(tokenizer: TextTokenizer, document: Encoded) -> str:
    """A document's text with its trained runs in square brackets."""
    text, inside = "", False
    trained = np.ones(len(document.ids), bool) if document.trained is None else document.trained
    for number, is_trained in zip(document.ids.tolist(), trained.tolist(), strict=True):
        text += "" if inside == is_trained else "[" if is_trained else "]"
        text += tokenizer.encoder.decode([number], skip_special_tokens=False)
        inside = is_trained
    return text + "]" * inside


def test_a_question_is_context_and_its_answer_is_trained_with_eos(qwen):
    rows = records([{"question": "What is 2 + 2?", "answer": "It is <<2+2=4>>4.\n#### 4"}])
    encoder = opened(rows, qwen)
    (document,) = encoder.encode(rows)
    assert shown(qwen, document) == "What is 2 + 2?[It is <<2+2=4>>4.\n#### 4<|endoftext|>]"
    assert encoder.end_token_ids == (qwen.eos_token_id,)


def test_with_a_template_a_question_is_a_chat(qwen):
    rows = records([{"question": "What is 2 + 2?", "answer": "4"}])
    encoder = opened(rows, qwen, chat_template="tokenizer")
    (document,) = encoder.encode(rows)
    assert shown(qwen, document) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n[4<|im_end|>]\n"
    )
    assert encoder.end_token_ids == (151645,)


@pytest.mark.parametrize("template", [None, "tokenizer"])
@pytest.mark.parametrize("name", ["gsm8k-test.jsonl", pytest.param("gsm8k-train.jsonl", marks=pytest.mark.slow)])
def test_gsm8k_trains_exactly_the_answers_and_their_ends(qwen, shared, name, template):
    rows = gsm8k(shared(name))
    rows = rows if "train" in name else rows[:200]
    encoder = opened(rows, qwen, chat_template=template)
    trained = 0
    for at in range(0, len(rows), 1000):
        for document in encoder.encode(rows[at : at + 1000]):
            trained += int(document.trained.sum())
    answers = qwen.encoder.encode_batch_fast([row.value["answer"] for row in rows], add_special_tokens=False)
    assert trained == sum(len(answer.ids) for answer in answers) + len(rows) == encoder.counts.trained
    assert encoder.counts.rows == encoder.counts.documents == len(rows)


def test_a_bad_row_is_raised_or_set_aside(qwen):
    rows = records([{"question": "a", "answer": "b"}, {"text": "c"}, {"question": "d", "answer": "e"}])
    encoder = opened(rows, qwen)
    with pytest.raises(BadRow, match=r"^rows\.jsonl:2: the row is text, but the data is question-answer"):
        encoder.encode(rows)
    bad: list[BadRow] = []
    assert [document.place for document in encoder.encode(rows, bad)] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert [error.place for error in bad] == ["rows.jsonl:2"]
