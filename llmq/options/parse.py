"""Options: one description of each gives its flag, its `--config` key, help, default and limits.

To the user all keys are flat: `--learning-rate`, `learning_rate:` or `learning-rate:` in the file, `learning_rate=` in
`llmq.train`. What there is to set is in `data`, `maths` and `run` beside this. The effective options, printed and fed
back with `--config`, give the same run.
"""

# No `from __future__ import annotations`: SECTIONS is read off the annotations of Options.

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any

from llmq.errors import UsageError
from llmq.options import adapters
from llmq.options.adapters import AdapterOptions
from llmq.options.data import DataOptions, ModelOptions, SourceOptions
from llmq.options.field import (
    Description,
    Section,
    build,
    describe,
    flag,
    is_file_name,
    named,
    plain,
    read_flat_yaml,
    refuse,
    truth,
    written,
)
from llmq.options.maths import (
    LossOptions,
    MemoryOptions,
    OptimizerOptions,
    PrecisionOptions,
    RegularizationOptions,
    ScheduleOptions,
    ShardingOptions,
    final_fraction,
)
from llmq.options.run import (
    CheckpointOptions,
    ExportOptions,
    FaultOptions,
    LaunchOptions,
    LogOptions,
    ProfileOptions,
    RunOptions,
    StoppingOptions,
    SystemOptions,
)
from llmq.plugins import split, table
from llmq.redact import note_secrets

VIRTUAL = ("prompt_tuning", "prefix_tuning")
ALTERNATIVES = (
    ("steps", "epochs"),
    ("global_batch_size", "grad_accumulation"),
    ("bf16_layers", "fp8_layers"),
    ("warmup", "warmup_ratio"),
    ("min_lr", "final_lr_fraction"),
    ("lora_rank", "adapter", "ia3", "adapter_method", *VIRTUAL),
)
UNSETS = {  # what an option of the command line takes back where a file has it: its alternatives, and what they need
    **{one: tuple(other for other in group if other != one) for group in ALTERNATIVES for one in group},
    "train_file": ("data",),
    "data": ("train_file", "eval_file"),
    "adapter": ("lora_rank", "ia3", *VIRTUAL, *adapters.SHAPE),
}
OPEN = {"attn_bwd_chunks": "auto", "lmhead_chunks": 0}  # what leaves a number to be found
OF_ADAPTERS = {"learning_rate": adapters.RATE, "master_dtype": "fp32", "grad_accum_dtype": "fp32"}  # defaults
NEEDED = ("model", "train_file", "data")  # the last two are alternatives
LONGEST_NAME = 200  # bytes of a file's name: file systems take 255, and files in the making have longer names
PATHS_WITH_NAME = (
    ("log", "log_file"),
    ("checkpoint", "checkpoint_dir"),
    ("export", "out_dir"),
    ("profile", "profile_file"),
)


