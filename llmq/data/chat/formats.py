"""What a row of data means: its format, found from the columns of the first rows, and the row's content in one of four
shapes: text, a prompt with its answer, a chat, or tokens.

A format is a set of columns; `mapping` gives a column another name in the data ("messages" is called "dialogue"). The
two chat formats differ in how a message is written: `role` and `content` (OpenAI's) or `from` and `value` (ShareGPT's),
in a column `messages` or `conversations`. Which one it is is read off the first message, not off the column's name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmq.data.chat.encoded import Encoded, EncodeOptions, trained_runs
from llmq.data.chat.template import Environment, RenderError, prompt_template
from llmq.data.rows.row_files import BadRow, Record, kind_of
from llmq.errors import DataError, UsageError
from llmq.tensor import IGNORED


@dataclass(frozen=True)
class Pair:
    """A prompt (possibly empty) and its answer; `asked` is what a user would say, `system` what comes before it."""

    prompt: str
    answer: str
    asked: str
    system: str | None = None


@dataclass(frozen=True)
class Chat:
    """Messages and the tools on offer as a chat template takes them: role, content (a string), tool_calls, ...

    `untrained` are the indices of messages that say that they are not trained. The first `num_asked` are the prompt,
    which is trained only where everything is.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    untrained: frozenset[int] = frozenset()
    num_asked: int = 0


Content = str | Pair | Chat | Encoded  # text, a prompt with its answer, a chat, or tokens

# Columns of each format: those that a row must have, those that it may have, in the order in which they are looked for.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tokens": (("input_ids",), ("labels", "attention_mask")),
    "messages": (("messages",), ("tools", "train_on")),
    "sharegpt": (("conversations",), ("system", "tools", "train_on")),
    "prompt-completion": (("prompt", "completion"), ()),
    "alpaca": (("instruction", "output"), ("input", "system")),
    "question-answer": (("question", "answer"), ()),
    "text": (("text",), ()),
}
# Other names that common data sets have for the columns of a format, looked for after all of the above.
OTHER_NAMES: tuple[tuple[str, dict[str, str]], ...] = (
    ("prompt-completion", {"completion": "response"}),
    ("alpaca", {"output": "response", "input": "context"}),  # Dolly's
    ("alpaca", {"output": "response"}),
    ("prompt-completion", {"prompt": "input", "completion": "output"}),
)
CHATS = ("messages", "sharegpt")
PAIRS = ("prompt-completion", "alpaca", "question-answer")
CHAT_COLUMNS = ("messages", "conversations")
# How a message of each format that can be a chat is written.
_OPENAI = ("role", "content")
MESSAGE_KEYS = {"messages": _OPENAI, "prompt-completion": _OPENAI, "sharegpt": ("from", "value")}
# Keys of a message that are of no interest where a template does not read them; for tool_calls see masks.unwritten.
KNOWN_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# What ShareGPT and those who write like it call the roles.
SHAREGPT_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
    **{role: role for role in ROLES},
}
# What a message that is context only (a bad answer, say) has as 0 or false: `weight` (OpenAI, Mistral, OpenChat),
# `train` or `training` (axolotl), `loss` (ms-swift, XTuner, AgentInstruct), or one of the others. Or the row has a list
# with a value for each message, or each of the assistant's; null says nothing.
TURN_KEYS = ("weight", "train", "training", "train_on", "train_on_turn", "loss")
TURN_COLUMNS = ("train_on", "train_on_turns", "weights")
DETAIL_KEYS = ("train_detail", "training_detail")  # axolotl's, for parts of a turn
# Stanford Alpaca's, by whether the row has an input.
PREAMBLES = {
    False: "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
    True: "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.",
}


@dataclass(frozen=True)
class Format:
    """A format with the data's own names for its columns."""

    name: str
    columns: dict[str, str]  # ours -> theirs, for all columns that a row may have
    words: str  # it and the mapping, and how it was found
    has_messages: bool  # in each row
    is_chat: bool  # each row becomes a chat
    template: Environment | None  # writes the prompt from all columns
    preamble: bool  # of Alpaca's prompt

    def read(self, record: Record, vocab_size: int) -> Content:
        """The row's content; BadRow if it is of another format, empty, or not what the columns should hold."""
        row = _Row(record, self)
        if self.name == "text":
            return row.filled("text")
        if self.name == "tokens":
            return _tokens(row, vocab_size)
        if self.has_messages:
            return _chat(row)
        pair = _pair(row)
        if not self.is_chat:
            return pair
        system = [{"role": "system", "content": pair.system}] if pair.system else []
        return Chat([*system, {"role": "user", "content": pair.asked}, {"role": "assistant", "content": pair.answer}])


