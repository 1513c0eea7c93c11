"""PEFT's format of an adapter, as far as all methods share it: names of tensors and modules, keys of
`adapter_config.json`, and how its two files are written.

A tensor has the name of the module that it belongs to in PEFT's model, `base_model.model.` before ours; the bias of an
adapted map is its `base_layer.bias` there.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from llmq.adapters.targets import EMBED_ROW, FILE, LM_HEAD, Module, Target, linear_modules, modules_of
from llmq.files.huggingface import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Export, export_bytes, write_json, write_tensors
from llmq.files.tensor_files import Stored
from llmq.model.config import ModelConfig
from llmq.model.parameters import HEAD, parameter_rows
from llmq.row import Part, Row

PREFIX = "base_model.model."  # of the names in PEFT's files

About = dict[str, Any]  # adapter_config.json
Read = Callable[[Row], np.ndarray]
Tensors = dict[str, np.ndarray]  # of a file, by name


# what is read


def check_pattern(text: str) -> None:
    """ValueError for what is no pattern."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a pattern: {error}") from None


def _names(value: Any) -> Any:
    if isinstance(value, str):
        check_pattern(value)
    elif value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise ValueError("must be a pattern, a list of names, or null")
    return value


def _layers(value: Any) -> Any:
    if value is None or all(type(one) is int for one in (value if isinstance(value, list) else [value])):
        return value
    raise ValueError("must be the number of a layer, a list of such numbers, or null")


Names = Annotated[Any, PlainValidator(_names)]
Rank = Annotated[int, Field(ge=1)]


class PeftConfig(BaseModel):
    """The keys that are read of all methods, with PEFT's defaults. Others may say anything."""

    model_config = ConfigDict(allow_inf_nan=False)

    base_model_name_or_path: str | None = None
    bias: Any = None
    fan_in_fan_out: Any = None
    lora_dropout: float | None = Field(None, ge=0, lt=1)
    ensure_weight_tying: Any = None
    target_modules: Names = None
    exclude_modules: Names = None
    modules_to_save: list[str] | None = None
    feedforward_modules: Names = None
    layers_pattern: Names = None
    layers_to_transform: Annotated[Any, PlainValidator(_layers)] = None
    num_virtual_tokens: int | None = Field(None, ge=1)


def is_target(about: PeftConfig, name: str) -> bool:
    """Whether a module is one that PEFT's config has in `target_modules`, in `layers_to_transform` if it has those, and
    not in `exclude_modules`."""
    wanted, excluded, layers = about.target_modules, about.exclude_modules, about.layers_to_transform
    if (excluded and is_named(excluded, name)) or is_named(about.modules_to_save, name):
        return False
    if wanted == "all-linear":
        return name != LM_HEAD
    if isinstance(wanted, str) or name in (wanted or ()) or layers in (None, []):
        return is_named(wanted, name)
    patterns = about.layers_pattern or r"[^.]*"
    found = (re.match(rf".*\.{one}\.(\d+)\.", name) for one in ([patterns] if isinstance(patterns, str) else patterns))
    layer = next((int(match[1]) for match in found if match), None)
    return is_named(wanted, name) and layer in ([layers] if isinstance(layers, int) else layers)


