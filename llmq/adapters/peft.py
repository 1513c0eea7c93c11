"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, read and written.

A tensor has the name of the module that it belongs to in PEFT's model, `base_model.model.` before ours; the bias of an
adapted map is its `base_layer.bias` there. The tensors that are there say which maps have adapters, and of what rank;
the config must agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from llmq.adapters.adalora import Patterns, checked_triplets, kept_rows, kept_value, rank_pattern
from llmq.adapters.base_record import AdapterBase, as_held, other_base, read_base
from llmq.adapters.first_values import FirstAdapter
from llmq.adapters.ia3 import checked_gains
from llmq.adapters.lora import Lora
from llmq.adapters.method import Method
from llmq.adapters.peft_config import wrong_keys
from llmq.adapters.peft_names import PREFIX, base_copies, checked_beside, is_target
from llmq.adapters.taken_out import TAKEN_OUT
from llmq.adapters.targets import (
    EMBED,
    LM_HEAD,
    MAGNITUDE,
    Module,
    Target,
    linear_modules,
    scale_of,
)
from llmq.adapters.virtual_tokens import KINDS, TENSOR, checked_virtual, columns_of
from llmq.errors import DataError
from llmq.files.huggingface import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Export, write_json, write_tensors
from llmq.files.source import ModelSource, Values, open_parameters
from llmq.files.tensor_files import Stored, tensors_of
from llmq.model.config import ModelConfig, read_json
from llmq.model.held import AS_IT_IS, HeldBase
from llmq.model.parameters import parameter_rows
from llmq.row import Row

LORA = re.compile(r"(.+)\.lora_(?:([AB])\.weight|(magnitude)_vector)")
NAMES_AND_SIZES = re.compile(r"^(missing: )?\S+|\S*\.\S+|\d+")  # in what is wrong with a tensor
SAME_BASE = (True, False, None, "gaussian", "eva", "orthogonal")  # of PEFT's inits, those that leave the model as it is
# Fields of PEFT's LoraConfig that change what is computed, and that llmq does not have.
UNKNOWN = (
    *("layer_replication", "fan_in_fan_out", "lora_bias", "trainable_token_indices"),
    *("target_parameters", "use_qalora", "alora_invocation_tokens", "use_bdlora", "kasa_config", "monteclora_config"),
)


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in a folder: what it is, the name of its base model, and its tensors by our names."""

    folder: Path
    adapters: Method
    base: str | None
    trained_on: AdapterBase | None  # None of an adapter that llmq did not write
    tensors: dict[str, Stored]
    copies: dict[str, Stored]  # tensors of the base that PEFT stored beside it
    names: dict[str, str]  # of tensors in the file, by ours
    config: ModelConfig
    columns: dict[str, slice] = field(default_factory=dict)  # of a tensor in the file, of those that are not all of one

    def read(self, name: str) -> np.ndarray:
        """One tensor in f32. DataError."""
        found = self._tensor(self.tensors[name], self.names[name]).astype(np.float32)
        return found[:, self.columns[name]] if name in self.columns else found

    def _tensor(self, stored: Stored, name: str) -> np.ndarray:
        """A tensor by its name in the file, in its dtype. DataError."""
        try:
            with safe_open(stored.path, framework="numpy") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{stored.path} cannot be read: {error}") from None

    def check_base(self, source: ModelSource, seed: int) -> str | None:
        """How a source differs from what the adapter was trained on, in a sentence; None if it does not.

        DataError for a model that it is merged into, and where PEFT stored another embedding or head beside it than the
        source has.
        """
        of_part = {part.name: (row, part) for row in parameter_rows(self.config) for part in row.parts}
        for name, stored in self.copies.items():
            row, part = of_part.get(name, of_part[f"{EMBED}.weight"])  # a head that is tied
            ((_, value),) = open_parameters(source, seed)([row])
            theirs = self._tensor(stored, self.names[name])
            if not np.array_equal(value[part.start : part.stop].astype(theirs.dtype), theirs):
                raise DataError(
                    f"{self.folder} has another {name} than {source.place}, and does not name it in modules_to_save: "
                    "give the model with that matrix, or save the adapter with it among modules_to_save"
                )
        return other_base(self.folder, self.base, self.trained_on, source, seed)

    def values(self, otherwise: Values, held: HeldBase = AS_IT_IS) -> Values:
        """The values of rows: those of the adapter, and `otherwise` those that it does not have, less what it began
        with where that was taken out of the model, as a run reads them that holds them so."""
        base = as_held(held, FirstAdapter(self.adapters, self.config, otherwise).base)

        def found(rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
            own = {row.name for row in rows if all(part.name in self.tensors for part in row.parts)}
            for row, value in base([row for row in rows if row.name not in own]):
                there = any(part.name in self.tensors for part in row.parts)
                yield row, self._over(row, value.astype(np.float32)) if there else value
            yield from ((row, self._over(row, np.zeros(row.shape, np.float32))) for row in rows if row.name in own)

        return found

    def _over(self, row: Row, value: np.ndarray) -> np.ndarray:
        """`value` with the parts that the adapter has."""
        whole = value.reshape(row.part_axes)
        for part in row.parts:
            if part.name in self.tensors:
                stored = self.read(part.name)  # of AdaLoRA it may have less: what is kept
                whole[part.start : part.stop][tuple(map(slice, stored.shape))] = stored
        return whole.reshape(row.shape)


def open_adapter(folder: Path, config: ModelConfig) -> StoredAdapter:
    """The adapter of a folder, checked to be one for this model. DataError has an example of each kind of misfit."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise DataError(f"{folder} has no {ADAPTER_CONFIG}: give a folder with an adapter in PEFT's format")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise DataError(f"{folder} has no {ADAPTER_WEIGHTS}: give a folder with an adapter in PEFT's format")
    about = read_json(folder / ADAPTER_CONFIG)
    _refuse_others(folder, about)
    stored = tensors_of(folder / ADAPTER_WEIGHTS)
    names = {_our_name(name): name for name in stored}
    tensors = {ours: stored[name] for ours, name in names.items()}
    copies = {name: tensors.pop(name) for name in base_copies(about, tensors, config)}
    adapters, problems = CHECKS[about["peft_type"]](about, tensors, config)
    if problems:
        base = about.get("base_model_name_or_path") or "which its config does not name"
        raise DataError(
            f"{folder} does not fit the model: {_by_kind(problems)}. Check that --model is its base, {base}"
        )
    columns = columns_of(adapters, config)
    if columns:
        tensors, names = dict.fromkeys(columns, tensors[TENSOR]), dict.fromkeys(columns, names[TENSOR])
    base = about.get("base_model_name_or_path")
    return StoredAdapter(folder, adapters, base, read_base(folder), tensors, copies, names, config, columns)


