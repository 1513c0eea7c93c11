"""Rotary embedding in config.json: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5.

What follows from other keys, such as a factor that is the quotient of two lengths, is found here, so that a RopeConfig
says all that its table is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo

from llmq.model.key_types import Factor, Positive, Size
from llmq.row import HeadOrder

ROPE, LOCAL, NONE = "rope", "rope_local", "rope_none"  # constants of a run: of most layers, of those with a window


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; `kind` says how frequencies are scaled (`frequencies` in llmq/model/rope.py).

    Of a head's channels the first `partial` are turned; channels 2i and 2i + 1 of files are a pair if they are
    `interleaved`, else those of two halves. `original_max_position` is the length at which a kind changes, or from
    which its frequencies are scaled.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial: float = 1.0
    interleaved: bool = False
    attention_factor: float | None = None  # what cos and sin are multiplied by; None: what follows from the others
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """How many channels of a head are turned."""
        return int(head_dim * self.partial)

    def order(self, head_dim: int, turned: int | None = None) -> HeadOrder | None:
        """How the channels of heads lie in files, of which the first ones are `turned` (None: all); None: as here."""
        share = self.rotary_dim(head_dim)
        return HeadOrder(head_dim, share, self.interleaved, turned) if self.interleaved or share < head_dim else None

    def identity(self) -> dict[str, Any]:
        """What its table is made of, in a checkpoint: of most only what is no default."""
        always = ("theta", "kind", "factor", "low_freq_factor", "high_freq_factor", "original_max_position")
        found = {one.name: (getattr(self, one.name), one.default) for one in fields(self)}
        return {name: value for name, (value, default) in found.items() if name in always or value != default}

    def changes_at(self, length: int) -> str | None:
        """What rows of `length` tokens do to a kind whose table depends on that, in words; None for other kinds."""
        most = self.original_max_position
        if self.kind == "longrope":
            which, side = ("long", "more than") if length > most else ("short", "at most")
            return f"Rotary embedding by the {which} factors (longrope): rows have {length:,} tokens, {side} {most:,}"
        if self.kind == "dynamic" and length > most:
            return f"Rotary embedding with a larger base (dynamic): rows have {length:,} tokens, more than {most:,}"
        return None


def _family(info: ValidationInfo) -> Any:
    """The Family whose keys are read."""
    return info.context


def one_kind(given: Any, info: ValidationInfo) -> Any:
    """A rope object with its kind as `rope_type`; `type` is the older name.

    Its `original_max_position_embeddings` is that of the config's top level where there is one, as in transformers 5.
    """
    if not isinstance(given, Mapping):
        raise ValueError("must be an object or null")
    if given and all(isinstance(value, dict) for value in given.values()):
        raise ValueError("rotary embedding that differs between layers is not supported for this architecture")
    found = {key: value for key, value in given.items() if value is not None}
    if found.get("partial_rotary_factor", 1) != 1 and not _family(info).partial:
        raise ValueError(NO_PARTIAL)
    kinds = [found[key] for key in ("rope_type", "type") if key in found]
    if kinds[1:] and kinds[0] != kinds[1]:
        raise ValueError(f"type {kinds[1]!r} contradicts rope_type {kinds[0]!r}")
    kind = kinds[0] if kinds else None if "factor" in found else "default"
    kind = _family(info).rope_kinds.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ValueError(f"rope_type {kind!r} is not supported; known are {', '.join(ROPE_KEYS)}")
    most, outer = info.data.get("max_position", 1), info.data.get("original_max_position")
    if kind in ("yarn", "longrope"):
        found.setdefault("original_max_position_embeddings", most)
    if kind == "dynamic":
        found["original_max_position_embeddings"] = most
    elif outer:
        found["original_max_position_embeddings"] = outer
    original = found.get("original_max_position_embeddings")
    if kind in ("yarn", "longrope") and isinstance(original, int) and original > 0:
        found.setdefault("factor", most / original)
    return {**found, "rope_type": kind}


NO_PARTIAL = "partial rotary embedding is not supported for this architecture"


def partial_of_family(share: float, info: ValidationInfo) -> float:
    """The share of channels that are turned. ValueError in a family that turns all."""
    if share != 1 and not _family(info).partial:
        raise ValueError(NO_PARTIAL)
    return share


def _above_low(high: float, info: ValidationInfo) -> float:
    low = info.data.get("low_freq_factor", 0)
    if high <= low:
        raise ValueError(f"must be above low_freq_factor ({low:g})")
    return high


def one_rope(newer: Any, info: ValidationInfo) -> RopeConfig:
    """From `rope_theta` and `rope_scaling` (4) and `rope_parameters` (5), which must agree."""
    named = {"rope_scaling.": info.data.get("rope_scaling"), "rope_parameters.": newer}
    thetas = {"rope_theta": info.data.get("rope_theta")}
    thetas |= {f"{key}rope_theta": rope.rope_theta for key, rope in named.items() if rope}
    thetas = {key: theta for key, theta in thetas.items() if theta}
    if len(set(thetas.values())) > 1:
        said = ", ".join(f"{key} is {theta:g}" for key, theta in thetas.items())
        raise ValueError(f"the rotary base contradicts itself: {said}")
    kinds = [rope.config() for rope in named.values() if rope]
    if len(set(kinds)) > 1:
        raise ValueError("contradicts rope_scaling")
    shares = [rope.partial for rope in named.values() if rope and rope.partial is not None]
    found = replace(
        (kinds or [RopeConfig()])[0],
        theta=next(iter(thetas.values()), _family(info).default_theta),
        partial=next(iter(shares), info.data.get("partial", 1.0)),
        interleaved=_family(info).interleaved,
    )
    _check(found, info.data.get("head_dim"))
    return found


def one_local_rope(given: Any, info: ValidationInfo) -> RopeConfig:
    """Of layers with a window: from `rope_local_base_freq` (4) and what `parted` finds (5), which must agree."""
    thetas = [given.rope_theta if given else None, info.data.get("rope_local_base_freq")]
    if None not in thetas and thetas[0] != thetas[1]:
        raise ValueError(f"rope_theta {thetas[0]:g} contradicts rope_local_base_freq {thetas[1]:g}")
    found = replace(given.config() if given else RopeConfig(), theta=thetas[0] or thetas[1] or 10000.0)
    _check(found, info.data.get("head_dim"))
    return found


def own_local_rope(given: Any, info: ValidationInfo) -> RopeConfig:
    """Of layers with a window: what `parted` finds, else one that is not scaled; `rope_theta` is for all layers."""
    theta = (given and given.rope_theta) or info.data.get("rope_theta") or _family(info).default_theta
    found = replace(given.config() if given else RopeConfig(), theta=theta)
    _check(found, info.data.get("head_dim"))
    return found


def parted(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with the objects of `rope_parameters` for each kind of layer (5) as those of two ropes."""
    both = keys.get("rope_parameters")
    if not isinstance(both, Mapping) or not both or both.keys() - {"full_attention", "sliding_attention"}:
        return dict(keys)
    own = {"rope_parameters": both.get("full_attention"), "local_rope_parameters": both.get("sliding_attention")}
    return {**keys, **own}


