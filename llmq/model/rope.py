"""The rotary table: cos and sin of every position's angles, for the kinds of frequency scaling that models use."""

import numpy as np

from llmq.model.config import RopeConfig


def rope_table(config: RopeConfig, head_dim: int, length: int, dtype: np.dtype | type) -> np.ndarray:
    """(length, head_dim) in `dtype`: cos of the Hd/2 angles of each position, then their sin; computed in f64."""
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies(config, head_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(dtype)


def frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """(head_dim / 2,) radians per position, f64: theta^(-2i / head_dim), scaled as `config.kind` says.

    `linear` divides all by `factor` (position interpolation, Chen et al., 2023). `llama3` divides only what turns fewer
    than `low_freq_factor` times within the original context, keeps what turns more than `high_freq_factor` times, and
    blends in between (Llama 3.1; `_compute_llama3_parameters` in transformers' modeling_rope_utils.py).
    """
    freq = config.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.kind == "default":
        return freq
    if config.kind == "linear":
        return freq / config.factor
    assert config.kind == "llama3", config.kind
    turns = config.original_max_position * freq / (2 * np.pi)
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return kept * freq + (1 - kept) * freq / config.factor


def document_positions(borders: np.ndarray, length: int) -> np.ndarray:
    """(B, length) int32: how far each token is from the start of its document, by `borders` (B,D+1) int32.

    A row of borders has the first tokens of its documents, ascending from 0, then `length` repeated.
    """
    starts = np.zeros((len(borders), length + 1), np.int32)
    np.put_along_axis(starts, borders.astype(np.int64), borders, axis=1)
    return np.arange(length, dtype=np.int32) - np.maximum.accumulate(starts[:, :length], axis=1)
