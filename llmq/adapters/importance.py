"""When AdaLoRA chooses ranks, and how important the parameters of adapters are by which it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from llmq.adapters.method import Programs, Tracked
from llmq.adapters.peft_format import PREFIX, Tensors
from llmq.adapters.targets import FILE
from llmq.errors import UsageError
from llmq.ops.record import Recorder
from llmq.optimizers.rule import MASTER
from llmq.row import Row
from llmq.stores.replicated import StatePiece
from llmq.stores.sharding import Shards
from llmq.tensor import NORM_ROWS, Ref, num_norm_tiles

ALIGNED = 4  # the flags of a row begin at a multiple of this, as kernels read 16 bytes at a time
SUMS, KEPT = "importance", "kept"  # cells: sums of all rows' importance; 1 for each triplet that is kept, else 0
Patterns = Mapping[str, tuple[bool, ...]]  # what is kept of each adapter, by its module


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


def rank_pattern(patterns: Patterns) -> dict[str, list[bool]] | None:
    """PEFT's `rank_pattern`; None where all is kept."""
    return {f"{name}.lora_E": list(kept) for name, kept in patterns.items()} or None


def kept_alone(patterns: Patterns, tensors: Tensors) -> Tensors:
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
        return replace(export, about=about, stored=partial(kept_alone, patterns))

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
