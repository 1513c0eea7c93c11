"""Which format rows have, what a row holds, and what is said of a bad one."""

import re

import numpy as np
import pytest

from llmq.data.chat.encoded import EncodeOptions
from llmq.data.chat.formats import FORMATS, PREAMBLES, Chat, Format, Pair, find_format
from llmq.data.rows.row_files import BadRow, Record
from llmq.errors import DataError, UsageError
from llmq.options.parse import descriptions

VOCABULARY = 100
ASK, TELL = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
TOOL = {"type": "function", "function": {"name": "f"}}


def record(row: dict, number: int = 1) -> Record:
    return Record(f"rows.jsonl:{number}", row)


def found(*rows: dict, **options) -> Format:
    """The format of data that begins with these rows."""
    return find_format([record(row, number) for number, row in enumerate(rows, 1)], EncodeOptions(**options))


def read(row: dict, first: dict | None = None, **options):
    """The content of a row, in the format of `first` (or of itself)."""
    return found(first or row, **options).read(record(row, 2), VOCABULARY)


def alpaca(opening: str, given: str = "", system: str | None = None) -> Pair:
    """What Alpaca's prompt makes of the instruction a with the output b."""
    asked = f"### Instruction:\na\n\n### Input:\n{given}" if given else "### Instruction:\na"
    return Pair(f"{opening}\n\n{asked}\n\n### Response:\n", "b", f"a\n\n{given}" if given else "a", system)


@pytest.mark.parametrize(
    ("row", "name", "content"),
    [
        ({"text": "a", "url": "b"}, "text", "a"),
        ({"prompt": "a", "completion": " b"}, "prompt-completion", Pair("a", " b", "a")),
        ({"question": "a", "answer": "b"}, "question-answer", Pair("a", "b", "a")),
        ({"instruction": "a", "input": "", "output": "b", "text": "c"}, "alpaca", alpaca(PREAMBLES[False])),
        ({"instruction": "a", "input": "c", "output": "b"}, "alpaca", alpaca(PREAMBLES[True], "c")),
        ({"instruction": "a", "context": "c", "response": "b", "id": 1}, "alpaca", alpaca(PREAMBLES[True], "c")),
        ({"instruction": "a", "context": None, "response": "b"}, "alpaca", alpaca(PREAMBLES[False])),
        ({"instruction": "a", "response": "b"}, "alpaca", alpaca(PREAMBLES[False])),
        ({"prompt": "a", "response": "b"}, "prompt-completion", Pair("a", "b", "a")),
        ({"input": "a", "output": "b"}, "prompt-completion", Pair("a", "b", "a")),
        ({"prompt": [ASK], "completion": [TELL]}, "prompt-completion", Chat([ASK, TELL], num_asked=1)),
        ({"prompt": [ASK, TELL, ASK], "completion": [{**TELL, "weight": 0}, ASK, TELL], "tools": [TOOL]},
         "prompt-completion", Chat([ASK, TELL, ASK, TELL, ASK, TELL], [TOOL], frozenset({3}), 3)),
        ({"instruction": "a", "input": "c", "output": "b", "system": "d"}, "alpaca", alpaca("d", "c", "d")),
        ({"messages": [ASK, TELL], "prompt": "a", "text": "c"}, "messages", Chat([ASK, TELL])),
        ({"messages": [ASK, TELL], "tools": [TOOL]}, "messages", Chat([ASK, TELL], [TOOL])),
        ({"messages": [ASK, TELL], "tools": '[{"name": "f"}]'}, "messages", Chat([ASK, TELL], [{"name": "f"}])),
        ({"messages": [ASK, TELL], "tools": None}, "messages", Chat([ASK, TELL])),
        ({"messages": [ASK, TELL], "tools": []}, "messages", Chat([ASK, TELL], [])),
        ({"conversations": [ASK, TELL]}, "messages", Chat([ASK, TELL])),
        ({"conversations": [HUMAN, GPT]}, "sharegpt", Chat([ASK, TELL])),
        ({"messages": [HUMAN, GPT]}, "sharegpt", Chat([ASK, TELL])),
        ({"conversations": [HUMAN, GPT], "system": "s"}, "sharegpt",
         Chat([{"role": "system", "content": "s"}, ASK, TELL])),
        ({"conversations": [{"from": "system", "value": "s"}, HUMAN, {"from": "observation", "value": "o"}, GPT]},
         "sharegpt", Chat([{"role": "system", "content": "s"}, ASK, {"role": "tool", "content": "o"}, TELL])),
    ],
)  # fmt: skip
def test_the_format_is_read_off_the_columns(row, name, content):
    assert found(row).name == name and read(row) == content


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "a"}, {"role": "developer", "content": "a"}),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
         {"role": "user", "content": "ab"}),
        ({"content": "a", "role": "user", "name": "Eve", "tool_calls": None},
         {"content": "a", "role": "user", "name": "Eve"}),
        ({"role": "assistant", "content": None, "tool_calls": [TOOL]}, {"role": "assistant", "tool_calls": [TOOL]}),
        ({"role": "assistant", "content": "a", "reasoning_content": "b"},
         {"role": "assistant", "content": "a", "reasoning_content": "b"}),
    ],
)  # fmt: skip
def test_a_message_is_what_transformers_gives_to_a_template(message, expected):
    """The order of its keys stays, null keys go, text in parts is one text."""
    first, second = read({"messages": [message, TELL]}).messages
    assert list(first.items()) == list(expected.items()) and second == TELL