def _refuse_others(folder: Path, about: dict[str, Any]) -> None:
    kind = about.get("peft_type")
    if not isinstance(kind, str) or kind not in CHECKS:
        raise DataError(f"{folder / ADAPTER_CONFIG}: peft_type {kind} is not read, only {', '.join(CHECKS)}")
    if unknown := [name for name in UNKNOWN if about.get(name)]:
        said = ", ".join(f"{name} {about[name]}" for name in unknown)
        raise DataError(f"{folder / ADAPTER_CONFIG}: llmq does not have {said}")
    if problems := wrong_keys(about):
        raise DataError(f"{folder / ADAPTER_CONFIG} cannot be used:\n" + "\n".join(f"  - {one}" for one in problems))


def _by_kind(problems: Sequence[str]) -> str:
    """The first problem of each kind, those that differ in names and sizes alone, with the number of the others."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(NAMES_AND_SIZES.sub(r"\1", problem), []).append(problem)
    return "; ".join(f"{one[0]} (and {len(one) - 1} more like it)" if one[1:] else one[0] for one in kinds.values())


def _our_name(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def _checked(about: dict[str, Any], tensors: dict[str, Stored], config: ModelConfig) -> tuple[Lora, list[str]]:
    """What the config and the tensors say, and what is wrong with them."""
    modules = {module.name: module for module in linear_modules(config)}
    matches = {name: match for name in tensors if (match := LORA.fullmatch(name))}
    also, problems = checked_beside(about, tensors, config, matches)
    pairs: dict[str, dict[str, Stored]] = {}
    for name, match in matches.items():
        pairs.setdefault(match[1], {})[match[2] or match[3]] = tensors[name]
    rank, rslora, dora = int(about.get("r", 8)), bool(about.get("use_rslora")), bool(about.get("use_dora"))
    alpha = float(about.get("lora_alpha", 8))
    found = []
    for name, pair in pairs.items():
        if name not in modules:
            problems.append(f"{name} is no linear map of this model")
            continue
        own = int(_of_pattern(about.get("rank_pattern"), name, rank))
        problems += _unlike(modules[name], pair, own, dora=dora)
        own_alpha = float(_of_pattern(about.get("alpha_pattern"), name, alpha))
        found.append(Target(modules[name], own, own_alpha, scale_of(own, own_alpha, rslora=rslora)))
    wanted = {name for name in modules if is_target(about, name)}
    problems += [f"missing: {name}.lora_A.weight and lora_B.weight" for name in modules if name in wanted - set(pairs)]
    if dora and LM_HEAD in pairs:
        problems.append("lm_head has magnitudes (use_dora), which llmq does not compute for the logits")
    order = {name: index for index, name in enumerate(modules)}
    targets = tuple(sorted(found, key=lambda target: order[target.module.name]))
    said = about.get("init_lora_weights", True)
    if said not in SAME_BASE and said not in TAKEN_OUT:
        problems.append(
            f"init_lora_weights {said} changes the model as llmq does not: save the adapter with "
            "path_initial_model_for_weight_conversion"
        )
    init = said if said in ("gaussian", *TAKEN_OUT) else "kaiming"
    if init in TAKEN_OUT and config.tie_embeddings and LM_HEAD in pairs:
        problems.append(f"init_lora_weights {init} changes lm_head, which is the embedding too")
    dropout, bias = float(about.get("lora_dropout") or 0), str(about.get("bias") or "none")
    return Lora(rank, alpha, targets, dropout, bias, rslora, init, dora, also=also), problems


CHECKS = {  # by peft_type
    "LORA": _checked,
    "IA3": checked_gains,
    "ADALORA": checked_triplets,
    **dict.fromkeys(KINDS, checked_virtual),
}


def _unlike(module: Module, pair: dict[str, Stored], rank: int, *, dora: bool) -> Iterator[str]:
    """What is wrong with the matrices of an adapter, and with its magnitudes."""
    wanted: dict[str, tuple[int, ...]] = {"A": (rank, module.inputs), "B": (module.outputs, rank)}
    if dora:
        wanted["magnitude"] = (module.outputs,)
    elif "magnitude" in pair:
        yield f"{module.name}.{MAGNITUDE} is there, and use_dora is not"
    for key, shape in wanted.items():
        name = f"{module.name}.{MAGNITUDE if key == 'magnitude' else f'lora_{key}.weight'}"
        if key not in pair:
            yield f"missing: {name}"
        elif pair[key].shape != shape:
            yield f"{name} has shape {list(pair[key].shape)}, the model and its rank ask for {list(shape)}"


def _of_pattern(pattern: dict[str, Any] | None, name: str, otherwise: float) -> float:
    """The value of the first key that is the end of a name, or matches it, as PEFT looks it up."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return otherwise


