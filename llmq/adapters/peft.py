"""Adapters in PEFT's format as they are read: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from llmq.adapters.base_record import AdapterBase, as_held, other_base, read_base
from llmq.adapters.first_values import FirstAdapter
from llmq.adapters.method import Method
from llmq.adapters.methods import METHODS
from llmq.adapters.peft_format import PREFIX, base_copies
from llmq.adapters.targets import EMBED
from llmq.errors import DataError
from llmq.files.huggingface import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from llmq.files.source import ModelSource, Values, open_parameters
from llmq.files.tensor_files import Stored, tensors_of
from llmq.model.config import ModelConfig, problems_of, read_json
from llmq.model.held import AS_IT_IS, HeldBase
from llmq.model.parameters import parameter_rows
from llmq.row import Row

KINDS = {name: method for method in METHODS for name in method.peft_types}
NAMES_AND_SIZES = re.compile(r"^(missing: )?\S+|\S*\.\S+|\d+")  # in what is wrong with a tensor
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
    columns: Mapping[str, slice]  # of tensors that are a part of one in the file

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
    adapters, problems = KINDS[about["peft_type"]].of_peft(about, tensors, config)
    if problems:
        base = about.get("base_model_name_or_path") or "which its config does not name"
        raise DataError(
            f"{folder} does not fit the model: {_by_kind(problems)}. Check that --model is its base, {base}"
        )
    places = adapters.columns(config)
    if places:
        names = {own: names[whole] for own, (whole, _) in places.items()}
        tensors = {own: tensors[whole] for own, (whole, _) in places.items()}
    columns = {own: columns for own, (_, columns) in places.items()}
    base = about.get("base_model_name_or_path")
    return StoredAdapter(folder, adapters, base, read_base(folder), tensors, copies, names, config, columns)


def _refuse_others(folder: Path, about: dict[str, Any]) -> None:
    """DataError for what is of no method, or has keys with other values than PEFT gives them."""
    kind = about.get("peft_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise DataError(f"{folder / ADAPTER_CONFIG}: peft_type {kind} is not read, only {', '.join(KINDS)}")
    if unknown := [name for name in UNKNOWN if about.get(name)]:
        said = ", ".join(f"{name} {about[name]}" for name in unknown)
        raise DataError(f"{folder / ADAPTER_CONFIG}: llmq does not have {said}")
    try:
        KINDS[kind].peft_keys.model_validate(about)
    except ValidationError as error:
        lines = "\n".join(f"  - {one}" for one in problems_of(about, error))
        raise DataError(f"{folder / ADAPTER_CONFIG} cannot be used:\n{lines}") from None


def _by_kind(problems: Sequence[str]) -> str:
    """The first problem of each kind, those that differ in names and sizes alone, with the number of the others."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(NAMES_AND_SIZES.sub(r"\1", problem), []).append(problem)
    return "; ".join(f"{one[0]} (and {len(one) - 1} more like it)" if one[1:] else one[0] for one in kinds.values())


def _our_name(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")
