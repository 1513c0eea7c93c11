"""The linear maps of a model by the names of Hugging Face's modules, and which of them have adapters.

q_proj, k_proj and v_proj have adapters of their own, although one site computes all three.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any

from llmq.errors import UsageError
from llmq.model.config import ModelConfig
from llmq.model.parameters import EMBED_ROW, HEAD, padded_vocab, parameter_rows
from llmq.options.adapters import AdapterOptions
from llmq.row import HeadOrder, Row

MAGNITUDE = "lora_magnitude_vector"  # the name of what DoRA adds
FILE = "adapter"  # the file of an adapter's rows
LM_HEAD = "lm_head"
FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # maps that share their input
INWARD = "mlp.down"  # of the layers' sites, whose inputs IA3 scales
SCALED = f"keeps what a map computes for the backward pass, which the logits are too large for: leave {LM_HEAD} out of"
TAKEN_OUT = ("pissa", "olora")  # inits whose first product is taken out of the base
WORDS = ("attention", "mlp")  # `all` is both


@dataclass(frozen=True)
class Module:
    """A linear map of Hugging Face's: outputs [start, stop) of a site, of which it has `outputs` and the others are
    padding."""

    name: str  # model.layers.0.self_attn.q_proj
    site: str
    start: int
    stop: int
    outputs: int
    inputs: int
    order: HeadOrder | None = None  # of outputs in files
    transposed: bool = False

    @property
    def key(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Target:
    """A module that has an adapter, whose output is multiplied by `scale`.

    Of IA3 there is no rank: its outputs have gains, or its inputs if it is `inward`. Of AdaLoRA's that was read `kept`
    says what is there; None: all.
    """

    module: Module
    rank: int
    alpha: float
    scale: float
    inward: bool = False
    kept: tuple[bool, ...] | None = None

    @property
    def present(self) -> int:
        """Rows of A that are there, of `rank`."""
        return self.rank if self.kept is None else sum(self.kept)


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
            part.order,
            part.transposed,
        )
        for row in rows
        for part in row.parts
    ]
    return (*found, Module(LM_HEAD, HEAD, 0, padded_vocab(config), config.vocab_size, config.hidden_size))


@lru_cache(maxsize=8)  # asked for every site of a model each time that one is built
def outputs_of(config: ModelConfig) -> dict[str, int]:
    """Outputs of all maps that a site computes, by site."""
    return {module.site: module.stop for module in linear_modules(config)}


def chosen(text: str, config: ModelConfig, option: str = "--lora-targets") -> tuple[Module, ...]:
    """The modules that `all`, `attention`, `mlp`, names or patterns with commas between name.

    A name is a whole one, or its last parts (`q_proj`, `layers.3.mlp.up_proj`); a pattern has `*`, `?` or `[...]`.
    UsageError for one that matches nothing.
    """
    every = linear_modules(config)
    wanted = [part.strip() for part in text.split(",")]
    wanted = [one for part in wanted for one in (WORDS if part == "all" else [part])]
    hits = {part: {module.name for module in every if is_meant(part, module)} for part in wanted}
    if unknown := [part or "''" for part, names in hits.items() if not names]:
        keys = ", ".join(dict.fromkeys(module.key for module in every))
        raise UsageError(
            f"{option} {', '.join(unknown)}: no such linear map in a model of {config.num_layers} layers: use all, "
            f"attention, mlp, names ({keys}, layers.0.{every[0].name.partition('.0.')[2]}) or patterns (layers.[0-3].*)"
        )
    names = set().union(*hits.values())
    return tuple(module for module in every if module.name in names)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is a dotted name, or its last parts."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def is_meant(by: str, module: Module) -> bool:
    """Whether a module is in the sublayers that a word is for, or has such a name."""
    return f".{by}." in module.site if by in WORDS else matches(by, module.name)


def shared(options: AdapterOptions, config: ModelConfig) -> dict[str, Any]:
    """What the options say of adapters of any kind, as arguments. UsageError."""
    assert options.lora_targets is not None
    assert options.lora_rank is not None and options.lora_alpha is not None
    modules, rank, alpha = chosen(options.lora_targets, config), options.lora_rank, options.lora_alpha
    if options.dora:
        without_head(modules, f"--dora {SCALED} --lora-targets")
    if options.lora_init in TAKEN_OUT and config.tie_embeddings:
        what = f"--lora-init {options.lora_init} takes what adapters begin with out of the weights"
        without_head(modules, f"{what}, and {LM_HEAD} is the embedding too: leave it out of --lora-targets")
    patterns: dict[str, Any] = {
        "ranks": _patterns("--lora-rank-pattern", options.lora_rank_pattern, int),
        "alphas": _patterns("--lora-alpha-pattern", options.lora_alpha_pattern, float),
    }
    return {
        "rank": rank,
        "alpha": alpha,
        "targets": targets(modules, rank, alpha, rslora=options.rslora, **patterns),
        "dropout": options.lora_dropout or 0.0,
        "bias": options.lora_bias or "none",
        "base": options.base_dtype,
        "also": trained_in_full(options.train_also, config, modules),
        "plus": options.lora_plus_ratio or 1.0,
    }


def _patterns(option: str, text: str | None, kind: Callable[[str], float]) -> dict[str, Any]:
    """What `PATTERN=NUMBER` with commas between says, in order. UsageError for what is no number above 0, and for a
    pattern with two numbers."""
    found: dict[str, Any] = {}
    for one in text.split(",") if text else ():
        name, _, said = one.strip().rpartition("=")
        try:
            number = kind(said)
        except ValueError:
            number = kind("0")
        if not name or not 0 < number < math.inf:
            raise UsageError(f"{option} {one.strip()}: write PATTERN=NUMBER with a number above 0, such as q_proj=32")
        if found.setdefault(name, number) != number:
            raise UsageError(f"{option} gives {name} twice, as {found[name]:g} and as {number:g}: remove one")
    return found


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

    def first(patterns: Mapping[str, Any] | None, module: Module, otherwise: Any) -> Any:
        hits = (value for key, value in (patterns or {}).items() if is_meant(key, module))
        return next(hits, otherwise)

    for module in modules:
        own = first(ranks, module, rank)
        if own > min(module.outputs, module.inputs):
            said = f"--lora-rank {rank}" if own == rank else f"--lora-rank-pattern's {own}"
            raise UsageError(
                f"{said} is larger than {module.name} ({module.outputs} x {module.inputs}): use a "
                "smaller rank, or leave that out of --lora-targets"
            )
        own_alpha = first(alphas, module, alpha)
        found.append(Target(module, own, own_alpha, scale_of(own, own_alpha, rslora=rslora)))
    for option, patterns in (("--lora-rank-pattern", ranks), ("--lora-alpha-pattern", alphas)):
        for pattern in patterns or {}:
            if not any(is_meant(pattern, module) for module in modules):
                raise UsageError(f"{option} {pattern}: no linear map with an adapter has such a name")
    return tuple(found)


def without_head(modules: Sequence[Module], why: str) -> None:
    """UsageError if the head is among modules."""
    if any(module.name == LM_HEAD for module in modules):
        raise UsageError(why)


def modules_of(row: Row, config: ModelConfig) -> tuple[str, ...]:
    """The modules of Hugging Face's that a row of the model is a parameter of, the head's among those of a tied one."""
    found = tuple(part.name.rpartition(".")[0] for part in row.parts)
    return (*found, LM_HEAD) if row.name == EMBED_ROW and config.tie_embeddings else found


def rows_named(
    option: str,
    text: str,
    names_of: Callable[[Row], Sequence[str]],
    is_named: Callable[[str, str], bool],
    config: ModelConfig,
    adapted: Collection[str] = (),
) -> frozenset[str]:
    """The names of the model's rows of which `text` has all names, or patterns of these, with commas.

    UsageError for a name or pattern that matches nothing or what is `adapted`, and where only a part of a row is named.
    """
    names, wanted = {row.name: names_of(row) for row in parameter_rows(config)}, [by.strip() for by in text.split(",")]
    hits = {name: [by for by in wanted if is_named(by, name)] for own in names.values() for name in own}
    if unknown := [by or "''" for by in wanted if not any(by in found for found in hits.values())]:
        said = f"{option} {', '.join(unknown)}: nothing in the model has such a name"
        raise UsageError(f"{said}; some are {', '.join([*list(hits)[:5], *list(hits)[-2:]])}")
    kept = {row: own for row, own in names.items() if any(hits[name] for name in own)}
    for own in kept.values():
        if both := [name for name in own if name in adapted]:
            said = f"{option} {text} trains {both[0]} in full, which has an adapter"
            raise UsageError(f"{said}: leave it out of one of them")
        if missing := [name for name in own if not hits[name]]:
            raise UsageError(
                f"{option} {text} names a part of {', '.join(own)}, which llmq holds as one: name "
                f"{', '.join(missing)} too, or none of them"
            )
    return frozenset(kept)


def trained_in_full(text: str | None, config: ModelConfig, adapted: Sequence[Module]) -> frozenset[str]:
    """The names of the rows of the modules that --train-also names; None: of none. UsageError."""
    if text is None:
        return frozenset()
    tied = {config.family.wiring.names.embed, LM_HEAD} if config.tie_embeddings else set()

    def is_named(by: str, name: str) -> bool:
        return any(matches(by, one) for one in (tied if name in tied else {name}))

    names_of, names = partial(modules_of, config=config), {module.name for module in adapted}
    return rows_named("--train-also", text, names_of, is_named, config, names)


def scale_of(rank: int, alpha: float, *, rslora: bool) -> float:
    """What multiplies B A x; 0 of a rank that is yet to be found."""
    if rank == 0:
        return 0.0
    return alpha / math.sqrt(rank) if rslora else alpha / rank
