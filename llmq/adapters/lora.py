"""LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021): W x + s B A x, with A (R,K) and B
(N,R), s = alpha / R, or alpha / sqrt(R) (rsLoRA; Kalajdzievski, 2023), and the ways in which A and B begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmq.adapters.method import Change, Method, ReadTensor, SiteFacts
from llmq.adapters.peft_names import in_full_config, plain, target_names
from llmq.adapters.taken_out import TAKEN_OUT, first_pair
from llmq.adapters.targets import FILE, MAGNITUDE, Target, outputs_of, scale_of
from llmq.errors import UsageError
from llmq.files.weight_files import norms_of
from llmq.model.config import ModelConfig
from llmq.row import Row
from llmq.sites.adapted import AdaptedLinear
from llmq.sites.dora import DoraLinear
from llmq.sites.linear import Linear
from llmq.sites.lora import DroppedAdapter, LoraAdapter, LowRank

INITS = {"kaiming": True, "eva": True}  # as PEFT's config has it, where its word is another


@dataclass(frozen=True)
class Lora(Method):
    """Low-rank adapters. `rank` and `alpha` are those of most targets; `dropout` is the share of inputs left out.

    `bias`: none is trained, `all` of the model, or those of adapted maps (`lora_only`). `init` says how A is drawn:
    kaiming (uniform up to 1/sqrt(K)), gaussian (with deviation 1/R) or from inputs (eva), B being zero, or that A and
    B are taken out of the weight (pissa, olora). With `dora` the outputs have magnitudes of their own (Liu et al.,
    2024). The learning rate of B and of vectors is `plus` times that of A (LoRA+; Hayou et al., 2024). With eva a map
    may get `rho` times its rank. Ranks for a `budget` of parameters are 0 until they are found, and an alpha of 0
    becomes twice the rank.
    """

    rank: int
    alpha: float
    targets: tuple[Target, ...]
    dropout: float = 0.0
    bias: str = "none"
    rslora: bool = False
    init: str = "kaiming"
    dora: bool = False
    plus: float = 1.0
    rho: float = 1.0
    budget: int | None = None

    @property
    def added_weights(self) -> float:  # type: ignore[override]
        """Weights of A and B that a token passes."""
        return sum(target.rank * (target.module.inputs + target.module.outputs) for target in self.targets)

    @property
    def looks_at(self) -> str | None:  # type: ignore[override]
        """Gradients choose the ranks within a budget, inputs are what A begins with."""
        return "gradients" if self.lacks_ranks else "inputs" if self.init == "eva" else None

    @property
    def lacks_ranks(self) -> bool:
        """Whether ranks are to be found before the run is planned."""
        return self.budget is not None and any(target.rank == 0 for target in self.targets)

    @property
    def takes_out(self) -> bool:  # type: ignore[override]
        """Of PiSSA and OLoRA."""
        return self.init in TAKEN_OUT

    @property
    def is_relative(self) -> bool:  # type: ignore[override]
        """Where outputs have magnitudes, or the first A and B were made of the weight."""
        return self.dora or self.takes_out

    def around(self, base: Linear, at: SiteFacts) -> AdaptedLinear | DoraLinear:
        """`base` with low-rank adapters on those of its maps that have them."""
        found = AdaptedLinear(base, self.low_rank(base.name, at))
        return DoraLinear(found, self.without_drops(base.name, at), at.stat) if self.dora else found

    def low_rank(self, site: str, at: SiteFacts) -> LoraAdapter | DroppedAdapter:
        """The adapters of a site, whose dropout draws by the place's seed."""
        lora = self.without_drops(site, at)
        return DroppedAdapter(lora, self.dropout, at.seed) if self.dropout else lora

    def without_drops(self, site: str, at: SiteFacts) -> LoraAdapter:
        """The adapters of a site, without dropout."""
        return LoraAdapter(site, self.pieces(site), self.init, FILE, at.values, outputs_of(at.config, site))

    def pieces(self, site: str) -> list[LowRank]:
        """The adapters of a site's parts, whose A lie one after the other."""
        found, first = [], 0
        for target in self.by_site[site]:
            of = target.module
            place = (of.start, of.stop, first, target.rank, target.scale, target.present)
            found.append(LowRank(of.name, of.key, of.inputs, of.outputs, *place))
            first += target.rank
        return found

    def without_dropout(self) -> Lora:
        """The same as it is evaluated."""
        return replace(self, dropout=0.0)

    def trains(self, row: Row) -> bool:
        """Biases, too, if they are asked for. UsageError where only a part of one would be trained."""
        if super().trains(row):
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

    def rate_of(self, row: Row) -> float:
        """LoRA+ has one of its own for B and for vectors."""
        return self.plus if ".lora_b." in row.name or len(row.shape) == 1 else 1.0

    def with_ranks(self, ranks: Mapping[str, tuple[int, float]]) -> Lora:
        """Those whose maps are named; one of rank 0 has no adapter. Ranks for other maps change nothing."""
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

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        about = {"dropout": self.dropout, "bias": self.bias, "rslora": self.rslora}
        more: dict[str, Any] = {"dora": True} if self.dora else {}
        more |= {"init": self.init} if self.takes_out else {}
        more |= {"eva": [self.rank, self.rho]} if self.init == "eva" else {}
        more |= {} if self.budget is None else {"budget": self.budget}
        return {**super().identity(), **about, **more}

    def words(self) -> str:
        """Ranks, maps, biases and modules in full."""
        biases = "" if self.bias == "none" else " with biases"
        full = f", beside {len(self.also)} parameters in full" if self.also else ""
        return f"{self.kind} of {self.rank_words} on {len(self.targets)} linear maps{biases}{full}"

    @property
    def kind(self) -> str:
        """What the adapters are called."""
        return "Adapters with magnitudes" if self.dora else "Adapters"

    @property
    def rank_words(self) -> str:
        """The rank, or the smallest and the largest."""
        ranks = sorted({target.rank for target in self.targets})
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"

    def facts(self) -> dict[str, Any]:
        """Rank and magnitudes, too."""
        return {**super().facts(), "lora_rank": self.rank, "dora": self.dora}

    def refuse_unplanned(self) -> None:
        """UsageError for ranks that are to be found."""
        if self.lacks_ranks:
            raise UsageError(
                "--lora-rank auto looks at gradients before the run is planned, and here nothing but a plan is made: "
                "give a number"
            )

    def tile_problems(self) -> Iterator[str]:
        """Dropout."""
        if self.dropout:
            yield (
                f"--lora-dropout {self.dropout:g} draws by the place of a token, which a tile does not know: use "
                "--lora-dropout 0"
            )

    def peft_config(self, config: ModelConfig, base: str, revision: str | None) -> dict[str, Any]:
        """PEFT's LoraConfig."""
        ranks = {t.module.name: t.rank for t in self.targets if t.rank != self.rank}
        alphas = {t.module.name: t.alpha for t in self.targets if t.alpha != self.alpha}
        return {
            "peft_type": "LORA",
            **super().peft_config(config, base, revision),
            "r": self.rank,
            "lora_alpha": plain(self.alpha),
            "lora_dropout": self.dropout,
            "target_modules": target_names(self.targets, config),
            "rank_pattern": ranks,
            "alpha_pattern": {name: plain(alpha) for name, alpha in alphas.items()},
            "bias": self.bias,
            "use_rslora": self.rslora,
            "use_dora": self.dora,
            "init_lora_weights": INITS.get(self.init, self.init),
            "fan_in_fan_out": False,
            **in_full_config(self.also, config),
        }

    def first_pair(self, target: Target, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of PiSSA or OLoRA."""
        return first_pair(self.init, weight, target.rank, target.scale)

    def doubled(self) -> Lora:
        """Adapters of twice the rank that multiply by the same scales, on a model that is as it was."""
        more = 2**0.5 if self.rslora else 2.0
        targets = tuple(replace(t, rank=2 * t.rank, alpha=more * t.alpha) for t in self.targets)
        return replace(self, rank=2 * self.rank, alpha=more * self.alpha, targets=targets, init="kaiming")

    def on_rest(self) -> Lora:
        """The same on a model from which what it begins with was taken out before."""
        return replace(self, init="kaiming") if self.takes_out else self

    def change(self, target: Target, weight: np.ndarray, read: ReadTensor) -> Change:
        """s B A less what that was at first if it was taken out of the weight, or with magnitudes m what makes rows of
        the weight m (weight + s B A) / |weight + s B A|."""
        name = target.module.name
        a, b = (read(f"{name}.lora_{key}.weight") for key in "AB")
        if self.takes_out:
            first_a, first_b = self.first_pair(target, weight)
            a, b = np.concatenate([a, first_a]), np.concatenate([b, -first_b], axis=1)
        m = read(f"{name}.{MAGNITUDE}") if self.dora else None

        def change(start: int, stop: int) -> np.ndarray:
            added = np.float32(target.scale) * (b[start:stop] @ a)
            if m is None:
                return added
            moved = weight[start:stop] + added
            return moved * (m[start:stop] / norms_of(moved))[:, None] - weight[start:stop]

        return change
