"""What comes before an answer: Alpaca's prompt, or a template of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError

from llmq.data.chat.sandbox import Environment, RenderError
from llmq.errors import UsageError

# Stanford Alpaca's, by whether the row has an input.
PREAMBLES = {
    False: "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
    True: "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.",
}


def alpaca_prompt(instruction: str, given: str | None, system: str | None, *, preamble: bool) -> str:
    """The prompt of an instruction with its input; `system` takes the preamble's place."""
    opening = system or (PREAMBLES[bool(given)] if preamble else None)
    parts = [opening] if opening else []
    parts += [f"### Instruction:\n{instruction}"]
    parts += [f"### Input:\n{given}"] if given else []
    return "\n\n".join([*parts, "### Response:\n"])


def read_prompt_template(path: str) -> str:
    """The text of --prompt-template FILE; UsageError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--prompt-template {path} cannot be read: {reason}") from None


class PromptTemplate:
    """A Jinja template that writes a prompt from a row's columns, for any number of threads.

    A null column is written as nothing. UsageError if it is no template.
    """

    def __init__(self, source: str) -> None:
        self._environment = Environment()  # the same row has the same prompt on every day
        self._environment.undefined = StrictUndefined
        self._environment.finalize = lambda value: "" if value is None else value
        try:
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise UsageError(f"--prompt-template is not Jinja: {error.message} (line {error.lineno})") from None

    def render(self, columns: Mapping[str, Any]) -> str:
        """A row's prompt. RenderError if the template raises: for a column that is not there, say."""
        try:
            return self._environment.render(self._template, columns).text
        except Exception as error:  # a template can raise anything that Python's operators and methods do
            raise RenderError(" ".join(str(error).split())[:300] or type(error).__name__) from None
