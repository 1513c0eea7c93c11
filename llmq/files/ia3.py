"""Gains in PEFT's format (IA3Config): `ia3_l` (N,1) of outputs, (1,K) of the inputs of `feedforward_modules`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.files.peft_names import checked_beside, in_full_config, is_named, is_target, target_names
from llmq.files.tensor_files import Stored
from llmq.model.adapters import LM_HEAD, Adapters, linear_modules, scaled
from llmq.model.config import ModelConfig

GAINS = "ia3_l"


def checked_gains(about: dict[str, Any], tensors: dict[str, Stored], config: ModelConfig) -> tuple[Adapters, list[str]]:
    """What a config of IA3 and its tensors say, and what is wrong with them."""
    modules = {module.name: module for module in linear_modules(config)}
    own = {name: name.removesuffix(f".{GAINS}") for name in tensors if name.endswith(f".{GAINS}")}
    also, problems = checked_beside(about, tensors, config, own)
    named = list(own.values())
    problems += [f"{name} is no linear map of this model" for name in named if name not in modules]
    found = [module for name, module in modules.items() if name in named]
    inward = {module.name for module in found if is_named(about.get("feedforward_modules"), module.name)}
    for module in found:
        shape = (1, module.inputs) if module.name in inward else (module.outputs, 1)
        if (there := tensors[f"{module.name}.{GAINS}"].shape) != shape:
            problems.append(f"{module.name}.{GAINS} has shape {list(there)}, the model asks for {list(shape)}")
    wanted = [name for name in modules if is_target(about, name)]
    problems += [f"missing: {name}.{GAINS}" for name in wanted if name not in named]
    if LM_HEAD in named:
        problems.append("lm_head has gains, which llmq does not compute for the logits")
    try:
        targets = scaled(found, inward)
    except UsageError as error:
        targets = ()
        problems.append(str(error))
    return Adapters(0, 1.0, targets, method="ia3", also=also), problems


def gain_change(gains: np.ndarray, weight: np.ndarray, *, inward: bool) -> Callable[[int, int], np.ndarray]:
    """A function that gives what gains add to rows [start, stop) of a map's weight or bias: (l - 1) times it."""
    if weight.ndim == 1:
        gains = gains[:, 0]
    return lambda start, stop: ((gains if inward else gains[start:stop]) - 1) * weight[start:stop]


def gain_config(adapters: Adapters, config: ModelConfig, base: str, revision: str | None) -> dict[str, Any]:
    """PEFT's IA3Config of these adapters."""
    return {
        "peft_type": "IA3",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "target_modules": target_names(adapters.targets, config),
        "feedforward_modules": target_names([target for target in adapters.targets if target.inward], config),
        "fan_in_fan_out": False,
        **in_full_config(adapters, config),
        "init_ia3_weights": True,
        "inference_mode": True,
    }
