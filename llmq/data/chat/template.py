"""Templates in Jinja: which chat template a tokenizer has, what it makes of a conversation, as transformers'
apply_chat_template does, and what --prompt-template makes of a row.

A chat template sees `messages`, `tools`, `documents` (None), `add_generation_prompt` and the tokenizer's named special
tokens (`bos_token`, ...). `strftime_now` gives one time for all rows: when tokenizing them began, also if it is resumed
on another day.

Templates are strangers' code. jinja2's sandbox keeps them away from Python's internals and bounds `range`. A rendering
that writes too much is stopped while it writes; one that takes too long is stopped at its next call of a function,
method or macro.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmq.data.tokens.tokenizer import TemplateNote, json_if_there
from llmq.errors import DataError, UsageError
from llmq.files.huggingface import TEMPLATE_FOLDER

MAX_OUTPUT = 1 << 22  # characters of one rendering: about a million tokens
MAX_SECONDS = 10.0  # of one rendering
OWN = "tokenizer"  # the name that --chat-template has for the tokenizer's own
REASONING = ("reasoning_content", "thinking", "reasoning")  # what a message's reasoning is called
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# What reads as a marker in a chat's text: <|im_end|>, [INST], </s>, <start_of_turn>.
MARKER = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<[\uff5c][^<>\s]{1,40}>|\[/?[A-Z][A-Z_]{2,30}\]|</?s>|<(?:start|end)_of_[a-z]+>"
)


class RenderError(ValueError):
    """A template that cannot render what it is given, and why."""


class Rendering(NamedTuple):
    """The text that a template makes, and the spans [start, stop) of its generation blocks."""

    text: str
    generated: list[tuple[int, int]]


class Environment(ImmutableSandboxedEnvironment):
    """A template in Hugging Face's language, for any number of threads; without `now`, it sees no time."""

    def __init__(self, source: str, now: datetime | None = None, **more: Any) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], **more)
        self.lock = threading.Lock()  # a rendering is Python only: side by side, threads would gain nothing
        self.has_generation = False  # whether it has such blocks
        self.deadline = 0.0
        self.written = 0  # characters that left the template so far
        self.generated: list[tuple[int, int, str]] = []  # spans of generation blocks, and what they hold
        self.filters["tojson"] = _tojson
        del self.globals["lipsum"], self.filters["random"]  # they give another text in each run
        self.globals |= {"raise_exception": _raise_exception, **({"strftime_now": now.strftime} if now else {})}
        with warnings.catch_warnings():  # Python warns of escapes such as "\[", which templates have and mean
            warnings.simplefilter("ignore")
            self.template = self.from_string(source)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `__obj` for a template; TemplateError after the deadline."""
        if time.monotonic() > __self.deadline:
            raise TemplateError(f"it does not end within {MAX_SECONDS:g} s")
        return super().call(__context, __obj, *args, **kwargs)

    def fill(self, variables: Mapping[str, Any]) -> Rendering:
        """What the template makes. RenderError if it raises, takes too long, or writes too much."""
        pieces: list[str] = []
        try:
            with self.lock:
                self.deadline, self.written, self.generated = time.monotonic() + MAX_SECONDS, 0, []
                for piece in self.template.generate(variables):
                    pieces.append(piece)
                    self.written += len(piece)
                    if self.written > MAX_OUTPUT:
                        raise TemplateError(f"it writes more than {MAX_OUTPUT:,} characters")
                text, generated = "".join(pieces), self.generated
            if any(text[start:stop] != content for start, stop, content in generated):
                raise TemplateError("a generation block stands in a macro or set block, where its place is not known")
        except Exception as error:  # a template can raise anything that Python's operators and methods do
            raise RenderError(_reason(error)) from None
        return Rendering(text, [(start, stop) for start, stop, _ in generated])


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: what the model is to write. Changes nothing in the text."""

    tags = {"generation"}
    environment: Environment

    def parse(self, parser: Parser) -> nodes.Node:
        self.environment.has_generation = True
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


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers writes it: nothing is escaped for HTML, and the keys keep their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate(Environment):
    """A chat template, for any number of threads; `tool_use` is another one for conversations with tools, or itself.

    `origin` says where it is from, `variables` are the special tokens by their names. DataError if it is no template.
    """

    def __init__(
        self, source: str, origin: str, variables: Mapping[str, str] | None = None, now: datetime | None = None
    ) -> None:
        self.source, self.origin, self.variables = source, origin, dict(variables or {})
        self.now, self.tool_use = now or datetime.now(), self
        try:
            super().__init__(source, self.now)
        except TemplateSyntaxError as error:
            said = f"{error.message} (line {error.lineno})"
            raise DataError(f"{origin}: the chat template is not Jinja: {said}") from None
        except Exception as error:  # what Python's own compiler does not take: MemoryError, RecursionError, ...
            raise DataError(f"{origin}: the chat template cannot be compiled ({_reason(error)})") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """A conversation's text. RenderError if the template raises, takes too long, or writes too much."""
        variables = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        written = [_with_reasoning(message) for message in messages]
        return self.fill({**self.variables, "messages": written, **variables})

    def pick(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """The one for a conversation with these tools."""
        return self if tools is None else self.tool_use

    @property
    def words(self) -> frozenset[str]:
        """All words of both sources, and so the keys of a message that they may read."""
        found = frozenset(re.findall(r"\w+", self.source + self.tool_use.source))
        return found.union(REASONING) if found.intersection(REASONING) else found

    @property
    def note(self) -> TemplateNote:
        """What a sidecar keeps of them."""
        other = None if self.tool_use is self else self.tool_use.source
        return TemplateNote(origin=self.origin, default=self.source, tool_use=other)


def _reason(error: Exception) -> str:
    """An error in one line; a message of the template's own is shown alone."""
    words = " ".join(str(error).split())[:300]
    return words if type(error) is TemplateError and words else f"{type(error).__name__}: {words}".rstrip(": ")


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose reasoning has the name that templates read, as transformers 5 does it."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def open_template(folder: Path, wanted: str | None = None, now: datetime | None = None) -> ChatTemplate:
    """The template of a tokenizer's folder, or the one that `wanted` names, at the time `now` (None: the clock's).

    Raises DataError for what is no template, and what `chosen_templates` raises.
    """
    variables, now = named_tokens(folder), now or datetime.now()
    found = [ChatTemplate(*chosen, variables, now) for chosen in chosen_templates(folder, wanted)]
    found[0].tool_use = found[-1]
    return found[0]


def chosen_templates(folder: Path, wanted: str | None = None) -> list[tuple[str, str]]:
    """Source and origin of the template, and of the one for tools if there are two; see `open_template`.

    `wanted` is the tokenizer's own ("tokenizer"), one of its named templates, a file, or the template itself (text with
    {{ or {%). Raises DataError if the tokenizer has none, UsageError if `wanted` is nothing of these.
    """
    if wanted is not None and ("{{" in wanted or "{%" in wanted):
        return [(wanted, "--chat-template")]
    own = _own_templates(folder)
    if wanted is not None and wanted != OWN:
        if wanted in own:
            return [own[wanted]]
        path = Path(os.path.expanduser(wanted))
        try:
            return [(path.read_text(encoding="utf-8"), str(path))]
        except (OSError, UnicodeDecodeError) as error:
            names = ", ".join(own) or "none"
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UsageError(
                f"--chat-template {wanted[:100]}: cannot be read as a file ({reason}), is not a template itself, and "
                f"is not one of the tokenizer's ({names})"
            ) from None
    if not own:
        raise DataError(f"{folder} has no chat template: give one as a file with --chat-template FILE")
    if len(own) > 1 and "default" not in own:
        raise DataError(f"{folder} has several chat templates ({', '.join(own)}): choose one with --chat-template NAME")
    return [own.get("default", next(iter(own.values()))), *([own["tool_use"]] if "tool_use" in own else [])]


def _own_templates(folder: Path) -> dict[str, tuple[str, str]]:
    """Name -> source and origin of the templates in a tokenizer's folder.

    Where there are template files, those in tokenizer_config.json do not count, as in transformers.
    """
    found: dict[str, tuple[str, str]] = {}
    for path in (folder / "chat_template.jinja", *sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))):
        if path.is_file():
            try:
                found["default" if path.parent == folder else path.stem] = (path.read_text(encoding="utf-8"), str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: cannot be read ({error})") from None
    if found:
        return found
    for path in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        value = json_if_there(path).get("chat_template") or []
        for item in value if isinstance(value, list) else [value]:
            match item:
                case str():
                    found.setdefault("default", (item, f"the chat_template of {path}"))
                case {"name": str(name), "template": str(text)}:
                    found[name] = (text, f"the chat_template {name} of {path}")
                case _:
                    raise DataError(f"{path}: chat_template is neither text nor a list of names with templates")
    return found


def named_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the tokenizer's files name, such as bos_token -> <s>."""
    tokens: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        content = json_if_there(folder / name)
        for key in NAMED_TOKENS:
            value = content.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens.setdefault(key, value)
    return tokens


def read_prompt_template(path: str) -> str:
    """The text of --prompt-template FILE; UsageError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--prompt-template {path} cannot be read: {reason}") from None


def prompt_template(source: str) -> Environment:
    """A template that writes a prompt from a row's columns; a null one is nothing. UsageError if it is no template."""
    try:  # the same row has the same prompt on every day
        return Environment(source, undefined=StrictUndefined, finalize=lambda value: "" if value is None else value)
    except TemplateSyntaxError as error:
        raise UsageError(f"--prompt-template is not Jinja: {error.message} (line {error.lineno})") from None
