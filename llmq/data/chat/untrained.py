"""Messages that say that they are not trained: a bad answer that is context only, say.

A message says it in a key: `weight` 0 or 1 (OpenAI, Mistral, OpenChat), `train` or `training` (axolotl), `loss`
(ms-swift, XTuner, AgentInstruct), or one of the others. Or the row says it of all its messages, in a list. What says 0
or false leaves the turn out; nothing trains a turn whose role is not trained. Null says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llmq.data.rows.row_files import BadRow

TURN_KEYS = ("weight", "train", "training", "train_on", "train_on_turn", "loss")
TURN_COLUMNS = ("train_on", "train_on_turns", "weights")  # each a list
DETAIL_KEYS = ("train_detail", "training_detail")  # axolotl's, for parts of a turn

OnBad = Callable[[str], BadRow]


def untrained_messages(messages: list[dict[str, Any]], row: Mapping[str, Any], column: str, bad: OnBad) -> set[int]:
    """The indices of the messages that say that they are not trained; takes the keys that say it out of them.

    `column` of the row has a list, or one of TURN_COLUMNS if it is one of these. Raises `bad(reason)` for values that
    say neither, and for two that disagree.
    """
    said: list[dict[str, bool]] = []  # of each message, by what says it
    for number, message in enumerate(messages, 1):
        if detail := next((key for key in DETAIL_KEYS if key in message), None):
            raise bad(
                f"message {number} has {detail}, for parts of a turn, but only whole turns can be left out: take it out"
            )
        given = {key: message.pop(key) for key in TURN_KEYS if key in message}
        said.append({key: _is_trained(f"message {number} has {key}", value, bad) for key, value in given.items()})
    for name in TURN_COLUMNS if column in TURN_COLUMNS else (column,):
        for turn, value in _by_turn(name, row.get(name), messages, bad).items():
            said[turn][name] = _is_trained(f"{name} has for message {turn + 1}", value, bad)
    for number, by in enumerate(said, 1):
        if len(set(by.values())) > 1:
            each = ", ".join(f"{key}: {'yes' if value else 'no'}" for key, value in by.items())
            raise bad(f"message {number} is both to be trained and not to be trained ({each}): remove one of these")
    return {turn for turn, by in enumerate(said) if not all(by.values())}


def _by_turn(name: str, values: Any, messages: list[dict[str, Any]], bad: OnBad) -> dict[int, Any]:
    """What a column says of each message, or of each of the assistant's, by their indices."""
    if values is None:
        return {}
    if not isinstance(values, list):
        raise bad(
            f"{name} is {json.dumps(values, default=str)[:40]}, not a list that says for each message whether it is "
            "trained: rename the column, or name another with --map train_on=COLUMN"
        )
    turns = list(range(len(messages)))
    if len(values) != len(turns):
        turns = [turn for turn in turns if messages[turn]["role"] == "assistant"]
    if len(values) != len(turns):
        raise bad(
            f"{name} has {len(values)} values for {len(messages)} messages: give one for each, or one for each of the "
            "assistant's"
        )
    return {turn: value for turn, value in zip(turns, values, strict=True) if value is not None}


def _is_trained(what: str, value: Any, bad: OnBad) -> bool:
    """Whether a value says that a turn is trained; `what` has it, in words."""
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    shown = json.dumps(value, default=str)[:40]
    raise bad(f"{what} {shown}: give 1 or 0 (true or false), as a turn is trained or not")
