"""Families that are described: the facts of one that llmq does not know, over the objects of those that it knows.

A description is a YAML file (`--family`), and then the key `llmq_family` of config.json, so that exported models and
checkpoints have it. `like` names a known family, of which the facts are taken that the description leaves out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from llmq.disk import small_text
from llmq.errors import DataError, nearest
from llmq.model.families import ConfigKeys, Family
from llmq.model.family_table import FAMILIES
from llmq.model.key_types import Positive
from llmq.model.multimodal import TEXT_ONLY
from llmq.model.wiring import Names, Wiring

KEY = "llmq_family"
MOST_BYTES = 1 << 20  # of a file
PLACES = {"pre": "pre", "post": "post", "pre+post": "both"}
UNFIT = "not a family that llmq can make:"
Text = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Rope(_Part):
    theta: Positive | None = None
    partial: Annotated[Positive, Field(le=1)] | None = None
    interleaved: bool | None = None


class DescribedFamily(_Part):
    """What a file may say. Of what it does not say, the facts are those of the family that this one is `like`."""

    like: str = "llama"
    norm: Literal["rmsnorm", "layernorm"] | None = None
    where: Literal["pre", "post", "pre+post"] | None = None
    norm_offset: float | None = None
    norm_bias: bool | None = None
    parallel: bool | None = None
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] | None = None
    gated: bool | None = None
    scaled_embedding: bool | None = None
    qk_norm: Literal["none", "heads", "all"] | None = None
    biases: Literal["none", "qkv", "all"] | None = None
    transposed: bool | None = None
    rope: _Rope = _Rope()
    names: dict[str, str | list[Text]] = {}
    keys: dict[Text, Text] = {}
    defaults: dict[Text, Any] = {}
    harmless: list[Text] = []

    def wiring(self, like: Wiring) -> Wiring:
        """The facts of layers, and the names of their tensors."""
        said = {
            "layernorm": self.norm and self.norm == "layernorm",
            "norms": self.where and PLACES[self.where],
            "scaled": self.scaled_embedding,
            "wide_qk_norm": self.qk_norm and self.qk_norm == "all",
            "all_biased": self.biases and self.biases == "all",
            **{name: getattr(self, name) for name in ("norm_offset", "norm_bias", "parallel", "activation", "gated")},
            "transposed": self.transposed,
        }
        names: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in self.names.items()}
        return replace(like, names=replace(like.names, **names), **_given(said))

    def facts(self) -> dict[str, bool]:
        """Those of a ModelConfig that no key says."""
        said = {"qk_norm": self.qk_norm and self.qk_norm == "heads", "qkv_bias": self.biases and self.biases != "none"}
        return _given(said)

    def problems(self) -> list[str]:
        """What is wrong with names."""
        known = {one.name: type(one.default) for one in fields(Names)}
        found = [f"names.{name} is no part of a model{nearest(name, known)}" for name in self.names.keys() - known]
        for name, value in self.names.items():
            if name in known and isinstance(value, list) != (known[name] is tuple):
                kind = "a list of names" if known[name] is tuple else "one name"
                found.append(f"names.{name} ({value!r}): must be {kind}")
        families = [one.model_type for one in FAMILIES.values() if one.within is TEXT_ONLY]
        if self.like not in families:
            found.append(f"like ({self.like!r}): llmq knows {', '.join(families)}{nearest(self.like, families)}")
        return found


def read_description(path: str | Path) -> dict[str, Any]:
    """The mapping in a file. DataError for what is no description, with its lines."""
    import yaml

    class Loader(yaml.SafeLoader):
        """With numbers such as 1e-5, which are texts in YAML 1.1."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), [*"-+0123456789"])
    path = Path(path).expanduser()
    text = small_text(path, MOST_BYTES, "--family", "give a YAML file with the facts of a family")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader)):
            raise DataError(f"--family {path} has an alias (*name): write out what it stands for")
        twice, found = _repeated(yaml.compose(text, Loader)), yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise DataError(f"--family {path} is not YAML: {' '.join(str(error).split())}") from error
    if twice:
        raise DataError(f"--family {path}: {twice} is given a second time")
    if not isinstance(found, dict):
        raise DataError(f"--family {path} must hold lines of the form `norm: layernorm`")
    try:
        described(found)
    except DataError as error:
        raise DataError(f"--family {path}: {error}") from None
    return found


def described(facts: Any) -> DescribedFamily:
    """A description from its mapping. DataError with what is wrong."""
    _as_json(facts)
    try:
        found = TypeAdapter(DescribedFamily).validate_python(facts)
    except ValidationError as error:
        problems = [_said(one) for one in error.errors()]
    else:
        problems = found.problems()
    if problems:
        raise DataError("\n".join([UNFIT, *(f"  - {one}" for one in problems)]))
    return found