def find_format(first: Sequence[Record], options: EncodeOptions) -> Format:
    """The format of data that begins with the rows `first`, or the one asked for with the columns found.

    With a template that writes the prompt, a format of prompts and answers needs the answer alone.

    The first row that has a format decides; a later row of another one is a bad row. UsageError for an unknown format
    or mapping; DataError if there are no rows, or none has the columns of a format.
    """
    data_format, mapping, prompt = options.data_format, dict(options.mapping), options.prompt_template
    if data_format is not None and data_format not in FORMATS:
        raise UsageError(f"--data-format {data_format} is not one of {', '.join(FORMATS)}")
    names = [data_format] if data_format else list(FORMATS)
    if prompt is not None and not (names := [name for name in names if name in PAIRS]):
        raise UsageError(f"--prompt-template: {data_format} rows have no prompt: leave one of the two out")
    template = None if prompt is None else prompt_template(prompt)
    known = {column for name in names for part in FORMATS[name] for column in part} | {"role", "content"}
    if unknown := [ours for ours in mapping if ours not in known]:
        raise UsageError(
            f"--map {unknown[0]}=...: {unknown[0]} is not a column of {data_format or 'any format'}; known are "
            f"{', '.join(sorted(known))}"
        )
    for record in first:
        if found := _match(record.value, names, mapping, with_prompt=template is None):
            name, columns = found
            used = {ours for ours, its in columns.items() if ours in mapping or any(its in row.value for row in first)}
            named = (ours if ours == its else f"{ours} = {its}" for ours, its in columns.items() if ours in used)
            how = f"as in {record.place}" if data_format is None else "as asked"
            by = ", the prompt written by --prompt-template" if template else ""
            words = f"{name} ({how}), columns {', '.join(named)}{by}"
            has_messages = name in CHATS or (name == PAIRS[0] and isinstance(record.value[columns["completion"]], list))
            is_chat = has_messages or (name in PAIRS and options.chat_template is not None)
            return Format(name, columns, words, has_messages, is_chat, template, options.preamble)
    there = ", ".join(map(str, first[0].value)) or "none"
    wanted = "; ".join(f"{name} ({', '.join(FORMATS[name][0][template is not None :])})" for name in names)
    raise DataError(
        f"{first[0].place}: the columns ({there}) match no format: {wanted}: name the columns with --map "
        "OURS=THEIRS, for example --map messages=dialogue"
    )


def _match(
    row: dict[str, Any], names: Sequence[str], mapping: dict[str, str], *, with_prompt: bool = True
) -> tuple[str, dict[str, str]] | None:
    """The first of the formats `names` whose columns the row has, by our names and then by other common ones; and all
    columns that a row may have, ours -> theirs."""
    for name, other in [*((name, dict[str, str]()) for name in names), *OTHER_NAMES]:
        if name not in names:
            continue
        (needed, optional), called = FORMATS[name], {**other, **mapping}
        if name not in CHATS:
            columns = {ours: called.get(ours, ours) for ours in needed[not with_prompt :]}
        elif column := _chat_column(row, name, mapping):
            columns = {needed[0]: column, **{key: mapping[key] for key in ("role", "content") if key in mapping}}
        else:
            continue
        there = all(row.get(columns[ours]) is not None for ours in columns if ours in needed)
        if there and all(other[ours] in row for ours in other if ours in optional):
            return name, {**columns, **{ours: called.get(ours, ours) for ours in optional}}
    return None


def _chat_column(row: dict[str, Any], name: str, mapping: dict[str, str]) -> str | None:
    """The column that holds messages written as in the chat format `name`; None if there is none."""
    given = [mapping[ours] for ours in CHAT_COLUMNS if ours in mapping]
    role_key = mapping.get("role", MESSAGE_KEYS[name][0])
    for column in given or CHAT_COLUMNS:
        messages = row.get(column)
        if isinstance(messages, list) and messages and isinstance(messages[0], dict) and role_key in messages[0]:
            return column
    return None


