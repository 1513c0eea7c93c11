"""The rotary table: cos and sin of every position's angles, for the kinds of frequency scaling that models use."""

import math

import numpy as np

from llmq.model.config import ModelConfig, RopeConfig
from llmq.model.rope_keys import LOCAL, NONE, ROPE
from llmq.tensor import Ref


def table_refs(config: ModelConfig, length: int, stat: str, before: str = "") -> dict[str, Ref]:
    """The constants that the layers of a model read, by their names there."""
    names = dict.fromkeys(map(config.table, range(config.num_layers)))
    return {name: Ref(f"{before}{name}", "const", (length, config.head_dim), stat) for name in names}


def table_of(config: ModelConfig, name: str, length: int) -> np.ndarray:
    """The table of such a name (length, head_dim) in f64."""
    rope = {ROPE: config.rope, LOCAL: config.local_rope, NONE: None}[name]
    if rope is not None:
        return rope_table(rope, config.head_dim, length, np.float64)
    return np.repeat([[1.0, 0.0]], config.head_dim // 2, axis=1).repeat(length, axis=0)


def rope_table(config: RopeConfig, head_dim: int, length: int, dtype: np.dtype | type) -> np.ndarray:
    """(length, head_dim) in `dtype`: cos of the Hd/2 angles of each position, then their sin; computed in f64.

    Channels that are not turned, which are the last of each half, have cos 1 and sin 0.
    """
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies(config, head_dim, length)
    turned, scale = angles.shape[1], attention_factor(config)
    table = np.zeros((length, 2, head_dim // 2))
    table[:, 0] = 1
    table[:, 0, :turned], table[:, 1, :turned] = scale * np.cos(angles), scale * np.sin(angles)
    return table.reshape(length, head_dim).astype(dtype)


def frequencies(config: RopeConfig, head_dim: int, length: int) -> np.ndarray:
    """(R / 2,) radians per position of rows of `length` tokens, f64, for the R channels that are turned: theta^(-2i/R),
    scaled as `config.kind` says, as in transformers' modeling_rope_utils.py.

    `linear` divides all by `factor` (position interpolation, Chen et al., 2023). `llama3` divides only what turns fewer
    than `low_freq_factor` times within the original context, keeps what turns more than `high_freq_factor` times, and
    blends in between (Llama 3.1). `yarn` does so between `beta_slow` and `beta_fast` turns, by the numbers of channels
    (YaRN; Peng et al., 2023). `longrope` has a divisor for each, other ones in rows longer than the original context
    (LongRoPE; Ding et al., 2024). `dynamic` has a larger base in such rows (NTK-aware scaling).
    """
    r, theta, original = config.rotary_dim(head_dim), config.theta, config.original_max_position
    if config.kind == "dynamic":
        theta *= (config.factor * max(length, original) / original - (config.factor - 1)) ** (r / (r - 2))
    freq = theta ** -(np.arange(0, r, 2, dtype=np.float64) / r)
    if config.kind in ("default", "dynamic"):
        return freq
    if config.kind == "linear":
        return freq / config.factor
    if config.kind == "longrope":
        return freq / np.array(config.long_factor if length > original else config.short_factor)
    if config.kind == "yarn":
        kept = 1 - _ramp(config, r)
    else:
        assert config.kind == "llama3", config.kind
        turns = original * freq / (2 * np.pi)
        kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        kept = np.clip(kept, 0, 1)
    return kept * freq + (1 - kept) * freq / config.factor


def _ramp(config: RopeConfig, r: int) -> np.ndarray:
    """(R / 2,) from 0 for channels that turn `beta_fast` times or more to 1 for those of `beta_slow` or fewer."""

    def channel(turns: float) -> float:
        """The one, among frequencies and between them, that turns so often within the original context."""
        return r * math.log(config.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = channel(config.beta_fast), channel(config.beta_slow)
    low, high = (math.floor(low), math.ceil(high)) if config.truncate else (low, high)
    low, high = max(low, 0), min(high, r - 1)
    high += 0.001 if low == high else 0
    return np.clip((np.arange(r // 2) - low) / (high - low), 0, 1)


def attention_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by, so that attention is as sharp over a longer context."""
    if config.attention_factor is not None or config.factor <= 1:
        return 1.0 if config.attention_factor is None else config.attention_factor
    if config.kind == "longrope":
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))
    if config.kind != "yarn":
        return 1.0
    above, below = (
        0.1 * (scale or 1) * math.log(config.factor) + 1 for scale in (config.mscale, config.mscale_all_dim)
    )
    return above / below if config.mscale and config.mscale_all_dim else 0.1 * math.log(config.factor) + 1


def document_positions(borders: np.ndarray, length: int) -> np.ndarray:
    """(B, length) int32: how far each token is from the start of its document, by `borders` (B,D+1) int32.

    A row of borders has the first tokens of its documents, ascending from 0, then `length` repeated.
    """
    starts = np.zeros((len(borders), length + 1), np.int32)
    np.put_along_axis(starts, borders.astype(np.int64), borders, axis=1)
    return np.arange(length, dtype=np.int32) - np.maximum.accumulate(starts[:, :length], axis=1)
