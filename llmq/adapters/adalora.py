"""AdaLoRA (Zhang et al., "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", 2023): W x + s B E A x with
E diagonal, of which those entries are kept that matter most.

In PEFT's format (AdaLoraConfig) `lora_A` (r,K), `lora_B` (N,r), `lora_E` (r,1) of the r triplets
that are kept of the `init_r` which each adapter began with; `rank_pattern` says which ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmq.adapters.budget import Budget
from llmq.adapters.importance import Importance, NoImportance
from llmq.adapters.lora import Lora
from llmq.adapters.method import Change, Method, ReadTensor, SiteFacts
from llmq.adapters.peft_names import checked_beside, in_full_config, is_target, plain, target_names
from llmq.adapters.targets import FILE, Module, Target, linear_modules, outputs_of
from llmq.files.tensor_files import Stored
from llmq.model.config import ModelConfig
from llmq.row import Part, Row
from llmq.sites.adalora import AdaLoraAdapter
from llmq.stores.sharding import Shards

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


@dataclass(frozen=True)
class AdaLora(Lora):
    """Adapters whose ranks are chosen while they are trained, by a `schedule`."""

    schedule: Budget = field(kw_only=True)

    def without_drops(self, site: str, at: SiteFacts) -> AdaLoraAdapter:
        """The triplets of a site, of whose orthogonality each norm counts as the mean of all."""
        weight = self.schedule.orth_reg / (2 * len(self.targets))
        about = (self.pieces(site), "normal", FILE, at.values, outputs_of(at.config, site))
        return AdaLoraAdapter(site, *about, stat=at.stat, orthogonality=weight)

    def importance(self, rows: Sequence[Row], stat: str, shards: Shards | None) -> NoImportance:
        """Sensitivity and uncertainty of the parameters of adapters, unless the schedule is spent."""
        if self.schedule.spent:
            return super().importance(rows, stat, shards)
        return Importance(rows, stat, self.schedule, shards)

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        present = {target.module.name: target.present for target in self.targets if target.kept is not None}
        kept = {"kept": present} if present else {}
        return {**super().identity(), "adalora": self.schedule.identity(), **kept}

    @property
    def kind(self) -> str:
        """What the adapters are called."""
        return "Adapters with singular values (AdaLoRA)"

    @property
    def rank_words(self) -> str:
        """The rank at first and at last."""
        last = "" if self.schedule.spent else f" at first and {self.schedule.target_rank} on average at last"
        return super().rank_words + last

    def change(self, target: Target, weight: np.ndarray, read: ReadTensor) -> Change:
        """s B E A."""
        a, b, e = (read(f"{target.module.name}.lora_{key}") for key in "ABE")
        return lambda start, stop: np.float32(target.scale) * (b[start:stop] @ (a * e))

    def peft_config(self, config: ModelConfig, base: str, revision: str | None) -> dict[str, Any]:
        """PEFT's AdaLoraConfig, with the pattern of ranks of adapters that were read."""
        return {
            "peft_type": "ADALORA",
            **Method.peft_config(self, config, base, revision),
            "r": 8,
            "init_r": self.rank,
            **{name: getattr(self.schedule, field) for field, (name, _) in FIELDS.items()},
            "lora_alpha": plain(self.alpha),
            "lora_dropout": self.dropout,
            "target_modules": target_names(self.targets, config),
            "rank_pattern": rank_pattern({t.module.name: t.kept for t in self.targets if t.kept is not None}),
            "bias": self.bias,
            "init_lora_weights": True,
            "fan_in_fan_out": False,
            **in_full_config(self.also, config),
        }


def with_triplets(targets: Sequence[Target]) -> tuple[Target, ...]:
    """Targets of AdaLoRA."""
    return tuple(replace(target, scale=scale_of_triplets(target.rank, target.alpha)) for target in targets)


def scale_of_triplets(rank: int, alpha: float) -> float:
    """What multiplies B E A x in AdaLoRA: as in PEFT, of the rank that adapters begin with."""
    return (alpha if alpha > 0 else float(rank)) / (rank + 1e-5)


def checked_triplets(
    about: dict[str, Any], tensors: dict[str, Stored], config: ModelConfig
) -> tuple[AdaLora, list[str]]:
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
    return AdaLora(rank, alpha, tuple(targets), dropout, bias, also=also, schedule=budget), problems


def _unlike(module: Module, own: dict[str, Stored], rank: int) -> list[str]:
    """What is wrong with the three tensors of an adapter that has so many triplets."""
    wanted = {"A": (rank, module.inputs), "B": (module.outputs, rank), "E": (rank, 1)}
    missing = [f"missing: {module.name}.lora_{key}" for key in wanted if key not in own]
    return missing + [
        f"{module.name}.lora_{key} has shape {list(own[key].shape)}, the model and its ranks ask for {list(shape)}"
        for key, shape in wanted.items()
        if key in own and own[key].shape != shape
    ]


def rank_pattern(patterns: Patterns) -> dict[str, list[bool]] | None:
    """PEFT's `rank_pattern`; None where all is kept."""
    return {f"{name}.lora_E": list(kept) for name, kept in patterns.items()} or None


def present(adapters: Method) -> Patterns:
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
