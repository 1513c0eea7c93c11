"""Model shape and precision made into sublayers and sites: the only place where one is chosen over another."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from llmq.blocks.attention import Attention, DenseCore, Heads, NormedRotary, PackedCore, Rotary
from llmq.blocks.embed import Embed, NoisyEmbed
from llmq.blocks.head import Head
from llmq.blocks.mlp import Mlp
from llmq.errors import UsageError
from llmq.model.decoder import Block, Model
from llmq.model.parameters import HEAD, padded_vocab
from llmq.plan.spec import Spec
from llmq.sites.factories import FACTORIES
from llmq.sites.linear import Linear

Sites = Callable[[Spec, str], Linear]  # what computes the linear map of a name

NOISE_STREAM = zlib.crc32(b"embedding noise")  # addresses its random bits, as a parameter's name does


def site_of(spec: Spec, name: str) -> Linear:
    """The site of the linear map of a name."""
    p = spec.precision
    return FACTORIES[p.dtype(name)](name, p.gradient, p.scaling)


def build_model(spec: Spec, sites: Sites = site_of) -> Model:
    """The objects whose forward and backward are recorded in training. UsageError for what cannot be combined."""
    site = partial(sites, spec)
    config, precision, memory, hyper = spec.config, spec.precision, spec.memory, spec.hyper
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
        core = DenseCore(*scope) if spec.packing is None else PackedCore(*scope, spec.packing)
        at = f"layers.{layer}"
        attention = Attention(c, heads, eps, site(f"{at}.attention.qkv"), site(f"{at}.attention.o"), rotary, core)
        mlp = Mlp(c, config.intermediate_size, eps, site(f"{at}.mlp.up"), site(f"{at}.mlp.down"))
        blocks.append(Block(attention, mlp))
    padded = padded_vocab(config)
    head = Head(c, config.vocab_size, padded, eps, memory.head_chunks, hyper.z_loss, site(HEAD))
    embed = NoisyEmbed(c, hyper.neftune_alpha, spec.seed, NOISE_STREAM) if hyper.neftune_alpha else Embed()
    return Model(embed, tuple(blocks), head)


def without_noise(model: Model) -> Model:
    """The model as it is evaluated."""
    return replace(model, embed=Embed())
