"""Model shape and precision made into sublayers and sites: the only place where one is chosen over another."""

from __future__ import annotations

import zlib
from dataclasses import replace

from llmq.blocks.attention import Attention, DenseCore, Heads, NormedRotary, PackedCore, Packing, Rotary
from llmq.blocks.embed import Embed, NoisyEmbed
from llmq.blocks.head import Head
from llmq.blocks.mlp import Mlp
from llmq.config import ModelConfig
from llmq.errors import UsageError
from llmq.model import Block, Model
from llmq.optimizer import Hyperparameters
from llmq.plan.memory import Memory
from llmq.plan.precision import HEAD, SITES, Precision
from llmq.rows import padded_vocab

NOISE_STREAM = zlib.crc32(b"embedding noise")  # addresses its random bits, as a parameter's name does


def build_model(
    config: ModelConfig,
    precision: Precision,
    memory: Memory,
    hyper: Hyperparameters,
    seed: int,
    packing: Packing | None = None,
) -> Model:
    """The objects whose forward and backward are recorded in training. UsageError for what cannot be combined."""
    if precision.head == "e4m3" and precision.scaling == "blockwise":
        raise UsageError(
            "--head-dtype e4m3 needs one scale per tensor or row, as cuBLASLt takes 1x128 scales neither for a chunk "
            "of the head's input nor for one token: use --fp8-scaling rowwise, or leave the head in bf16"
        )
    c, eps = config.hidden_size, config.rms_norm_eps
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    rotary = NormedRotary(heads, eps) if config.qk_norm else Rotary(heads)
    blocks = []
    for layer in range(config.num_layers):
        scope = (heads, config.window(layer), memory.attention_chunks)
        core = DenseCore(*scope) if packing is None else PackedCore(*scope, packing)
        qkv, o, up, down = (precision.site(f"layers.{layer}.{site}") for site in SITES)
        attention = Attention(c, heads, eps, qkv, o, rotary, core)
        mlp = Mlp(c, config.intermediate_size, eps, up, down)
        blocks.append(Block(attention, mlp))
    padded = padded_vocab(config)
    head = Head(c, config.vocab_size, padded, eps, memory.head_chunks, hyper.z_loss, precision.site(HEAD))
    embed = NoisyEmbed(c, hyper.neftune_alpha, seed, NOISE_STREAM) if hyper.neftune_alpha else Embed()
    return Model(embed, tuple(blocks), head)


def without_noise(model: Model) -> Model:
    """The model as it is evaluated."""
    return replace(model, embed=Embed())