def is_named(wanted: str | Iterable[str] | None, name: str) -> bool:
    """Whether a module has one of the names, or the last parts of its name, or matches what is one pattern."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted or ())


@dataclass(frozen=True)
class ReadModules:
    """What the folder of an adapter has: the tensors of each module by the end of their names, in forward order; the
    rows that are trained in full; and what is wrong with any."""

    tensors: Mapping[Module, Mapping[str, Stored]]
    also: frozenset[str]
    problems: list[str]

    def check(self, module: Module, shapes: Mapping[str, tuple[int, ...]], asks: str) -> None:
        """Notes which tensors of a module are missing, or have other shapes than what `asks` for these."""
        own = self.tensors[module]
        for end, shape in shapes.items():
            if end not in own:
                self.problems.append(f"missing: {module.name}.{end}")
            elif own[end].shape != shape:
                has = f"{module.name}.{end} has shape {list(own[end].shape)}"
                self.problems.append(f"{has}, {asks} {list(shape)}")


def read_modules(
    about: PeftConfig, tensors: Mapping[str, Stored], config: ModelConfig, ends: Collection[str], needed: str
) -> ReadModules:
    """The tensors of a method that adapts modules, whose names have these `ends`; a target `needs` some of them. Others
    are biases, and parameters that are trained in full."""
    modules = {module.name: module for module in linear_modules(config)}
    found: dict[str, dict[str, Stored]] = {}
    own = {name: end for name in tensors for end in ends if name.endswith(f".{end}")}
    for name, end in own.items():
        found.setdefault(name.removesuffix(f".{end}"), {})[end] = tensors[name]
    problems: list[str] = []
    also = modules_in_full(about, config, problems)
    rows = [row for row in parameter_rows(config) if row.name.endswith("bias") or row.name in also]
    shapes = {part.name: part.shape(row.part_axes) for row in rows for part in row.parts}
    if EMBED_ROW in also and config.tie_embeddings:
        shapes[f"{LM_HEAD}.weight"] = shapes[f"{config.family.wiring.names.embed}.weight"]
    for name, tensor in tensors.items():
        if name not in own and name not in shapes:
            problems.append(f"{name} is no part of an adapter of this model")
        elif name not in own and shapes[name] != tensor.shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, the model asks for {list(shapes[name])}")
    in_full = [part.name for row in rows if row.name in also for part in row.parts]
    problems += [f"missing: {name}, of modules_to_save" for name in in_full if name not in tensors]
    problems += [f"{name} is no linear map of this model" for name in found if name not in modules]
    problems += [f"missing: {name}.{needed}" for name in modules if is_target(about, name) and name not in found]
    return ReadModules({module: found[name] for name, module in modules.items() if name in found}, also, problems)


def modules_in_full(about: PeftConfig, config: ModelConfig, problems: list[str]) -> frozenset[str]:
    """The names of the rows of `modules_to_save`; what llmq does not have of these goes to `problems`."""
    wanted = about.modules_to_save or ()
    found: dict[str, list[bool]] = {}
    for row in parameter_rows(config):
        found[row.name] = [any(name.endswith(one) for one in wanted) for name in modules_of(row, config)]
    if config.tie_embeddings and any(found[EMBED_ROW]):
        found[EMBED_ROW] = [True]
        if not about.ensure_weight_tying:
            problems.append(
                "modules_to_save has the embedding or the head of a model that ties them, without ensure_weight_tying: "
                "PEFT trains a copy of one of them, llmq the matrix that both are"
            )
    cut = [name for name, hits in found.items() if any(hits) and not all(hits)]
    problems += [f"modules_to_save has a part of {name}, which llmq holds as one" for name in cut]
    return frozenset(name for name, hits in found.items() if any(hits))


def base_copies(about: PeftConfig, tensors: Collection[str], config: ModelConfig) -> list[str]:
    """The embedding and the head among an adapter's tensors where it does not train them: as PEFT stores them beside an
    adapter of lm_head, and on request."""
    own = modules_in_full(about, config, [])
    head = EMBED_ROW if config.tie_embeddings else f"{HEAD}.weight"
    row_of = {f"{config.family.wiring.names.embed}.weight": EMBED_ROW, f"{LM_HEAD}.weight": head}
    return [name for name, row in row_of.items() if name in tensors and row not in own]


# what is written


def stored_rows(rows: Sequence[Row], targets: Sequence[Target]) -> tuple[Row, ...]:
    """The rows of adapters of targets, trained biases among them, whose parts have the names of PEFT's tensors."""
    adapted = {target.module.name for target in targets}
    has_head = any(part.name == f"{LM_HEAD}.weight" for row in rows for part in row.parts)

    def with_head(row: Row) -> tuple[Part, ...]:
        # PEFT looks for the matrix of a tied model under both of its names.
        tied = row.name == EMBED_ROW and not has_head
        return (*row.parts, replace(row.parts[0], name=f"{LM_HEAD}.weight")) if tied else row.parts

    def renamed(part: Part) -> Part:
        module = part.name.removesuffix(".bias")
        own = f"{module}.base_layer.bias" if module != part.name and module in adapted else part.name
        return replace(part, name=PREFIX + own)

    return tuple(
        replace(row, parts=tuple(map(renamed, with_head(row)))) for row in rows if row.trainable or row.file == FILE
    )


