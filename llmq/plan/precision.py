"""Precision options made into dtypes and sites: which linear map of which layer computes in what.

A site is named by its place: `layers.3.mlp.down`, or for the logits `head`. Which of them multiply in fp8 is decided
here, once; everything else only asks for the site of a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from llmq.errors import UsageError
from llmq.model.config import ModelConfig
from llmq.model.parameters import HEAD, linear_maps
from llmq.optimizers.rule import Rule, dtype_flags, kept

if TYPE_CHECKING:
    from llmq.options.maths import PrecisionOptions

FLAGS = {
    "model": "--model-dtype",
    "matmul": "--matmul-dtype",
    "gradient": "--gradient-dtype",
    "scaling": "--fp8-scaling",
    "head": "--head-dtype",
    "m": "--opt-m-dtype",
    "v": "--opt-v-dtype",
    "master": "--master-dtype",
    "grad": "--grad-accum-dtype",
}


@dataclass(frozen=True)
class Precision:
    """Resolved dtypes. `stat` is that of statistics and losses: fp32, or fp64 in a model of fp64.

    `head` is the dtype of the logits' matmuls: the model's where the blocks are fp8, unless given. Sites in
    `wide`, by name, stay in the model's dtype although `matmul` is fp8.
    """

    model: str = "fp32"
    matmul: str = "fp32"
    gradient: str = "e4m3"
    scaling: str = "delayed"
    m: str = "fp32"
    v: str = "fp32"
    master: str = "fp32"
    grad: str = "fp32"
    head: str = ""
    wide: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.head:
            object.__setattr__(self, "head", self.model if self.matmul == "e4m3" else self.matmul)

    @property
    def stat(self) -> str:
        """Dtype of statistics, losses and optimizer scalars."""
        return "fp64" if self.model == "fp64" else "fp32"

    @property
    def wide_master(self) -> str:
        """Dtype of the masters of weights that are not held in 8 bits."""
        return self.model if self.master == "none" else self.master

    @property
    def has_own_master(self) -> bool:
        """Whether forward can do without the masters on the device: they are not the weights that it reads."""
        return self.master != "none" and (self.master != self.model or self.matmul == "e4m3")

    def of_state(self, name: str) -> str:
        """Dtype of an optimizer's state."""
        dtype: str = getattr(self, name)
        return dtype

    def with_states(self, dtypes: Mapping[str, str]) -> Precision:
        """The same with other dtypes of the optimizer's states, by name."""
        changed: dict[str, Any] = dict(dtypes)
        return replace(self, **changed)

    def identity(self) -> dict[str, Any]:
        """Every dtype by its option, and the sites that are not fp8."""
        return {**{flag: getattr(self, name) for name, flag in FLAGS.items()}, "sites outside fp8": list(self.wide)}

    def without(self, sites: Iterable[str]) -> Precision:
        """The same with these sites in the model's dtype too."""
        return replace(self, wide=tuple(sorted({*self.wide, *sites})))

    def without_fp8(self) -> Precision:
        """The same with all matmuls of the blocks in the model's dtype."""
        return replace(self, matmul=self.model, wide=())

    def dtype(self, name: str) -> str:
        """What the linear map of that name multiplies in: `layers.3.mlp.down`, or `head`."""
        dtype = self.head if name == HEAD else self.matmul
        return self.model if dtype == "e4m3" and name in self.wide else dtype


@dataclass(frozen=True)
class Watching:
    """How the errors of fp8 copies are watched: a reading after each n-th step, or never; do low ones leave fp8?"""

    every: int = 0
    fallback: bool = False


def watching(options: PrecisionOptions) -> Watching:
    """The options as numbers."""
    return Watching(options.log_fp8_every or 0, options.fp8_fallback)


def refuse_unkept(options: PrecisionOptions, rule: Rule) -> None:
    """UsageError for the dtype of a state that the optimizer does not keep."""
    states = {kind.name for kind in rule.states}
    dtypes = {"m": options.opt_m_dtype, "v": options.opt_v_dtype}
    unkept = {name: dtype for name, dtype in dtypes.items() if name not in states and dtype != "fp32"}
    if unkept:
        raise UsageError(f"{dtype_flags(unkept)} is of no use, as {kept(rule)}: leave it out")