@pytest.mark.parametrize(
    ("key", "values"),
    [("weight", (0, 1)), ("weight", (0.0, 1.0)), ("train", (False, True)), ("training", (False, True)),
     ("train_on", (0, 1)), ("train_on_turn", (False, True)), ("loss", (False, True))],
)  # fmt: skip
def test_a_message_says_whether_it_is_trained(key, values):
    for off in values:
        chat = read({"messages": [{**ASK, key: 1}, {**TELL, key: off}, {**ASK, key: None}, TELL]})
        assert chat == Chat([ASK, TELL, ASK, TELL], None, frozenset() if off else frozenset({1}))
    row = {"conversations": [HUMAN, {**GPT, key: values[0]}], "system": "s"}
    assert read(row) == Chat([{"role": "system", "content": "s"}, ASK, TELL], None, frozenset({2}))


@pytest.mark.parametrize(
    ("row", "mapping", "untrained"),
    [
        ({"train_on": [0, 1, 1, 0]}, (), {0, 3}),
        ({"train_on_turns": [True, None, None, False]}, (), {3}),
        ({"weights": [0, 1]}, (), {1}),
        ({"keep": [1, 0], "weights": 0.5}, (("train_on", "keep"),), {3}),
        ({"keep": [1, 0]}, (), set()),
        ({"train_on": None}, (), set()),
    ],
)
def test_a_row_says_of_all_its_messages_or_the_assistants_whether_they_are_trained(row, mapping, untrained):
    messages = {"messages": [ASK, TELL, ASK, TELL]}
    for first in (None, messages):
        chat = read({**messages, **row}, mapping=mapping, first=first and {**first, **row})
        assert chat == Chat([ASK, TELL, ASK, TELL], None, frozenset(untrained))


def test_a_format_can_be_chosen_and_columns_and_keys_can_have_other_names():
    row = {"dialog": [{"who": "user", "said": "a"}, {"who": "assistant", "said": "b"}]}
    mapping = (("messages", "dialog"), ("role", "who"), ("content", "said"))
    assert read(row, mapping=mapping) == Chat([ASK, TELL])
    assert read({"Frage": "a", "answer": "b"}, mapping=(("question", "Frage"),)) == Pair("a", "b", "a")
    assert read({"messages": [ASK], "dialog": [TELL]}, mapping=(("messages", "dialog"),)) == Chat([TELL])
    row = {"messages": [ASK, TELL], "text": "c", "body": "d"}
    assert read(row, data_format="text") == "c"
    asked = {"data_format": "text", "mapping": (("text", "body"),)}
    assert read(row, **asked) == "d" and found(row, **asked).words == "text (as asked), columns text = body"
    assert found({}, row).words == "messages (as in rows.jsonl:2), columns messages"


