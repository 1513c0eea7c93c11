"""Speed of light: the time that the matmuls of training alone would take at the device's peak rate.

Forward and backward of a linear map cost 6 FLOPs per weight and token, 4 where the weight is frozen. The attention's
two products cost 12*Hq*Hd*T per layer and token in forward and backward if every query saw every key; a causal one sees
half of them. Norms, rotations, the optimizer and all memory traffic are free here, and recomputation counts as lost
time. A sliding window counts as full attention, and so does a row of packed documents, whose attention is less work:
the figure depends on the model's size alone, and on that of its adapters, which multiply in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from llmq.model.adapters import EMBED_ROW, Adapters
from llmq.model.config import ModelConfig
from llmq.model.parameters import HEAD, linear_maps
from llmq.ops.seam import record

DtypeOf = Callable[[str], str]

LINEAR = ("linear_forward", "linear_dgrad", "linear_wgrad")
FROZEN = LINEAR[:2]  # of a weight that has no gradient
ATTENTION = ("attention_forward", "attention_backward")


def seconds_per_token(
    config: ModelConfig,
    seq_len: int,
    peaks: Mapping[str, float],
    dtype: DtypeOf,
    adapters: Adapters | None = None,
    frozen: Collection[str] = (),
) -> float:
    """Least seconds of training for one token. `peaks` are the device's dense FLOP/s by dtype, with one for bf16.

    `dtype` says what the linear map of a name multiplies in. With `adapters` the model's weights have no gradient
    but for those trained in full, else those `frozen`, by the names of their rows.
    """
    attention = config.num_layers * config.num_heads * config.head_dim * seq_len
    per_weight, per_frozen, per_score = (2 * _products(ops) for ops in (LINEAR, FROZEN, ATTENTION))
    added = 0 if adapters is None else adapters.added_weights
    seconds = (per_score / 2 * attention + per_weight * added) / peaks["bf16"]
    for name, size in linear_maps(config).items():
        row = EMBED_ROW if name == HEAD and config.tie_embeddings else f"{name}.weight"
        is_frozen = row in frozen if adapters is None else row not in adapters.also
        seconds += (per_frozen if is_frozen else per_weight) * size / peaks[dtype(name)]
    return seconds


def _products(ops: tuple[str, ...]) -> int:
    """Matrix products that these ops make, without those that they make again."""
    return sum(record(op).products - record(op).remade for op in ops)


def fraction(
    tokens_per_second: float,
    config: ModelConfig,
    seq_len: int,
    peaks: Mapping[str, float],
    dtype: DtypeOf,
    adapters: Adapters | None = None,
) -> float:
    """Share of the speed of light that a rate of training is."""
    return tokens_per_second * seconds_per_token(config, seq_len, peaks, dtype, adapters)
