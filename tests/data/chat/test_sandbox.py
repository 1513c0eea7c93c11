"""Templates of strangers: what they cannot reach, how long they run, how much they write."""

from __future__ import annotations

import time

import pytest

from llmq.data.chat import sandbox
from llmq.data.chat.sandbox import RenderError
from llmq.data.chat.template import ChatTemplate

CHAT = [{"role": "user", "content": "Hello!"}]

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ (messages | attr('__class__')).__base__ }}",
    "{{ messages[0]['content']['__class__']['__mro__'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__call__.__func__.__globals__ }}",
    "{{ dict.__class__.__init__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{0.__class__}'.format_map({'0': ''}) }}",
    "{{ '{m.__class__}'.format(m=messages) }}",
    "{{ [messages] | map(attribute='__class__') | first }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ [''] | groupby('__class__') }}",
    "{{ [''] | sum(attribute='__class__', start=0) }}",
    "{{ [''] | sort(attribute='__class__.__name__') }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% for x in [1] recursive %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}{{ m._func.__globals__ }}",
    "{{ (messages | tojson).__class__.__base__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].pop('role') }}",
    "{% do messages.clear() %}",
    "{{ environment.loader }}{{ environment.deadline + 1 }}",
    "{{ range.__globals__ }}",
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
        ("{{ [1] | random }}", "^the filter random gives another text in each run: take it out of the template$"),
    ],
)
def test_a_rendering_that_goes_too_far_is_stopped_and_says_why(monkeypatch, text, says):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    start = time.process_time()
    with pytest.raises(RenderError, match=says):
        ChatTemplate(text, "endless").render(CHAT)
    assert time.process_time() - start < 10


def test_each_rendering_has_a_time_and_an_output_of_its_own(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    half = ChatTemplate(
        "{{ 'a' * 2500000 }}{% for i in range(9) %}{{ raise_exception('no') if i > 9 }}{% endfor %}", "half"
    )
    for _ in range(3):
        assert len(half.render(CHAT).text) == 2_500_000
        time.sleep(0.1)
