"""Low-rank adapters on a frozen model: which linear maps have one, of what rank, and what is trained beside them.

LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021) adds s B A x to W x, with A (R,K) and B
(N,R), s = alpha / R, or alpha / sqrt(R) (rsLoRA; Kalajdzievski, 2023). Maps go by the names of Hugging Face's modules:
q_proj, k_proj and v_proj have adapters of their own, although one site computes all three.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from llmq.errors import UsageError
from llmq.model.adalora import Budget
from llmq.model.config import ModelConfig
from llmq.model.first_adapter import TAKEN_OUT
from llmq.model.parameters import HEAD, padded_vocab, parameter_rows
from llmq.row import Row

MAGNITUDE = "lora_magnitude_vector"  # the name of what DoRA adds
FILE = "adapter"  # the file of an adapter's rows
LM_HEAD, EMBED = "lm_head", "model.embed_tokens"
EMBED_ROW = "embed.weight"  # which a tied head is
FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # maps that share their input
INWARD = ("down_proj",)  # maps whose inputs IA3 scales
WORDS = {"attention": "self_attn.*_proj", "mlp": "mlp.*_proj"}  # `all` is both


@dataclass(frozen=True)
class Module:
    """A linear map of Hugging Face's with so many `inputs`: outputs [start, stop) of a site, of which it has `outputs`
    and the others are padding."""

    name: str  # model.layers.0.self_attn.q_proj
    site: str
    start: int
    stop: int
    outputs: int
    inputs: int

    @property
    def key(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Target:
    """A module that has an adapter, whose output is multiplied by `scale`.

    Of IA3 there is no rank: its outputs have gains, or its inputs if it is `inward`.
    """

    module: Module
    rank: int
    alpha: float
    scale: float
    inward: bool = False
    kept: tuple[bool, ...] | None = None  # of AdaLoRA's that was read: its rank pattern; None: all

    @property
    def present(self) -> int:
        """Rows of A that are there, of `rank`."""
        return self.rank if self.kept is None else sum(self.kept)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run. `rank` and `alpha` are those of most targets; `dropout` is the share of inputs left out.

    `bias`: none is trained, `all` of the model, or those of adapted maps (`lora_only`). `init` says how A is drawn:
    kaiming (uniform up to 1/sqrt(K)), gaussian (with deviation 1/R) or from inputs (eva), B being zero, or that A and
    B are taken out of the weight (pissa, olora). With eva a map may get `rho` times its rank. Ranks for a `budget`
    of parameters are 0 until they are found, and an alpha of 0 becomes twice the rank. `base` is the dtype that
    frozen maps of layers are held in; None: the model's. `also` names the model's rows that are trained in full. With
    `dora` the outputs have magnitudes of their own (Liu et al., 2024). `method`: lora, or ia3, of which there are only
    `targets`, `base` and `also`, or prompt or prefix, of which there are only `base` and `num_virtual` tokens before
    each document (llmq/model/virtual_tokens.py). The learning rate of B and of vectors is `plus` times that of A
    (LoRA+; Hayou et al., 2024). With a `schedule` they are AdaLoRA's, and ranks are chosen while they are trained.
    """

    rank: int
    alpha: float
    targets: tuple[Target, ...]
    dropout: float = 0.0
    bias: str = "none"
    rslora: bool = False
    init: str = "kaiming"
    base: str | None = None
    also: frozenset[str] = frozenset()
    dora: bool = False
    method: str = "lora"
    plus: float = 1.0
    num_virtual: int = 0
    rho: float = 1.0
    budget: int | None = None
    schedule: Budget | None = None

    @cached_property
    def by_site(self) -> dict[str, tuple[Target, ...]]:
        """The targets of each site that has any, in the order of its outputs."""
        found: dict[str, list[Target]] = {}
        for target in self.targets:
            found.setdefault(target.module.site, []).append(target)
        return {site: tuple(sorted(targets, key=lambda t: t.module.start)) for site, targets in found.items()}

    @property
    def orthogonality(self) -> float:
        """What AdaLoRA multiplies each of its norms by: they count as their mean."""
        return 0.0 if self.schedule is None else self.schedule.orth_reg / (2 * len(self.targets))

    @property
    def added_weights(self) -> float:
        """Weights of A and B that a token passes."""
        return sum(target.rank * (target.module.inputs + target.module.outputs) for target in self.targets)

    @property
    def is_relative(self) -> bool:
        """Whether what they change depends on the value of the weight."""
        return self.dora or self.method == "ia3"

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        ranks = {target.module.name: [target.rank, target.alpha] for target in self.targets}
        about = {"dropout": self.dropout, "bias": self.bias, "rslora": self.rslora, "base": self.base}
        more: dict[str, Any] = {"also": sorted(self.also)} if self.also else {}
        more |= {"dora": True} if self.dora else {}
        more |= {"init": self.init} if self.init in TAKEN_OUT else {}
        more |= {"eva": [self.rank, self.rho]} if self.init == "eva" else {}
        more |= {} if self.budget is None else {"budget": self.budget}
        if self.schedule is not None:
            present = {target.module.name: target.present for target in self.targets if target.kept is not None}
            more |= {"adalora": self.schedule.identity(), **({"kept": present} if present else {})}
        if self.num_virtual:
            more |= {"method": self.method, "virtual tokens": self.num_virtual}
        elif self.method != "lora":
            more |= {"method": self.method, "inward": sorted(t.module.name for t in self.targets if t.inward)}
        return {**about, **more, "targets": ranks}

    def with_ranks(self, ranks: Mapping[str, tuple[int, float]]) -> Adapters:
        """The same with other ranks and alphas by the names of maps; one of rank 0 has no adapter.

        Ranks for other maps than have one change nothing.
        """
        if ranks.keys() != {target.module.name for target in self.targets}:
            return self
        found = []
        for target in self.targets:
            rank, alpha = ranks[target.module.name]
            if rank:
                found.append(Target(target.module, rank, alpha, scale_of(rank, alpha, rslora=self.rslora)))
        if self.budget is None or not found:
            return replace(self, targets=tuple(found))
        ((rank, alpha), _), *_ = Counter((target.rank, target.alpha) for target in found).most_common(1)
        return replace(self, rank=rank, alpha=alpha, targets=tuple(found))

    @property
    def lacks_ranks(self) -> bool:
        """Whether ranks are to be found before the run is planned."""
        return self.budget is not None and any(target.rank == 0 for target in self.targets)

    def without_dropout(self) -> Adapters:
        """The same as it is evaluated."""
        return replace(self, dropout=0.0)

    def trains(self, row: Row) -> bool:
        """Whether a parameter is trained. UsageError where only a part of it would be."""
        if row.file == FILE or row.name in self.also:
            return True
        if self.bias == "none" or not row.name.endswith(".bias"):
            return False
        adapted = self.by_site.get(row.site or "", ())
        if self.bias == "lora_only" and 0 < len(adapted) < len(row.parts):
            names = ", ".join(part.name for part in row.parts)
            raise UsageError(
                f"--lora-bias lora_only would train a part of {names}, which llmq holds as one: target all of their "
                "maps, or use --lora-bias all or none"
            )
        return self.bias == "all" or bool(adapted)

    def frozen(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        """The rows of the model with adapters, of which all others are frozen."""
        return tuple(replace(row, trainable=row.trainable and self.trains(row), rate=self.rate_of(row)) for row in rows)

    def rate_of(self, row: Row) -> float:
        """What multiplies the learning rate of a parameter."""
        return self.plus if ".lora_b." in row.name or len(row.shape) == 1 else 1.0


def linear_modules(config: ModelConfig) -> tuple[Module, ...]:
    """Every linear map of a model, in forward order. The last one makes the logits; its weight may be tied."""
    rows = [row for row in parameter_rows(config) if row.site and row.site != HEAD and row.name.endswith(".weight")]
    found = [
        Module(
            part.name.removesuffix(".weight"),
            row.site or "",
            part.start,
            part.stop,
            part.stop - part.start,
            row.shape[1],
        )
        for row in rows
        for part in row.parts
    ]
    return (*found, Module(LM_HEAD, HEAD, 0, padded_vocab(config), config.vocab_size, config.hidden_size))


def scaled(modules: Sequence[Module], inward: Collection[str] | None = None) -> tuple[Target, ...]:
    """Targets of IA3, of which those named `inward` (None: as in the paper) have gains on their inputs.

    UsageError for inputs that several maps share.
    """
    found = tuple(
        Target(module, 0, 1.0, 1.0, module.key in INWARD if inward is None else module.name in inward)
        for module in modules
    )
    if cut := [t for t in found if t.inward and t.module.key in FUSED]:
        raise UsageError(f"IA3 scales the inputs of {cut[0].module.name}, which llmq reads once for several maps")
    return found


def outputs_of(config: ModelConfig, site: str) -> int:
    """Outputs of all maps that a site computes."""
    return max(module.stop for module in linear_modules(config) if module.site == site)


def chosen(text: str, config: ModelConfig, option: str = "--lora-targets") -> tuple[Module, ...]:
    """The modules that `all`, `attention`, `mlp`, names or patterns with commas between stand for.

    A name is a whole one, or its last parts (`q_proj`, `layers.3.mlp.up_proj`); a pattern has `*`, `?` or `[...]`.
    UsageError for one that matches nothing.
    """
    every = linear_modules(config)
    wanted = [part.strip() for part in text.split(",")]
    wanted = [one for part in wanted for one in (WORDS.values() if part == "all" else [WORDS.get(part, part)])]
    hits = {part: {module.name for module in every if matches(part, module.name)} for part in wanted}
    if unknown := [part or "''" for part, names in hits.items() if not names]:
        keys = ", ".join(dict.fromkeys(module.key for module in every))
        raise UsageError(
            f"{option} {', '.join(unknown)}: no such linear map in a model of {config.num_layers} layers: use all, "
            f"attention, mlp, names ({keys}, layers.0.{every[0].name.split('.', 3)[3]}) or patterns (layers.[0-3].*)"
        )
    names = set().union(*hits.values())
    return tuple(module for module in every if module.name in names)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is a dotted name, or its last parts."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def targets(
    modules: Sequence[Module],
    rank: int,
    alpha: float,
    *,
    rslora: bool,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
) -> tuple[Target, ...]:
    """Adapters of `rank` and `alpha`, or of those of the first pattern of `ranks` and `alphas` that a module matches.

    UsageError for a rank larger than what it adds to, and for a pattern that matches none of the modules.
    """
    found = []
    for module in modules:
        own = by_pattern(ranks or {}, module.name, rank)
        if own > min(module.outputs, module.inputs):
            said = f"--lora-rank {rank}" if own == rank else f"--lora-rank-pattern's {own}"
            raise UsageError(
                f"{said} is larger than {module.name} ({module.outputs} x {module.inputs}): use a "
                "smaller rank, or leave that out of --lora-targets"
            )
        own_alpha = by_pattern(alphas or {}, module.name, alpha)
        found.append(Target(module, own, own_alpha, scale_of(own, own_alpha, rslora=rslora)))
    for option, patterns in (("--lora-rank-pattern", ranks), ("--lora-alpha-pattern", alphas)):
        for pattern in patterns or {}:
            if not any(matches(WORDS.get(pattern, pattern), module.name) for module in modules):
                raise UsageError(f"{option} {pattern}: no linear map with an adapter has such a name")
    return tuple(found)


