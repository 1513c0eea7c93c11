"""LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021): W x + s B A x, with A (R,K) and B
(N,R), s = alpha / R, or alpha / sqrt(R) (rsLoRA; Kalajdzievski, 2023), and the ways in which A and B begin.

In PEFT's format (LoraConfig) `lora_A.weight`, `lora_B.weight` and the `lora_magnitude_vector` of DoRA. The tensors that
are there say which maps have adapters, and of what rank; the config must agree.

PiSSA and OLoRA take what an adapter begins with out of the weight, so that the model computes what it did: W - s B A +
s B A. With magnitudes (DoRA) an adapter begins with the norms of the weight's rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import PlainValidator

from llmq.adapters.added_tokens import KEY, TABLES, new_tokens_config, read_new_tokens
from llmq.adapters.method import Change, Method, ReadTensor, SiteFacts
from llmq.adapters.peft_format import (
    PREFIX,
    About,
    AdapterFile,
    PeftConfig,
    Rank,
    Tensors,
    check_pattern,
    in_full_config,
    plain,
    read_modules,
    target_names,
)
from llmq.adapters.targets import FILE, LM_HEAD, MAGNITUDE, TAKEN_OUT, Target, outputs_of, scale_of, shared
from llmq.errors import UsageError
from llmq.files.source import Values
from llmq.files.tensor_files import Stored, norms_of
from llmq.model.config import ModelConfig
from llmq.model.parameters import EMBED_ROW, HEAD_ROW, parameter_rows
from llmq.options.adapters import AdapterOptions
from llmq.row import Part, Row
from llmq.sites.adapted import AdaptedLinear
from llmq.sites.dora import DoraLinear
from llmq.sites.linear import Linear
from llmq.sites.lora import DroppedAdapter, LoraAdapter, LowRank

WHOLE = 512  # rows or columns up to which a matrix is decomposed as a whole
OVERSAMPLED, BLOCKS = 8, 8  # directions beside the rank, and powers, of the Krylov space of larger ones
OF_WEIGHTS = ("norms", *TAKEN_OUT)  # inits that follow from weights
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]  # A and B by module
SAME_BASE = (True, False, None, "gaussian", "eva", "orthogonal")  # of PEFT's inits, those that do not change the model


def _numbers(value: Any) -> Any:
    if value is not None and not (isinstance(value, dict) and all(type(n) in (int, float) for n in value.values())):
        raise ValueError("must be an object of numbers by names or patterns, or null")
    for pattern in value or ():
        check_pattern(pattern)
    return value


Numbers = Annotated[Any, PlainValidator(_numbers)]


class LoraKeys(PeftConfig):
    """What is read of PEFT's LoraConfig."""

    trainable_token_indices: Any = None
    r: Rank = 8
    lora_alpha: float = 8
    use_rslora: Any = None
    use_dora: Any = None
    init_lora_weights: Any = True
    rank_pattern: Numbers = None
    alpha_pattern: Numbers = None


