"""Chat templates: text and ids as transformers', which one is taken, what a bad or a hostile one can do."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from chat_cases import CHATS, GOLDEN, ONE, PAIRS, VARIABLES, chat_tokenizer, source, template

from llmq.data.chat.template import ChatTemplate, RenderError, named_tokens, open_template
from llmq.errors import DataError, UsageError

GOLDENS = json.loads(GOLDEN.read_text("utf-8"))
NOW = datetime(2025, 3, 9, 7, 5)


@pytest.mark.sample
@pytest.mark.parametrize(("name", "chat"), PAIRS)
def test_texts_and_ids_are_those_of_transformers(name, chat):
    assert list(GOLDENS) == [f"{name}/{chat}" for name, chat in PAIRS]
    (messages, tools), golden, used = CHATS[chat], GOLDENS[f"{name}/{chat}"], template(name)
    text, _ = used.render(messages, tools)
    assert text == golden["text"]
    assert chat_tokenizer().encode(text, add_special_tokens=False).ids == golden["ids"]
    assert used.render(messages[:-1], tools, add_generation_prompt=True).text == golden["prompt"]


@pytest.mark.judge
@pytest.mark.parametrize(("name", "chat"), PAIRS)
def test_texts_and_ids_are_those_of_transformers_live(name, chat, tmp_path):
    pytest.importorskip("transformers", reason="the judge is transformers")
    from golden.make_chats import judge, judged

    assert json.loads(json.dumps(judged(judge(tmp_path), name, chat))) == GOLDENS[f"{name}/{chat}"]


def test_what_a_template_can_use():
    """Hugging Face's globals and filters, each in a line."""
    text = (
        "{{ strftime_now('%d %b %Y') }}|{{ {'b': '<é>', 'a': [1, none]} | tojson }}|"
        "{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}|"
        "{{ 'é' | tojson(ensure_ascii=true) }}|{{ [1, 2] | tojson(separators=(',', ':')) }}|"
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}|{{ dict(a=1) }}|{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}|"
        "{{ bos_token }}|{{ documents is none }}|{{ unk_token is defined }}"
    )
    made = ChatTemplate(text, "all", VARIABLES, NOW).render(ONE).text
    assert made == (
        '09 Mar 2025|{"b": "<é>", "a": [1, null]}|{\n "a": 2,\n "b": 1\n}|"\\u00e9"|[1,2]|02|'
        "{'a': 1}|2|<s>|True|False"
    )
    assert ChatTemplate("a\n  {% if true %}\nb\n  {% endif %}\n c\n", "trim").render(ONE).text == "a\nb\n c"


def test_reasoning_is_known_by_the_name_that_templates_read():
    shown = ChatTemplate("{{ messages[0].reasoning_content }},{{ messages[0].thinking }}", "names")
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert shown.render([{"role": "assistant", "content": "a", name: "why"}]).text == "why,why"
    assert shown.render([{"role": "user", "content": "a"}]).text == ","


def test_threads_can_share_a_template():
    used = template("chatml_generation")
    chats = [[ONE[0], {"role": "assistant", "content": "a" * n}] for n in range(64)]
    expected, interval = [used.render(chat) for chat in chats], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds: a thread is left after some instructions
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(used.render, chats * 4)) == expected * 4
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for m in messages %}", r"the chat template is not Jinja: Unexpected end of template.*\(line 1\)"),
        ("\n{% generation %}a", r"not Jinja.*\(line 2\)"),
        ("{{ messages[0] | from_json }}", "is not Jinja: No filter named 'from_json'"),
        ("{{ [1] | random }}", "is not Jinja: No filter named 'random'"),  # which gives another text in each run
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"cannot be compiled \(RecursionError"),
        ("{{ " + "-" * 3000 + "1 }}", "cannot be compiled"),
    ],
)
def test_what_is_no_template_is_refused(text, says):
    with pytest.raises(DataError, match=says):
        ChatTemplate(text, "bad")


def folder_with(tmp_path: Path, **files: object) -> Path:
    for name, content in files.items():
        path = tmp_path / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


NAMED = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}]


@pytest.mark.parametrize(
    ("files", "wanted", "plain", "with_tools"),
    [
        ({"tokenizer_config_json": {"chat_template": "one"}}, None, "one", "one"),
        ({"tokenizer_config_json": {"chat_template": "one"}}, "tokenizer", "one", "one"),
        ({"tokenizer_config_json": {"chat_template": NAMED}}, None, "d", "t"),
        ({"tokenizer_config_json": {"chat_template": NAMED}}, "rag", "r", "r"),
        ({"tokenizer_config_json": {"chat_template": "one"}, "chat_template_jinja": "two"}, None, "two", "two"),
        ({"tokenizer_config_json": {"chat_template": NAMED}, "chat_template_jinja": "two"}, None, "two", "two"),
        ({"chat_template_json": {"chat_template": "three"}}, None, "three", "three"),
        ({"chat_template_jinja": "a", "additional_chat_templates__tool_use_jinja": "b"}, None, "a", "b"),
        ({"tokenizer_config_json": {"chat_template": "one"}}, "{{ 'inline' }}", "inline", "inline"),
    ],
)
def test_the_template_is_the_tokenizers_or_the_one_asked_for(tmp_path, files, wanted, plain, with_tools):
    found = open_template(folder_with(tmp_path, **files), wanted)
    assert [found.pick(tools).render(ONE, tools).text for tools in (None, [])] == [plain, with_tools]


