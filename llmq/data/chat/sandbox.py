"""Jinja templates of strangers: what they can reach, how long they run, how much they write.

jinja2's ImmutableSandboxedEnvironment keeps a template away from Python's internals, but not from time and memory:
three nested loops over `range(99999)`, a macro that calls itself twice, or a string doubled forty times are legal. So
each rendering has a budget of work. The compiler's tree is rewritten to pay from it: ten units for every node of a
loop's or macro's body each time it runs, and the length of what goes into an operator, call, filter or the output.
Where a value is looked at to its depths (as text, as JSON) or put into another one, all that it holds is paid: no value
of a template's own is larger than the budget, although sixty nested pairs of the same list would be. Work is counted,
not timed, so that a template passes or fails alike on every machine; a clock beside it bounds what the count is wrong
about. Refused: a child process with a time limit (one more process for each worker, 0.1 s to start), and sys.settrace
(all templates several times slower).

A template writes the same in each run: no `random`, no text with an address in memory, no order of a set.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, Undefined, nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_WORK = 20_000_000  # units of a rendering: a second at most, and several times a million characters of chat
MAX_SECONDS = 10.0  # of a rendering
# A number of five digits, a star or a nested field in a format is a width that the budget would not see.
_WIDE_FIELD = re.compile(r"%[^A-Za-z%]*(\*|\d{5})|\{[^{}]*:[^{}]*(\d{5}|\{)")
_SETS: Any = (type({}.keys()), type({}.items()))
_VIEWS: Any = (*_SETS, type({}.values()))
_CONTAINERS: Any = (list, tuple, dict, set, frozenset, *_VIEWS)
_SIZED: Any = (str, bytes, range, *_CONTAINERS)
_PLAIN: Any = (str, bytes, range, int, float, type(None), Undefined)
# Filters that make text of whatever they are given.
_WRITERS = re.compile(
    "capitalize|center|e|escape|forceescape|indent|lower|pprint|replace|safe|string|striptags|title|trim|truncate|upper|"
    "urlencode|urlize|wordcount|wordwrap|xmlattr"
)


class TooMuchWork(Exception):
    """A rendering that went over its budget."""


class Environment(ImmutableSandboxedEnvironment):
    """Hugging Face's template language, on a budget. One rendering at a time."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "//", "%"})

    def __init__(self, now: datetime) -> None:
        # Unoptimized: constants are not computed by the compiler, which has no budget.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], optimized=False)
        self.finalize = _paid_output
        self.work_left = 0
        self.deadline = 0.0
        self.written = 0  # characters that left the template so far
        self.generated: list[tuple[int, int, str]] = []  # spans of generation blocks, and what they hold
        self.filters = {name: _paid_filter(self, name, function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _paid_filter(self, "tojson", _tojson), "random": _random}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": now.strftime,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Meter(self).visit(Parser(self, source, name, filename).parse())

    def pay(self, work: int) -> None:
        """Takes work from the budget; TooMuchWork where nothing is left."""
        self.work_left -= work
        if self.work_left < 0 or time.monotonic() > self.deadline:
            raise TooMuchWork

    def pay_for(self, *values: Any) -> None:
        """Pays for the lengths of `values`."""
        self.pay(sum(map(_length, values)))

    def pay_for_all(self, *values: Any) -> None:
        """Pays for everything in `values`, at any depth."""
        left = self.work_left
        self.pay(sum(_size(value, left) for value in values))

    def paid(self, value: Any) -> Any:
        """A list, tuple or dict of the template's own, paid for."""
        self.pay_for_all(value)
        return value

    def joined(self, *values: Any) -> str:
        """The operator `~`."""
        self.pay_for_all(*values)
        return "".join(map(str, values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # nearly all that templates do
            self.pay(len(left) + len(right))
            return left + right
        self.pay_for(left, right)
        match operator, left, right:
            case "*" | "//" | "%", int(), int():
                self.pay(_length(left) * _length(right))  # in words of 64 bits
            case ("*", int() as count, value) | ("*", value, int() as count):
                self.pay(max(count, 0) * _size(value, self.work_left))
            case "**", int(), int():
                self.pay(abs(left).bit_length() * abs(right))
            case "%", str(), _:
                _refuse_wide_fields(left)
                self.pay_for_all(right)
            case "-", _, _ if isinstance(left, _SETS):  # Python gives a set, whose order is another in each process
                taken = set(right)
                return dict.fromkeys(item for item in left if item not in taken).keys()
        return self.binop_table[operator](left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps str.format, and nothing else, in a function of its own.
        of = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if of is not __self:
            __self.pay_for(of, *args, *kwargs.values())
            if isinstance(of, str | bytes | int | _Dict) or isinstance(__obj, _Dict):
                _pay_for_growth(__self, getattr(__obj, "__name__", "dict"), of, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def render(environment: Environment, template: Any, variables: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """The text that a template of `environment` makes, and the spans [start, stop) of its generation blocks.

    Raises whatever the template does, and TooMuchWork.
    """
    environment.work_left, environment.deadline = MAX_WORK, time.monotonic() + MAX_SECONDS
    environment.written, environment.generated = 0, []
    blocks = []
    for block in template.generate(variables):
        blocks.append(block)
        environment.written += len(block)
    text = "".join(blocks)
    for start, stop, content in environment.generated:
        if text[start:stop] != content:
            raise TemplateError("a generation block stands in a macro or in a set block, where its place is not known")
    return text, [(start, stop) for start, stop, _ in environment.generated]


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: what the model is to write. Changes nothing in the text."""

    tags = {"generation"}
    environment: Environment

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_span"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _span(self, context: Any, caller: Callable[[], str]) -> str:
        text, start = caller(), self.environment.written
        self.environment.generated.append((start, start + len(text), text))
        return text


class _Meter(NodeTransformer):
    """Puts the payments into a template's tree."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def _call(self, method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)
        return call.set_lineno(line).set_environment(self.environment)  # type: ignore[return-value]

    def _body(self, node: Any) -> nodes.Node:
        work = 10 + sum(10 + len(getattr(inner, "data", "")) for part in node.body for inner in _descendants(part))
        self.generic_visit(node)
        # The name of the attribute is written as it is; a Call node would go through the sandbox, four times slower.
        payment = nodes.ExprStmt(nodes.EnvironmentAttribute(f"pay({work})"))
        node.body.insert(0, payment.set_lineno(node.lineno).set_environment(self.environment))
        return node

    visit_For = visit_Macro = visit_CallBlock = _body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("joined", node.nodes, node.lineno)

    def _literal(self, node: Any) -> nodes.Node:
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        self.generic_visit(node)
        if constant or getattr(node, "ctx", "load") != "load":
            return node
        return self._call("paid", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _literal


def _descendants(node: nodes.Node) -> Iterator[nodes.Node]:
    """A node and everything below it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.iter_child_nodes())


def _length(value: Any) -> int:
    """Characters of a text, items of a container, words of a number: what looking through a value once costs."""
    if isinstance(value, _SIZED):
        return 1 + len(value)
    return 1 + value.bit_length() // 64 if isinstance(value, int) else 1


def _size(value: Any, limit: int) -> int:
    """Characters in a value and ten for each item, through all containers; TooMuchWork above `limit`.

    For what becomes text: TemplateError for a function and all else that Python shows with its address.
    """
    if not isinstance(value, _CONTAINERS):
        if not isinstance(value, _PLAIN) and " at 0x" in repr(value):
            kind = "generator" if isinstance(value, _Drained) else type(value).__name__
            raise TemplateError(f"it writes a {kind} as text: call it if it is a function, or make a list of it")
        return _length(value)
    total = 1
    for item in value.items() if isinstance(value, dict) else value:
        total += 10 + _size(item, limit - total)
        if total > limit:
            raise TooMuchWork
    return total


def _pay_for_growth(environment: Environment, name: str, of: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Pays for what a method or filter `name` may make of `of` beyond the length of what goes in."""
    values = [*args, *kwargs.values()]
    widest = max([0, *(abs(v) for v in values if isinstance(v, int)), *(len(v) for v in values if isinstance(v, str))])
    match name:
        case "center" | "ljust" | "rjust" | "zfill" | "to_bytes" | "batch" | "slice" | "round":
            environment.pay(widest)
        case "wordwrap" if isinstance(width := kwargs.get("width", next(iter(args), 79)), int):
            # A word is cut by copying all of its rest, line after line.
            between = max([0, *(len(v) for v in values if isinstance(v, str))])
            environment.pay(_length(of) ** 2 // max(width, 1) // 1000 + between * _length(of) // max(width, 1))
        case "indent" | "expandtabs" | "translate" | "urlize":
            # Once per line, tab or character, of which the text has at most its length. The usual few are free.
            environment.pay(widest * _length(of) if widest > 100 else 0)
            environment.pay(
                sum(_length(of) * _size(v, environment.work_left) for v in values if isinstance(v, Mapping))
            )
        case "tojson" | "pprint" | "string":
            environment.pay(_size(of, environment.work_left) * (1 + widest))
        case "replace" if isinstance(of, str) and args and isinstance(args[0], str):
            environment.pay(of.count(args[0]) * max(map(_length, values)))
        case "replace":
            environment.pay(_size(of, environment.work_left) * max(map(_length, values), default=1))
        case "join":
            separator, items = (
                (of, args[0]) if isinstance(of, str) and args and not isinstance(args[0], str) else ("", of)
            )
            items = _known(items)
            between = max([len(separator), *(len(v) for v in values if isinstance(v, str))])
            count = len(items) if hasattr(items, "__len__") else 10_000  # a generator does not say
            environment.pay(_size(items, environment.work_left) + between * count)
        case "sum" if "start" in kwargs or len(args) > 1:
            environment.pay(_length(of) ** 2 // 16)
        case "sum":
            environment.pay(_size(_known(of), environment.work_left))  # numbers may be long
        case "dict" | "fromkeys":
            count = _length(args[0]) if name == "fromkeys" and args else 1
            environment.pay(count * sum(_size(v, environment.work_left) for v in values))
        case "format" | "format_map":
            _refuse_wide_fields(str(of))
            environment.pay_for_all(*values)


def _refuse_wide_fields(text: str) -> None:
    if _WIDE_FIELD.search(text):
        raise TemplateError("a format has a width of five digits or one that is computed")


def _paid_filter(environment: Environment, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        given = args[first:]
        environment.pay_for(*given, *kwargs.values())
        if given:
            _pay_for_growth(environment, name, given[0], given[1:], kwargs)
            if _WRITERS.fullmatch(name) and type(given[0]) is not str:
                environment.pay_for_all(given[0])
        made = function(*args, **kwargs)
        return _Drained(environment, made) if hasattr(made, "__next__") else made

    return paid


class _Drained:
    """What a filter makes one after the other, all worked out at once: thousands of iterators in one end the process.

    An iterator still, as a template can tell: it is true, has no length, and gives its items once. An error comes in
    the place of its item, which a template may never ask for.
    """

    def __init__(self, environment: Environment, made: Iterator[Any]) -> None:
        self._items: list[Any] = []
        self._at = 0
        self._error: Exception | None = None
        try:
            for item in made:
                environment.pay(10)
                self._items.append(item)
        except TooMuchWork:
            raise
        except Exception as error:
            self._error = error

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._at == len(self._items):
            raise self._error or StopIteration
        self._at += 1
        return self._items[self._at - 1]

    def _left(self) -> list[Any]:
        return self._items[self._at :]


def _known(value: Any) -> Any:
    """A value, or the items that are left where a filter's are worked out."""
    return value._left() if isinstance(value, _Drained) else value


@pass_context
def _paid_output(context: Any, value: Any) -> Any:
    """Called with everything that is printed. With the context, so that the compiler prints nothing by itself."""
    environment = context.environment
    environment.pay(len(value)) if type(value) is str else environment.pay_for_all(value)
    return value


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _random(*args: Any) -> None:
    raise TemplateError("the filter random gives another text in each run: take it out of the template")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers writes it: nothing is escaped for HTML, and the keys keep their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """`dict` for templates: makes them, and has no other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` for templates: no attribute begins with an underscore, and its text does not show what it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        content = dict(*rest, **kwargs)
        for name in content:
            _refuse_private(name)
        Namespace.__init__(self, content)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no attribute {name!r}: names that begin with _ are private")
