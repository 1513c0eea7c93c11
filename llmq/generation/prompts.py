"""Prompts: what is asked of a model, read from files, and made into its tokens; and answers from tokens: whole, or in
pieces as they come, to an end token, a stop text or the most tokens."""

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import tokenizers

from llmq.adapters.virtual_tokens import VIRTUAL
from llmq.data.chat.template import ChatTemplate, RenderError, open_template
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.engine.generate import Drawn
from llmq.errors import DataError, UsageError


@dataclass(frozen=True)
class Question:
    """One of a text, the messages of a chat, or tokens; `shown` is what a line of output repeats of it."""

    shown: Mapping[str, Any]
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tokens: tuple[int, ...] | None = None


def read_questions(path: Path, flag: str = "--prompts") -> list[Question]:
    """The questions in a file: JSON lines with `prompt`, `messages` or `tokens`, or lines of text, without empty ones.

    DataError for a file that cannot be read, has no prompt, or has a line of JSON with none of these.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"{flag} {path}: cannot be read ({reason})") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{flag} {path}: has no prompt")
    is_json = path.suffix in (".jsonl", ".json", ".ndjson") or numbered[0][1].lstrip().startswith("{")
    if not is_json:
        return [Question({"prompt": line}, text=line) for _, line in numbered]
    return [_question(line, f"{path}:{number}") for number, line in numbered]


def _question(line: str, place: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: is no JSON ({error}): a file of text lines begins with another sign than {{"
        ) from None
    if isinstance(row, str):
        row = {"prompt": row}
    if isinstance(row, dict):
        for name in ("prompt", "messages", "tokens"):
            if (question := _asked(row.get(name))) is not None and name in question.shown:
                return question
    raise DataError(f"{place}: has no prompt (text), messages (a list of objects) or tokens (a list of ids)")


def questions_of(prompts: object) -> list[Question]:
    """The question or questions of a Python caller: a text, a chat (a list of messages), tokens, or a list of these.

    UsageError that names each prompt that is none of them.
    """
    if (single := _asked(prompts)) is not None:
        return [single]
    several = prompts if isinstance(prompts, Iterable) and not isinstance(prompts, Mapping) else [prompts]
    found = [(number, one, _asked(one)) for number, one in enumerate(several, 1)]
    if wrong := [f"prompt {number} is {reprlib.repr(one)}" for number, one, question in found if question is None]:
        wanted = "a text, a chat (a list of messages such as {'role': 'user', 'content': 'Hi'}) or a list of token ids"
        raise UsageError(f"{'; '.join(wrong)}: give {wanted}, or a list of these")
    return [question for _, _, question in found if question is not None]


def _asked(value: object) -> Question | None:
    """What a value asks; None of one that is no text, messages or tokens."""
    if isinstance(value, str):
        return Question({"prompt": value}, text=value)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(one, Mapping) for one in value):
            return Question({"messages": value}, messages=value)
        if all(type(one) is int for one in value):
            return Question({"tokens": value}, tokens=tuple(value))
    return None


class PromptReader:
    """Questions to tokens and tokens to text, by a model's tokenizer and chat template; without one, tokens alone.

    Tokens begin with `num_virtual` times VIRTUAL, unless there are none.
    """

    def __init__(
        self, tokenizer: TextTokenizer | None, vocab_size: int, chat_template: str | None = None, num_virtual: int = 0
    ) -> None:
        self._virtual = (VIRTUAL,) * num_virtual
        self._tokenizer, self._vocab_size, self._wanted = tokenizer, vocab_size, chat_template
        self._template: ChatTemplate | None = None
        self._encoder: tokenizers.Tokenizer | None = None
        if tokenizer is not None:
            # A copy that reads special tokens where text spells them, as templates do, and prompts in transformers.
            self._encoder = tokenizer.reads_special()

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokens can be shown as text."""
        return self._encoder is not None

    def tokens(self, question: Question) -> tuple[int, ...]:
        """The tokens of a question. UsageError where there is no tokenizer, or an id that the model lacks."""
        if question.messages is not None:
            return self.chat(question.messages)
        if question.tokens is not None:
            if wrong := [one for one in question.tokens if not 0 <= one < self._vocab_size]:
                raise UsageError(f"token {wrong[0]} of a prompt is not in the vocabulary of {self._vocab_size:,}")
            return self._led(question.tokens)
        encoder = self._open()
        assert self._tokenizer is not None
        ids = encoder.encode(question.text or "", add_special_tokens=False).ids
        return self._checked((*self._tokenizer.begin_ids, *ids))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The tokens of a chat up to where the model answers."""
        encoder = self._open()
        assert self._tokenizer is not None
        if self._template is None:
            self._template = open_template(self._tokenizer.folder, self._wanted)
        try:
            text = self._template.render(messages, add_generation_prompt=True).text
        except RenderError as error:
            raise DataError(f"{self._template.origin}: cannot render the chat: {error}") from None
        return self._checked(tuple(encoder.encode(text, add_special_tokens=False).ids))

    def special_token(self, text: str) -> int | None:
        """The special token that is spelled so, which no decoded text shows."""
        encoder = self._open()
        token = encoder.token_to_id(text)
        added = None if token is None else encoder.get_added_tokens_decoder().get(token)
        return token if added is not None and added.special else None

    def stops(self, texts: Iterable[str]) -> tuple[frozenset[int], list[str]]:
        """What ends an answer: those of the texts that are special tokens, as tokens, and the others."""
        special = {text: self.special_token(text) for text in texts}
        tokens = frozenset(token for token in special.values() if token is not None)
        return tokens, [text for text, token in special.items() if token is None]

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text, without special ones."""
        return str(self._open().decode(list(tokens), skip_special_tokens=True))

    def _checked(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if tokens and max(tokens) >= self._vocab_size:
            raise DataError(
                f"the tokenizer has token {max(tokens)}, the model only {self._vocab_size:,}: use the model's own"
            )
        return self._led(tokens)

    def _led(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens after virtual ones."""
        return (*self._virtual, *tokens) if tokens else ()

    def _open(self) -> tokenizers.Tokenizer:
        if self._encoder is None:
            raise UsageError("the model has no tokenizer: give one with --tokenizer, or prompts as tokens")
        return self._encoder


@dataclass(frozen=True)
class Answer:
    """What a model wrote after a prompt, or the next piece of it.

    text: without the stop text that ended it; None if the model has no tokenizer.
    tokens: the ids of all generated tokens, those of a stop text too, without the end token.
    logprobs: log p (nats) of each of `tokens` by the softmax of the model's own logits, before temperature, penalty and
        cuts; empty if it was not asked for.
    finish_reason: "stop" at an end token or a stop text, "length" at the most tokens; None in a piece before the last.
    index, sample: the number of the prompt, and of this answer to it, from 0.
    """

    text: str | None
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    index: int = 0
    sample: int = 0


class Draft:
    """An answer while its tokens come, to the first of the texts `stop` to be complete.

    Held back is what is a part of a character, or may be the beginning of such a text. With `late`, which knows no stop
    text, all of it is decoded at the end. Without a tokenizer there is no text.
    """

    def __init__(
        self, reader: PromptReader, stop: Sequence[str] = (), place: tuple[int, int] = (0, 0), *, late: bool = False
    ) -> None:
        self._reader, self._stop, self._place, self._late = reader, stop, place, late
        self.tokens, self._logprobs = list[int](), list[float]()
        self._start = self._shown = 0  # tokens before `start` no longer change the text of those after `shown`
        self._sent = 0  # tokens in earlier pieces
        self._text, self._held, self.is_stopped = "", "", False

    def add(self, token: int, logprob: float | None = None) -> bool:
        """One more token; whether it completes a stop text."""
        self.tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        if not self._late and (text := self._new_text()) and not text.endswith("\ufffd"):
            self._start, self._shown = self._shown, len(self.tokens)
            self._take(text)
        return self.is_stopped

    def piece(self, finish_reason: str | None) -> Answer:
        """All that came since the last piece."""
        if finish_reason and self._reader.has_tokenizer and not self.is_stopped:
            self._take(self._new_text())
            self._text, self._held = self._text + self._held, ""
        reason = "stop" if self.is_stopped else finish_reason  # what is held back may have a stop text, too
        text = self._text if self._reader.has_tokenizer else None
        found = Answer(text, tuple(self.tokens[self._sent :]), tuple(self._logprobs), reason, *self._place)
        self._text, self._sent, self._logprobs = "", len(self.tokens), []
        return found

    def _new_text(self) -> str:
        """What the tokens after `shown` add, with the beginning of a character at its end."""
        before = self._reader.text(self.tokens[self._start : self._shown])
        return self._reader.text(self.tokens[self._start :])[len(before) :]

    def _take(self, text: str) -> None:
        """Adds what of the text so far no later one can make part of a stop text."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        self.is_stopped = bool(found)
        begun = (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
        end = min(found)[1] if found else len(text) - max(begun, default=0)
        self._text, self._held = self._text + text[:end], "" if found else text[end:]


def pieces(
    reader: PromptReader,
    found: Iterable[Drawn],
    places: Iterable[tuple[int, int]],
    max_tokens: int,
    over: set[int],
    *,
    stop: Sequence[str] = (),
    live: bool = False,
) -> Iterator[Answer]:
    """Answers as they end, each to a prompt and a sample, from what `generate` yields; if `live`, a piece for each
    token. Text is decoded token by token only then, or for stop texts; `over` gets those that one ends."""
    late = not (stop or (live and reader.has_tokenizer))
    written = [Draft(reader, stop, place, late=late) for place in places]
    for index, token, logprob in found:
        draft, reason = written[index], None
        if token is None:
            reason = "stop"
        elif draft.add(token, logprob):
            over.add(index)
            reason = "stop"
        elif len(draft.tokens) == max_tokens:
            reason = "length"
        if live or reason:
            yield draft.piece(reason)


def in_order(answers: Iterable[Answer], num_prompts: int, samples: int = 1) -> Iterator[Answer]:
    """Whole answers, as they end, by prompt and sample; up to the first that is missing."""
    waiting, coming = dict[tuple[int, int], Answer](), iter(answers)
    for place in product(range(num_prompts), range(samples)):
        while place not in waiting:
            if (answer := next(coming, None)) is None:
                return
            waiting[answer.index, answer.sample] = answer
        yield waiting.pop(place)
