"""Command lines to print: how to go on with a run."""

from __future__ import annotations

import shlex

from llmq.options import Options, descriptions
from llmq.section import flag

NEEDED = ("model", "train_file", "data")  # the last two are alternatives


def continue_command(options: Options) -> str:
    """The `llmq-train` command, quoted for a shell, that continues a run from its newest checkpoint.

    It has the options that differ from their defaults.
    """
    values = {**options.to_flat(), **options.templates}
    plain = Options.parse({key: values[key] for key in NEEDED if values[key] is not None})
    defaults = {**plain.to_flat(), **plain.templates}
    flags = []
    for key in descriptions():
        value = values[key]
        if key == "continue" or value is None or (value == defaults[key] and key not in NEEDED):
            continue
        items = value if isinstance(value, list) else [value]
        flags += [flag(key) if item is True else f"{flag(key)}={item}" for item in items]
    return shlex.join(["llmq-train", *flags, "--continue"])
