"""Chat templates: which one a tokenizer has, and what it makes of a conversation, as transformers' apply_chat_template.

A template sees `messages`, `tools`, `documents` (None), `add_generation_prompt` and the tokenizer's named special
tokens (`bos_token`, ...). `strftime_now` gives one time for all rows: when tokenizing them began, also if it is resumed
on another day.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from llmq.data.chat.sandbox import Environment, RenderError, Rendering
from llmq.data.tokens.tokenizer import TemplateNote, json_if_there
from llmq.errors import DataError, UsageError
from llmq.files.huggingface import TEMPLATE_FOLDER

OWN = "tokenizer"  # the name that --chat-template has for the tokenizer's own
MAX_TEMPLATE = 1 << 18  # characters; the longest of well-known models has about 30,000
REASONING = ("reasoning_content", "thinking", "reasoning")  # what a message's reasoning is called
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# What reads as a marker in a template's text: <|im_end|>, [INST], </s>, <start_of_turn>.
MARKER = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<[\uff5c][^<>\s]{1,40}>|\[/?[A-Z][A-Z_]{2,30}\]|</?s>|<(?:start|end)_of_[a-z]+>"
)


class ChatTemplate:
    """A compiled template, for any number of threads.

    `origin` says where it is from, `variables` are the special tokens by their names. DataError if it is no template.
    """

    def __init__(
        self, source: str, origin: str, variables: Mapping[str, str] | None = None, now: datetime | None = None
    ) -> None:
        if len(source) > MAX_TEMPLATE:
            raise DataError(
                f"{origin}: the chat template has {len(source):,} characters; the limit is {MAX_TEMPLATE:,}"
            )
        self.source, self.origin, self.variables = source, origin, dict(variables or {})
        self.now = now or datetime.now()
        self._environment = Environment(self.now)
        try:
            with warnings.catch_warnings():  # Python warns of escapes such as "\[", which templates have and mean
                warnings.simplefilter("ignore")
                self._template = self._environment.from_string(source)
                tree = self._environment.parse(source)
        except TemplateSyntaxError as error:
            raise DataError(
                f"{origin}: the chat template is not Jinja: {error.message} (line {error.lineno})"
            ) from None
        except Exception as error:  # what Python's own compiler does not take: MemoryError, RecursionError, ...
            raise DataError(f"{origin}: the chat template cannot be compiled ({_reason(error)})") from None
        self.has_generation = any(
            isinstance(block.call.node, nodes.ExtensionAttribute) for block in tree.find_all(nodes.CallBlock)
        )
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self.markers = tuple(dict.fromkeys(MARKER.findall("\n".join(texts))))
        self.names = _names(tree)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """A conversation's text. RenderError if the template raises, takes too long, or writes too much."""
        variables = {
            **self.variables,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._environment.render(self._template, variables)
        except Exception as error:  # a template can raise anything that Python's operators and methods do
            raise RenderError(_reason(error)) from None


def _names(tree: nodes.Template) -> frozenset[str]:
    """What a template may read of a message: its attributes and items; all names of the reasoning if one of them."""
    found = {node.attr for node in tree.find_all(nodes.Getattr)}
    found |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(found.union(REASONING) if found.intersection(REASONING) else found)


def _reason(error: Exception) -> str:
    """An error in one line; a message of the template's own is shown alone."""
    words = " ".join(str(error).split())[:300]
    return words if type(error) is TemplateError and words else f"{type(error).__name__}: {words}".rstrip(": ")


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose reasoning has the name that templates read, as transformers 5 does it."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


@dataclass(frozen=True)
class Templates:
    """The template for conversations, and another one for those with tools, if the tokenizer has both."""

    default: ChatTemplate
    tool_use: ChatTemplate | None = None

    @property
    def all(self) -> list[ChatTemplate]:
        """Both, or the only one."""
        return [self.default] if self.tool_use is None else [self.default, self.tool_use]

    def pick(self, tools: Sequence[Any] | None) -> ChatTemplate:
        return self.tool_use if self.tool_use is not None and tools is not None else self.default


def template_note(templates: Templates) -> TemplateNote:
    """What a sidecar keeps of the templates that rendered its rows."""
    other = templates.tool_use
    return TemplateNote(
        origin=templates.default.origin, default=templates.default.source, tool_use=other.source if other else None
    )


def open_templates(folder: Path, wanted: str | None = None, now: datetime | None = None) -> Templates:
    """The templates of a tokenizer's folder, or the one that `wanted` names, at the time `now` (None: the clock's).

    Raises DataError for what is no template, and what `chosen_templates` raises.
    """
    variables, now = named_tokens(folder), now or datetime.now()
    return Templates(*(ChatTemplate(*chosen, variables, now) for chosen in chosen_templates(folder, wanted)))


def chosen_templates(folder: Path, wanted: str | None = None) -> list[tuple[str, str]]:
    """Source and origin of the template, and of the one for tools if there are two; see `open_templates`.

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
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        value = json_if_there(path).get("chat_template")
        if isinstance(value, str):
            found.setdefault("default", (value, f"the chat_template of {path}"))
            continue
        if value is None:
            continue
        if not isinstance(value, list) or not all(
            isinstance(v, dict) and isinstance(v.get("name"), str) and isinstance(v.get("template"), str) for v in value
        ):
            raise DataError(f"{path}: chat_template is neither text nor a list of names with templates")
        for item in value:
            found[item["name"]] = (item["template"], f"the chat_template {item['name']} of {path}")
    files = [("default", folder / "chat_template.jinja")]
    files += [(path.stem, path) for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))]
    own_files: dict[str, tuple[str, str]] = {}
    for name, path in files:
        if path.is_file():
            try:
                own_files[name] = (path.read_text(encoding="utf-8"), str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: cannot be read ({error})") from None
    return own_files or found


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
