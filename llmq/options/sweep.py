"""The file of `--adapters`: a YAML list of adapters, each with a name and those options of a run that are its own.

An entry stands for a run of this adapter alone: the command, with the entry's options in place of its own. It is parsed
as such a run's options are, so that every limit, alias and contradiction holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmq.errors import UsageError
from llmq.options.field import flag, named, plain, read_yaml_list, written
from llmq.options.parse import UNSETS, Options, minimal, spellings

EXAMPLE = "{name: low, lora_rank: 8, learning_rate: 1e-4}"
LONGEST = 100  # letters of a name, which is a folder's
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{LONGEST - 1}}}")
OWN = (  # what an adapter may have of its own
    *("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "rslora", "lora_init", "adapter"),
    *("lora_rank_pattern", "lora_alpha_pattern", "lora_plus_ratio"),
    *("train_file", "weight", "eval_file", "augment", "data", "eval_fraction", "data_format", "map", "prompt_template"),
    *("preamble", "chat_template", "train_on", "overlong", "skip_bad_rows", "streaming", "packing", "max_docs"),
    *("batch_size", "learning_rate", "lr_schedule", "warmup", "warmup_ratio", "cooldown", "min_lr"),
    *("final_lr_fraction", "beta_1", "beta_2", "adam_epsilon", "weight_decay", "grad_clip", "seed"),
)
NOT_SHARED = {"lora_rank": ("auto",), "lora_init": ("pissa", "olora", "eva")}  # what changes the base, or comes first
OF_RUN = ("adapters", "sample_prompts", "sample_tokens", "global_batch_size", "grad_accumulation", "batch_size", "fit")


class AdapterEntry(NamedTuple):
    """An entry of the file: the adapter's name, which its folder has too, and its options as they are written."""

    name: str
    place: str
    given: dict[str, Any]


@dataclass(frozen=True)
class MemberOptions:
    """One of several adapters: its name, what its entry says, and the options of a run of it alone."""

    name: str
    given: Mapping[str, Any]
    options: Options


def read_members(options: Options) -> tuple[MemberOptions, ...]:
    """The adapters of `--adapters`; none of a run that has no such file. UsageError names all that is wrong in it."""
    flat = options.to_flat()
    if flat["adapters"] is None:
        return ()
    path, problems = flat["adapters"], list[str]()
    entries = list(_entries(path, problems))
    problems += [*_twice(entries), *_same_folders(flat, entries)]
    sizes = {} if problems else _sizes(entries, flat["batch_size"], problems)
    base = {key: value for key, value in _of_command(options).items() if key not in OF_RUN}
    found = []
    for entry in entries if not problems else ():
        try:
            alone = Options.parse(_of_one(entry, sizes[entry.name], flat, base))
        except UsageError as error:
            problems.append(f"{entry.place}{entry.name}: {error}")
            continue
        if not {"lora_rank", "adapter"} & {key for key, value in alone.to_flat().items() if value is not None}:
            problems.append(f"{entry.place}{entry.name} has no rank: add lora_rank, there or to the command")
        found.append(MemberOptions(entry.name, entry.given, alone))
    if problems:
        raise UsageError("\n  ".join([f"--adapters {path}:", *problems] if problems[1:] else problems))
    return tuple(found)


def _of_one(entry: AdapterEntry, size: int, flat: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run of one adapter with so many rows: the command's, of which `base` are the fewest and
    `flat` all, with the entry's in their place."""
    total, micro_steps = flat["global_batch_size"], flat["grad_accumulation"]
    step = {"global_batch_size": micro_steps * size} if total else {"grad_accumulation": micro_steps}
    taken_back = {other for key in entry.given for other in UNSETS.get(key, ())}
    kept = {key: value for key, value in base.items() if key not in taken_back}
    return {**kept, **entry.given, **step, "batch_size": size}


def _of_command(options: Options) -> dict[str, Any]:
    """The command's options, without those that may be an adapter's own and follow from others."""
    flat, found = options.to_flat(), minimal(options)
    for key in (key for key in OWN if key in found):
        rest = {name: value for name, value in found.items() if name != key}
        with suppress(UsageError):
            if Options.parse(rest).to_flat() == {**flat, "continue": None, "reset": None}:
                found = rest
    return found


def _entries(path: str, problems: list[str]) -> Iterator[AdapterEntry]:
    """The entries with known keys and a name; what is wrong with others goes to `problems`."""
    for place, (values, places) in read_yaml_list(os.path.expanduser(path), "--adapters", EXAMPLE):
        name = values.pop("name", None)
        wrong: list[str] = []
        given = named(values, spellings(), wrong, places)
        for key in given:
            if key not in OWN:
                at = next(places[own] for own in values if spellings()[plain(own)].key == key)
                of_run = "is of the whole run: give it on the command line, not for an adapter"
                is_method = spellings()[key].section == "adapters"
                wrong.append(f"{at}{flag(key)} {'does not go with --adapters: leave it out' if is_method else of_run}")
        for key, refused in NOT_SHARED.items():
            if given.get(key) in refused:
                wrong.append(f"{place}{written(key, given[key])} does not go with --adapters: use another value")
        problems += wrong
        if isinstance(name, str) and NAME.fullmatch(name):
            yield AdapterEntry(name, place, given)
        else:
            said = "an adapter has no name" if name is None else f"name {name!r} is no folder's"
            problems.append(f"{place}{said}: use letters, digits, - and _, {LONGEST} at most, as in `- {EXAMPLE}`")


def _twice(entries: Sequence[AdapterEntry]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for entry in entries:
        if (first := seen.setdefault(entry.name.lower(), entry.place)) != entry.place:
            yield f"{entry.place}the name {entry.name} is taken by {first.rstrip(': ')}: use another"


def _sizes(entries: Sequence[AdapterEntry], total: int, problems: list[str]) -> dict[str, int]:
    """Rows of a micro-batch by name: those that an entry asks for, and of what is left an equal share each."""
    found: dict[str, int] = {}
    for entry in entries:
        if "batch_size" in entry.given:
            said = str(entry.given["batch_size"])
            if not said.isdecimal() or int(said) < 1:
                problems.append(f"{entry.place}--batch-size {said} is no number of rows: use 1 or more")
                return {}
            found[entry.name] = int(said)
    rest, others = total - sum(found.values()), [one.name for one in entries if one.name not in found]
    each = rest // len(others) if others else 0
    if rest != each * len(others) or (others and each < 1):
        given = sum(found.values())
        least = given + max(each, 1) * len(others)
        fits = f"{least} or {least + len(others)}" if others and rest > 0 and each else str(least)
        kept = f", of which entries ask for {given}," if found else ""
        problems.append(
            f"--batch-size {total}{kept} has no equal number of rows for each of {len(entries)} adapters: use {fits}"
        )
    return {**found, **dict.fromkeys(others, each)}


def _same_folders(flat: Mapping[str, Any], entries: Sequence[AdapterEntry]) -> Iterator[str]:
    """A message for an adapter whose folder is that of something else."""
    for key in ("checkpoint_dir", "log_file"):
        for entry in entries:
            if os.path.abspath(flat[key]) == os.path.abspath(os.path.join(flat["out_dir"], entry.name)):
                yield f"{entry.place}{entry.name} is exported to {flat[key]}, which is {flag(key)}: use another name"
