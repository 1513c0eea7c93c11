"""Where a method of adaptation comes from: the options, or the folder of an adapter in PEFT's format.

Such a folder has `adapter_config.json` and `adapter_model.safetensors`, and in `llmq_base.json` what PEFT has no place
for and does not read: which weights a run trained the adapter on, and how they were held. A merged model has
`llmq_merged.json`, with the fingerprints of its adapters.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from llmq.adapters.adalora import AdaLora
from llmq.adapters.added_tokens import apart
from llmq.adapters.ia3 import Gains
from llmq.adapters.lora import Lora
from llmq.adapters.method import NO_ADAPTERS, Method
from llmq.adapters.part import PartOfModel
from llmq.adapters.peft_format import PREFIX, PeftConfig, base_copies
from llmq.adapters.virtual_tokens import Prefix, Prompt
from llmq.errors import DataError
from llmq.files import tensor_files
from llmq.files.huggingface import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from llmq.files.source import ModelSource, Values, fingerprint, open_parameters
from llmq.files.tensor_files import FILE_DTYPES, Stored, by_kind, read_tensor, tensors_of
from llmq.model.config import ModelConfig, problems_of, read_json
from llmq.model.held import AS_IT_IS, HELD_FORMS, HeldBase
from llmq.model.parameters import parameter_rows
from llmq.options.adapters import AdapterOptions
from llmq.plugins import Table, table
from llmq.row import Row

METHODS: Table[type[Method]] = table(
    "method",
    {
        "lora": Lora,
        "ia3": Gains,
        "adalora": AdaLora,
        "prompt_tuning": Prompt,
        "prefix_tuning": Prefix,
        "train_only": PartOfModel,
    },
    needs=("of_options", "peft_types"),
    gives=("rows", "site"),
)
NAMES_AND_SIZES = re.compile(r"(?<=^missing: )\S+|^(?!missing: )\S+|\S*\.\S+|\d+")  # in what is wrong with a tensor
# Fields of PEFT's LoraConfig that change what is computed, and that llmq does not have.
UNKNOWN = (
    *("layer_replication", "lora_bias"),
    *("target_parameters", "use_qalora", "alora_invocation_tokens", "use_bdlora", "kasa_config", "monteclora_config"),
)
BASE, MERGED = "llmq_base.json", "llmq_merged.json"
DTYPES = ("fp32", "bf16")  # that a run computes in


def resolve(options: AdapterOptions, config: ModelConfig, steps: int = 0, new_rows: range = range(0)) -> Method:
    """What the options ask for on a model, of which `new_rows` are of added tokens. UsageError, DataError.

    `steps` are those of the run, which the schedule of AdaLoRA ends with; 0 where they are not known.
    """
    found = _asked(options, config, steps)
    return found.with_new_rows(new_rows) if new_rows else found


def _asked(options: AdapterOptions, config: ModelConfig, steps: int) -> Method:
    if options.adapter is not None:
        return _stored(options, Path(options.adapter), config)
    if options.adapter_method is not None:
        found: Method = METHODS.call(
            options.adapter_method, options, config, steps, by=lambda method: method.of_options
        )
        return found
    asked = (method.of_options(options, config, steps) for method in METHODS.ours.values())
    return next((found for found in asked if found is not None), NO_ADAPTERS)


def _stored(options: AdapterOptions, folder: Path, config: ModelConfig) -> Method:
    """The adapter of a folder, on a base that is held as it was unless the options say otherwise."""
    stored = open_adapter(folder, config)
    found, trained_on = stored.adapters, stored.trained_on
    found = replace(found, base=options.base_dtype or (trained_on.held.base if trained_on else None))
    if not isinstance(found, Lora):
        return found
    dropout = found.dropout if options.lora_dropout is None else options.lora_dropout
    return replace(found, dropout=dropout, plus=options.lora_plus_ratio or 1.0)


def merges(options: AdapterOptions) -> bool:
    """Whether the finished run leaves the merged model, too."""
    return options.merge


def first_values(options: AdapterOptions, adapters: Method, config: ModelConfig, model: Values) -> Values:
    """The values of all rows before the first step: the model's, and those of --adapter, or of new adapters.
    DataError."""
    model = apart(adapters.new_rows, config, model)
    if options.adapter is not None:
        return open_adapter(Path(options.adapter), config).values(model)
    return adapters.first_values(config, model)


def base_notes(options: AdapterOptions, source: ModelSource, held: HeldBase, seed: int) -> Iterator[str]:
    """What the user should know of the base of --adapter, which this run holds so. DataError for a model that has the
    adapter in its weights."""
    if options.adapter is None:
        return
    stored = open_adapter(Path(options.adapter), source.config)
    if other := stored.check_base(source, seed):
        yield other
    if (trained_on := stored.trained_on) is None:
        return
    if trained_on.held != held:
        yield f"{options.adapter} was trained on a base in {trained_on.held}, and this run holds it in {held}"
    elif held.is_quantized and options.base_dtype is None:
        yield f"The base is held in {held}, as {options.adapter} was trained on it (--base-dtype {held.base})"


@dataclass(frozen=True)
class AdapterBase:
    """What an adapter was trained on: the fingerprint of the `weights`, and how the run held them."""

    weights: str
    held: HeldBase = field(default_factory=HeldBase)

    def to_json(self) -> dict[str, Any]:
        """The contents of the file."""
        held = self.held
        about: dict[str, Any] = {"weights": self.weights, "base_dtype": held.base, "model_dtype": held.dtype}
        if held.base == "nf4":
            about["double_quantization"] = True
        if held.base == "e4m3":
            about["one_scale"] = sorted(held.single)
        return about


def read_base(folder: Path) -> AdapterBase | None:
    """What the folder of an adapter has of its base; None of one that llmq did not write. DataError."""
    path = folder / BASE
    if not path.is_file():
        return None
    about = read_json(path)
    base, dtype, weights = about.get("base_dtype"), about.get("model_dtype"), about.get("weights")
    is_known = base is None or base in HELD_FORMS
    if not is_known or dtype not in DTYPES or not isinstance(weights, str):
        said = f"base_dtype {base}, model_dtype {dtype}, weights {weights}"
        raise DataError(f"{path} has {said}: known are {', '.join(HELD_FORMS)} or null, {' and '.join(DTYPES)}, a text")
    if base == "nf4" and about.get("double_quantization") is not True:
        raise DataError(f"{path}: llmq holds nf4 with double quantization alone")
    return AdapterBase(weights, HeldBase(base, dtype, frozenset(map(str, about.get("one_scale") or ()))))


def weights_of(source: ModelSource, seed: int) -> str:
    """What tells the weights of a source from others."""
    return fingerprint(source) or f"drawn from seed {seed}"


def adapter_fingerprint(folder: Path) -> str:
    """What tells the adapter of a folder from others."""
    return tensor_files.fingerprint(tensors_of(folder / ADAPTER_WEIGHTS))


def merged_record(source: ModelSource, adapters: Sequence[Path]) -> dict[str, Any]:
    """What the folder of a model says that is made of a source and adapters."""
    return {"adapters": [*_merged_into(source), *map(adapter_fingerprint, adapters)]}


def _merged_into(source: ModelSource) -> list[str]:
    """The fingerprints of the adapters that a source has in its weights."""
    path = None if source.folder is None or source.from_scratch else source.folder / MERGED
    return read_json(path).get("adapters", []) if path is not None and path.is_file() else []


def held_for(bases: Sequence[AdapterBase | None], base_dtype: str | None, model_dtype: str | None) -> HeldBase:
    """How to hold the base of adapters: as options say, else as what they were trained on was held.

    DataError where they were trained on bases that were held in different ways.
    """
    if base_dtype in DTYPES:
        return HeldBase(None, base_dtype)
    recorded = [base.held for base in bases if base is not None]
    if base_dtype is not None:
        held = HeldBase(base_dtype, recorded[0].dtype if recorded else "bf16")
        held = next((one for one in recorded if one.base == base_dtype), held)
    else:
        found = {*recorded, *(AS_IT_IS for base in bases if base is None)}
        if len(found) > 1 and any(one.is_quantized for one in found):
            words = " and ".join(sorted(map(str, found)))
            raise DataError(f"the adapters were trained on bases in {words}: choose one with --base-dtype")
        held = found.pop() if len(found) == 1 else AS_IT_IS
    return replace(held, dtype=model_dtype or held.dtype)


def as_held(held: HeldBase, values: Values) -> Values:
    """The values of rows, of which those of the model are what a run reads that holds them so."""

    def read(rows: Sequence[Row]) -> Iterator[tuple[Row, Any]]:
        for row, value in values(rows):
            yield row, held.value(row, value) if row.file == "model" else value

    return read


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in a folder: what it is, the name of its base model, and its tensors by our names."""

    folder: Path
    adapters: Method
    base: str | None
    trained_on: AdapterBase | None  # None of an adapter that llmq did not write
    tensors: dict[str, Stored]
    copies: dict[str, Stored]  # tensors of the base that PEFT stored beside it
    config: ModelConfig
    columns: Mapping[str, slice]  # of tensors that are a part of one in the file

    def read(self, name: str) -> np.ndarray:
        """One tensor in f32. DataError."""
        found = read_tensor(self.tensors[name]).astype(np.float32)
        return found[:, self.columns[name]] if name in self.columns else found

    def check_base(self, source: ModelSource, seed: int) -> str | None:
        """How a source differs from what the adapter was trained on, in a sentence; None if it does not: by the weights
        where the folder has their fingerprint, else by the name of the model.

        DataError for a model that it is merged into, and where PEFT stored another embedding or head beside it than the
        source has.
        """
        of_part = {part.name: (row, part) for row in parameter_rows(self.config) for part in row.parts}
        embed = f"{self.config.family.wiring.names.embed}.weight"
        for name, stored in self.copies.items():
            row, part = of_part.get(name, of_part[embed])  # a head that is tied
            ((_, value),) = open_parameters(source, seed)([row])
            theirs, new = read_tensor(stored), self.adapters.new_rows
            known = np.delete(theirs, new, axis=0)  # PEFT stores all of a matrix that was resized
            if not np.array_equal(np.delete(part.take(value), new, axis=0).astype(theirs.dtype), known):
                raise DataError(
                    f"{self.folder} has another {name} than {source.place}, and does not name it in modules_to_save: "
                    "give the model with that matrix, or save the adapter with it among modules_to_save"
                )
        named = self.base
        if (merged := _merged_into(source)) and adapter_fingerprint(self.folder) in merged:
            of = f", {named}" if named else ""
            raise DataError(
                f"{source.name} has the adapter of {self.folder} in its weights already: give the model that it was "
                f"trained on{of}"
            )
        if self.trained_on is not None:
            said = f"{self.folder} was trained on {named or 'a model'} with other weights than those of {source.place}"
            return said if self.trained_on.weights != weights_of(source, seed) else None
        is_other = named is not None and Path(named).name.lower() != Path(source.name).name.lower()
        return f"{self.folder} was trained on {named}, and is given {source.place}" if is_other else None

    def values(self, otherwise: Values, held: HeldBase = AS_IT_IS) -> Values:
        """The values of rows: those of the adapter, and `otherwise` those that it does not have, less what it began
        with where that was taken out of the model, as a run reads them that holds them so."""
        known = apart(self.adapters.new_rows, self.config, otherwise)
        base = as_held(held, self.adapters.rest(self.config, known))

        def found(rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
            for row in rows:
                has = [part.name in self.tensors for part in row.parts]
                for _, value in [(row, np.zeros(row.shape, np.float32))] if all(has) else base([row]):
                    yield row, self._over(row, value.astype(np.float32)) if any(has) else value

        return found

    def _over(self, row: Row, value: np.ndarray) -> np.ndarray:
        """`value` with the parts that the adapter has."""
        whole = value.reshape(row.part_axes)
        for part in row.parts:
            if part.name in self.tensors:
                part.put(whole, self.read(part.name))  # of AdaLoRA it may have less: what is kept
        return whole.reshape(row.shape)


def open_adapter(folder: Path, config: ModelConfig) -> StoredAdapter:
    """The adapter of a folder, checked to be one for this model. DataError has an example of each kind of misfit."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise DataError(f"{folder} has no {ADAPTER_CONFIG}: give a folder with an adapter in PEFT's format")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise DataError(f"{folder} has no {ADAPTER_WEIGHTS}: give a folder with an adapter in PEFT's format")
    method, about = _config_of(folder)
    stored = tensors_of(folder / ADAPTER_WEIGHTS)
    owned = {name.removeprefix(PREFIX).replace(".token_adapter.base_layer.", "."): stored[name] for name in stored}
    tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in owned.items()}
    copies = {name: tensors.pop(name) for name in base_copies(about, tensors, config)}
    adapters, problems = method.of_peft(about, tensors, config)
    wrong = ((name, tensor.dtype) for name, tensor in tensors.items() if tensor.dtype not in FILE_DTYPES)
    problems += [f"{name} is stored as {dtype}; known are {', '.join(FILE_DTYPES)}" for name, dtype in wrong]
    # PEFT says so of Conv1D, whose matrices are transposed in files: of other maps it would transpose what is not.
    if about.fan_in_fan_out and not any(target.module.transposed for target in adapters.targets):
        problems.append("fan_in_fan_out is true, and the matrices of this model are not transposed")
    base = about.base_model_name_or_path
    if problems:
        said, named = "; ".join(by_kind(problems, NAMES_AND_SIZES)), base or "which its config does not name"
        raise DataError(f"{folder} does not fit the model: {said}. Check that --model is its base, {named}")
    if columns := adapters.columns(config):
        tensors = dict.fromkeys(columns, *tensors.values())
    return StoredAdapter(folder, adapters, base, read_base(folder), tensors, copies, config, columns)


def _kinds(methods: Mapping[str, type[Method]]) -> dict[str, type[Method]]:
    """Methods by PEFT's names of them."""
    return {name: method for method in methods.values() for name in method.peft_types}


def _config_of(folder: Path) -> tuple[type[Method], PeftConfig]:
    """The method and the config of a folder. DataError for what is of none, or has other values than PEFT gives."""
    about = read_json(folder / ADAPTER_CONFIG)
    kind, kinds = str(about.get("peft_type")), _kinds(METHODS)
    if kind not in kinds:
        kinds = _kinds(METHODS.whole())
    if kind not in kinds:
        raise DataError(f"{folder / ADAPTER_CONFIG}: peft_type {kind} is not read, only {', '.join(kinds)}")
    if unknown := [name for name in UNKNOWN if about.get(name)]:
        said = ", ".join(f"{name} {about[name]}" for name in unknown)
        raise DataError(f"{folder / ADAPTER_CONFIG}: llmq does not have {said}")
    try:
        return kinds[kind], kinds[kind].peft_keys.model_validate(about)
    except ValidationError as error:
        lines = "\n".join(f"  - {one}" for one in problems_of(about, error))
        raise DataError(f"{folder / ADAPTER_CONFIG} cannot be used:\n{lines}") from None