class _Row:
    """A row as its format sees it; what is wrong with it is a BadRow."""

    def __init__(self, record: Record, form: Format) -> None:
        self.place, self.value, self.form = record.place, record.value, form

    def bad(self, reason: str) -> BadRow:
        return BadRow(self.place, reason)

    def get(self, ours: str) -> Any:
        """A column's value; None where it is absent and need not be there."""
        theirs = self.form.columns.get(ours, ours)
        value = self.value.get(theirs)
        if value is None and ours in FORMATS[self.form.name][0]:
            other = _match(self.value, list(FORMATS), {})
            is_other = f"the row is {other[0]}, " if other and other[0] != self.form.name else ""
            there = "is null" if theirs in self.value else "is missing"
            raise self.bad(f"{is_other}but the data is {self.form.words}: {theirs} {there}".removeprefix("but "))
        return value

    def string(self, ours: str) -> str | None:
        """A column that holds text, if anything."""
        value = self.get(ours)
        if value is not None and not isinstance(value, str):
            raise self.bad(f"{self.form.columns[ours]} is {kind_of(value)}, not text")
        return value

    def filled(self, ours: str) -> str:
        """A column that holds some text."""
        value = self.string(ours)
        if not value:
            raise self.bad(f"{self.form.columns[ours]} is empty")
        return value


def _pair(row: _Row) -> Pair:
    name, template = row.form.name, row.form.template
    *_, answer = FORMATS[name][0]
    if template is not None:
        try:
            prompt = template.fill(row.value).text
        except RenderError as error:
            raise row.bad(f"the prompt template fails: {error}; the columns are {', '.join(row.value)}") from None
    elif name == "alpaca":
        instruction, given, system = row.filled("instruction"), row.string("input"), row.string("system")
        opening = system or (PREAMBLES[bool(given)] if row.form.preamble else "")  # of the row's own, if it has one
        task = f"### Instruction:\n{instruction}"
        parts = [opening, task, f"### Input:\n{given}" if given else "", "### Response:\n"]
        asked = f"{instruction}\n\n{given}" if given else instruction
        return Pair("\n\n".join(part for part in parts if part), row.filled(answer), asked, system or None)
    else:
        prompt = row.filled("question") if name == "question-answer" else row.string("prompt") or ""
    return Pair(prompt, row.filled(answer), prompt)


def _tokens(row: _Row, vocab_size: int) -> Encoded:
    ids = _integers(row, "input_ids")
    if not ids.size:
        raise row.bad(f"{row.form.columns['input_ids']} is empty")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        raise row.bad(f"token {at} has the id {ids[at]}, but the vocabulary has {vocab_size} ids (from 0)")
    extra = {name: _integers(row, name) for name in ("labels", "attention_mask") if row.get(name) is not None}
    for name, values in extra.items():
        if len(values) != len(ids):
            raise row.bad(f"{name} has {len(values)} numbers for {len(ids)} tokens")
    labels = extra.get("labels", ids)
    wrong = (labels != IGNORED) & (labels != ids)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise row.bad(
            f"label {at} is {labels[at]}, which is neither its token ({ids[at]}) nor {IGNORED}: labels are aligned "
            "with their tokens, not shifted by one"
        )
    seen = extra["attention_mask"] != 0 if "attention_mask" in extra else np.ones(len(ids), bool)
    if not seen.any():
        raise row.bad("attention_mask leaves no token")
    trained = (labels != IGNORED)[seen] if "labels" in extra else None
    return Encoded(row.place, ids[seen].astype(np.int32), trained, trained_runs(trained))


def _integers(row: _Row, name: str) -> np.ndarray:
    """A column that holds a list of integers (n,) int64."""
    value = row.get(name)
    try:
        array = np.asarray(value if isinstance(value, list | np.ndarray) else None)
    except ValueError:  # lists in the list
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise row.bad(f"{row.form.columns.get(name, name)} is not a list of integers")
    return array.astype(np.int64)


def _chat(row: _Row) -> Chat:
    """A chat, also of a prompt and a completion that are messages, as TRL has them."""
    column = FORMATS[row.form.name][0][-1]
    asked = _messages(row, "prompt") if row.form.name in PAIRS else []
    answered = _messages(row, column)
    if not any(m.get("content", "").strip() or m.get("tool_calls") for m in answered):
        raise row.bad("no message has any text" if answered else f"{row.form.columns[column]} is empty")
    system = row.string("system") if "system" in row.form.columns else None
    before = [{"role": "system", "content": system}] if system else []
    untrained = frozenset(len(before) + turn for turn in _untrained(row, [*asked, *answered]))
    return Chat([*before, *asked, *answered], _tools(row), untrained, len(asked))


