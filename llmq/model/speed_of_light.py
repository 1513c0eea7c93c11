"""Speed of light: the time that the matmuls of training alone would take at the device's peak rate.

Forward and backward of a linear map cost 6 FLOPs per weight and token, 4 where the weight is frozen. The attention's
two products cost 12*Hq*Hd*T per layer and token in forward and backward if every query saw every key; a causal one sees
half of them. Norms, rotations, the optimizer and all memory traffic are free here, and recomputation counts as lost
time. A sliding window counts as full attention, and so does a row of packed documents, whose attention is less work:
the figure depends on the model's size alone, and on that of its adapters, which multiply in bf16.
"""

from collections.abc import Callable, Mapping

from llmq.model.config import ModelConfig
from llmq.model.parameters import EMBED_ROW, HEAD, linear_maps
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
    added: float = 0,
    is_frozen: Callable[[str], bool] = lambda row: False,
) -> float:
    """Least seconds of training for one token. `peaks` are the device's dense FLOP/s by dtype, with one for bf16.

    `dtype` gives what the linear map of a name multiplies in. A token passes `added` weights beside
    the model's; a row that `is_frozen` has no gradient.
    """
    attention = config.num_layers * config.num_heads * config.head_dim * seq_len
    per_weight, per_frozen, per_score = (2 * _products(ops) for ops in (LINEAR, FROZEN, ATTENTION))
    seconds = (per_score / 2 * attention + per_weight * added) / peaks["bf16"]
    for name, size in linear_maps(config).items():
        row = EMBED_ROW if name == HEAD and config.tie_embeddings else f"{name}.weight"
        seconds += (per_frozen if is_frozen(row) else per_weight) * size / peaks[dtype(name)]
    return seconds


def _products(ops: tuple[str, ...]) -> int:
    """Matrix products that these ops make, without those that they make again."""
    return sum(record(op).products - record(op).remade for op in ops)
