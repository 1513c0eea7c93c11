"""What is trained in a chat: spans of the rendered text, and the tokens that they cover.

A turn's span is what the model is to write at inference: from the end of the prompt (the conversation before it,
rendered with add_generation_prompt) to the end of the token that ends the turn. It is found by rendering the
conversation up to the turn with and without it; where the template has `generation` blocks, these say it, and an end
token right after a block that has none is trained with it. What a block holds after its end token (ChatML's line
break) is trained, too, as transformers' mask has it; no turn gets a second end token.

A conversation is one sample as long as its rendering begins with the rendering of each trained turn as the last one.
Some templates write earlier turns differently from the last (Qwen3 leaves out their reasoning; Mistral moves the system
message to the last question). A turn that would not stand in the sample as it does at inference gets a sample of its
own, which ends with it. So such a conversation becomes several samples, and each trained turn is in exactly one. Not
counted are end tokens that only the last turn has after its own (Phi-3's EOS): an earlier turn is trained without.

A message can say that it is not trained: its turn is context only.

A token is trained if it holds any character of a span, as in transformers' assistant masks: the text is tokenized once,
as a whole, so that a token can straddle the border.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

import numpy as np
import tokenizers

from llmq.data.chat.formats import ROLES, Chat
from llmq.data.chat.template import ChatTemplate, RenderError, Rendering
from llmq.errors import UsageError

_START, _STOP = itemgetter(0), itemgetter(1)  # of a token's place in the text


@dataclass(frozen=True)
class TrainOn:
    """Which turns are trained: all tokens, the last assistant turn, or the turns of some roles."""

    roles: frozenset[str] = frozenset({"assistant"})
    everything: bool = False
    only_last: bool = False

    @classmethod
    def parse(cls, text: str | None) -> TrainOn:
        """`assistant` (and None), `all`, `last`, or roles with commas between; UsageError for anything else."""
        if text in (None, "all", "last"):
            return cls(everything=text == "all", only_last=text == "last")
        roles = [role.strip() for role in str(text).split(",")]
        if unknown := [role for role in roles if role not in ROLES]:
            raise UsageError(
                f"--train-on {text}: {unknown[0]!r} is not a role: give all, last, or some of {', '.join(ROLES)}"
            )
        return cls(roles=frozenset(roles))

    def candidates(self, chat: Chat) -> list[int]:
        """Indices of the messages that are trained unless they say that they are not."""
        turns = enumerate(chat.messages)
        found = [i for i, m in turns if self.everything or (i >= chat.num_asked and m["role"] in self.roles)]
        return found[-1:] if self.only_last else found

    def describe(self) -> str:
        if self.everything:
            return "every token"
        return "the last assistant turn" if self.only_last else f"turns of {', '.join(sorted(self.roles))}"


@dataclass
class Sample:
    """A text to be tokenized as a whole, and its trained spans [start, stop) in characters, ascending.

    `ends` says whether the last span ends the text's last turn without any token to end it: EOS is then to be added.
    `turns` has, of each trained turn, where its last span and where its message stops, ascending.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    ends: bool = False
    turns: tuple[tuple[int, int], ...] = ()

    def put_first(self, spans: Sequence[tuple[int, int]], own: str) -> None:
        """Adds a turn before the others, whose spans are in the text and in `own`, the rendering that ends with it."""
        if filled := [(start, stop) for start, stop in spans if start < stop]:
            stop = filled[-1][1]
            self.spans = (*filled, *self.spans)
            self.turns = ((stop, len(own) if self.text.startswith(own) else stop), *self.turns)


