"""Precision options made into dtypes and sites: which linear map of which layer computes in what.

A site is named by its place: `layers.3.mlp.down`, or for the logits `head`. Which of them multiply in fp8 is decided
here, once; everything else only asks for the site of a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmq.errors import UsageError
from llmq.sites.bf16 import Bf16Linear
from llmq.sites.fp8 import Fp8Linear

if TYPE_CHECKING:
    from llmq.sections import PrecisionOptions

SITES = ("attention.qkv", "attention.o", "mlp.up", "mlp.down")  # the linear maps of a layer
HEAD = "head"
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

    `head` is the dtype of the logits' matmuls: the model's where the blocks are fp8 and nothing else is said. Sites in
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
        """What the linear map of that name multiplies in: `layers.N.` and one of SITES, or `head`."""
        dtype = self.head if name == HEAD else self.matmul
        return self.model if dtype == "e4m3" and name in self.wide else dtype

    def site(self, name: str) -> Any:
        """The site of the linear map of that name."""
        dtype = self.dtype(name)
        return Fp8Linear(self.gradient, self.scaling) if dtype == "e4m3" else Bf16Linear(dtype)


@dataclass(frozen=True)
class Watching:
    """How the errors of fp8 copies are watched: a reading after each n-th step, or never; do low ones leave fp8?"""

    every: int = 0
    fallback: bool = False


def watching(options: PrecisionOptions) -> Watching:
    """The options as numbers."""
    return Watching(options.log_fp8_every or 0, options.fp8_fallback)


def is_auto(options: PrecisionOptions) -> bool:
    """Whether timing decides which sites stay in fp8."""
    return options.matmul_dtype == "auto"


def site_names(num_layers: int) -> list[str]:
    """All sites of the blocks of a model, in the order of the forward pass."""
    return [f"layers.{layer}.{site}" for layer in range(num_layers) for site in SITES]


def resolve(options: PrecisionOptions, num_layers: int) -> Precision:
    """The options as dtypes and sites of a model with so many layers; UsageError for what cannot be combined."""
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
        wide=wide_sites(options.bf16_layers, options.fp8_layers, num_layers),
    )


def wide_sites(bf16_layers: str | None, fp8_layers: str | None, num_layers: int) -> tuple[str, ...]:
    """The sites that stay wide, by what the options name; UsageError for what names nothing, or leaves no fp8 site."""
    every = site_names(num_layers)
    if bf16_layers is not None:
        wide = chosen(bf16_layers, "--bf16-layers", num_layers)
    elif fp8_layers is not None:
        narrow = chosen(fp8_layers, "--fp8-layers", num_layers)
        wide = {name for name in every if name not in narrow}
    else:
        return ()
    if len(wide) == len(every):
        raise UsageError(
            f"--bf16-layers {bf16_layers} leaves no site of {num_layers} layers in e4m3: use --matmul-dtype bf16"
        )
    return tuple(sorted(wide))


def chosen(text: str, flag: str, num_layers: int) -> set[str]:
    """Sites of `FIRST,LAST` (so many layers at either end) or of names, with commas between.

    A name is a layer (`layers.3`), a site of every layer (`mlp.down`, `attention`) or one site (`layers.3.mlp.down`).
    """
    every, parts = site_names(num_layers), [part.strip() for part in text.split(",")]
    if all(part.isascii() and part.isdigit() for part in parts):
        return _ends(parts, flag, num_layers)
    found: set[str] = set()
    unknown = []
    for part in parts:
        hits = [name for name in every if _names(part, name)]
        found.update(hits)
        if not hits:
            unknown.append(part)
    if unknown:
        raise UsageError(
            f"{flag} {', '.join(unknown)}: no such layer or site in a model of {num_layers} layers: use FIRST,LAST "
            f"(such as 2,1), a layer (layers.0 to layers.{num_layers - 1}), a site ({', '.join(SITES)}) or one site "
            f"of a layer (layers.0.{SITES[-1]})"
        )
    return found


def _ends(parts: Sequence[str], flag: str, num_layers: int) -> set[str]:
    if len(parts) != 2 or not 0 < int(parts[0]) + int(parts[1]) <= num_layers:
        raise UsageError(
            f"{flag} {','.join(parts)}: two numbers are the first and the last layers, together 1 to {num_layers}: use "
            f"for example 1,{min(1, num_layers - 1)}, or names such as layers.0"
        )
    first, last = int(parts[0]), int(parts[1])
    layers = [*range(first), *range(num_layers - last, num_layers)]
    return {f"layers.{layer}.{site}" for layer in layers for site in SITES}


def _names(part: str, site: str) -> bool:
    """Whether `part` is a whole piece of a site's name, up to dots."""
    return bool(part) and f".{part}." in f".{site}." and part != "layers" and not part.isdigit()
