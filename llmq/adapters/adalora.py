"""AdaLoRA (Zhang et al., "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", 2023): W x + s B E A x with
E diagonal, of which those entries are kept that matter most.

All adapters begin with one rank. After the warmup a number of triplets (an entry of E, a row of A, a column of B) that
falls with a cubic is kept, those that score highest over all maps. The E of others is set to 0; it may grow again until
the final steps, in which it is held at 0.

In PEFT's format (AdaLoraConfig) `lora_A` (r,K), `lora_B` (N,r), `lora_E` (r,1) of the r triplets
that are kept of the `init_r` which each adapter began with; `rank_pattern` says which ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import PlainValidator, model_validator

from llmq.adapters.lora import Lora
from llmq.adapters.method import Change, Programs, ReadTensor, SiteFacts, Tracked
from llmq.adapters.peft_format import PREFIX, About, AdapterFile, PeftConfig, Rank, Tensors, read_modules
from llmq.adapters.targets import FILE, Target, outputs_of, shared
from llmq.errors import UsageError
from llmq.files.source import Values
from llmq.files.tensor_files import Stored
from llmq.model.config import ModelConfig
from llmq.ops.record import Recorder
from llmq.optimizers.rule import MASTER
from llmq.options.adapters import OF_BUDGET, AdapterOptions
from llmq.row import Row
from llmq.sites.adalora import AdaLoraAdapter
from llmq.stores.replicated import StatePiece
from llmq.stores.sharding import Shards
from llmq.tensor import NORM_ROWS, Ref, num_norm_tiles

ALIGNED = 4  # the flags of a row begin at a multiple of this, as kernels read 16 bytes at a time
SUMS, KEPT = "importance", "kept"  # cells: sums of all rows' importance; 1 for each triplet that is kept, else 0
Patterns = Mapping[str, tuple[bool, ...]]  # what is kept of each adapter, by its module
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


@dataclass(frozen=True)
class Budget:
    """The schedule of ranks; steps count from 1.

    `target_rank` is that of the adapters at last, on average (PEFT: target_r). Ranks stay for `warmup` steps (tinit)
    and in the `final` ones (tfinal) of `total` (total_step), and are chosen again every `interval` steps in between
    (deltaT) and at the end of that. `orth_reg` is the weight of the regulariser (orth_reg_weight). One that is `spent`
    is that of an adapter that was read, whose ranks stay.
    """

    target_rank: int
    warmup: int = 0
    final: int = 0
    interval: int = 10
    beta_1: float = 0.85
    beta_2: float = 0.85
    orth_reg: float = 0.5
    total: int = 0
    spent: bool = False

    def check(self, rank: int) -> None:
        """UsageError for a schedule that has no time, or nothing, to choose from."""
        if self.target_rank >= rank:
            raise UsageError(
                f"--adalora-target-rank {self.target_rank} is not below --lora-rank {rank}, with which adapters begin"
            )
        if self.total and self.last <= max(self.warmup, 1):
            raise UsageError(
                f"--adalora-warmup {self.warmup} and --adalora-final {self.final} leave none of {self.total} steps in "
                "which ranks are chosen, after at least one whose gradients say how: use fewer, or more --steps"
            )

    @property
    def last(self) -> int:
        """The step after which ranks are chosen for the last time."""
        return self.total - self.final

    def chooses(self, step: int) -> bool:
        """Whether ranks are chosen after a step."""
        return step == self.last or (self.warmup < step < self.last and step % self.interval == 0)

    def holds(self, step: int) -> bool:
        """Whether what was left out is held at 0."""
        return step > self.last

    def count(self, step: int, triplets: int, adapters: int) -> int:
        """How many of all `triplets` are kept after a step, of `adapters` in all."""
        target, rest = self.target_rank * adapters, 1 - (step - self.warmup) / (self.last - self.warmup)
        return int((triplets - target) * rest**3 + target)


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
        return super().file(rows, config, model)._replace(stored=partial(_kept, there))


def with_triplets(targets: Sequence[Target]) -> tuple[Target, ...]:
    """Targets of AdaLoRA."""
    return tuple(replace(target, scale=scale_of_triplets(target.rank, target.alpha)) for target in targets)


def scale_of_triplets(rank: int, alpha: float) -> float:
    """What multiplies B E A x in AdaLoRA: as in PEFT, of the rank that adapters begin with."""
    return (alpha if alpha > 0 else float(rank)) / (rank + 1e-5)


def rank_pattern(patterns: Patterns) -> dict[str, list[bool]] | None:
    """PEFT's `rank_pattern`; None where all is kept."""
    return {f"{name}.lora_E": list(kept) for name, kept in patterns.items()} or None


