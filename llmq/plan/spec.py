"""What is to be planned: one frozen object that everything that plans passes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmq.adapters.method import NO_ADAPTERS, Method
from llmq.blocks.packed import Packing
from llmq.model.config import ModelConfig
from llmq.model.optimizer import Hyperparameters
from llmq.model.regularization import UNREGULARIZED, Regularization
from llmq.model.speed_of_light import seconds_per_token
from llmq.plan.memory import Memory
from llmq.plan.precision import Precision
from llmq.stores.sharding import ALONE, Sharding


@dataclass(frozen=True)
class Completions:
    """What a run writes after prompts while it trains: so many `sequences` at a time, of at most `length` tokens.

    Prompts are read in rows of `row` tokens; `packed`: several in a row.
    """

    sequences: int
    length: int
    row: int
    packed: bool


@dataclass(frozen=True)
class Spec:
    """A run as the planner sees it, all options resolved: (batch_size, seq_len) tokens in a micro-batch.

    With `packing` every batch comes with the borders of its rows' documents; None: each row is one document. `observe`
    asks for the program that measures the errors of fp8 copies, if there are any, `completions` for those that write.
    `sharding` says which of how many ranks this is, and what it holds. `adapters` say what is trained.
    """

    config: ModelConfig
    precision: Precision
    memory: Memory
    hyper: Hyperparameters
    batch_size: int
    seq_len: int
    seed: int = 0
    packing: Packing | None = None
    observe: bool = False
    sharding: Sharding = ALONE
    completions: Completions | None = None
    adapters: Method = NO_ADAPTERS
    regularization: Regularization = UNREGULARIZED

    def light_s(self, peaks: Mapping[str, float]) -> float:
        """Seconds for a trained token at the speed of light, on a device with these peaks."""
        about = (self.precision.dtype, self.adapters.added_weights, self.adapters.is_frozen)
        return seconds_per_token(self.config, self.seq_len, peaks, *about)

    def evaluated(self) -> Spec:
        """The run as it is evaluated, and as it writes: no noise, no dropout, and the loss of the data alone."""
        return replace(self.without_noise(), regularization=UNREGULARIZED)

    def without_noise(self) -> Spec:
        """The same without noise on tokens and dropout."""
        quiet = replace(self.regularization, neftune_alpha=0.0)
        return replace(self, regularization=quiet, adapters=self.adapters.without_dropout())
