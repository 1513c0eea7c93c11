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


def continue_prompts(writer: Writer, questions: Sequence[Question]) -> None:
    """Prints what follows a prompt as it comes; of several answers each when it is whole, below its number."""
    samples = writer.settings.samples
    if len(questions) * samples == 1:
        for piece in writer.pieces(questions):
            show(piece.text or "")
        print(flush=True)
        return
    for answer in writer.answers(questions):
        numbers = [f"prompt {answer.index + 1}"] if len(questions) > 1 else []
        numbers += [f"sample {answer.sample + 1}"] if samples > 1 else []
        print(f"[{', '.join(numbers)}]\n{answer.text}", flush=True)


def answer_all(writer: Writer, questions: Sequence[Question], out: str | None) -> None:
    """Writes a JSON line for each answer, in order, to `out` or stdout."""
    with nullcontext(sys.stdout) if out is None else _opened(out) as file:
        for answer in writer.answers(questions):
            which = {"sample": answer.sample} if writer.settings.samples > 1 else {}
            row = {**questions[answer.index].shown, **which, "text": answer.text, "new_tokens": answer.tokens}
            scores = {"logprobs": answer.logprobs} if writer.sampling.logprobs else {}
            row |= {**scores, "finish_reason": answer.finish_reason}
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)


def chat(writer: Writer, system: str | None) -> None:
    """Answers each line of input that is not empty, with all turns before it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for line in filter(str.strip, _lines()):
        messages.append({"role": "user", "content": line})
        texts = []
        for piece in writer.chat_pieces(messages):
            texts.append(piece.text or "")
            show(texts[-1])
        print(flush=True)
        messages.append({"role": "assistant", "content": "".join(texts)})


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
