"""The base of an adapter: which weights a run trained it on and how they were held, as its folder has them, and which
adapters a merged model has.

PEFT's two files have no place for it: it is in `llmq_base.json` beside them, which PEFT does not read. A merged model
has `llmq_merged.json`, with the fingerprints of its adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmq.errors import DataError
from llmq.files import tensor_files
from llmq.files.huggingface import ADAPTER_WEIGHTS
from llmq.files.source import ModelSource, Values, fingerprint
from llmq.files.tensor_files import tensors_of
from llmq.model.config import read_json
from llmq.model.held import AS_IT_IS, HELD_FORMS, HeldBase
from llmq.row import Row

BASE, MERGED = "llmq_base.json", "llmq_merged.json"
DTYPES = ("fp32", "bf16")  # that a run computes in


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


def other_base(folder: Path, named: str | None, base: AdapterBase | None, source: ModelSource, seed: int) -> str | None:
    """How a source differs from what the adapter of a folder was trained on, in a sentence; None if it does not.

    By the weights where the folder has their fingerprint, else by the name of the model. DataError for a model that the
    adapter is merged into.
    """
    if (merged := _merged_into(source)) and adapter_fingerprint(folder) in merged:
        raise DataError(
            f"{source.name} has the adapter of {folder} in its weights already: give the model that it was trained on"
            + (f", {named}" if named else "")
        )
    if base is not None:
        trained_on = f"{named or 'a model'} with other weights than those of {source.place}"
        return f"{folder} was trained on {trained_on}" if base.weights != weights_of(source, seed) else None
    is_named = named is not None and Path(named).name.lower() != Path(source.name).name.lower()
    return f"{folder} was trained on {named}, and is given {source.place}" if is_named else None


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