def _kept(patterns: Patterns, tensors: Tensors) -> Tensors:
    """The tensors of adapters, of what is kept alone."""
    for name, kept in patterns.items():
        a, b, e, own = *(f"{PREFIX}{name}.lora_{key}" for key in "ABE"), np.array(kept, bool)
        tensors |= {a: tensors[a][own], b: tensors[b][:, own], e: tensors[e][own]}
    return tensors


class Scores(NamedTuple):
    """What is kept of a row, or of this rank's share of it, beside the optimizer's state."""

    sensitivity: Ref
    uncertainty: Ref


class Importance(Tracked):
    """The scores of the rows of adapters under a budget, in `dtype`; with `shards`, those of this rank's share."""

    titles = dict.fromkeys(Scores._fields, "Importance")
    first = {SUMS: 0, KEPT: 1}
    saved = (KEPT,)

    def __init__(self, rows: Sequence[Row], dtype: str, budget: Budget, shards: Shards | None) -> None:
        self.budget, self._shards, self.updates = budget, shards, (self._update,)
        self.rows = {row.name: row for row in rows if row.file == FILE and ".lora_" in row.name}
        share = shards.share if shards else lambda ref: ref
        self.refs = {
            name: Scores(*(share(Ref(name, space, row.shape, dtype, row.layer)) for space in Scores._fields))
            for name, row in self.rows.items()
        }
        self.values = [row for row in self.rows.values() if row.name.endswith(".lora_e")]
        self.num_triplets = sum(row.shape[0] for row in self.values)
        self._first, num_sums = _side_by_side({name: _num_sums(row) for name, row in self.rows.items()})
        self._places, num_flags = _side_by_side({row.name: row.shape[0] for row in self.values}, ALIGNED)
        # of all triplets in the cell of flags
        self._triplets = np.concatenate([self._places[row.name] + np.arange(row.shape[0]) for row in self.values])
        sizes = {SUMS: num_sums, KEPT: num_flags}
        self.cells = {name: Ref(name, "cell", (count,), dtype) for name, count in sizes.items()}

    def _update(self, ops: Any, row: Row, piece: StatePiece, grad: Ref, scale: Ref, apply: Ref) -> None:
        """The scores of a piece of a row <- its value after the update, and its gradient."""
        if row.name in self.refs:
            s, u = (piece.of(ref) for ref in self.refs[row.name])
            betas = {"beta_1": self.budget.beta_1, "beta_2": self.budget.beta_2}
            ops.importance(s, u, s, u, piece.state[MASTER], grad, scale, apply, **betas)

    def programs(self, weights: Any, moments: Any) -> dict[str, Callable[[Recorder], None]]:
        """`measure` leaves the sums of all scores, `mask` sets to 0 what is not kept."""
        return {"measure": self.measure, "mask": lambda ops: self.mask(ops, weights, moments)}

    def before_step(self, engine: Programs, step: int) -> None:
        """As in PEFT, the last step of the schedule does not count for its own choice."""
        if step == self.budget.last:
            engine.run("measure")

    def after_update(self, engine: Programs, step: int) -> str | None:
        """Chooses what is kept where that is due, and holds what was left out at 0; says how much is kept."""
        chooses = self.budget.chooses(step)
        text = self._choose(engine, step) if chooses else None
        if chooses or self.budget.holds(step):
            engine.change("mask")
        return text

    def _choose(self, engine: Programs, step: int) -> str:
        if step != self.budget.last:
            engine.run("measure")
        count = self.budget.count(step, self.num_triplets, sum(len(row.parts) for row in self.values))
        flags = kept(self.scores(engine.read(self.total)), count)
        engine.write(self.cells[KEPT], self.cell_of(flags))
        ranks = [sum(pattern) for pattern in self.patterns(flags).values()]
        return (
            f"Step {step}: {sum(ranks)} of {self.num_triplets} singular values are kept, {min(ranks)} to "
            f"{max(ranks)} of a map"
        )

    def exported(self, export: Any, engine: Programs) -> Any:
        """The export of what is kept, alone."""
        patterns = self.patterns(self.kept(engine))
        about = {**export.about, "rank_pattern": rank_pattern(patterns)}
        return replace(export, about=about, stored=partial(_kept, patterns))

    def kept(self, engine: Programs) -> np.ndarray:
        """Flags of all triplets: what is kept now."""
        return engine.read(self.cells[KEPT])[self._triplets] != 0

    def measure(self, ops: Any) -> None:
        """The cell of sums <- all scores; of many ranks that share them out, each has its own, beside zeros."""
        for name, row in self.rows.items():
            s, u = self.refs[name]
            before = 0 if self._shards is None else self._shards.bounds[name][self._shards.rank]
            count = num_norm_tiles(s.shape) * s.shape[-1] if _of_columns(row) else s.shape[0]
            first = before // NORM_ROWS * row.shape[-1] if _of_columns(row) else before
            sums = self.cells[SUMS].flat(self._first[name] + first, count)
            ops.importance_sums(sums, s, u, of_columns=_of_columns(row))
        if self._shards is not None:
            ops.all_reduce(self.total, self.cells[SUMS])

    @property
    def total(self) -> Ref:
        """The cell with the sums of all ranks."""
        cell = self.cells[SUMS]
        return cell if self._shards is None else Ref(f"agreed.{SUMS}", "cell", cell.shape, cell.dtype)

    def mask(self, ops: Any, weights: Any, moments: Any) -> None:
        """The E of triplets that are not kept <- 0, and copies of the weights from that."""
        places = self._places
        walks = moments.walk(ops, only=places), weights.written(ops, places)
        for (row, pieces), weight in zip(*walks, strict=True):
            for piece in pieces:
                own = self.cells[KEPT].flat(places[row.name], row.shape[0])
                ops.scale_columns_forward(piece.state[MASTER], piece.state[MASTER], own, None, None)
                ops.cast(piece.of(weight), piece.state[MASTER])

    def scores(self, sums: np.ndarray) -> np.ndarray:
        """The score of every triplet, in f64: that of its entry of E, the mean of its row of A and that of its column
        of B."""
        found, total = [], sums.astype(np.float64)
        for row in self.values:
            site = row.name.removesuffix(".lora_e")
            down = self.rows[f"{site}.lora_a"]
            own = self._of(total, row) + self._of(total, down) / down.shape[1]
            for part in row.parts:
                up = self.rows[f"{site}.lora_b.{part.name.removesuffix('.lora_E').rpartition('.')[2]}"]
                columns = self._of(total, up).reshape(-1, up.shape[1]).sum(axis=0)
                own[part.start : part.stop] += columns / up.parts[0].stop
            found.append(own)
        return np.concatenate(found)

    def _of(self, sums: np.ndarray, row: Row) -> np.ndarray:
        return sums[self._first[row.name] :][: _num_sums(row)]

    def cell_of(self, flags: np.ndarray) -> np.ndarray:
        """The cell of what is kept, of flags of all triplets."""
        cell = np.zeros(self.cells[KEPT].shape)
        cell[self._triplets] = flags
        return cell

    def patterns(self, flags: np.ndarray) -> dict[str, tuple[bool, ...]]:
        """What is kept of each adapter, by the names of its module, of flags of all triplets."""
        parts = [part for row in self.values for part in row.parts]
        ends = np.cumsum([part.stop - part.start for part in parts])
        names = [part.name.removesuffix(".lora_E") for part in parts]
        return {name: tuple(own.tolist()) for name, own in zip(names, np.split(flags, ends[:-1]), strict=True)}


def _side_by_side(sizes: Mapping[str, int], multiple: int = 1) -> tuple[dict[str, int], int]:
    """Where each of some ranges begins, at a multiple, and where the last one ends."""
    ends = [0, *accumulate(-(-size // multiple) * multiple for size in sizes.values())]
    return dict(zip(sizes, ends, strict=False)), ends[-1]


def kept(scores: np.ndarray, count: int) -> np.ndarray:
    """Which of all triplets score above the one that is the first to be left out, so that `count` or fewer are kept."""
    left_out = len(scores) - count
    return scores > np.partition(scores, left_out - 1)[left_out - 1]


def _of_columns(row: Row) -> bool:
    return ".lora_b." in row.name


def _num_sums(row: Row) -> int:
    return num_norm_tiles(row.shape) * row.shape[-1] if _of_columns(row) else row.shape[0]
