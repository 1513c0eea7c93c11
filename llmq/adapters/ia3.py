"""IA3 (Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning", 2022):
gains on the outputs of maps, or on their inputs.

In PEFT's format (IA3Config) they are `ia3_l`, (N,1) of outputs, (1,K) of the inputs of `feedforward_modules`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from llmq.adapters.method import Change, Method, ReadTensor, SiteFacts
from llmq.adapters.peft_format import About, PeftConfig, in_full_config, is_named, read_modules, target_names
from llmq.adapters.targets import (
    FILE,
    FUSED,
    INWARD,
    LM_HEAD,
    SCALED,
    Module,
    Target,
    chosen,
    outputs_of,
    trained_in_full,
    without_head,
)
from llmq.errors import UsageError
from llmq.files.tensor_files import Stored
from llmq.model.config import ModelConfig
from llmq.options.adapters import AdapterOptions
from llmq.sites.ia3 import GainLinear, GainPiece, InputGainLinear
from llmq.sites.linear import Linear

GAINS = "ia3_l"


@dataclass(frozen=True)
class Gains(Method):
    """Gains on the outputs of targets, or on their inputs."""

    targets: tuple[Target, ...]

    peft_types: ClassVar[tuple[str, ...]] = ("IA3",)

    @classmethod
    def of_options(cls, options: AdapterOptions, config: ModelConfig, steps: int) -> Gains | None:
        """Gains on the maps of --ia3. UsageError."""
        if options.ia3 is None:
            return None
        modules = chosen(options.ia3, config, "--ia3")
        without_head(modules, f"--ia3 {SCALED} --ia3")
        also = trained_in_full(options.train_also, config, modules)
        return cls(scaled(modules), base=options.base_dtype, also=also)

    @classmethod
    def of_peft(cls, about: PeftConfig, tensors: dict[str, Stored], config: ModelConfig) -> tuple[Gains, list[str]]:
        """What an IA3Config and its tensors say, and what is wrong with them."""
        found = read_modules(about, tensors, config, (GAINS,), GAINS)
        modules = list(found.tensors)
        inward = {module.name for module in modules if is_named(about.feedforward_modules, module.name)}
        for module in modules:
            shape = (1, module.inputs) if module.name in inward else (module.outputs, 1)
            found.check(module, {GAINS: shape}, "the model asks for")
        if any(module.name == LM_HEAD for module in modules):
            found.problems.append("lm_head has gains, which llmq does not compute for the logits")
        try:
            targets = scaled(modules, inward)
        except UsageError as error:
            targets = ()
            found.problems.append(str(error))
        return cls(targets, also=found.also), found.problems

    def around(self, base: Linear, at: SiteFacts) -> GainLinear | InputGainLinear:
        """`base` with gains on its outputs or its inputs."""
        targets = self.by_site[base.name]
        first = targets[0].module
        if targets[0].inward:
            return InputGainLinear(base, first.name, first.inputs, at.stat, FILE)
        of = [target.module for target in targets]
        pieces = [GainPiece(m.name, m.key, m.start, m.stop, m.order) for m in of]
        return GainLinear(base, pieces, outputs_of(at.config)[base.name], at.stat, FILE)

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        inward = sorted(target.module.name for target in self.targets if target.inward)
        return {**super().identity(), "method": "ia3", "inward": inward}

    def words(self) -> str:
        """How many maps have gains."""
        return f"Gains (IA3) on {len(self.targets)} linear maps"

    def changed_tensors(self) -> dict[str, Target]:
        """Weights, and biases where gains multiply the outputs."""
        biases = {f"{target.module.name}.bias": target for target in self.targets if not target.inward}
        return super().changed_tensors() | biases

    def change(self, target: Target, weight: np.ndarray, read: ReadTensor) -> Change:
        """(l - 1) times the weight or the bias."""
        gains = read(f"{target.module.name}.{GAINS}")
        if weight.ndim == 1:
            gains = gains[:, 0]
        return lambda start, stop: ((gains if target.inward else gains[start:stop]) - 1) * weight[start:stop]

    def peft_config(self, config: ModelConfig) -> About:
        """PEFT's IA3Config."""
        outward, inward = (target_names([t for t in self.targets if t.inward == way], config) for way in (False, True))
        return {
            "peft_type": "IA3",
            "target_modules": [*outward, *inward],  # PEFT looks for the others among these, by name
            "feedforward_modules": inward,
            "fan_in_fan_out": any(target.module.transposed for target in self.targets),
            **in_full_config(self.also, config),
            "init_ia3_weights": True,
        }


def scaled(modules: Sequence[Module], inward: Collection[str] | None = None) -> tuple[Target, ...]:
    """Targets of IA3, of which those named `inward` (None: as in the paper) have gains on their inputs.

    UsageError for inputs that several maps share.
    """
    found = tuple(
        Target(module, 0, 1.0, 1.0, module.site.endswith(INWARD) if inward is None else module.name in inward)
        for module in modules
    )
    if cut := [t for t in found if t.inward and t.module.key in FUSED]:
        raise UsageError(f"IA3 scales the inputs of {cut[0].module.name}, which llmq reads once for several maps")
    return found
