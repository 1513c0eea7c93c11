"""Options of a run as one value: `Config`, which flags, YAML files and keywords mean alike, and presets of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmq.disk import storage
from llmq.errors import UsageError
from llmq.options.field import named, plain, read_flat_yaml, refuse
from llmq.options.parse import UNSETS, Options, minimal, spellings
from llmq.screen import fact_lines

HELD = "rows given to train()"  # stands for data that is not there yet


@dataclass(frozen=True, init=False)
class Config:
    """Options of llmq-train by name, in any of their spellings; what is not given has its default.

    `Config(model="Qwen/Qwen2.5-0.5B", lr=1e-5).options` is `{"model": ..., "learning_rate": 1e-5}`. Values are checked
    by `check`, and by a run.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    def __init__(self, **options: Any) -> None:
        """UsageError for names that are no options, with the nearest ones."""
        object.__setattr__(self, "options", _by_key(options))

    def replace(self, **options: Any) -> Config:
        """The same with other options. What is given takes back its alternatives, as `epochs` does `steps`; None takes
        back the option itself."""
        given = _by_key(options)
        gone = {spellings()[plain(name)].key for name in options if plain(name) in spellings()}
        gone |= {other for key in given for other in UNSETS.get(key, ())}
        return Config(**{key: value for key, value in self.options.items() if key not in gone}, **given)

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """The options as a file for --config, which is written if a `path` is given. StorageError."""
        import yaml

        text = yaml.safe_dump(_plain(self.options), sort_keys=False, default_flow_style=False)
        if path is not None:
            with storage(Path(path)):
                Path(path).write_text(text, "utf-8")
        return text

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Config:
        """The options of a file of `name: value` lines. UsageError for one that cannot be read."""
        return cls(**_by_key(*read_flat_yaml(os.path.expanduser(path))))

    def parse(self) -> Options:
        """All options, checked. UsageError lists all that is wrong."""
        return Options.parse(self.options)

    def check(self) -> list[str]:
        """What a run would refuse of the options, whatever data `train` is given; empty if nothing."""
        try:
            self._with_data()
        except UsageError as error:
            return [line.strip() for line in str(error).splitlines() if not line.endswith("need a change:")]
        return []

    def explain(self, *, only_changes: bool = False) -> str:
        """The block [Options] that a run prints; with `only_changes` the lines of those that differ from their
        defaults. UsageError."""
        options = self._with_data()
        return "\n".join(
            fact_lines(minimal(options)) if only_changes else ["[Options]", *fact_lines(options.to_flat())]
        )

    def _with_data(self) -> Options:
        """All options, checked, of a run on data that `train` is given, unless they name some. UsageError."""
        data = {} if {"data", "train_file"} & self.options.keys() else {"data": HELD}
        return Options.parse({**self.options, **data})


def _by_key(options: Mapping[str, Any], places: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Options by their own names, without those that are None; `places` say where a file has them. UsageError."""
    problems = list[str]()
    found = named(options, spellings(), problems, places or {})
    refuse(problems)
    return {key: value for key, value in found.items() if value is not None}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as YAML has them: lists for tuples, text for paths."""

    def written(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [written(item) for item in value]
        if callable(value):
            raise UsageError(f"{value} is a function, which no file can name: llmq.register gives it a name")
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    return {key: written(value) for key, value in options.items()}
