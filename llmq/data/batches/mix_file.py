"""The sources that `--train-file` or `--data` name: by themselves, or in a mix file.

A mix file is a YAML list of `train_file` (a path or glob, or several) or `data`, and `weight`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from llmq.errors import UsageError
from llmq.options.field import Float

SUFFIXES = (".yaml", ".yml")
EXAMPLE = "{train_file: a.bin, weight: 0.3}"

Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]


class MixEntry(BaseModel):
    """One source in a mix file: token files (paths and globs), or the data that they are to be made from."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    train_file: Names = ()
    data: Name | None = None
    weight: Annotated[Float, Field(gt=0)]

    @model_validator(mode="after")
    def _has_one(self) -> MixEntry:
        if bool(self.train_file) == (self.data is not None):
            raise ValueError("needs either train_file (a path or glob, or a list of them) or data (a name or path)")
        return self

    @property
    def name(self) -> str:
        return self.data if self.data is not None else ", ".join(self.train_file)


@dataclass(frozen=True)
class Source:
    """A part of what is trained on: `files` are paths and globs of token files, none yet of data to tokenize."""

    name: str
    files: tuple[str, ...]
    weight: float | None  # None: all parts follow each other, and have no shares


_ENTRIES = TypeAdapter(Annotated[list[MixEntry], Field(min_length=1)])
_ADVICE = {  # where a mix file names what the option does not take
    "train_file": "--train-file takes token files: make them with tokenize-data, and name them as train_file; or give "
    "the mix file as --data",
    "data": "--data takes no token files: name text or rows as data",
}


def read_sources(key: str, names: Sequence[str], weights: Sequence[float] | None) -> list[Source]:
    """The sources that the option `key`, train_file or data, names: itself, or in the mix file that it names."""
    option = f"--{key.replace('_', '-')}"
    if mix := next((name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES), None):
        if weights is not None or len(names) > 1:
            raise UsageError(
                f"{option} {mix} describes a whole mixture, with its weights: leave out --weight and others, or put "
                "them into it"
            )
        entries = read_mix(mix)
        if wrong := [entry.name for entry in entries if not getattr(entry, key)]:
            raise UsageError(f"{mix}: {', '.join(wrong)}: {_ADVICE[key]}")
        return [Source(entry.name, entry.train_file, entry.weight) for entry in entries]
    if weights is not None and len(weights) != len(names):
        raise UsageError(
            f"--weight is given {len(weights)} times and {option} {len(names)} times: give one weight for each"
        )
    shares: Sequence[float | None] = weights or [None] * len(names)
    return [Source(name, (name,), weight) for name, weight in zip(names, shares, strict=True)]


def read_mix(path: str) -> list[MixEntry]:
    """The entries of a mix file, whose paths are those of the folder that the command runs in.

    UsageError names everything that is wrong in the file.
    """
    import yaml

    try:
        return _ENTRIES.validate_python(yaml.safe_load(Path(path).read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problems = [_problem(path, found) for found in error.errors(include_url=False)]
        raise UsageError("\n  ".join(problems)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _problem(path: str, error: Any) -> str:
    place = [str(key) if n else f"source {key + 1}" for n, key in enumerate(error["loc"])]
    reason = error["msg"].removeprefix("Value error, ")
    return f"{', '.join([path, *place])}: {error['input']!r:.200}: {reason}: write lines such as `- {EXAMPLE}`"
