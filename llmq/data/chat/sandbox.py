"""The Jinja environment of chat templates: jinja2's sandbox with what transformers adds, and limits on time and output.

The sandbox keeps a template away from Python's internals and bounds `range`. A rendering that writes too much is
stopped while it writes; one that takes too long is stopped at its next call of a function, method or macro.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT = 1 << 22  # characters of one rendering: about a million tokens
MAX_SECONDS = 10.0  # of one rendering


class RenderError(ValueError):
    """A template that cannot render what it is given, and why."""


class Rendering(NamedTuple):
    """The text that a template makes, and the spans [start, stop) of its generation blocks."""

    text: str
    generated: list[tuple[int, int]]


class Environment(ImmutableSandboxedEnvironment):
    """Hugging Face's template language, for any number of threads; without `now`, templates see no time."""

    def __init__(self, now: datetime | None = None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.lock = threading.Lock()  # a rendering is Python only: side by side, threads would gain nothing
        self.deadline = 0.0
        self.written = 0  # characters that left the template so far
        self.generated: list[tuple[int, int, str]] = []  # spans of generation blocks, and what they hold
        self.filters |= {"tojson": _tojson, "random": _random}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, **({"strftime_now": now.strftime} if now else {})}

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `__obj` for a template; TemplateError after the deadline."""
        if time.monotonic() > __self.deadline:
            raise TemplateError(f"it does not end within {MAX_SECONDS:g} s")
        return super().call(__context, __obj, *args, **kwargs)

    def render(self, template: Template, variables: Mapping[str, Any]) -> Rendering:
        """What a template of this environment makes.

        Raises whatever the template does, and TemplateError if it takes too long or writes too much.
        """
        with self.lock:
            self.deadline = time.monotonic() + MAX_SECONDS
            self.written, self.generated = 0, []
            pieces = []
            for piece in template.generate(variables):
                pieces.append(piece)
                self.written += len(piece)
                if self.written > MAX_OUTPUT:
                    raise TemplateError(f"it writes more than {MAX_OUTPUT:,} characters")
            text = "".join(pieces)
            for start, stop, content in self.generated:
                if text[start:stop] != content:
                    raise TemplateError(
                        "a generation block stands in a macro or in a set block, where its place is not known"
                    )
            return Rendering(text, [(start, stop) for start, stop, _ in self.generated])


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


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _random(*args: Any) -> None:
    raise TemplateError("the filter random gives another text in each run: take it out of the template")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers writes it: nothing is escaped for HTML, and the keys keep their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
