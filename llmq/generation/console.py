"""What llmq-generate does in a terminal: one prompt as it comes, a file of them, a chat turn by turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TextIO

from llmq.errors import StorageError
from llmq.generation.prompts import Question
from llmq.generation.text import Writer


def show(text: str) -> None:
    """Text to the terminal, now."""
    print(text, end="", flush=True)


def continue_prompt(writer: Writer, prompt: str) -> None:
    """Prints what follows a prompt."""
    for _ in writer.answers([Question({}, text=prompt)], show):
        print(flush=True)


def answer_all(writer: Writer, questions: Sequence[Question], out: str | None) -> None:
    """Writes a JSON line for each question, in order, to `out` or stdout."""
    with nullcontext(sys.stdout) if out is None else _opened(out) as file:
        for question, answer in zip(questions, writer.answers(questions), strict=True):
            row = {**question.shown, "text": answer.text, "new_tokens": answer.tokens, "end": answer.end}
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)


def chat(writer: Writer, system: str | None) -> None:
    """Answers each line of input that is not empty, with all turns before it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for line in filter(str.strip, _lines()):
        messages.append({"role": "user", "content": line})
        answer = writer.chat_answer(messages, show)
        print(flush=True)
        messages.append({"role": "assistant", "content": answer.text or ""})


def _opened(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"--out {path}: cannot be written ({error.strerror})") from None


def _lines() -> Iterator[str]:
    """Lines of input, asked for where that is a terminal."""
    asked = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(asked)
        except EOFError:
            return