def _across(sections: Mapping[str, Any]) -> Iterator[str]:
    """Contradictions between sections; one that is bad in itself is None."""
    data, source, system, run = (sections[name] for name in ("data", "source", "system", "run"))
    if data and source:
        plans_only = run is not None and run.dry_run
        yield from source.beside(data, plans_only=plans_only)
    if (log := sections["log"]) and (checkpoint := sections["checkpoint"]):
        yield from checkpoint.beside(log)
    if system and run and system.gpu is not None and not run.dry_run:
        yield f"--gpu {system.gpu} only plans: add --dry-run, or choose a GPU of this machine with CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Options:
    """All sections of a run, checked. `templates` are the paths as given, before %n became the run's name.

    `given` are the keys of options that were given, at their defaults, too; but for what leaves a number to be found.
    `notices` say what was given twice.
    """

    model: ModelOptions
    data: DataOptions
    source: SourceOptions
    adapters: AdapterOptions
    precision: PrecisionOptions
    memory: MemoryOptions
    sharding: ShardingOptions
    schedule: ScheduleOptions
    optimizer: OptimizerOptions
    loss: LossOptions
    regularization: RegularizationOptions
    log: LogOptions
    stopping: StoppingOptions
    faults: FaultOptions
    checkpoint: CheckpointOptions
    export: ExportOptions
    system: SystemOptions
    launch: LaunchOptions
    profile: ProfileOptions
    run: RunOptions
    templates: Mapping[str, str]
    given: frozenset[str] = field(default=frozenset(), compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, given: Mapping[str, Any], problems: Sequence[str] = (), notices: Sequence[str] = ()) -> "Options":
        """Options from flat keys in any spelling; values may be text. A `config` key names a file that is read first.

        What is given overrides the file, and takes back alternatives that the file has. None is the same as not given,
        where the default is None. UsageError lists everything that is wrong at once, after the caller's own `problems`.
        Plug-ins that are named are imported; PluginError if that fails.
        """
        errors = list(problems)
        values, places = _read(given, errors)
        given_keys = tuple(values)
        if truth(values.get("fit")) and "global_batch_size" in values and "grad_accumulation" not in values:
            values = {"batch_size": 1, **values}  # until it is chosen, as any step is a multiple of it
        if values.keys() & {"lora_rank", "adapter", *VIRTUAL}:
            values = {**OF_ADAPTERS, **values}
        if "ia3" in values:
            values = {**OF_ADAPTERS, "learning_rate": adapters.RATE_OF_GAINS, **values}
        sections: dict[str, Any] = {}
        for name, section_class in SECTIONS.items():
            mine = {d.field: d for d in descriptions().values() if d.section == name}
            fields = {attribute: values[d.key] for attribute, d in mine.items() if d.key in values}
            sections[name] = build(section_class, fields, mine, errors, places)
        note_secrets("\n".join(map(str, values.values())))
        errors.extend(_across(sections))
        refuse(errors)
        templates = {key: getattr(sections[section], key) for section, key in PATHS_WITH_NAME}
        found = {key: descriptions()[key] for key in given_keys}
        closed = {key for key, d in found.items() if getattr(sections[d.section], d.field) != OPEN.get(key)}
        made = cls(**_with_name(sections), templates=templates, given=frozenset(closed), notices=tuple(notices))
        for _, kind, name in plugins_of(made.to_flat()):
            table(kind)[name]  # imported, before anything asks which ops there are
        return made

    def to_flat(self) -> dict[str, Any]:
        """Every option by its key, as JSON knows it (tuples are lists, absent is None)."""
        return {
            d.key: list(value) if isinstance(value := getattr(getattr(self, d.section), d.field), tuple) else value
            for d in descriptions().values()
        }

    def to_yaml(self) -> str:
        """The effective options as a `--config` file. Parsing it gives equal options."""
        import yaml

        values = {**self.to_flat(), **self.templates}
        if self.data.global_batch_size is not None:
            del values["grad_accumulation"]  # follows from the other two, so that either can be changed on the way in
        if self.schedule.final_lr_fraction == final_fraction(self.schedule.model_dump()):
            del values["final_lr_fraction"]  # so can the schedule
        parts = []
        for section, cls in SECTIONS.items():
            keys = [d.key for d in descriptions().values() if d.section == section]
            shown = {key: values[key] for key in keys if values.get(key) is not None}
            parts.append(f"# {cls.title}\n" + yaml.safe_dump(shown, sort_keys=False, default_flow_style=False))
        return "\n".join(parts)


SECTIONS: dict[str, type[Section]] = {
    name: kind for name, kind in Options.__annotations__.items() if name not in ("templates", "given", "notices")
}


@cache
def descriptions() -> dict[str, Description]:
    """Every option by its key, in the order of the sections."""
    return {d.key: d for name, cls in SECTIONS.items() for d in describe(name, cls)}


@cache
def spellings() -> dict[str, Description]:
    """Every option by every name that it may be given with."""
    return {name: d for d in descriptions().values() for name in (d.key, *d.aliases)}