def _as_json(facts: Any) -> str:
    """A description as config.json has it. DataError for what JSON does not have, such as a date."""
    try:
        return json.dumps(facts, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{UNFIT}\n  - a value that config.json cannot have: {error}") from None


def family_of(facts: Any, model_type: str) -> Family:
    """The family of a description, whose name in config.json is `model_type`. DataError with what is wrong."""
    return _family_of(_as_json(facts), model_type)


@cache
def _family_of(facts: str, model_type: str) -> Family:
    said = described(json.loads(facts))
    like = next(one for one in FAMILIES.values() if one.model_type == said.like)
    rope, defaults = said.rope, dict(said.defaults)
    if rope.partial is not None:
        defaults["partial_rotary_factor"] = rope.partial
    wiring = said.wiring(like.wiring)
    if wrong := _unmade(wiring, interleaved=like.interleaved if rope.interleaved is None else rope.interleaved):
        raise DataError(f"{UNFIT}\n  - {wrong}")
    own = {
        "model_type": model_type,
        "defaults": {**like.defaults, **defaults},
        "facts": {**like.facts, **said.facts()},
        "takes": like.takes | {*said.harmless},
        "wiring": wiring,
        "partial": True if rope.partial is not None else None,
        "interleaved": rope.interleaved,
        "default_theta": rope.theta,
    }
    kept = {one.name: getattr(like, one.name) for one in fields(like)}
    kind = type("Described", (type(like),), {"keys": _renamed(like.keys, said.keys)})
    made: Family = kind(**{**kept, **_given(own)})
    return made


def _unmade(wiring: Wiring, *, interleaved: bool) -> str:
    """What facts together have no object; "" of those that have one."""
    names, after = wiring.names, wiring.norms != "pre"
    of_layer = [*names.qkv, names.o, *names.up, names.down]
    of_layer += [names.attention_norm] if wiring.norms != "post" else []
    of_layer += [names.mlp_norm] if wiring.norms != "post" and not wiring.parallel else []
    of_layer += [names.attention_post_norm, names.mlp_post_norm] if after else []
    outside = [names.embed, names.layers, names.norm, names.head, *filter(None, [names.positions])]
    wrong = {
        "norm: layernorm after a sublayer, and with a norm_offset, has no object: use rmsnorm": wiring.layernorm
        and (after or wiring.norm_offset),
        "parallel: true is for where: pre": wiring.parallel and after,
        "qk_norm: all with rope.interleaved has no object": wiring.wide_qk_norm and interleaved,
        "names.attention_post_norm and names.mlp_post_norm are needed": after
        and not (names.attention_post_norm and names.mlp_post_norm),
        "names: two tensors have one name": any(len({*some}) < len(some) for some in (of_layer, outside)),
        "names: a tensor has an empty name": not all([*of_layer, *outside]),
        "norm_bias: false is for norm: layernorm": not (wiring.norm_bias or wiring.layernorm),
        "names.qkv must be three names, or one of a fused tensor": len(names.qkv) not in (1, 3),
        "names.up must be one name without a gate, and one or two with one": len(names.up)
        not in ((1, 2) if wiring.gated else (1,)),
    }
    return next((text for text, is_wrong in wrong.items() if is_wrong), "")


def _renamed(form: type[ConfigKeys], names: Mapping[str, str]) -> type[ConfigKeys]:
    """The keys of a family, some of them under other names. DataError for names that it does not have."""
    known = {info.alias or name: name for name, info in form.model_fields.items()}
    if unknown := [name for name in names if name not in known]:
        raise DataError(f"keys.{unknown[0]} is no key of config.json that llmq reads{nearest(unknown[0], known)}")
    others: dict[str, Any] = {}
    for name, theirs in names.items():
        info = copy(form.model_fields[known[name]])
        info.alias = info.validation_alias = info.serialization_alias = theirs
        others[known[name]] = (info.annotation, info)
    return create_model("DescribedKeys", __base__=form, **others) if others else form


def _given(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if value is not None}


def _said(error: Any) -> str:
    """A message of pydantic as one of ours."""
    key = ".".join(str(part) for part in error["loc"] if not str(part).startswith(("str", "list[")))
    if error["type"] == "extra_forbidden":
        known = _Rope.model_fields if key.startswith("rope.") else DescribedFamily.model_fields
        return f"{key} is no fact that llmq has an object for{nearest(key.rpartition('.')[2], known)}"
    said = str(error["msg"]).replace("Input should be", "must be")
    return f"{key} ({error['input']!r}): {said}" if key else said


def _repeated(node: Any) -> str:
    """A key that a mapping has twice, at any depth."""
    pairs = node.value if getattr(node, "id", "") == "mapping" else ()
    names = [key.value for key, _ in pairs]
    twice = next((str(name) for name in names if names.count(name) > 1), "")
    return twice or next(filter(None, (_repeated(value) for _, value in pairs)), "")
