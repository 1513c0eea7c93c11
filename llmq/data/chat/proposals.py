"""Which --map would make a format of columns that have other names: a guess from their names and values."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

ASKED = ("prompt", "question", "query", "instruction", "input", "problem", "user", "human", "source", "context")
ANSWERED = (
    "completion",
    "response",
    "answer",
    "output",
    "reply",
    "solution",
    "target",
    "assistant",
    "label",
    "summary",
)
ROLE_KEYS = ("role", "from", "speaker", "author", "sender")


def proposed_map(row: Mapping[str, Any], pair: tuple[str, str], roles: Iterable[str]) -> str:
    """`--map prompt=query --map completion=reply`, or messages or text; empty if no column looks like any of these.

    `pair` has our names of prompt and answer, `roles` those that a message of the format messages can have.
    """
    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and (found := _message_keys(value[0])):
            role, content = found
            if role in ("role", "from"):
                return _flags(messages=name)
            if value[0][role] in roles:
                return _flags(messages=name, role=role, content=content)
            return "--data-format sharegpt " + _flags(conversations=name, role=role, content=content)
    texts = {str(name): value for name, value in row.items() if isinstance(value, str)}
    answer = _named_like(texts, ANSWERED)
    asked = _named_like([name for name in texts if name != answer], ASKED)
    if answer and asked:
        return _flags(**{pair[0]: asked, pair[1]: answer})
    return _flags(text=max(texts, key=lambda name: len(texts[name]))) if texts else ""


def _message_keys(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """The keys of a message's role and of its content, if it has both."""
    texts = [key for key, value in message.items() if isinstance(value, str)]
    role = _named_like(texts, ROLE_KEYS)
    content = next((key for key in texts if key != role), None)
    return (role, content) if role and content else None


def _named_like(names: Iterable[str], words: Iterable[str]) -> str | None:
    """The first name that has one of the words in it; an earlier word counts first."""
    names = list(names)
    return next((name for word in words for name in names if word in name.lower()), None)


def _flags(**columns: str) -> str:
    return " ".join(f"--map {shlex.quote(f'{ours}={theirs}')}" for ours, theirs in columns.items())