def _read(given: Mapping[str, Any], errors: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by key, of the file that `config` names and of what is given, and the places of those in the file."""
    given = dict(given)
    config = given.pop("config", None)
    values = named(given, spellings(), errors, {})
    if config is None:
        return values, {}
    if not isinstance(config, str | os.PathLike) or not is_file_name(os.fspath(config)):
        raise UsageError(f"--config {config!r} is not the path of a file")
    in_file, of_names = read_flat_yaml(os.path.expanduser(config))
    taken_back = {*values, *(other for key in values for other in UNSETS.get(key, ()))}
    file_values = named(in_file, spellings(), errors, of_names)
    keys = {name: spellings()[plain(name)].key for name in of_names if plain(name) in spellings()}
    places = {key: of_names[name] for name, key in keys.items() if key not in taken_back}
    return {**values, **{key: value for key, value in file_values.items() if key not in taken_back}}, places


def _with_name(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The sections with the run's name in place of %n. UsageError for outputs that cannot be, or are at one place."""
    of_model = os.path.basename(os.path.abspath(sections["model"].model))  # so the same command finds its checkpoints
    name = sections["log"].name or re.sub(r"[\\%\x00-\x1f]", "_", of_model) or "model"
    found = {**sections, "log": sections["log"].model_copy(update={"name": name})}
    outputs = []
    for section, key in PATHS_WITH_NAME:
        path = getattr(sections[section], key).replace("%n", name)
        if (longest := max(len(os.fsencode(part)) for part in path.split(os.sep))) > LONGEST_NAME:
            raise UsageError(
                f"{flag(key)} {path}: a name in it has {longest} bytes, the most are {LONGEST_NAME}: use a "
                "shorter one (%n is the --name)"
            )
        found[section] = found[section].model_copy(update={key: path})
        outputs.append((flag(key), path))
    for (one, path), (other, same) in combinations(outputs, 2):
        if os.path.abspath(path) == os.path.abspath(same):
            raise UsageError(f"{one} and {other} are both {path}: name two places")
    return found


def plugins_of(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, kind and name for each option, of a result of `to_flat`, that names a plug-in."""
    for d in descriptions().values():
        value = values.get(d.key) if d.plugin else None
        for text in (value,) if isinstance(value, str) else value or ():
            if d.plugin and (name := split(text)[0]) not in d.plugin.ours:
                yield d.key, d.plugin.kind, name


def minimal(options: Options) -> dict[str, Any]:
    """The fewest options that a command needs to get these: those that differ from their defaults, by key."""
    values = {**options.to_flat(), **options.templates}
    found = {key: values[key] for key in NEEDED if values[key] is not None}
    found |= {"dry_run": True} if values["dry_run"] else {}  # which needs less
    while True:  # each option may move the defaults of others
        plain = Options.parse(found)
        now = {**plain.to_flat(), **plain.templates}
        done = {*found, "continue", "reset"}
        unlike = {key: value for key, value in values.items() if key not in done and value not in (None, now[key])}
        if not unlike:
            return found
        found |= unlike


def continue_command(options: Options, start: Sequence[str]) -> str:
    """The command, quoted for a shell, that resumes a run from its newest checkpoint on as many ranks.

    It is `start`, which takes the arguments of `llmq-train`, with the options that differ from their defaults.
    """
    return shlex.join([*start, *_flags(minimal(options)), "--continue"])


def arguments_of(options: Options) -> list[str]:
    """The arguments with which llmq-train has these options."""
    values = options.to_flat()
    once = {key: value for key in ("continue", "reset") if (value := values[key]) is not None}
    return _flags({**minimal(options), **once})


def _flags(given: Mapping[str, Any]) -> list[str]:
    values = {
        key: given[key] if isinstance(given[key], list) else [given[key]] for key in descriptions() if key in given
    }
    return [written(key, value, "=") for key, several in values.items() for value in several]


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`--weight-decay 0.1 to 0.0` for each option that differs between two results of `to_flat`.

    One that an earlier release did not have was at its default.
    """
    once = ("continue", "reset", "overwrite", "verbosity")
    old = {key: before.get(key, d.default) for key, d in descriptions().items()}
    keys = [key for key in now if key not in once and now[key] != old[key]]
    return [f"{flag(key)} {shown(old[key])} to {shown(now[key])}" for key in keys]


def shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else str(value)
