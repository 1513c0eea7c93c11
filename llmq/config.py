"""The shape of a model: Hugging Face `config.json` in both spellings, and presets, read into one ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is `default`, `linear` (positions / factor) or `llama3` (frequency-dependent factor)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """What the engine needs to know of a Llama- or Qwen-class decoder. Sizes are unpadded."""

    architecture: str  # LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[
        int | None, ...
    ] = ()  # per layer: sliding window in tokens (self included), None is full; () is all full
    dtype: str = "bf16"  # of the source's weights: bf16, fp16, fp32
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the config.json as read, for the export

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full causal attention."""
        return self.windows[layer] if self.windows else None