@pytest.mark.parametrize(
    ("first", "later", "mapping", "content"),
    [
        ({"messages": [ASK, TELL]}, {"tools": [TOOL]}, (), Chat([ASK, TELL], [TOOL])),
        ({"messages": [ASK, TELL]}, {"functions": [TOOL]}, (("tools", "functions"),), Chat([ASK, TELL], [TOOL])),
        ({"conversations": [HUMAN, GPT]}, {"system": "s"}, (), Chat([{"role": "system", "content": "s"}, ASK, TELL])),
        ({"instruction": "a", "output": "b"}, {"more": "c"}, (("input", "more"),), alpaca(PREAMBLES[True], "c")),
        ({"instruction": "a", "response": "b"}, {"more": "c"}, (("input", "more"),), alpaca(PREAMBLES[True], "c")),
    ],
)  # fmt: skip
def test_a_column_that_only_later_rows_have_is_read_and_named_if_it_is_among_the_first(first, later, mapping, content):
    row = {**first, **later}
    assert read(row, mapping=mapping, first=first) == content
    (ours, theirs), *_ = mapping or [(next(iter(later)),) * 2]
    named = ours if ours == theirs else f"{ours} = {theirs}"
    for rows, is_named in (([first], bool(mapping)), ([first, row], True)):
        described = found(*rows, mapping=mapping).words
        assert (named in described.split("columns ")[1].split(", ")) == is_named