def is_auto(options: PrecisionOptions) -> bool:
    """Whether timing decides which sites stay in fp8."""
    return options.matmul_dtype == "auto"


def block_sites(config: ModelConfig) -> list[str]:
    """All sites of the blocks of a model, in the order of the forward pass."""
    return [name for name in linear_maps(config) if name != HEAD]


def resolve(options: PrecisionOptions, config: ModelConfig) -> Precision:
    """The options as dtypes and sites of a model; UsageError for what cannot be combined."""
    model = options.model_dtype
    if model == "fp32" and options.master_dtype == "bf16":
        raise UsageError("--master-dtype bf16 is narrower than --model-dtype fp32: use --model-dtype bf16")
    return Precision(
        model=model,
        matmul="e4m3" if options.matmul_dtype == "auto" else options.matmul_dtype,
        gradient=options.gradient_dtype or "e4m3",
        scaling=options.fp8_scaling or "delayed",
        m=options.opt_m_dtype,
        v=options.opt_v_dtype,
        master=options.master_dtype,
        grad=options.grad_accum_dtype,
        head=options.head_dtype or "",
        wide=wide_sites(options.bf16_layers, options.fp8_layers, block_sites(config)),
    )


def wide_sites(bf16_layers: str | None, fp8_layers: str | None, every: Sequence[str]) -> tuple[str, ...]:
    """Those of the sites `every` that stay wide; UsageError for what names nothing, or leaves no fp8 site."""
    if bf16_layers is not None:
        wide = chosen(bf16_layers, "--bf16-layers", every)
    elif fp8_layers is not None:
        narrow = chosen(fp8_layers, "--fp8-layers", every)
        wide = {name for name in every if name not in narrow}
    else:
        return ()
    if len(wide) == len(every):
        raise UsageError(
            f"--bf16-layers {bf16_layers} leaves no site of {len(_layers(every))} layers in e4m3: "
            "use --matmul-dtype bf16"
        )
    return tuple(sorted(wide))


def chosen(text: str, flag: str, every: Sequence[str]) -> set[str]:
    """Of the sites `every` those of `FIRST,LAST` (numbers of layers at either end) or of names, with commas between.

    A name is a layer (`layers.3`), a site of every layer (`mlp.down`, `attention`) or one site (`layers.3.mlp.down`).
    """
    parts, layers = [part.strip() for part in text.split(",")], _layers(every)
    if all(part.isascii() and part.isdigit() for part in parts):
        return {name for layer in _ends(parts, flag, len(layers)) for name in layers[layer]}
    found: set[str] = set()
    unknown = []
    for part in parts:
        hits = [name for name in every if _names(part, name)]
        found.update(hits)
        if not hits:
            unknown.append(part)
    if unknown:
        sites = list(dict.fromkeys(name.split(".", 2)[2] for name in every))
        raise UsageError(
            f"{flag} {', '.join(unknown)}: no such layer or site in a model of {len(layers)} layers: use FIRST,LAST "
            f"(such as 2,1), a layer (layers.0 to layers.{len(layers) - 1}), a site ({', '.join(sites)}) or one site "
            f"of a layer (layers.0.{sites[-1]})"
        )
    return found


def _layers(every: Sequence[str]) -> list[list[str]]:
    """The sites of each layer."""
    return [list(names) for _, names in groupby(every, key=lambda name: name.split(".")[1])]


def _ends(parts: Sequence[str], flag: str, num_layers: int) -> list[int]:
    """The layers that FIRST,LAST names."""
    if len(parts) != 2 or not 0 < int(parts[0]) + int(parts[1]) <= num_layers:
        raise UsageError(
            f"{flag} {','.join(parts)}: two numbers are the first and the last layers, together 1 to {num_layers}: use "
            f"for example 1,{min(1, num_layers - 1)}, or names such as layers.0"
        )
    first, last = int(parts[0]), int(parts[1])
    return [*range(first), *range(num_layers - last, num_layers)]


def _names(part: str, site: str) -> bool:
    """Whether `part` is a whole piece of a site's name, up to dots."""
    return bool(part) and f".{part}." in f".{site}." and part != "layers" and not part.isdigit()
