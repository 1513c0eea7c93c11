"""What a run trains: the model, or by a method of adaptation what lies beside a frozen one.

`Method` has all that the rest of llmq asks of one, with the answers of a frozen model with nothing beside it; a method
is a class that answers some of these questions in another way, in a file of its own. `NoAdapters` is the run that
trains the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np

from llmq.adapters.added_tokens import added_rows
from llmq.adapters.peft_format import About, AdapterFile, PeftConfig, stored_rows
from llmq.adapters.targets import FILE, Target
from llmq.blocks.added_tokens import AddedEmbed, AddedOutputs
from llmq.blocks.attention import Rotary
from llmq.blocks.embed import Embed
from llmq.files.source import Values
from llmq.files.tensor_files import Stored
from llmq.model.config import ModelConfig
from llmq.model.parameters import HEAD
from llmq.ops.record import Recorder
from llmq.options.adapters import AdapterOptions
from llmq.protocols import Site
from llmq.row import Row
from llmq.sites.adapted import AdaptedLinear
from llmq.sites.linear import Linear
from llmq.stores.replicated import StatePiece
from llmq.stores.sharding import Shards
from llmq.tensor import Ref

Change = Callable[[int, int], np.ndarray]  # what a method adds to rows [start, stop) of a weight, in f32
NO_TARGETS: tuple[Target, ...] = ()
NOTHING: str | None = None
ReadTensor = Callable[[str], np.ndarray]  # a tensor of an adapter by its name without PEFT's prefix, in f32
# States of a piece of a row <- its value after the update and its gradient: ops, row, piece, gradient, scale, apply.
Track = Callable[[Any, Row, StatePiece, Ref, Ref, Ref], None]


@dataclass(frozen=True)
class SiteFacts:
    """Where sites of a method are: in which model, whose values and statistics have these dtypes, under which seed, and
    in micro-batches of `batch_size` rows."""

    config: ModelConfig
    values: str
    stat: str
    seed: int
    batch_size: int


class Programs(Protocol):
    """What is asked of the engine that runs the plan."""

    def run(self, name: str) -> None:
        """Runs a program."""

    def change(self, name: str) -> None:
        """Runs a program that changes weights."""

    def read(self, ref: Ref) -> np.ndarray:
        """A copy of a tensor."""

    def write(self, ref: Ref, values: np.ndarray) -> None:
        """Sets a tensor."""


class Tracked:
    """What most methods keep: nothing."""

    titles: Mapping[str, str] = {}  # of the states' spaces in the allocator table
    refs: Mapping[str, Sequence[Ref]] = {}  # states by the names of their rows
    cells: Mapping[str, Ref] = {}
    first: Mapping[str, float] = {}  # what each cell is filled with before the first step
    saved: Sequence[str] = ()  # cells that a checkpoint holds
    updates: Sequence[Track] = ()  # called with each piece of a row after its update

    def programs(self, weights: Any, moments: Any) -> dict[str, Callable[[Recorder], None]]:
        """What records the programs that are run between steps, by name."""
        return {}

    def before_step(self, engine: Programs, step: int) -> None:
        """Called before the micro-steps of a step, from 1."""

    def after_update(self, engine: Programs, step: int) -> str | None:
        """Called after the update of a step, which it may change; returns a line for the log."""
        return None

    def exported(self, export: Any, engine: Programs) -> Any:
        """The export of a finished run, with what was chosen while it trained."""
        return export


@dataclass(frozen=True)
class Method:
    """A frozen model whose layers' maps are held in `base` (None: in the model's dtype), but for the rows named in
    `also`, which are trained in full, and `new_rows` of its embedding and head."""

    base: str | None = field(default=None, kw_only=True)
    also: frozenset[str] = field(default=frozenset(), kw_only=True)
    new_rows: range = field(default=range(0), kw_only=True)  # of embedding and head, which are trained: added tokens

    targets = NO_TARGETS  # the maps that it adapts
    freezes = True  # whether the model is frozen
    num_virtual = 0  # virtual tokens before each document
    added_weights = 0.0  # beside the model's, that a token passes
    unmergeable = NOTHING  # why it is a part of no weight
    takes_out = False  # whether what it begins with is taken out of the weights

    peft_types: ClassVar[tuple[str, ...]] = ()  # what PEFT calls it
    peft_keys: ClassVar[type[PeftConfig]] = PeftConfig  # what is read of its config

    # where it comes from

    @classmethod
    def of_options(cls, options: AdapterOptions, config: ModelConfig, steps: int) -> Method | None:
        """What the options ask for, if it is this, in a run of `steps` (0: unknown). UsageError."""
        raise NotImplementedError

    @classmethod
    def of_peft(cls, about: Any, tensors: dict[str, Stored], config: ModelConfig) -> tuple[Method, list[str]]:
        """What a folder's config and tensors, by our names, say, and what is wrong with them."""
        raise NotImplementedError

    def first_values(self, config: ModelConfig, model: Values) -> Values:
        """The values of all rows before the first step of a run that trains new ones, by those of the model."""
        return model

    def rest(self, config: ModelConfig, model: Values) -> Values:
        """The values of a model's rows, less what it begins with where that is taken out of them."""
        return model

    def with_new_rows(self, new: range) -> Method:
        """The same with these rows of the model trained, if it can train rows: else they stay frozen."""
        return self

    # what computes

    @cached_property
    def by_site(self) -> dict[str, tuple[Target, ...]]:
        """The targets of each site that has any, in the order of its outputs."""
        found: dict[str, list[Target]] = {}
        for target in self.targets:
            found.setdefault(target.module.site, []).append(target)
        return {site: tuple(sorted(targets, key=lambda t: t.module.start)) for site, targets in found.items()}

    def site(self, base: Linear, at: SiteFacts) -> Site:
        """The linear map `base`, with what the method puts around it where it is adapted."""
        found = self.around(base, at) if base.name in self.by_site else base
        columns = (self.new_rows.start, len(self.new_rows))
        return AdaptedLinear(base, AddedOutputs(columns)) if base.name == HEAD and self.new_rows else found

    def around(self, base: Linear, at: SiteFacts) -> Site:
        """A linear map that has targets, with what the method puts around it."""
        raise NotImplementedError

    def table(self, config: ModelConfig) -> Embed:
        """What reads the embedding's rows of tokens."""
        return AddedEmbed(config.hidden_size, self.new_rows) if self.new_rows else Embed()

    def embed(self, base: Embed, config: ModelConfig) -> Embed:
        """The embedding, with what the method puts around it."""
        return base

    def rotary(self, base: Rotary) -> Rotary:
        """What makes queries, keys and values of positions, with what the method puts around it."""
        return base

    def without_dropout(self) -> Method:
        """The same as it is evaluated."""
        return self

    # what is trained

    def rows(self, rows: Sequence[Row], config: ModelConfig) -> tuple[Row, ...]:
        """The rows of a model with the method's own, of which all but what it trains are frozen. UsageError where it
        would train a part of one."""
        return tuple(
            replace(row, trainable=row.trainable and self.trains(row), rate=self.rate_of(row))
            for row in self.with_own(rows, config)
        )

    def with_own(self, rows: Sequence[Row], config: ModelConfig) -> Sequence[Row]:
        """The rows of a model, with those of the method that no site has."""
        return [one for row in rows for one in (row, *added_rows(row, self.new_rows))]

    def trains(self, row: Row) -> bool:
        """Whether a row is trained."""
        return row.file == FILE or row.name in self.also

    def rate_of(self, row: Row) -> float:
        """What multiplies the learning rate of a row."""
        return 1.0

    def is_frozen(self, row: str) -> bool:
        """Whether a row of the model gets no gradient."""
        return row not in self.also

    def tracked(self, rows: Sequence[Row], stat: str, shards: Shards | None) -> Tracked:
        """What it keeps of trained rows beside the optimizer's states, and does around a step."""
        return Tracked()

    # what it is

    def must_match(self) -> dict[str, Any]:
        """What a checkpoint has in common with the run that resumes it."""
        return {"adapters": self.identity()}

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        ranks = {target.module.name: [target.rank, target.alpha] for target in self.targets}
        also: dict[str, Any] = {"also": sorted(self.also)} if self.also else {}
        also |= {"new rows": [self.new_rows.start, self.new_rows.stop]} if self.new_rows else {}
        return {"dropout": 0.0, "bias": "none", "rslora": False, "base": self.base, **also, "targets": ranks}

    def words(self) -> str:
        """What is trained, before the numbers of parameters."""
        return "A part of the model"

    # what goes with it

    def tile_problems(self) -> Iterator[str]:
        """Why --seq-tiles does not go with it."""
        yield from ()

    # files

    def peft_config(self, config: ModelConfig) -> About:
        """What PEFT's config of it says beside that of all methods."""
        raise NotImplementedError

    def file(self, rows: Sequence[Row], config: ModelConfig, model: Values | None) -> AdapterFile:
        """What its file has of a plan's rows. It is for the model as it was, whose values are `model`; None: for what
        is left of that where something is taken out of it."""
        return AdapterFile(stored_rows(rows, self.targets), self.peft_config(config))

    def columns(self, config: ModelConfig) -> Mapping[str, slice]:
        """By the names of our tensors, which columns of the file's one tensor they are, where there is one."""
        return {}

    def on_rest(self) -> Method:
        """The same on a model from which what it begins with was taken out before."""
        return self

    def changed_tensors(self) -> dict[str, Target]:
        """The model's tensors that it changes, each with the target that says how."""
        return {f"{target.module.name}.weight": target for target in self.targets}

    def change(self, target: Target, weight: np.ndarray, read: ReadTensor) -> Change:
        """What it adds to a tensor (N,K) or (N,) of a target, by the tensors of the adapter."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoAdapters(Method):
    """The run that trains the model."""

    freezes = False

    def rows(self, rows: Sequence[Row], config: ModelConfig) -> tuple[Row, ...]:
        """The rows of the model."""
        return tuple(rows)

    def is_frozen(self, row: str) -> bool:
        """None is."""
        return False

    def must_match(self) -> dict[str, Any]:
        """Nothing."""
        return {}


NO_ADAPTERS = NoAdapters()