class Turns:
    """One conversation's renderings."""

    def __init__(self, template: ChatTemplate, chat: Chat, end_tokens: tuple[str, ...]) -> None:
        self.template, self.chat, self.end_tokens = template, chat, end_tokens

        # Turns are looked at from last to first, so that few renderings, each as long as the conversation, are made
        # once and kept.
        self.render = lru_cache(4)(self._render)

    def _render(self, count: int, prompt: bool = False) -> Rendering:
        """The first `count` messages, with the generation prompt if `prompt`."""
        return self.template.render(self.chat.messages[:count], self.chat.tools, add_generation_prompt=prompt)

    def spans(self, turn: int) -> list[tuple[int, int]]:
        """What is trained of message `turn` in the rendering that ends with it; at least one span."""
        text, generated = self.render(turn + 1)
        is_assistant = self.chat.messages[turn]["role"] == "assistant"
        if is_assistant and self.template.has_generation:
            *blocks, (start, stop) = self._blocks(turn, text, generated)
            return [*blocks, (start, self._with_end(text, blocks[0][0] if blocks else start, stop))]
        found = self._prompt_end(turn, text) if is_assistant else self._content_start(turn, text)
        start = self._message_start(turn, text) if found is None else found
        # to the end of the last end token, if only white space follows it, else of the text
        bare = text.rstrip()
        return [(start, len(bare) if len(bare) > start and bare.endswith(self.end_tokens) else len(text))]

    def _blocks(self, turn: int, text: str, generated: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The generation blocks of assistant turn `turn` in the rendering that ends with it."""
        roles = [message["role"] for message in self.chat.messages[: turn + 1]]
        if len(generated) == roles.count("assistant"):
            return generated[-1:]
        before = self._message_start(turn, text)
        own = [block for block in generated if block[0] >= before]
        if not own:
            raise RenderError(f"message {turn + 1} has no generation block, as other assistant turns have")
        return own

    def _prompt_end(self, turn: int, text: str) -> int | None:
        """Where the prompt of an assistant turn ends and the model writes; None for a first message without either."""
        if not turn:  # few templates render no messages at all, and some put a system prompt of their own first
            try:
                nothing, prompt = self.render(0).text, self.render(0, prompt=True).text
            except RenderError:
                nothing = prompt = ""
            place = text.find(prompt) if prompt != nothing else -1
            return place + len(prompt) if place >= 0 else self._content_start(0, text)
        prompt = self.render(turn, prompt=True).text
        if text.startswith(prompt):
            return len(prompt)
        # A prompt that offers more than the turn takes up, such as the start of reasoning that it does not have.
        if not text.startswith(self.render(turn).text):
            raise RenderError(
                f"it writes the conversation before message {turn + 1} differently once that message is there, so what "
                "the model is to write cannot be found: use a template with generation blocks"
            )
        content = self._content_start(turn, text)  # which may begin like the reasoning does
        return min(_common(prompt, text), len(text) if content is None else content)

    def _content_start(self, turn: int, text: str) -> int | None:
        """Where the content of a message begins in the text that ends with it; None if it has none.

        With another content, the text is the same up to there. Searched for, a short one would be found in a marker.
        """
        message = self.chat.messages[turn]
        content = message.get("content", "")
        if not content.strip():
            return None
        other = next(digit for digit in "012" if digit not in (content[0], content.strip()[0]))
        try:
            changed = self.template.render([*self.chat.messages[:turn], {**message, "content": other}], self.chat.tools)
        except RenderError:  # a content that has to have some form
            return None
        # A template may also write earlier turns otherwise.
        return max(_common(changed.text, text), self._message_start(turn, text))

    def _message_start(self, turn: int, text: str) -> int:
        """Where a message begins in the text that ends with it."""
        return _common(self.render(turn).text, text) if turn else 0

    def _with_end(self, text: str, start: int, stop: int) -> int:
        """`stop`, or the end of the end token right after it if a turn from `start` to `stop` has none."""
        if text[start:stop].rstrip().endswith(self.end_tokens):
            return stop
        following = [token for token in self.end_tokens if text.startswith(token, stop)]
        return stop + max((len(token) for token in following), default=0)

    def standing(self, text: str, turn: int) -> list[tuple[int, int]] | None:
        """The spans of message `turn` as `text` has them; None if it differs from the rendering that ends with it.

        End tokens after the turn's own, which only the last turn of a conversation has, may be missing.
        """
        own, spans = self.render(turn + 1).text, self.spans(turn)
        start, stop = spans[0][0], spans[-1][1]
        while text[:stop] != own[:stop]:
            bare = own[start:stop].rstrip()
            last = next((token for token in self.end_tokens if bare.endswith(token)), None)
            if last is None or not bare.removesuffix(last).rstrip().endswith(self.end_tokens):
                return None
            stop = start + len(bare) - len(last)
        return [(first, min(last, stop)) for first, last in spans if first < stop or first == start]


def samples(template: ChatTemplate, chat: Chat, train_on: TrainOn, end_tokens: tuple[str, ...]) -> list[Sample]:
    """The samples of a conversation, in the order of their trained turns; one without spans if none is trained.

    `end_tokens` are the tokenizer's special tokens. RenderError if the template cannot render it.
    """
    turns = Turns(template, chat, end_tokens)
    whole = turns.render(len(chat.messages)).text
    if train_on.everything:
        return [_everything(turns, whole)]
    made: list[Sample] = []  # from the last turn to the first
    for turn in (turn for turn in reversed(train_on.candidates(chat)) if turn not in chat.untrained):
        own, text = turns.render(turn + 1).text, made[-1].text if made else whole
        standing = turns.standing(text, turn)
        if not made or standing is None:
            made.append(Sample(own if standing is None else text, ()))
        made[-1].put_first(standing or turns.spans(turn), own)
    for sample in made:
        # A last span that reaches the end of the text, where there is no end token, is a turn without one.
        reaches = bool(sample.spans) and sample.spans[-1][1] == len(sample.text)
        sample.ends = reaches and not sample.text.rstrip().endswith(end_tokens)
    return made[::-1] or [Sample(whole, ())]


def _everything(turns: Turns, whole: str) -> Sample:
    """A conversation that is trained from its first to its last character, but for what its messages leave out."""
    chat, spans, at, ends = turns.chat, [], 0, []
    for count in range(1, len(chat.messages) + 1):
        with suppress(RenderError):  # a conversation that must not end there
            if whole.startswith(text := turns.render(count).text) and text:  # else the template does not write it so
                ends.append((len(text), len(text)))
    for turn in sorted(chat.untrained):
        left = turns.standing(whole, turn)
        if left is None:
            raise RenderError(
                f"it writes message {turn + 1}, which is not to be trained, differently once others follow: name roles "
                "with --train-on in place of all"
            )
        for start, stop in left:
            spans.append((at, start))
            at = stop
    spans = [(start, stop) for start, stop in [*spans, (at, len(whole))] if start < stop]
    unended = len(chat.messages) - 1 not in chat.untrained and not whole.rstrip().endswith(turns.end_tokens)
    return Sample(whole, tuple(spans), unended, tuple(ends))


def unwritten(template: ChatTemplate, chat: Chat) -> str:
    """Which of a chat's tools and tool calls a template does not write: an answer that calls would be an empty one."""
    lost = ["tools"] if chat.tools and "tools" not in template.source else []
    if any(message.get("tool_calls") for message in chat.messages) and "tool_calls" not in template.source:
        # It may still write whole messages.
        silent = [{**message, "tool_calls": []} if "tool_calls" in message else message for message in chat.messages]
        if template.render(silent, chat.tools) == template.render(chat.messages, chat.tools):
            lost.append("tool_calls")
    return " and ".join(lost)


def _common(one: str, other: str) -> int:
    """Length of the common beginning of two texts."""
    if other.startswith(one):
        return len(one)
    same, differs = 0, min(len(one), len(other)) + 1  # lengths of beginnings
    while differs - same > 1:
        middle = (same + differs) // 2
        same, differs = (middle, differs) if one[:middle] == other[:middle] else (same, middle)
    return same


def trained_tokens(encoding: tokenizers.Encoding, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """(n,) bool: the tokens that hold a character of `spans`, of those of the text that was encoded."""
    # Looked up in the list, as both ends of tokens ascend: an array of it takes longer than all else that masks need.
    offsets = encoding.offsets
    trained = np.zeros(len(offsets), bool)
    for start, stop in spans:
        trained[bisect_right(offsets, start, key=_STOP) : bisect_left(offsets, stop, key=_START)] = True
    return trained


def turn_ends(encoding: tokenizers.Encoding, turns: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """`Sample.turns` in tokens: how many hold a character up to each trained stop, and how many end with the message.

    The second is at least the first, which a token can straddle.
    """
    offsets = encoding.offsets
    counts = [(bisect_left(offsets, stop, key=_START), bisect_right(offsets, end, key=_STOP)) for stop, end in turns]
    return [(stop, max(stop, end)) for stop, end in counts]
