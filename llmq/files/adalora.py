"""AdaLoRA's adapters in PEFT's format (AdaLoraConfig): `lora_A` (r,K), `lora_B` (N,r), `lora_E` (r,1) of the r triplets
that are kept of the `init_r` which each adapter began with; `rank_pattern` says which ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.files.peft_names import checked_beside, in_full_config, is_target, target_names
from llmq.files.tensor_files import Stored
from llmq.model.adalora import INIT, Budget
from llmq.model.adapters import Adapters, Module, Target, linear_modules, scale_of_triplets
from llmq.model.config import ModelConfig
from llmq.row import Part, Row

TRIPLET = re.compile(r"(.+)\.lora_([ABE])")
Patterns = Mapping[str, tuple[bool, ...]]  # what is kept of each adapter, by its module
# PEFT's names of what a budget says, with their defaults there
FIELDS: dict[str, tuple[str, float]] = {
    "target_rank": ("target_r", 8),
    "warmup": ("tinit", 0),
    "final": ("tfinal", 0),
    "interval": ("deltaT", 1),
    "beta_1": ("beta1", 0.85),
    "beta_2": ("beta2", 0.85),
    "orth_reg": ("orth_reg_weight", 0.5),
    "total": ("total_step", 0),
}


def checked_triplets(
    about: dict[str, Any], tensors: dict[str, Stored], config: ModelConfig
) -> tuple[Adapters, list[str]]:
    """What a config of AdaLoRA and its tensors say, and what is wrong with them."""
    modules = {module.name: module for module in linear_modules(config)}
    matches = {name: match for name in tensors if (match := TRIPLET.fullmatch(name))}
    also, problems = checked_beside(about, tensors, config, matches)
    rank, alpha = int(about.get("init_r", 12)), float(about.get("lora_alpha", 8))
    found: dict[str, dict[str, Stored]] = {}
    for name, match in matches.items():
        found.setdefault(match[1], {})[match[2]] = tensors[name]
    problems += [f"{name} is no linear map of this model" for name in found if name not in modules]
    patterns = about.get("rank_pattern") or {}
    targets = []
    for module in (module for name, module in modules.items() if name in found):
        pattern = patterns.get(f"{module.name}.lora_E")
        kept = None if pattern is None else tuple(map(bool, pattern))
        if kept is not None and len(kept) != rank:
            problems.append(f"rank_pattern of {module.name} has {len(kept)} flags, and init_r is {rank}")
            continue
        target = Target(module, rank, alpha, scale_of_triplets(rank, alpha), kept=kept)
        problems += _unlike(module, found[module.name], target.present)
        targets.append(target)
    wanted = [name for name in modules if is_target(about, name)]
    problems += [f"missing: {name}.lora_A, lora_B and lora_E" for name in wanted if name not in found]
    said: dict[str, Any] = {
        field: default if about.get(name) is None else type(default)(about[name])
        for field, (name, default) in FIELDS.items()
    }
    budget = Budget(**said, spent=True)
    dropout, bias = float(about.get("lora_dropout") or 0), str(about.get("bias") or "none")
    more: dict[str, Any] = {"init": INIT, "also": also, "schedule": budget}
    return Adapters(rank, alpha, tuple(targets), dropout, bias, **more), problems


def _unlike(module: Module, own: dict[str, Stored], rank: int) -> list[str]:
    """What is wrong with the three tensors of an adapter that has so many triplets."""
    wanted = {"A": (rank, module.inputs), "B": (module.outputs, rank), "E": (rank, 1)}
    missing = [f"missing: {module.name}.lora_{key}" for key in wanted if key not in own]
    return missing + [
        f"{module.name}.lora_{key} has shape {list(own[key].shape)}, the model and its ranks ask for {list(shape)}"
        for key, shape in wanted.items()
        if key in own and own[key].shape != shape
    ]


def triplet_config(adapters: Adapters, config: ModelConfig, base: str, revision: str | None) -> dict[str, Any]:
    """PEFT's AdaLoraConfig of these adapters, with the pattern of those that were read."""
    budget = adapters.schedule
    if budget is None:
        raise UsageError("adapters without a budget are LoRA's")
    return {
        "peft_type": "ADALORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": 8,
        "init_r": adapters.rank,
        **{name: getattr(budget, field) for field, (name, _) in FIELDS.items()},
        "lora_alpha": int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": target_names(adapters.targets, config),
        "rank_pattern": rank_pattern({t.module.name: t.kept for t in adapters.targets if t.kept is not None}),
        "bias": adapters.bias,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        **in_full_config(adapters, config),
        "inference_mode": True,
    }


def rank_pattern(patterns: Patterns) -> dict[str, list[bool]] | None:
    """PEFT's `rank_pattern`; None where all is kept."""
    return {f"{name}.lora_E": list(kept) for name, kept in patterns.items()} or None


def present(adapters: Adapters) -> Patterns:
    """Which triplets of adapters that were read are there: the first ones, whatever they were when chosen."""
    if all(t.kept is None for t in adapters.targets):
        return {}
    return {t.module.name: (True,) * t.present + (False,) * (t.rank - t.present) for t in adapters.targets}


def kept_rows(rows: Sequence[Row], patterns: Patterns) -> tuple[Row, ...]:
    """The rows of an adapter as they are stored, of what is kept alone."""
    found = []
    for row in rows:
        flags = _flags(row, patterns)
        if flags is None:
            found.append(row)
        elif ".lora_b." in row.name:
            found.append(replace(row, shape=(row.shape[0], int(np.sum(flags)))))
        else:
            counts, parts, start = [int(flags[part.start : part.stop].sum()) for part in row.parts], [], 0
            for part, count in zip(row.parts, counts, strict=True):
                parts.append(Part(part.name, start, start + count))
                start += count
            found.append(replace(row, shape=(start, *row.shape[1:]), parts=tuple(parts)))
    return tuple(found)


def kept_value(row: Row, value: np.ndarray, patterns: Patterns) -> np.ndarray:
    """What is kept of the value of a row, which is given as it was before `kept_rows`."""
    flags = _flags(row, patterns)
    if flags is None:
        return value
    return value[:, flags] if ".lora_b." in row.name else value[flags]


def _flags(row: Row, patterns: Patterns) -> np.ndarray | None:
    """What is kept of a row's columns, of B, or of its entries; None of a row without a pattern."""
    own = [TRIPLET.fullmatch(part.name) for part in row.parts]
    names = [match[1].removeprefix("base_model.model.") for match in own if match]
    if len(names) < len(row.parts) or not all(name in patterns for name in names):
        return None
    return np.array([flag for name in names for flag in patterns[name]])