def target_names(targets: Sequence[Target], config: ModelConfig) -> list[str]:
    """PEFT's `target_modules`: keys where all maps of that key are targets, else whole names, and those of a language
    model in a multimodal one, whose vision tower may have such keys, too."""
    if not config.family.within.is_all:
        return [target.module.name for target in targets]
    names = {target.module.name for target in targets}
    keys: dict[str, set[str]] = {}
    for module in linear_modules(config):
        keys.setdefault(module.key, set()).add(module.name)
    wanted = [key for key, all_of in keys.items() if all_of <= names]
    return [*wanted, *(target.module.name for target in targets if target.module.key not in wanted)]


def plain(alpha: float) -> float:
    """A number of PEFT's, whole if it is."""
    return int(alpha) if alpha == int(alpha) else alpha


def in_full_config(also: Collection[str], config: ModelConfig) -> dict[str, Any]:
    """What PEFT's config says of the modules of rows that are trained in full."""
    found = [name for row in parameter_rows(config) if row.name in also for name in modules_of(row, config)]
    tied = config.tie_embeddings and EMBED_ROW in also
    names = [name for name in dict.fromkeys(found) if not tied or name != LM_HEAD]
    return {"modules_to_save": names or None, **({"ensure_weight_tying": True} if tied else {})}


@dataclass(frozen=True)
class AdapterExport(Export):
    """The export of an adapter: PEFT's two files, and the tokenizer's. `stored` makes the file's tensors, by name, of
    those that are trained, where they differ; those of `twice` are then of twice the rank."""

    about: About = field(default_factory=dict)
    stored: Callable[[Tensors], Tensors] | None = None
    twice: Sequence[Row] = ()

    @property
    def num_bytes(self) -> int:
        """Of all tensors that are written."""
        return export_bytes(self.rows, self.dtype) + export_bytes(self.twice, self.dtype)

    def write_model(self, folder: Path, read: Read) -> None:
        """Config and weights into a new folder."""
        path, rows = folder / ADAPTER_WEIGHTS, self.rows
        if self.stored is None:
            write_tensors(path, rows, read, self.dtype)
        else:
            values = ((row, read(row).reshape(row.part_axes)) for row in rows)
            trained = {part.name: part.take(value) for row, value in values for part in row.parts}
            found = self.stored(trained)
            rows = [Row(name, one.shape, (Part(name, 0, len(one)),), "", decay=False) for name, one in found.items()]
            write_tensors(path, rows, lambda row: found[row.name], self.dtype)
        write_json(folder / ADAPTER_CONFIG, self.about)


class AdapterFile(NamedTuple):
    """What the file of an adapter has of a run's rows, its config, and what makes tensors of the file of those."""

    rows: Sequence[Row]
    about: About
    stored: Callable[[Tensors], Tensors] | None = None
    twice: Sequence[Row] = ()

    def export(self, base: str, revision: str | None) -> Callable[..., AdapterExport]:
        """What makes the export of it, for a base model of this name."""
        about: About = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "revision": revision}
        about = {"peft_type": self.about["peft_type"], **about, "inference_mode": True, **self.about}
        return partial(AdapterExport, about=about, stored=self.stored, twice=self.twice)