def test_a_template_can_be_a_file(tmp_path):
    (tmp_path / "mine.jinja").write_text(source("zephyr"))
    found = open_template(folder_with(tmp_path, special_tokens_map_json={"eos_token": {"content": "</s>"}}),
                           str(tmp_path / "mine.jinja"))  # fmt: skip
    assert found.render(ONE).text == GOLDENS["zephyr/one"]["text"]
    assert found.origin == str(tmp_path / "mine.jinja")


@pytest.mark.parametrize(
    ("files", "wanted", "error", "says"),
    [
        ({}, None, DataError, "has no chat template: give one as a file with --chat-template FILE"),
        ({"tokenizer_config_json": {"chat_template": NAMED[1:]}}, None, DataError, r"several .*\(tool_use, rag\)"),
        ({"tokenizer_config_json": {"chat_template": 5}}, None, DataError, "neither text nor a list of names"),
        ({"tokenizer_config_json": {"chat_template": [{"name": "a"}]}}, None, DataError, "neither text nor a list"),
        ({"chat_template_jinja": "a"}, "/no/such.jinja", UsageError, r"--chat-template /no/such.jinja: .*\(default\)"),
    ],
)
def test_a_template_that_cannot_be_found_says_where_it_was_looked_for(tmp_path, files, wanted, error, says):
    with pytest.raises(error, match=says):
        open_template(folder_with(tmp_path, **files), wanted)


def test_named_tokens_are_read_from_both_files(tmp_path):
    folder = folder_with(
        tmp_path,
        tokenizer_config_json={"bos_token": None, "eos_token": {"content": "<e>"}, "add_bos_token": True},
        special_tokens_map_json={"bos_token": "<b>", "eos_token": "<other>", "additional_special_tokens": ["x"]},
    )
    assert named_tokens(folder) == {"eos_token": "<e>", "bos_token": "<b>"}


CHAT = [{"role": "user", "content": "Hello!"}]
ESCAPES = [
    "{{ messages.__class__ }}",
    "{{ messages[0]['content']['__class__']['__mro__'] }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{0.__class__}'.format_map({'0': ''}) }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}{{ m._func.__globals__ }}",
    "{{ (messages | tojson).__class__.__base__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].pop('role') }}",
    "{{ environment.loader }}{{ environment.deadline + 1 }}",
    "{{ lipsum(n=100000) }}{{ lipsum.__globals__ }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_nothing_of_python_can_be_reached_or_changed(text):
    """It raises, or shows nothing of what it asked for, and the conversation stays as it was."""
    messages = [dict(message) for message in CHAT]
    try:
        made = ChatTemplate(text, "escape").render(messages).text
    except (RenderError, ValueError):
        made = ""
    assert not any(word in made for word in ("class", "built", "object", "0x", "root:", "uid=", "function")), made
    assert messages == CHAT


MANY = "{% for i in range(99999) %}BODY{% endfor %}"
TWICE = "{{ f(n - 1) }}{{ f(n - 1) }}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MANY.replace("BODY", MANY.replace("BODY", "")), "^it does not end within 0.2 s$"),
        ("{% macro f(n) %}{% if n %}" + TWICE + "{% endif %}{% endmacro %}{{ f(60) }}", "^it does not end within"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError|does not end"),
        ("{% for x in range(100001) %}{% endfor %}", "OverflowError: Range too big"),
        (MANY.replace("BODY", "{{ 'a' * 1000 }}"), "^it writes more than 4,194,304 characters$"),
        (MANY.replace("BODY", "a" * 10000), "^it writes more than"),
        ("{{ messages[0].content * 900000 }}", "^it writes more than"),
        ("{{ raise_exception('roles must take turns') }}", "^roles must take turns$"),
        ("{{ messages[5].content + 'a' }}", "UndefinedError: .*list object has no element 5"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% include 'other' %}", "TypeError: no loader"),
        ("{% macro f() %}b{% generation %}a{% endgeneration %}{% endmacro %}{{ f() }}", "stands in a macro"),
        ("{{ messages | map('nothing') | list }}", "TemplateRuntimeError: No filter named 'nothing'"),
    ],
)
def test_a_rendering_that_fails_or_goes_too_far_is_stopped_and_says_why(monkeypatch, text, says):
    monkeypatch.setattr("llmq.data.chat.template.MAX_SECONDS", 0.2)
    start = time.process_time()
    with pytest.raises(RenderError, match=says):
        ChatTemplate(text, "endless").render(CHAT)
    assert time.process_time() - start < 10


def test_each_rendering_has_a_time_and_an_output_of_its_own(monkeypatch):
    monkeypatch.setattr("llmq.data.chat.template.MAX_SECONDS", 0.2)
    half = ChatTemplate("{{ 'a' * 2500000 }}{{ dict() | length }}", "half")
    for _ in range(3):
        assert len(half.render(CHAT).text) == 2_500_001
        time.sleep(0.1)