@dataclass(frozen=True)
class Lora(Method):
    """Low-rank adapters. `rank` and `alpha` are those of most targets; `dropout` is the share of inputs left out.

    `bias`: none is trained, `all` of the model, or those of adapted maps (`lora_only`). `init` says how A is drawn:
    kaiming (uniform up to 1/sqrt(K)) or gaussian (with deviation 1/R), B being zero, or that A and B are taken out of
    the weight (pissa, olora). With `dora` the outputs have magnitudes of their own (Liu et al., 2024). The learning
    rate of B and of vectors is `plus` times that of A (LoRA+; Hayou et al., 2024).
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

    peft_types: ClassVar[tuple[str, ...]] = ("LORA",)
    peft_keys: ClassVar[type[PeftConfig]] = LoraKeys

    @classmethod
    def of_options(cls, options: AdapterOptions, config: ModelConfig, steps: int) -> Lora | None:
        """LoRA, unless the ranks are AdaLoRA's. UsageError."""
        if options.lora_rank is None or options.adalora:
            return None
        about: dict[str, Any] = {"rslora": options.rslora, "init": options.lora_init or "kaiming", "dora": options.dora}
        return cls(**shared(options, config), **about)

    @classmethod
    def of_peft(cls, about: Any, tensors: dict[str, Stored], config: ModelConfig) -> tuple[Lora, list[str]]:
        """What a LoraConfig and its tensors say, and what is wrong with them."""
        a, b = "lora_A.weight", "lora_B.weight"
        new, tensors, wrong = read_new_tokens(about.trainable_token_indices, tensors, config)
        found = read_modules(about, tensors, config, (a, b, MAGNITUDE), f"{a} and lora_B.weight")
        found.problems.extend(wrong)
        rank, rslora, dora = about.r, bool(about.use_rslora), bool(about.use_dora)
        alpha, targets = about.lora_alpha, list[Target]()
        for module, own in found.tensors.items():
            size = int(_of_pattern(about.rank_pattern, module.name, rank))
            shapes: dict[str, tuple[int, ...]] = {a: (size, module.inputs), b: (module.outputs, size)}
            if MAGNITUDE in own and not dora:
                found.problems.append(f"{module.name}.{MAGNITUDE} is there, and use_dora is not")
            shapes |= {MAGNITUDE: (module.outputs,)} if dora else {}
            found.check(module, shapes, "the model and its rank ask for")
            factor = float(_of_pattern(about.alpha_pattern, module.name, alpha))
            targets.append(Target(module, size, factor, scale_of(size, factor, rslora=rslora)))
        said, has_head = about.init_lora_weights, any(t.module.name == LM_HEAD for t in targets)
        if dora and has_head:
            found.problems.append("lm_head has magnitudes (use_dora), which llmq does not compute for the logits")
        if said not in SAME_BASE and said not in TAKEN_OUT:
            found.problems.append(
                f"init_lora_weights {said} changes the model as llmq does not: save the adapter with "
                "path_initial_model_for_weight_conversion"
            )
        init = said if said in ("gaussian", *TAKEN_OUT) else "kaiming"
        if init in TAKEN_OUT and config.tie_embeddings and has_head:
            found.problems.append(f"init_lora_weights {init} changes lm_head, which is the embedding too")
        if new and (has_head or found.also & {*TABLES}):
            found.problems.append(f"{KEY} are beside an adapter of lm_head, or of what modules_to_save trains in full")
        dropout, bias = about.lora_dropout or 0.0, str(about.bias or "none")
        read = cls(rank, alpha, tuple(targets), dropout, bias, rslora, init, dora, also=found.also, new_rows=new)
        return read, found.problems

    def with_new_rows(self, new: range) -> Lora:
        """The same, unless the whole embedding is trained. UsageError where the head has adapters, too."""
        if EMBED_ROW in self.also or self.new_rows:
            return self
        if HEAD_ROW in self.also or any(target.module.name == LM_HEAD for target in self.targets):
            raise UsageError(f"--add-tokens trains rows of {LM_HEAD}, which is adapted or trained: leave {LM_HEAD} out")
        return replace(self, new_rows=new)

    @property
    def added_weights(self) -> float:  # type: ignore[override]
        """Weights of A and B that a token passes."""
        return sum(target.rank * (target.module.inputs + target.module.outputs) for target in self.targets)

    @property
    def takes_out(self) -> bool:  # type: ignore[override]
        """Of PiSSA and OLoRA."""
        return self.init in TAKEN_OUT

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
        return LoraAdapter(site, self.pieces(site), self.init, FILE, at.values, outputs_of(at.config)[site])

    def pieces(self, site: str) -> list[LowRank]:
        """The adapters of a site's parts, whose A lie one after the other."""
        found, first = [], 0
        for target in self.by_site[site]:
            of = target.module
            place = (of.start, of.stop, first, target.rank, target.scale, target.present, of.order)
            found.append(LowRank(of.name, of.key, of.inputs, of.outputs, *place))
            first += target.rank
        return found

    def without_dropout(self) -> Lora:
        """The same without dropout, as in evaluation."""
        return replace(self, dropout=0.0)

    def trains(self, row: Row) -> bool:
        """Biases, too, if they are asked for. UsageError where only a part of one would be trained."""
        if super().trains(row):
            return True
        if self.bias == "none" or not row.name.endswith("bias"):
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

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        about = {"dropout": self.dropout, "bias": self.bias, "rslora": self.rslora}
        more: dict[str, Any] = {"dora": True} if self.dora else {}
        more |= {"init": self.init} if self.takes_out else {}
        return {**super().identity(), **about, **more}

    def words(self) -> str:
        """Ranks, maps, biases and modules in full."""
        biases = "" if self.bias == "none" else " with biases"
        full = f", beside {len(self.also)} parameters in full" if self.also else ""
        new = ", and the rows of new tokens" if self.new_rows else ""
        return f"{self.kind} of {self.rank_words} on {len(self.targets)} linear maps{biases}{full}{new}"

    @property
    def kind(self) -> str:
        """What the adapters are called."""
        return "Adapters with magnitudes" if self.dora else "Adapters"

    @property
    def rank_words(self) -> str:
        """The rank, or the smallest and the largest."""
        ranks = sorted({target.rank for target in self.targets})
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"

    def tile_problems(self) -> Iterator[str]:
        """Dropout."""
        if self.dropout:
            yield (
                f"--lora-dropout {self.dropout:g} draws by the place of a token, which a tile does not know: use "
                "--lora-dropout 0"
            )

    def peft_config(self, config: ModelConfig) -> About:
        """PEFT's LoraConfig."""
        ranks = {t.module.name: t.rank for t in self.targets if t.rank != self.rank}
        alphas = {t.module.name: t.alpha for t in self.targets if t.alpha != self.alpha}
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": plain(self.alpha),
            "lora_dropout": self.dropout,
            "target_modules": target_names(self.targets, config),
            "rank_pattern": ranks,
            "alpha_pattern": {name: plain(alpha) for name, alpha in alphas.items()},
            "bias": self.bias,
            "use_rslora": self.rslora,
            "use_dora": self.dora,
            "init_lora_weights": True if self.init == "kaiming" else self.init,
            "fan_in_fan_out": any(target.module.transposed for target in self.targets),
            **in_full_config(self.also, config),
            **new_tokens_config(self.new_rows, config),
        }

    def first_values(self, config: ModelConfig, model: Values) -> Values:
        """Those of the model, and what follows from its weights."""
        return FirstAdapter(self, config, model).values if self.takes_out or self.dora else model

    def rest(self, config: ModelConfig, model: Values) -> Values:
        """Less the first A and B of PiSSA and OLoRA."""
        return FirstAdapter(self, config, model).values if self.takes_out else model

    def file(self, rows: Sequence[Row], config: ModelConfig, model: Values | None) -> AdapterFile:
        """As PEFT converts what was taken out of the model: an adapter of twice the rank, with what it began with."""
        found = super().file(rows, config, model)
        if model is None or not self.takes_out:
            return found
        about, stored = self.doubled().peft_config(config), FirstAdapter(self, config, model).beside
        return found._replace(about=about, stored=stored, twice=[row for row in found.rows if row.init in TAKEN_OUT])

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
            first_a, first_b = first_pair(self.init, weight, target.rank, target.scale)
            a, b = np.concatenate([a, first_a]), np.concatenate([b, -first_b], axis=1)
        m = read(f"{name}.{MAGNITUDE}") if self.dora else None

        def change(start: int, stop: int) -> np.ndarray:
            added = np.float32(target.scale) * (b[start:stop] @ a)
            if m is None:
                return added
            moved = weight[start:stop] + added
            return moved * (m[start:stop] / norms_of(moved))[:, None] - weight[start:stop]

        return change


