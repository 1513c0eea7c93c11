"""What a plan of many layers takes, by plans of fewer: each further layer takes the same bytes.

What a few layers need most memory for, such as the embedding, may be something else than in the whole model. So an
estimate is the plan's own number or less; by a quarter of the layers it was the same wherever that was compared.
"""

from __future__ import annotations

from dataclasses import replace

from llmq.plan.plan import Plan, Scratch, make_plan
from llmq.plan.spec import Spec

LEAST_LAYERS, MORE = 4, 2  # an estimate is by so many layers at least, and by two more


def plans_of_few(spec: Spec, scratch_bytes: Scratch | None, layers: int) -> list[Plan]:
    """Plans of the first `layers` of a model, and of MORE."""
    return [make_plan(with_layers(spec, count), scratch_bytes) for count in (layers, layers + MORE)]


def with_layers(spec: Spec, layers: int) -> Spec:
    """The first `layers` of a model."""
    return replace(spec, config=replace(spec.config, num_layers=layers, windows=spec.config.windows[:layers]))


def extrapolated(first: float, second: float, layers: int, wanted: int) -> float:
    """The number for `wanted` layers, by those for `layers` and for MORE."""
    # Linear, as all layers are of the same shapes.
    return first + (wanted - layers) * (second - first) / MORE
