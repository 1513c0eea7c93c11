"""AdaLoRA (Zhang et al., "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", 2023): W x + s B E A x with
E diagonal, of which those entries are kept that matter most.

All adapters begin with one rank. After the warmup a number of triplets (an entry of E, a row of A, a column of B) that
falls with a cubic is kept, those that score highest over all maps. The E of others is set to 0; it may grow again until
the final steps, in which it is held at 0.

In PEFT's format (AdaLoraConfig) `lora_A` (r,K), `lora_B` (N,r), `lora_E` (r,1) of the r triplets
that are kept of the `init_r` which each adapter began with; `rank_pattern` says which ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import PlainValidator, model_validator

from llmq.adapters.importance import Budget, Importance, Patterns, kept_alone, rank_pattern
from llmq.adapters.lora import Lora
from llmq.adapters.method import Change, ReadTensor, SiteFacts, Tracked
from llmq.adapters.peft_format import About, AdapterFile, PeftConfig, Rank, read_modules
from llmq.adapters.targets import FILE, Target, outputs_of, shared
from llmq.files.source import Values
from llmq.files.tensor_files import Stored
from llmq.model.config import ModelConfig
from llmq.options.adapters import OF_BUDGET, AdapterOptions
from llmq.row import Row
from llmq.sites.adalora import AdaLoraAdapter
from llmq.stores.sharding import Shards

PEFTS = {  # PEFT's names of what a budget says
    "target_rank": "target_r",
    "warmup": "tinit",
    "final": "tfinal",
    "interval": "deltaT",
    "beta_1": "beta1",
    "beta_2": "beta2",
    "orth_reg": "orth_reg_weight",
    "total": "total_step",
}


def _flags(value: Any) -> Any:
    if value is None or (isinstance(value, dict) and all(isinstance(flags, list) for flags in value.values())):
        return value
    raise ValueError("must be an object of lists of flags by names, or null")


class AdaLoraKeys(PeftConfig):
    """What is read of PEFT's AdaLoraConfig."""

    init_r: Rank = 12
    lora_alpha: float = 8
    rank_pattern: Annotated[Any, PlainValidator(_flags)] = None
    target_r: int = 8
    tinit: int = 0
    tfinal: int = 0
    deltaT: int = 1
    beta1: float = 0.85
    beta2: float = 0.85
    orth_reg_weight: float = 0.5
    total_step: int = 0

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, about: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in about.items() if value is not None or name not in PEFTS.values()}


@dataclass(frozen=True)
class AdaLora(Lora):
    """Adapters whose ranks are chosen while they are trained, by a `schedule`."""

    schedule: Budget = field(kw_only=True)

    peft_types: ClassVar[tuple[str, ...]] = ("ADALORA",)
    peft_keys: ClassVar[type[PeftConfig]] = AdaLoraKeys

    @classmethod
    def of_options(cls, options: AdapterOptions, config: ModelConfig, steps: int) -> AdaLora | None:
        """AdaLoRA, whose schedule ends with the run. UsageError."""
        if not options.adalora:
            return None
        about = shared(options, config)
        said: list[Any] = [*(getattr(options, key) for key in OF_BUDGET), steps]
        schedule = Budget(*said)
        schedule.check(about["rank"])
        return cls(**{**about, "targets": with_triplets(about["targets"])}, schedule=schedule)

    @classmethod
    def of_peft(cls, about: Any, tensors: dict[str, Stored], config: ModelConfig) -> tuple[AdaLora, list[str]]:
        """What an AdaLoraConfig and its tensors say, and what is wrong with them."""
        found = read_modules(about, tensors, config, ("lora_A", "lora_B", "lora_E"), "lora_A, lora_B and lora_E")
        rank, alpha, patterns, targets = about.init_r, about.lora_alpha, about.rank_pattern or {}, list[Target]()
        for module in found.tensors:
            flags = patterns.get(f"{module.name}.lora_E")
            if flags is not None and len(flags) != rank:
                found.problems.append(f"rank_pattern of {module.name} has {len(flags)} flags, and init_r is {rank}")
                continue
            there = None if flags is None else tuple(map(bool, flags))
            targets.append(Target(module, rank, alpha, scale_of_triplets(rank, alpha), kept=there))
            own = targets[-1].present
            shapes = {"lora_A": (own, module.inputs), "lora_B": (module.outputs, own), "lora_E": (own, 1)}
            found.check(module, shapes, "the model and its ranks ask for")
        dropout, bias = about.lora_dropout or 0.0, str(about.bias or "none")
        budget = Budget(**{field: getattr(about, name) for field, name in PEFTS.items()}, spent=True)
        return cls(rank, alpha, tuple(targets), dropout, bias, also=found.also, schedule=budget), found.problems

    def with_new_rows(self, new: range) -> AdaLora:
        """The same, which trains none."""
        return self

    def without_drops(self, site: str, at: SiteFacts) -> AdaLoraAdapter:
        """The triplets of a site, of whose orthogonality each norm counts as the mean of all."""
        weight = self.schedule.orth_reg / (2 * len(self.targets))
        about = (self.pieces(site), "normal", FILE, at.values, outputs_of(at.config)[site])
        return AdaLoraAdapter(site, *about, stat=at.stat, orthogonality=weight)

    def tracked(self, rows: Sequence[Row], stat: str, shards: Shards | None) -> Tracked:
        """Sensitivity and uncertainty of the parameters of adapters, unless the schedule is spent."""
        if self.schedule.spent:
            return super().tracked(rows, stat, shards)
        return Importance(rows, stat, self.schedule, shards)

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        present = {target.module.name: target.present for target in self.targets if target.kept is not None}
        kept = {"kept": present} if present else {}
        return {**super().identity(), "adalora": asdict(self.schedule), **kept}

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

    def peft_config(self, config: ModelConfig) -> About:
        """PEFT's AdaLoraConfig, with the pattern of ranks of adapters that were read."""
        about = super().peft_config(config)
        del about["alpha_pattern"], about["use_rslora"], about["use_dora"]
        schedule = {name: getattr(self.schedule, field) for field, name in PEFTS.items()}
        pattern = rank_pattern({t.module.name: t.kept for t in self.targets if t.kept is not None})
        return {**about, "peft_type": "ADALORA", "r": 8, "init_r": self.rank, **schedule, "rank_pattern": pattern}

    def file(self, rows: Sequence[Row], config: ModelConfig, model: Values | None) -> AdapterFile:
        """Of adapters that were read what is there, which are the first triplets, whatever they were when chosen."""
        there: Patterns = {}
        if any(target.kept is not None for target in self.targets):
            there = {t.module.name: (True,) * t.present + (False,) * (t.rank - t.present) for t in self.targets}
        return super().file(rows, config, model)._replace(stored=partial(kept_alone, there))


def with_triplets(targets: Sequence[Target]) -> tuple[Target, ...]:
    """Targets of AdaLoRA."""
    return tuple(replace(target, scale=scale_of_triplets(target.rank, target.alpha)) for target in targets)


def scale_of_triplets(rank: int, alpha: float) -> float:
    """What multiplies B E A x in AdaLoRA: as in PEFT, of the rank that adapters begin with."""
    return (alpha if alpha > 0 else float(rank)) / (rank + 1e-5)
