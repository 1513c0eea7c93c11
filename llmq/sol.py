"""Speed of light: the time that the matmuls of training alone would take at the device's peak rate.

Forward and backward of a linear map cost 6 FLOPs per weight and token. The attention's two products cost 12*Hq*Hd*T per
layer and token in forward and backward if every query saw every key; a causal one sees half of them. Norms, rotations,
the optimizer and all memory traffic are free here, and recomputation counts as lost time. A sliding window counts as
full attention, and so does a row of packed documents, whose attention is less work: the figure depends on the model's
size alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmq.config import ModelConfig


def block_weights(config: ModelConfig) -> int:
    """Weights of the linear maps of all blocks: q, k, v, o, gate, up, down; no norms, no biases."""
    c, q = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    return config.num_layers * (c * (q + 2 * kv) + q * c + 3 * c * config.intermediate_size)


def seconds_per_token(
    config: ModelConfig, seq_len: int, peaks: Mapping[str, float], *, matmul_dtype: str, head_dtype: str
) -> float:
    """Least seconds of training for one token. `peaks` are the device's dense FLOP/s by dtype, with one for bf16."""
    attention = config.num_layers * config.num_heads * config.head_dim * seq_len
    return (
        6 * block_weights(config) / peaks[matmul_dtype]
        + 6 * config.vocab_size * config.hidden_size / peaks[head_dtype]
        + 6 * attention / peaks["bf16"]
    )


def fraction(
    tokens_per_second: float,
    config: ModelConfig,
    seq_len: int,
    peaks: Mapping[str, float],
    *,
    matmul_dtype: str,
    head_dtype: str,
) -> float:
    """Share of the speed of light that a rate of training is."""
    return tokens_per_second * seconds_per_token(
        config, seq_len, peaks, matmul_dtype=matmul_dtype, head_dtype=head_dtype
    )
