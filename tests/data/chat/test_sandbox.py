"""Templates of strangers: what they cannot reach, and that they end."""

from __future__ import annotations

import time

import pytest
from chat_cases import CHATS, PAIRS, template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmq.data.chat import sandbox
from llmq.data.chat.template import MAX_OUTPUT, ChatTemplate, RenderError

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
    "{% set ns = namespace(__init__=1) %}",
    "{% set ns = namespace(dict(_Namespace__attrs=1)) %}",
    "{% for x in [1] recursive %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}{{ m._func.__globals__ }}",
    "{{ (messages | tojson).__class__.__base__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].pop('role') }}",
    "{% do messages.clear() %}",
    "{{ environment.loader }}{{ environment.work_left + 1 }}",
    "{{ range.__globals__ }}",
    "{{ joined('a', 'b') }}{{ pay(-5) }}",
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


SIXTY = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = GROWN %}{% endfor %}"


def sixty(start: str, grown: str, then: str = "") -> str:
    """A value that grows sixty times, and what is done with it."""
    return SIXTY.replace("START", start).replace("GROWN", grown) + then


MANY = "{% for i in range(99999) %}BODY{% endfor %}"
TWICE = "{{ f(n - 1) }}{{ f(n - 1) }}"
A, B = "('a' * 1000000)", "('b' * 1000000)"
ENDLESS = {
    "loops": MANY.replace("BODY", MANY.replace("BODY", MANY)),
    "loops over a sum": "{% set ns = namespace(n=0) %}"
    + MANY.replace("BODY", MANY.replace("BODY", "{% set ns.n = ns.n + i %}")),
    "recursion in two branches": "{% macro f(n) %}{% if n %}" + TWICE + "{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for x in [[[]]] * 9 recursive %}{{ loop([x] * 9) }}{% endfor %}",
    "call blocks": "{% macro g(n) %}{{ caller() if n else '' }}{% endmacro %}"
    "{% macro f(n) %}{% call g(n) %}" + TWICE + "{% endcall %}{% endmacro %}{{ f(60) }}",
    "doubling by +": sixty("'ab'", "ns.s + ns.s"),
    "doubling by ~": sixty("'ab'", "ns.s ~ ns.s"),
    "doubling by a list": sixty("1", "[ns.s, ns.s]", "{{ ns.s }}"),
    "doubling by a dict": sixty("1", "{'a': ns.s, 'b': ns.s}", "{{ ns.s | tojson }}"),
    "doubling by dict()": sixty("1", "dict(a=ns.s, b=ns.s)", "{{ ns.s == ns.s.a }}"),
    "doubling by fromkeys": sixty("1", "dict.fromkeys('ab', ns.s)", "{{ ns.s == ns.s.a }}"),
    "squaring": sixty("3", "ns.s * ns.s"),
    "a product": "{{ 'a' * 10000000000 }}",
    "a product from the left": "{{ 10000000000 * [1] }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a constant in a test": "{% if 'a' * 10000000000 %}{% endif %}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "the filter center": "{{ 'a' | center(10000000000) }}",
    "the filter indent": "{{ ('a\n' * 100000) | indent(100000000) }}",
    "replace": f"{{{{ {A}.replace('a', {B}) }}}}",
    "the filter replace": f"{{{{ {A} | replace('a', {B}) }}}}",
    "join": "{{ ('b' * 100000).join(['a'] * 10000) }}",
    "the filter join": f"{{{{ range(99999) | join({B}) }}}}",
    "joining a string": f"{{{{ {A} | join({B}) }}}}",
    "joining a generator": f"{{{{ range(99999) | map('string') | join({B}) }}}}",
    "translate": f"{{{{ {A}.translate(dict([(97, {B})])) }}}}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "bytes": f"{{{{ {A}.encode().replace('a'.encode(), {B}.encode()) }}}}",
    "to_bytes": "{{ (5).to_bytes(10000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list }}",
    "slice": "{{ [1] | slice(10000000000) | list }}",
    "tojson": "{{ [[[1] * 100] * 100] | tojson(indent=10000) }}",
    "sum of lists": "{{ ([[1]] * 1000000) | sum(start=[]) }}",
    "a quotient of numbers": "{{ ('f' * 2000000) | int(0, 16) // (('e' * 1000000) | int(0, 16)) > 3 }}",
    "a remainder of numbers": "{{ ('f' * 2000000) | int(0, 16) % (('e' * 1000000) | int(0, 16)) > 3 }}",
    "a sum of long numbers": "{{ ([('f' * 2000000) | int(0, 16)] * 100000) | sum > 3 }}",
    "a long word in short lines": "{{ ('a' * 1000000) | wordwrap(1) | length }}",
    "wordwrap": f"{{{{ ('a ' * 1000000) | wordwrap(1, true, {B}) }}}}",
    "output": MANY.replace("BODY", "{{ 'a' * 1000 }}"),
    "the template's own text": MANY.replace("BODY", "a" * 10000),
    "output into a block": "{% set a %}" + MANY.replace("BODY", "{{ messages[0].content * 1000 }}") + "{% endset %}",
    "a generator": "{{ range(99999) | map('string') | map('center', 100000) | list | length }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_rendering_that_does_not_end_is_stopped(name, monkeypatch):
    if name.startswith(("loops", "recursion", "doubling")):  # these take as long as they may
        monkeypatch.setattr(sandbox, "MAX_WORK", sandbox.MAX_WORK // 20)
    start = time.process_time()
    with pytest.raises(RenderError, match=r"does not end|RecursionError"):
        ChatTemplate(ENDLESS[name], "endless").render(CHAT)
    assert time.process_time() - start < 10  # seconds; most take some milliseconds


@pytest.mark.parametrize(
    "text",
    ["{{ '%10000000000d' % 5 }}", "{{ '{:>10000000000}'.format(1) }}", "{{ '{:{}}'.format(1, 10000000000) }}",
     "{{ '%*d' % (10000000000, 5) }}", "{{ '%10000000000d' | format(5) }}", "{{ '{a:99999}'.format_map({'a': 1}) }}"],
)  # fmt: skip
def test_a_wide_field_is_refused(text):
    with pytest.raises(RenderError, match="a format has a width of five digits or one that is computed"):
        ChatTemplate(text, "wide").render(CHAT)


@pytest.mark.parametrize("link", ["batch(1)", "select", "slice(1)"])
def test_filters_of_filters_do_not_end_the_process(link):
    chain = "{% set ns = namespace(g=[1]) %}{% for i in range(60000) %}{% set ns.g = ns.g | LINK %}{% endfor %}done"
    chain = chain.replace("LINK", link) + "{% if ns.g | first %}{% endif %}"
    assert ChatTemplate(chain, "chain").render(CHAT).text == "done"


def test_what_filters_find_is_an_iterator_as_without_a_budget():
    """True when it is empty, without a length, there once; and its error comes in its place."""
    plain = ImmutableSandboxedEnvironment()
    text = (
        "{{ 'true' if [1] | select('none') else 'false' }}"
        "{% set ones = [1, 1] | map('string') %}{{ ones | join('-') }}/{{ ones | join('-') }}"
        "{{ [0, 1] | map('abs') | first }}{{ ['a', 1] | map('abs') | string | length > 9 if false }}"
        "{{ [1, 'a'] | map('abs') | first }}{{ [3, 1] | reverse | list }}{{ range(4) | map('abs') | sum }}"
    )
    assert ChatTemplate(text, "drained").render(CHAT).text == plain.from_string(text).render()
    with pytest.raises(RenderError, match="TypeError"):
        ChatTemplate("{{ [1, 'a'] | map('abs') | list }}", "drained").render(CHAT)
    with pytest.raises(RenderError, match=r"has no len\(\)"):
        ChatTemplate("{{ [1] | map('abs') | length }}", "drained").render(CHAT)


@pytest.mark.parametrize(
    "text",
    ["{{ range }}", "{{ [messages[0].items] }}", "{{ 'a' ~ strftime_now }}", "{{ range | upper }}", "{{ [range] | e }}",
     "{{ '%s' % range }}", "{{ '{}'.format(dict) }}", "{{ [1] | map('abs') }}", "{{ cycler(1) }}",
     "{{ {1: joiner()} }}", "{{ ['a'.upper] | join }}", "{{ 'a'.format | string }}", "{{ range | indent }}"],
)  # fmt: skip
def test_no_address_in_memory_is_written(text):
    with pytest.raises(RenderError, match=r"it writes a \w+ as text: call it if it is a function"):
        ChatTemplate(text, "address").render(CHAT)


def test_nothing_is_drawn_and_no_order_is_left_open():
    with pytest.raises(RenderError, match="random gives another text in each run"):
        ChatTemplate("{{ [1] | random }}", "random").render(CHAT)
    text = (
        "{{ ({" + ", ".join(f"'{letter}': 1" for letter in "defghijabcklm") + "}.keys() - ['e']) | join }}{{ 7 - 4 }}"
    )
    assert ChatTemplate(text, "order").render(CHAT).text == "dfghijabcklm3"


def test_an_output_has_a_limit():
    long = [{"role": "user", "content": "a" * (MAX_OUTPUT // 2 + 1)}]
    with pytest.raises(RenderError, match="it writes 4,194,306 characters; the limit is 4,194,304"):
        ChatTemplate("{{ messages[0].content }}{{ messages[0].content }}", "long").render(long)


def test_a_clock_bounds_what_the_count_is_wrong_about(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", -1.0)
    with pytest.raises(RenderError, match="does not end"):
        ChatTemplate("{% for m in messages %}{% endfor %}", "late").render(CHAT)


def test_each_rendering_has_a_budget_of_its_own(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_WORK", sandbox.MAX_WORK // 20)
    half = ChatTemplate("{% for i in range(300) %}{% for j in range(300) %}{% endfor %}{% endfor %}done", "half")
    for _ in range(3):
        assert half.render(CHAT).text == "done"


def test_a_chat_of_a_million_characters_is_well_within_the_budget():
    chat = [{"role": role, "content": "word \n" * 1000} for role in ("user", "assistant") * 100]
    for name in {name for name, _ in PAIRS} - {"mistral"}:
        used = template(name)
        assert len(used.render(chat).text) > 1_100_000
        assert used._environment.work_left > sandbox.MAX_WORK * 0.5, name


def test_payments_do_not_change_what_a_template_writes():
    """Operators, literals, loops and calls, against jinja2 without a budget."""
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    text = (
        "{{ 1 ~ 'a' ~ none ~ [1] }}{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ '%s-%d' % ('x', 3) }}"
        "{{ 3 * 'ab' }}{{ 1.5 * 2 }}{% for a, b in [(1, 'x'), (2, 'y')] %}{{ loop.index }}{{ a }}{{ b }}{% endfor %}"
        "{% for k, v in {'a': messages[0].role}.items() %}{{ k }}{{ v }}{% endfor %}{{ (1, messages[0].role) }}"
        "{% macro m(x, y=[2]) %}{{ x }}{{ y }}{% endmacro %}{{ m(1) }}"
        "{{ 'x' in ['x', messages[0].role] }}{% macro w() %}({{ caller(7) }}){% endmacro %}"
        "{% call(z) w() %}c{{ z }}{% endcall %}"
        "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is sequence else x }}{% endfor %}"
        "{{ messages | map(attribute='role') | join('-') }}{{ messages | selectattr('role') | list | length }}"
        "{{ 'a,b'.split(',') }}{{ '{}={:>4}'.format('x', 5) }}{{ 'abc'[1:] }}{{ 'abc' | upper | replace('B', 'x') }}"
        "{% set x, y = 1, messages[0].role %}{{ x }}{{ y }}{{ {'k': [1, {'m': 2}]} }}{{ (3 | string) + 'z' }}"
        "{% filter upper %}abc{% endfilter %}{{ 'a' if messages else 'b' }}{{ [3, 1, 2] | sort | first }}"
    )
    assert ChatTemplate(text, "paid").render(CHAT).text == plain.from_string(text).render(messages=CHAT)


@pytest.mark.parametrize(("name", "chat"), PAIRS[:3])
def test_a_rendering_costs_about_what_it_writes(name, chat):
    """The work of a small chat: some thousand units, of twenty million."""
    used = template(name)
    used.render(*CHATS[chat])
    assert 100 < sandbox.MAX_WORK - used._environment.work_left < 10_000