def without_head(modules: Sequence[Module], option: str = "--dora") -> None:
    """UsageError if the head is among modules whose outputs are to be scaled."""
    if any(module.name == LM_HEAD for module in modules):
        raise UsageError(
            f"{option} keeps what a map computes for the backward pass, which the logits are too large for: leave "
            f"{LM_HEAD} out of {'--ia3' if option == '--ia3' else '--lora-targets'}"
        )


def untied_only(modules: Sequence[Module], init: str) -> None:
    """UsageError if the head of a model that ties it is among modules whose weights are to change."""
    if any(module.name == LM_HEAD for module in modules):
        raise UsageError(
            f"--lora-init {init} takes what adapters begin with out of the weights, and {LM_HEAD} is the "
            "embedding too: leave it out of --lora-targets"
        )


def by_pattern(patterns: Mapping[str, float], name: str, otherwise: Any) -> Any:
    """The value of the first pattern that a module's name matches."""
    return next((value for key, value in patterns.items() if matches(WORDS.get(key, key), name)), otherwise)


def modules_of(row: Row, config: ModelConfig) -> tuple[str, ...]:
    """The modules of Hugging Face's that a row of the model is a parameter of, the head's among those of a tied one."""
    found = tuple(part.name.rpartition(".")[0] for part in row.parts)
    return (*found, LM_HEAD) if row.name == EMBED_ROW and config.tie_embeddings else found