def _untrained(row: _Row, messages: list[dict[str, Any]]) -> set[int]:
    """The indices of the messages that are not to be trained; takes the keys that say it out of them."""
    found, lists = set(), _by_turn(row, messages)
    for turn, message in enumerate(messages):
        place = f"message {turn + 1}"
        if detail := next((key for key in DETAIL_KEYS if key in message), None):
            raise row.bad(
                f"{place} has {detail}, for parts of a turn, but only whole turns can be left out: take it out"
            )
        said = {key: message.pop(key) for key in TURN_KEYS if key in message}
        said |= {f"the column {name}": values[turn] for name, values in lists.items() if values.get(turn) is not None}
        for key, value in said.items():
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                shown = json.dumps(value, default=str)[:40]
                raise row.bad(f"{place} has {key} {shown}: give 1 or 0 (true or false), as a turn is trained or not")
        if len(set(said.values())) > 1:
            each = ", ".join(f"{key}: {'yes' if value else 'no'}" for key, value in said.items())
            raise row.bad(f"{place} is both to be trained and not to be trained ({each}): remove one of these")
        if not all(said.values()):
            found.add(turn)
    return found


def _by_turn(row: _Row, messages: list[dict[str, Any]]) -> dict[str, dict[int, Any]]:
    """By column, what the row's lists say of its messages, by their indices."""
    found, given = {}, row.form.columns.get("train_on")
    names = () if given is None else TURN_COLUMNS if given in TURN_COLUMNS else (given,)
    for name, values in ((name, row.value[name]) for name in names if row.value.get(name) is not None):
        everyone = list(range(len(messages)))
        answers = [turn for turn in everyone if messages[turn]["role"] == "assistant"]
        count = len(values) if isinstance(values, list) else None
        if (turns := next((some for some in (everyone, answers) if len(some) == count), None)) is None:
            shown = f"{len(values)} values" if isinstance(values, list) else json.dumps(values, default=str)[:40]
            raise row.bad(
                f"{name} is {shown} for {len(messages)} messages: give a list with 1 or 0 for each, or for each of the "
                "assistant's; or name another column with --map train_on=COLUMN"
            )
        found[name] = dict(zip(turns, values, strict=True))
    return found


def _messages(row: _Row, column: str) -> list[dict[str, Any]]:
    """A column's messages with our keys, in their own order; null ones are left out, as transformers does."""
    columns, messages = row.form.columns, row.get(column)
    if not isinstance(messages, list):
        raise row.bad(f"{columns[column]} is {kind_of(messages)}, not a list of messages")
    role, content = (columns.get(ours, key) for ours, key in zip(_OPENAI, MESSAGE_KEYS[row.form.name], strict=True))
    names = SHAREGPT_ROLES if row.form.name == "sharegpt" else {role: role for role in ROLES}
    found = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise row.bad(f"message {number} is {kind_of(message)}, not an object with {role} and {content}")
        if not isinstance(message.get(role), str):
            raise row.bad(f"message {number} has no {role}: its keys are {', '.join(map(str, message)) or 'none'}")
        if message[role] not in names:
            known = f"known are {', '.join(names)}"
            raise row.bad(f"message {number} has the unknown role {message[role][:40]!r}: {known}")
        renamed = {role: "role", content: "content"}
        ours: dict[str, Any] = {str(renamed.get(key, key)): it for key, it in message.items() if it is not None}
        ours["role"] = names[message[role]]
        if "content" in ours:
            ours["content"] = _content(row, number, ours["content"])
        calls = ours.get("tool_calls")
        if calls is not None and not _is_objects(calls):
            raise row.bad(f"message {number} has tool_calls that are not a list of objects")
        if "content" not in ours and not calls:
            raise row.bad(f"message {number} has neither {content} nor tool_calls")
        found.append(ours)
    return found


def _content(row: _Row, number: int, content: Any) -> str:
    """A message's text; parts of type text are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise row.bad(f"message {number} has content that is {kind_of(content)}, not text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise row.bad(f"message {number} has a part of type {kind or kind_of(part)!r}: only text can be trained")
        texts.append(part["text"])
    return "".join(texts)


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _tools(row: _Row) -> list[Any] | None:
    """The tools on offer; a column of strings holds them as JSON."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise row.bad(f"tools is not JSON ({error})") from None
    if tools is not None and not _is_objects(tools):
        raise row.bad("tools is not a list of objects")
    return tools
