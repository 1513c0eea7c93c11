"""Command lines to print: how to resume a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from llmq.options.field import written
from llmq.options.parse import Options, descriptions, minimal


def continue_command(options: Options, start: Sequence[str]) -> str:
    """The command, quoted for a shell, that resumes a run from its newest checkpoint on as many ranks.

    It is `start`, which takes the arguments of `llmq-train`, with the options that differ from their defaults.
    """
    given = minimal(options)
    flags = [text for key in descriptions() if key in given for text in _flags(key, given[key])]
    return shlex.join([*start, *flags, "--continue"])


def _flags(key: str, value: Any) -> list[str]:
    return [written(key, item, "=") for item in (value if isinstance(value, list) else [value])]
