"""Command lines to print: how to resume a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from llmq.options.field import flag
from llmq.options.parse import Options, descriptions

NEEDED = ("model", "train_file", "data")  # the last two are alternatives


def continue_command(options: Options) -> str:
    """The `llmq-train` command, quoted for a shell, that continues a run from its newest checkpoint.

    It has the options that differ from their defaults.
    """
    values = {**options.to_flat(), **options.templates}
    said = {key: values[key] for key in NEEDED if values[key] is not None}
    while unlike := _unlike(values, said):  # a value moves the defaults of other options
        said |= unlike
    flags = [text for key in descriptions() if key in said for text in _flags(key, said[key])]
    return shlex.join(["llmq-train", *flags, "--continue"])


def _unlike(values: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What is still to say, beside `said`, to give these values."""
    plain = Options.parse(said)
    now = {**plain.to_flat(), **plain.templates}
    return {k: v for k, v in values.items() if k not in (*said, "continue", "reset") and v is not None and v != now[k]}


def _flags(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(key if value else f"no_{key}")]
    return [f"{flag(key)}={item}" for item in (value if isinstance(value, list) else [value])]