def test_tokens_are_taken_as_they_are():
    content = read({"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]})
    assert content.ids.dtype == np.int32
    assert (content.ids.tolist(), content.trained.tolist()) == ([5, 6, 7], [False, True, True])
    content = read({"input_ids": np.array([5, 6])})
    assert content.ids.tolist() == [5, 6] and content.trained is None
    content = read({"input_ids": [5, 6], "lab": [-100, 6]}, mapping=(("labels", "lab"),), first={"input_ids": [5, 6]})
    assert content.trained.tolist() == [False, True]


@pytest.mark.parametrize(
    ("data_format", "mapping", "rows", "error", "says"),
    [
        ("json", (), [{"text": "a"}], UsageError, "--data-format json is not one of tokens, messages, sharegpt, "),
        (None, (("texts", "a"),), [{"text": "a"}], UsageError, "--map texts=...: texts is not a column of any format"),
        ("text", (("question", "a"),), [{"text": "a"}], UsageError, "question is not a column of text"),
        (None, (), [{"body": "a", "url": "b"}, {}], DataError,
         r"^rows.jsonl:1: the columns \(body, url\) match no format: .*question-answer \(question, answer\)"),
        ("text", (), [{"body": "a"}], DataError, r"\(body\) match no format: text \(text\): name the columns"),
        (None, (), [{"text": None}], DataError, "match no format"),
        (None, (), [{"messages": []}], DataError, "match no format"),
    ],
)  # fmt: skip
def test_a_format_that_cannot_be_found_is_an_error(data_format, mapping, rows, error, says):
    with pytest.raises(error, match=says):
        found(*rows, data_format=data_format, mapping=mapping)


def test_a_prompt_template_writes_the_prompt_from_all_columns():
    row = {"title": "Tides", "year": 1912, "note": None, "response": "b"}

    def prompt(source, **more):
        return read({**row, **more}, prompt_template=source)

    assert prompt("{{ title }} ({{ year }}){{ note }}\n") == Pair("Tides (1912)", "b", "Tides (1912)")
    assert prompt("Q: {{ title }}\nA:\n\n", instruction="c") == Pair("Q: Tides\nA:\n", "b", "Q: Tides\nA:\n")
    assert prompt("{% if absent is defined %}x{% endif %}") == Pair("", "b", "")
    with pytest.raises(BadRow, match="template fails: UndefinedError: 'titel' is undefined; the columns are title, "):
        prompt("{{ titel }}")
    with pytest.raises(UsageError, match=r"--prompt-template is not Jinja: .* \(line 1\)"):
        prompt("{{ title")
    with pytest.raises(DataError, match=r"no format: prompt-completion \(completion\); alpaca \(output\); question"):
        found({"title": "a"}, prompt_template="{{ title }}")
    with pytest.raises(UsageError, match="--prompt-template: text rows have no prompt"):
        found({"text": "a"}, data_format="text", prompt_template="{{ text }}")
    assert "the prompt written by --prompt-template" in found(row, prompt_template="x").words


def test_alpacas_preamble_can_be_left_out():
    row = {"instruction": "a", "output": "b"}
    assert read(row, preamble=False) == Pair("### Instruction:\na\n\n### Response:\n", "b", "a")


CHAT, PAIR, TEXT, IDS = {"messages": [ASK, TELL]}, {"question": "a", "answer": "b"}, {"text": "a"}, {"input_ids": [1]}


@pytest.mark.parametrize(
    ("first", "row", "says"),
    [
        (TEXT, {"text": ""}, "text is empty"),
        (TEXT, {"text": None}, "the data is text (as in rows.jsonl:1), columns text: text is null"),
        (TEXT, {"text": 5}, "text is a number, not text"),
        (TEXT, CHAT, "the row is messages, but the data is text (as in rows.jsonl:1), columns text: text is missing"),
        (PAIR, TEXT, "the row is text, but the data is question-answer (as in rows.jsonl:1)"),
        (PAIR, {"question": "a", "answer": ""}, "answer is empty"),
        (CHAT, {"messages": "a"}, "messages is text, not a list of messages"),
        (CHAT, {"messages": []}, "messages is empty"),
        (CHAT, {"messages": [{"role": "user", "content": " "}]}, "no message has any text"),
        (CHAT, {"messages": ["a"]}, "message 1 is text, not an object with role and content"),
        (CHAT, {"messages": [ASK, {"content": "a"}]}, "message 2 has no role: its keys are content"),
        (CHAT, {"messages": [HUMAN, GPT]}, "message 1 has no role: its keys are from, value"),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]},
         "message 1 has the unknown role 'robot': known are system, developer, user, assistant, tool, function"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "content that is a number, not text or a list of parts"),
        (CHAT, {"messages": [{"role": "user"}]}, "message 1 has neither content nor tool_calls"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]},
         "message 1 has a part of type 'image': only text can be trained"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": "f()"}]}, "tool_calls that are not a list of objects"),
        ({**CHAT, "tools": []}, {**CHAT, "tools": "{"}, "tools is not JSON (Expecting property name"),
        ({**CHAT, "tools": []}, {**CHAT, "tools": {"a": 1}}, "tools is not a list of objects"),
        ({"conversations": [HUMAN]}, {"conversations": [{"from": "alien", "value": "a"}]}, "unknown role 'alien'"),
        (CHAT, {"messages": [ASK, {**TELL, "weight": 0.5}]}, "message 2 has weight 0.5: give 1 or 0 (true or false)"),
        (CHAT, {"messages": [ASK, {**TELL, "weight": 0, "train": True}]},
         "message 2 is both to be trained and not to be trained (weight: no, train: yes): remove one of these"),
        (CHAT, {"messages": [ASK, {**TELL, "weight": 0}], "train_on": [1]}, "(weight: no, the column train_on: yes)"),
        (CHAT, {"messages": [ASK, TELL, ASK], "train_on": [1, 0]}, "train_on is 2 values for 3 messages: give a list"),
        (CHAT, {**CHAT, "weights": 0.5}, "weights is 0.5 for 2 messages: give a list with 1 or 0 for each"),
        (CHAT, {**CHAT, "train_on": [1, 2]}, "message 2 has the column train_on 2: give 1 or 0"),
        (CHAT, {"messages": [ASK, {**TELL, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}]},
         "message 2 has train_detail, for parts of a turn, but only whole turns can be left out"),
        ({"prompt": [ASK], "completion": [TELL]}, {"prompt": "a", "completion": "b"}, "prompt is text, not a list"),
        ({"prompt": [ASK], "completion": [TELL]}, {"prompt": [ASK], "completion": []}, "completion is empty"),
        (IDS, {"input_ids": []}, "input_ids is empty"),
        *((IDS, {"input_ids": value}, "input_ids is not a list of integers")
          for value in ("1 2", [1, 2.5], [[1], [2, 3]], [True], [1, 10**30])),
        (IDS, {"input_ids": [1, 100]}, "token 1 has the id 100, but the vocabulary has 100 ids (from 0)"),
        ({**IDS, "labels": [1]}, {"input_ids": [1, 2], "labels": [1]}, "labels has 1 numbers for 2 tokens"),
        ({**IDS, "labels": [1]}, {"input_ids": [1, 2], "labels": [2, -100]},
         "label 0 is 2, which is neither its token (1) nor -100"),
        ({**IDS, "attention_mask": [1]}, {"input_ids": [1], "attention_mask": [0]}, "attention_mask leaves no token"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_its_reason(first, row, says):
    with pytest.raises(BadRow) as caught:
        read(row, first=first)
    assert caught.value.place == "rows.jsonl:2"
    assert says in caught.value.reason


def test_help_names_every_format() -> None:
    listed = descriptions()["data_format"].help.split("Format of the rows:")[1].split(".")[0]
    assert set(re.split(r"[ ,:.]+", listed)) - {"", "or"} == set(FORMATS)