def unrotated_of_list(listed: Any, info: ValidationInfo) -> tuple[int, ...]:
    """The layers with a 0 in `no_rope_layers`, or each `no_rope_layer_interval`-th where there is no list."""
    if not {"num_layers", "no_rope_layer_interval"} <= info.data.keys():
        return ()  # one of them is wrong
    layers, interval = info.data["num_layers"], info.data["no_rope_layer_interval"]
    if listed is None:
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(listed, list) or len(listed) < layers or any(one not in (0, 1) for one in listed):
        raise ValueError(f"must be a list of 0 or 1 for each of num_hidden_layers ({layers})")
    return tuple(layer for layer in range(layers) if not listed[layer])


def _check(rope: RopeConfig, head_dim: int | None) -> None:
    """ValueError for what has no table for heads of this size (None: it is wrong)."""
    if head_dim is None:
        return
    turned = rope.rotary_dim(head_dim)
    if turned < 2 or turned % 2:
        raise ValueError(f"turns {turned} of {head_dim} channels (partial_rotary_factor {rope.partial:g}), not pairs")
    for name in ("short_factor", "long_factor") if rope.kind == "longrope" else ():
        if len(getattr(rope, name)) != turned // 2:
            raise ValueError(f"{name} has {len(getattr(rope, name))} numbers, and heads have {turned // 2} frequencies")
    if rope.kind == "dynamic" and turned == 2:
        raise ValueError("is dynamic, which needs more than one frequency")
    if rope.kind == "yarn" and rope.theta <= 1:
        raise ValueError("is yarn, which needs a rope_theta above 1")


