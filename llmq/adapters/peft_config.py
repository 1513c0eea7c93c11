"""What `adapter_config.json` may say, as far as it is read: types and limits of PEFT's keys."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from llmq.model.config import problems_of


def _check_pattern(text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a pattern: {error}") from None


def _names(value: Any) -> Any:
    if isinstance(value, str):
        _check_pattern(value)
    elif value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise ValueError("must be a pattern, a list of names, or null")
    return value


def _layers(value: Any) -> Any:
    if value is None or all(type(one) is int for one in (value if isinstance(value, list) else [value])):
        return value
    raise ValueError("must be the number of a layer, a list of such numbers, or null")


def _numbers(value: Any) -> Any:
    if value is not None and not (isinstance(value, dict) and all(type(n) in (int, float) for n in value.values())):
        raise ValueError("must be an object of numbers by names or patterns, or null")
    for pattern in value or ():
        _check_pattern(pattern)
    return value


def _kept(value: Any) -> Any:
    if value is None or (isinstance(value, dict) and all(isinstance(flags, list) for flags in value.values())):
        return value
    raise ValueError("must be an object of lists of flags by names, or null")


Names = Annotated[Any, PlainValidator(_names)]
Numbers = Annotated[Any, PlainValidator(_numbers)]
Rank = Annotated[int, Field(ge=1)]


class _Any(BaseModel):
    """Of all methods. Keys that are not read may say anything."""

    model_config = ConfigDict(allow_inf_nan=False)

    base_model_name_or_path: str | None = None
    target_modules: Names = None
    exclude_modules: Names = None
    modules_to_save: list[str] | None = None
    feedforward_modules: Names = None
    layers_pattern: Names = None
    layers_to_transform: Annotated[Any, PlainValidator(_layers)] = None
    num_virtual_tokens: int | None = Field(None, ge=1)


class _Lora(_Any):
    r: Rank = 8
    lora_alpha: float = 8
    lora_dropout: float | None = Field(None, ge=0, lt=1)
    rank_pattern: Numbers = None
    alpha_pattern: Numbers = None


class _AdaLora(_Any):
    init_r: Rank = 12
    lora_alpha: float = 8
    lora_dropout: float | None = Field(None, ge=0, lt=1)
    rank_pattern: Annotated[Any, PlainValidator(_kept)] = None
    target_r: float | None = None
    tinit: float | None = None
    tfinal: float | None = None
    deltaT: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    orth_reg_weight: float | None = None
    total_step: float | None = None


FORMS: dict[str, type[_Any]] = {"LORA": _Lora, "ADALORA": _AdaLora}


def wrong_keys(about: dict[str, Any]) -> list[str]:
    """What is wrong with the values of a config whose `peft_type` is known."""
    try:
        FORMS.get(about["peft_type"], _Any).model_validate(about)
    except ValidationError as error:
        return problems_of(about, error)
    return []
