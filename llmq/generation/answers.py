"""Answers from tokens: whole, or in pieces as they come, to an end token, a stop text or the most tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from llmq.engine.generate import Drawn
from llmq.generation.prompts import PromptReader, TextStream


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
    """An answer while its tokens come."""

    def __init__(self, text: TextStream, index: int, sample: int) -> None:
        self._stream, self._index, self._sample = text, index, sample
        self.num_tokens, self._text = 0, ""
        self._tokens, self._logprobs = list[int](), list[float]()

    def add(self, token: int, logprob: float | None) -> bool:
        """One more token; whether it completes a stop text."""
        self.num_tokens += 1
        self._tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        self._text += self._stream.add(token)
        return self._stream.is_stopped

    def piece(self, finish_reason: str | None) -> Answer:
        """All that came since the last piece."""
        text = self._text + (self._stream.rest() if finish_reason else "")
        reason = "stop" if self._stream.is_stopped else finish_reason  # what is held back may have a stop text, too
        found = (text if self._stream.is_shown else None, tuple(self._tokens), tuple(self._logprobs), reason)
        self._text, self._tokens, self._logprobs = "", [], []
        return Answer(*found, self._index, self._sample)


def drafts(
    reader: PromptReader, num_prompts: int, samples: int = 1, *, stop: Sequence[str] = (), live: bool = False
) -> list[Draft]:
    """One for each answer, prompt by prompt. Text is decoded token by token only for stop texts, or if it is `live`."""
    late = not (stop or (live and reader.has_tokenizer))
    return [Draft(TextStream(reader, stop, late=late), *place) for place in product(range(num_prompts), range(samples))]


def pieces(
    found: Iterable[Drawn], written: Sequence[Draft], max_tokens: int, over: set[int], *, live: bool
) -> Iterator[Answer]:
    """Answers as they end, from what `generate` yields; if `live`, a piece for each token. `over` gets those that a
    stop text ends."""
    for index, token, logprob in found:
        draft, reason = written[index], None
        if token is None:
            reason = "stop"
        elif draft.add(token, logprob):
            over.add(index)
            reason = "stop"
        elif draft.num_tokens == max_tokens:
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