class RopeKeys(BaseModel, strict=True):
    """A `rope_scaling` or `rope_parameters` object, with the names of RopeConfig."""

    kind: Literal["default"] = Field(alias="rope_type")
    rope_theta: Positive | None = None
    partial: Positive | None = Field(None, alias="partial_rotary_factor", le=1)

    def config(self) -> RopeConfig:
        """What it asks for, without its base and its share of channels."""
        return RopeConfig(**{name: value for name, value in self if name not in ("rope_theta", "partial")})

    @classmethod
    def written(cls, rope: RopeConfig) -> dict[str, Any]:
        """The object for a rope of this kind: what the form needs, and what is no default."""
        found: dict[str, Any] = {"rope_theta": rope.theta}
        for name, about in cls.model_fields.items():
            value = getattr(rope, name, None)
            is_default = name == "rope_theta" or (not about.is_required() and value == getattr(RopeConfig, name))
            if not is_default and not about.exclude:
                found[about.alias or name] = list(value) if isinstance(value, tuple) else value
        return found


class LinearRopeKeys(RopeKeys):
    """Positions are divided."""

    kind: Literal["linear"] = Field(alias="rope_type")  # type: ignore[assignment]
    factor: Factor


class DynamicRopeKeys(RopeKeys):
    """The base grows beyond a length, which is the config's max_position_embeddings."""

    kind: Literal["dynamic"] = Field(alias="rope_type")  # type: ignore[assignment]
    factor: Factor
    original_max_position: Size = Field(alias="original_max_position_embeddings", exclude=True)


class Llama3RopeKeys(LinearRopeKeys):
    """Each frequency has a factor of its own."""

    kind: Literal["llama3"] = Field(alias="rope_type")  # type: ignore[assignment]
    low_freq_factor: Positive
    high_freq_factor: Annotated[Positive, AfterValidator(_above_low)]
    original_max_position: Size = Field(alias="original_max_position_embeddings")


class YarnRopeKeys(RopeKeys):
    """Fast frequencies stay, slow ones are divided, and cos and sin are larger."""

    kind: Literal["yarn"] = Field(alias="rope_type")  # type: ignore[assignment]
    factor: Positive
    original_max_position: Size = Field(alias="original_max_position_embeddings")
    attention_factor: Positive | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool = True


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Factors = Annotated[tuple[Positive, ...], BeforeValidator(_as_tuple)]


class LongRopeKeys(RopeKeys):
    """Each frequency has two divisors: one in short rows, one in rows longer than the original ones."""

    kind: Literal["longrope"] = Field(alias="rope_type")  # type: ignore[assignment]
    factor: Positive
    original_max_position: Annotated[Size, Field(ge=2)] = Field(alias="original_max_position_embeddings")
    attention_factor: Positive | None = None
    short_factor: Factors
    long_factor: Factors


ROPE_KEYS: dict[str, type[RopeKeys]] = {
    "default": RopeKeys,
    "linear": LinearRopeKeys,
    "llama3": Llama3RopeKeys,
    "dynamic": DynamicRopeKeys,
    "yarn": YarnRopeKeys,
    "longrope": LongRopeKeys,
}
Kinds = Annotated[
    RopeKeys | LinearRopeKeys | Llama3RopeKeys | DynamicRopeKeys | YarnRopeKeys | LongRopeKeys,
    Field(discriminator="kind"),
]
Rope = Annotated[Kinds, BeforeValidator(one_kind)]