def trained_in_full(
    text: str, config: ModelConfig, adapted: Sequence[Module], option: str = "--train-also"
) -> frozenset[str]:
    """The names of the rows of the modules that `text` names: names or patterns, with commas.

    UsageError for one that matches nothing or that has an adapter, and where only a part of a row would be trained.
    """
    rows, wanted = parameter_rows(config), [part.strip() for part in text.split(",")]
    names = {name for row in rows for name in modules_of(row, config)}
    if unknown := [by or "''" for by in wanted if not any(matches(by, name) for name in names)]:
        raise UsageError(
            f"{option} {', '.join(unknown)}: no module of the model has such a name; some are {EMBED}, {LM_HEAD}, "
            "model.norm, input_layernorm, layers.0.self_attn.o_proj"
        )
    chosen = {name for name in names if any(matches(by, name) for by in wanted)}
    kept = [row for row in rows if chosen & set(modules_of(row, config))]
    covered = {name for row in kept for name in modules_of(row, config)}
    if both := sorted(covered & {module.name for module in adapted}):
        raise UsageError(f"{option} {text} trains {both[0]} in full, which has an adapter: leave it out of one of them")
    tied = {EMBED, LM_HEAD} if config.tie_embeddings else set()
    if cut := sorted(covered - chosen - tied):
        raise UsageError(
            f"{option} {text} names a part of what llmq holds as one: name {', '.join(cut)} too, or none of them"
        )
    return frozenset(row.name for row in kept)


def scale_of(rank: int, alpha: float, *, rslora: bool) -> float:
    """What multiplies B A x; 0 of a rank that is yet to be found."""
    if rank == 0:
        return 0.0
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def with_triplets(targets: Sequence[Target]) -> tuple[Target, ...]:
    """Targets of AdaLoRA."""
    return tuple(replace(target, scale=scale_of_triplets(target.rank, target.alpha)) for target in targets)


def scale_of_triplets(rank: int, alpha: float) -> float:
    """What multiplies B E A x in AdaLoRA: as in PEFT, of the rank that adapters begin with."""
    return (alpha if alpha > 0 else float(rank)) / (rank + 1e-5)
