"""What is to be planned: one frozen object that everything that plans passes on, and what of it no plan can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmq.adapters.method import NO_ADAPTERS, Method
from llmq.blocks.packed import Packing
from llmq.errors import UsageError
from llmq.model.config import ModelConfig
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import parameter_rows
from llmq.model.speed_of_light import seconds_per_token
from llmq.plan.loss import CROSS_ENTROPY, Loss
from llmq.plan.memory import Memory
from llmq.plan.precision import Precision
from llmq.stores.sharding import ALONE, Sharding

if TYPE_CHECKING:
    from llmq.options.maths import RegularizationOptions


@dataclass(frozen=True)
class Regularization:
    """Weight of the squared log-partition in the loss (z_loss), and size of the noise on embedded tokens
    (neftune_alpha); 0 adds nothing."""

    z_loss: float = 0.0
    neftune_alpha: float = 0.0


UNREGULARIZED = Regularization()


@dataclass(frozen=True)
class Completions:
    """What a run writes after prompts while it trains: `sequences` at a time, of at most `length` tokens, drawn at a
    `temperature`.

    Prompts are read in rows of `row` tokens; `packed`: several in a row. `options` ask for it.
    """

    sequences: int
    length: int
    row: int
    packed: bool
    options: tuple[str, ...] = ()
    temperature: float = 0.0


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
    loss: Loss = CROSS_ENTROPY
    skips_spikes: bool = False  # a loss above the cell `loss_limit` is not applied

    @property
    def freezes(self) -> bool:
        """Whether adapters are trained beside a frozen model."""
        return self.adapters.freezes

    @property
    def base(self) -> str | None:
        """The dtype that a frozen model's linear maps are held in; None: the model's."""
        return self.adapters.base

    def with_base(self, base: str) -> Spec:
        """The same with a frozen model's linear maps in another dtype."""
        return replace(self, adapters=replace(self.adapters, base=base))

    @property
    def adapts_maps(self) -> bool:
        """Whether something is trained beside linear maps of a frozen model."""
        return bool(self.adapters.targets)

    @property
    def trained(self) -> str:
        """What is trained, in words."""
        return self.adapters.words()

    @property
    def text_len(self) -> int:
        """Tokens of a row that are read from data."""
        return self.seq_len - self.adapters.num_virtual

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


def regularization(options: RegularizationOptions) -> Regularization:
    """The options as constants."""
    return Regularization(options.z_loss, options.neftune_alpha)


def refuse(spec: Spec) -> None:
    """UsageError with everything that the update in backward, tiles, weights without masters and copies made for each
    use cannot do, and for ranks of adapters that are not known."""
    problems: list[str] = []
    if spec.memory.fused:
        problems += [f"--fused-update: {text}" for text in _fused(spec)]
    if spec.memory.seq_tiles > 1:
        problems += [f"--seq-tiles {spec.memory.seq_tiles}: {text}" for text in _tiled(spec)]
    if spec.precision.master == "none":
        problems += [f"--master-dtype none: {text}" for text in _without_master(spec)]
    if not spec.memory.persistent_quants:
        problems += [f"--no-persistent-quants: {text}" for text in _remade(spec)]
    if problems:
        raise UsageError("; ".join(problems))


def _fused(spec: Spec) -> Iterator[str]:
    clip, p = spec.hyper.grad_clip, spec.precision
    if spec.sharding.size > 1:
        yield f"it is for a run of one GPU, and this one has {spec.sharding.size}: use --zero-level 3"
    if clip and not spec.hyper.clips_by_last:
        yield f"the norm that --grad-clip {clip:g} looks at is not known then: use --clip-by last, or --grad-clip 0"
    if p.matmul == "e4m3" and p.scaling == "delayed":
        yield (
            "copies of weights are written before the end of the step, when --fp8-scaling delayed sets their scales: "
            "use --fp8-scaling current"
        )
    if "grad" in spec.memory.host:
        yield "it leaves no gradients for --offload-gradients to keep: leave that out"


def _tiled(spec: Spec) -> Iterator[str]:
    p = spec.precision
    yield from spec.adapters.tile_problems()
    if p.matmul == "e4m3" and p.scaling == "blockwise":
        yield "cuBLASLt takes no 1x128 scales of a piece of the gradient: use --fp8-scaling rowwise"
    rows = spec.adapters.rows(parameter_rows(spec.config), spec.config)
    if any(row.trainable and row.name.endswith((".o.bias", ".down.bias")) for row in rows):
        yield "a bias of what is added to the residual stream is trained by the whole gradient: use --seq-tiles 1"


def _without_master(spec: Spec) -> Iterator[str]:
    hosted = {"weight": "--stream-weights", "quant": "--offload-quants", "master": "--offload-master"}
    if spec.freezes:
        yield "adapters are all that is trained, and the model has no masters: hold it in --base-dtype e4m3 instead"
    for space, flag in hosted.items():
        if space in spec.memory.host and not (space == "master" and "weight" in spec.memory.host):
            yield f"weights take one byte each on the GPU, and {flag} does not move them: leave that out"
    if spec.sharding.states or spec.sharding.weights:
        yield f"weights are whole on each of {spec.sharding.size} GPUs: use --zero-level 0"


def _remade(spec: Spec) -> Iterator[str]:
    if spec.precision.master == "none":
        yield "--master-dtype none makes them for each use already: leave one of them out"
    if spec.freezes:
        yield "adapters are all that is trained, and the model has no masters: hold it in --base-dtype e4m3 instead"
    if spec.sharding.states or spec.sharding.weights:
        yield f"each of {spec.sharding.size} GPUs has masters of its share alone: use --zero-level 0"