def _of_pattern(pattern: dict[str, Any] | None, name: str, otherwise: float) -> float:
    """The value of the first key that is the end of a name, or matches it, as PEFT looks it up."""
    return next((value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", name)), otherwise)


class FirstAdapter:
    """The values of rows of a model with a new adapter on its weights, which `model` reads.

    Magnitudes are the norms of the model's rows. Of pissa and olora the first s B A are taken out of the weights.
    """

    def __init__(self, adapters: Lora, config: ModelConfig, model: Values) -> None:
        self.adapters, self.model = adapters, model
        self._weights = {row.name: row for row in parameter_rows(config)}
        self.site = lru_cache(maxsize=1)(self._site)  # the rows of a site follow each other

    def _site(self, name: str) -> tuple[np.ndarray, Pairs]:
        """The weight of a site, and the first A and B of each of its modules by name if they are taken out of it."""
        ((_, weight),) = self.model([self._weights[f"{name}.weight"]])
        of, found = self.adapters, Pairs()
        for target in of.by_site[name] if of.takes_out else ():
            part = weight[target.module.start : target.module.stop]
            found[target.module.name] = first_pair(of.init, part, target.rank, target.scale)
        return weight, found

    def values(self, rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        """The values of rows: of those that follow from weights, of weights less what is taken out, and the model's."""
        for row in rows:
            site = row.name.partition(".lora_")[0].removesuffix(".weight")
            if site in self.adapters.by_site and (row.init in OF_WEIGHTS or row.name in self._weights):
                yield row, self._value(row, *self.site(site), self.adapters.by_site[site])
            else:
                yield from self.model([row])

    def beside(self, tensors: Tensors) -> Tensors:
        """The tensors of an adapter of twice the rank: A over the first A, and B beside minus the first B."""
        for target in (one for targets in self.adapters.by_site.values() for one in targets):
            a, b = self.site(target.module.site)[1][target.module.name]
            down, up = (f"{PREFIX}{target.module.name}.lora_{key}.weight" for key in "AB")
            tensors[down] = np.concatenate([tensors[down], a])
            tensors[up] = np.concatenate([tensors[up], -Part(up, 0, len(b), target.module.order).take(b)], axis=1)
        return tensors

    def _value(self, row: Row, weight: np.ndarray, pairs: Pairs, targets: Sequence[Target]) -> np.ndarray:
        """The value of a weight, or of a row of an adapter that follows from it."""
        modules = [part.name.partition(".lora_")[0] for part in row.parts]
        if row.init == "norms":
            (own,) = (target.module for target in targets if target.module.name == modules[0])
            return norms_of(weight[own.start : own.stop])
        if row.init in TAKEN_OUT:
            return np.concatenate([pairs[name][".lora_b." in row.name] for name in modules])
        rest = weight.astype(np.float32) if pairs else weight
        for target in targets if pairs else ():
            a, b = pairs[target.module.name]
            rest[target.module.start : target.module.stop] -= np.float32(target.scale) * (b @ a)
        return rest


def first_pair(init: str, weight: np.ndarray, rank: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """A (R,K) and B (N,R) in f32 that an adapter of a weight (N,K) begins with.

    pissa: the principal singular values and vectors, B = U sqrt(S / s), A = sqrt(S / s) V^T (PiSSA; Meng et al., 2024).
    olora: of W = Q R the first columns of Q and rows of R (OLoRA; Bueyuekakyuez, 2024).
    """
    w = weight.astype(np.float32)
    if init == "olora":
        q, _ = np.linalg.qr(w[:, :rank])  # later columns change no earlier ones
        return q.T @ w, q
    u, s, vt = principal(w, rank)
    root = np.sqrt(s / np.float32(scale))
    return root[:, None] * vt, u * root


def principal(w: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The `rank` largest singular values of w (N,K), with vectors (N,R) and (R,K).

    Of a large matrix those in a block Krylov space of it (Musco and Musco, "Randomized Block Krylov Methods for
    Stronger and Faster Approximate Singular Value Decomposition", 2015), which is the same in every run.
    """
    if min(w.shape) <= max(WHOLE, (BLOCKS + 1) * (rank + OVERSAMPLED)):
        u, s, vt = np.linalg.svd(w, full_matrices=False)
        return u[:, :rank], s[:rank], vt[:rank]
    space = np.empty((w.shape[0], 0), np.float32)
    block = w @ np.random.default_rng(0).standard_normal((w.shape[1], rank + OVERSAMPLED), np.float32)
    for _ in range(BLOCKS + 1):
        for _ in range(2):  # the second time removes what rounding left
            block = np.linalg.qr(block - space @ (space.T @ block))[0]
        space = np.concatenate([space, block], axis=1)
        block = w @ (w.T @ block)
    low = space.T @ w
    squares, turn = np.linalg.eigh((low @ low.T).astype(np.float64))
    u, s = turn[:, ::-1][:, :rank].astype(np.float32), np.sqrt(squares[::-1][:rank]).astype(np.float32)
    return space @ u, s, (u.T @ low) / s[:, None]