@dataclass(frozen=True)
class AdapterExport(Export):
    """The export of an adapter: PEFT's two files, and the tokenizer's. `patterns` say what is kept of AdaLoRA's."""

    about: dict[str, Any] = field(default_factory=dict)  # adapter_config.json
    first: FirstAdapter | None = None  # what the rows, of twice the rank, began with
    patterns: Patterns = field(default_factory=dict)

    def write_model(self, folder: Path, read: Callable[[Row], np.ndarray]) -> None:
        """Config and weights into a new folder."""
        rows = kept_rows(self.rows, self.patterns)
        write_tensors(folder / ADAPTER_WEIGHTS, rows, partial(self._read, read), self.dtype)
        write_json(folder / ADAPTER_CONFIG, self.about)

    def choosing(self, patterns: Patterns) -> AdapterExport:
        """The export of AdaLoRA's adapters of which this is kept."""
        return replace(self, patterns=patterns, about={**self.about, "rank_pattern": rank_pattern(patterns)})

    def _read(self, read: Callable[[Row], np.ndarray], row: Row) -> np.ndarray:
        """The value of a row: of matrices that began as a part of the model, A over the first A, B beside -B."""
        value, (site, found, _) = read(row), row.name.partition(".lora_")
        if self.patterns:
            return kept_value(row, value, self.patterns)
        if self.first is None or not found or ".lora_m" in row.name:
            return value
        pairs = self.first.pairs(site)
        if ".lora_b." in row.name:
            ((_, b),) = [pairs[part.name.partition(".lora_")[0].removeprefix(PREFIX)] for part in row.parts]
            return np.concatenate([value, -b], axis=1)
        both = []
        for part in row.parts:
            start, stop = part.start // 2, part.stop // 2
            both += [value[start:stop], pairs[part.name.partition(".lora_")[0].removeprefix(PREFIX)][0]]
        return np.concatenate(both)


def with_first(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows of an adapter with twice the rank: what was trained, and what it began with."""
    found = []
    for row in rows:
        if row.name.endswith(".lora_a"):
            parts = tuple(replace(part, start=2 * part.start, stop=2 * part.stop) for part in row.parts)
            row = replace(row, shape=(2 * row.shape[0], row.shape[1]), parts=parts)
        elif ".lora_b." in row.name:
            row = replace(row, shape=(row.shape[0], 2 * row.shape[1]))
        found.append(row)
    return tuple(found)
