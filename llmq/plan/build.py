"""Model shape and precision made into sublayers and sites: the only place where one is chosen over another."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from llmq.adapters.method import SiteFacts
from llmq.blocks.attention import Attention, DenseCore, Heads, Rotary
from llmq.blocks.cached import CachedCore, Penalized, PromptCore, Sampler, Sampling, Scored, TokenHead
from llmq.blocks.embed import Embed, NoisyEmbed
from llmq.blocks.head import Head, LogitsReader
from llmq.blocks.mlp import Mlp
from llmq.blocks.packed import PackedCore
from llmq.blocks.tiles import Tiled
from llmq.errors import UsageError
from llmq.model.decoder import Block, Model
from llmq.model.held import HELD_FORMS, is_layer_weight
from llmq.model.parameters import HEAD, fitted_rows, padded_vocab
from llmq.plan.spec import Spec
from llmq.protocols import Core, Site
from llmq.row import Row
from llmq.sites.fp8 import Fp8Linear
from llmq.sites.linear import Bf16Linear
from llmq.stores.fetched_weights import MASTER_FORM

Cores = Callable[[int | None, int], Core]  # the attention of a layer, by its window and number
Rotaries = Callable[[int], Any]  # what happens to its queries and keys before that, by its number

NOISE_STREAM = zlib.crc32(b"embedding noise")  # addresses its random bits, as a parameter's name does


def site_of(spec: Spec, name: str) -> Site:
    """The site of the linear map of a name."""
    p = spec.precision
    dtype = p.dtype(name)
    base = Fp8Linear(name, p.gradient, p.scaling) if dtype == "e4m3" else Bf16Linear(name, dtype)
    return spec.adapters.site(base, SiteFacts(spec.config, p.model, p.stat, spec.seed, spec.batch_size))


def rows_of(spec: Spec, model: Model) -> tuple[Row, ...]:
    """The parameters of a model, of which all are frozen but what the spec trains."""
    rows = spec.adapters.rows(fitted_rows(spec.config, model.sites), spec.config)
    return tuple(_stored(spec, row) for row in rows)


def _stored(spec: Spec, row: Row) -> Row:
    """A row in the form that it is held in, if it is the weight of a layer's linear map: that of the base where it is
    frozen, 8 bits where it is trained without a master."""
    base, p = spec.base, spec.precision
    if base not in (None, *HELD_FORMS, p.model):
        raise UsageError(f"--base-dtype {base} does not multiply with --model-dtype {p.model}: give both the same")
    # Embedding, head and norms keep their dtype: bitsandbytes and PEFT quantize linear layers alone, too.
    if not is_layer_weight(row):
        return row
    if row.trainable:
        return replace(row, stored=MASTER_FORM) if p.master == "none" else row
    if base not in HELD_FORMS:
        return row
    # Where fp8 sites read one scale for the whole, they read the held bytes of fp8 directly.
    single = p.dtype(row.site or "") == "e4m3" and p.scaling in ("delayed", "current")
    return replace(row, stored=HELD_FORMS[base](row, single))


def build_model(spec: Spec) -> Model:
    """The objects whose forward and backward are recorded in training. UsageError for what cannot be combined."""
    config, precision, memory = spec.config, spec.precision, spec.memory
    if precision.head == "e4m3" and precision.scaling == "blockwise":
        raise UsageError(
            "--head-dtype e4m3 needs one scale per tensor or row, as cuBLASLt takes 1x128 scales neither for a chunk "
            "of the head's input nor for one token: use --fp8-scaling rowwise, or leave the head in bf16"
        )
    layers = _blocks(spec, lambda window, layer: _core(spec, window), partial(_rotary, spec), memory.seq_tiles)
    loss = spec.loss.reader(config.vocab_size, spec.regularization.z_loss)
    family, sizes = config.family, (config.hidden_size, padded_vocab(config))
    reader = family.reader(config, loss)
    head = Head(*sizes, family.norm(config), memory.head_chunks, site_of(spec, HEAD), reader)
    return Model(_embed(spec, _around(spec)), layers, head)


def build_decoder(spec: Spec, sampling: Sampling) -> Model:
    """The objects whose forward is recorded for the next token."""
    heads = _heads(spec)
    rotaries = [spec.config.family.rotary(spec.config, layer) for layer in range(spec.config.num_layers)]
    unturned = [rotary.unturned for rotary in rotaries]

    def core(window: int | None, layer: int) -> Core:
        return CachedCore(heads, window, layer, unturned[layer].left, rotaries[layer].table)

    return _generator(spec, _embed(spec, lambda base: base), core, unturned.__getitem__, sampling)


def build_prompt_reader(spec: Spec, sampling: Sampling) -> Model:
    """The objects whose forward is recorded for prompts, whose head is not."""

    def core(window: int | None, layer: int) -> Core:
        return PromptCore(_core(spec, window), layer)

    return _generator(spec, _embed(spec, _around(spec)), core, partial(_rotary, spec), sampling)


def _generator(spec: Spec, embed: Embed, cores: Cores, rotaries: Rotaries, sampling: Sampling) -> Model:
    config = spec.config
    sampler: LogitsReader = Sampler(config.vocab_size, sampling)
    if sampling.repetition_penalty != 1:
        sampler = Penalized(sampler, sampling.repetition_penalty)
    if sampling.logprobs:
        sampler = Scored(sampler, config.vocab_size)
    norm, reader = config.family.norm(config), config.family.reader(config, sampler)
    head = TokenHead(config.hidden_size, padded_vocab(config), norm, site_of(spec, HEAD), reader)
    return Model(embed, _blocks(spec, cores, rotaries), head)


def _blocks(spec: Spec, cores: Cores, rotaries: Rotaries, tiles: int = 1) -> tuple[Block, ...]:
    """The layers, with attention by `cores`, and the MLP in `tiles`."""
    config, heads, site = spec.config, _heads(spec), partial(site_of, spec)
    c, family, onto = config.hidden_size, config.family, config.family.onto(config)
    found = []
    for layer in range(config.num_layers):
        core, at = cores(config.window(layer), layer), f"layers.{layer}"
        qkv, o, up, down = (site(f"{at}.{name}") for name in ("attention.qkv", "attention.o", "mlp.up", "mlp.down"))
        attention = Attention(c, heads, family.into(config), qkv, rotaries(layer), core, o, onto)
        mlp = Mlp(c, config.intermediate_size, family.mlp_into(config), up, family.activation(config), down, onto)
        found.append(Block(attention, mlp if tiles == 1 else Tiled(mlp, tiles)))
    return tuple(found)


def _heads(spec: Spec) -> Heads:
    return spec.config.family.heads(spec.config)


def _embed(spec: Spec, around: Callable[[Embed], Embed]) -> Embed:
    """The embedding of a spec. UsageError for rows that are longer than a table of learned positions."""
    config = spec.config
    if config.family.wiring.names.positions and spec.seq_len > config.max_position:
        raise UsageError(
            f"rows of {spec.seq_len:,} tokens have more positions than the model's {config.max_position:,}, which are "
            "learned: use a smaller --seq-len, or write fewer tokens"
        )
    return config.family.embed(config, spec.precision.model, spec.adapters.table(config), around)


def _around(spec: Spec) -> Callable[[Embed], Embed]:
    """What a run puts around the embedding of tokens: noise, and virtual tokens."""
    config, alpha = spec.config, spec.regularization.neftune_alpha

    def around(base: Embed) -> Embed:
        noisy = NoisyEmbed(base, config.hidden_size, alpha, spec.seed, NOISE_STREAM) if alpha else base
        return spec.adapters.embed(noisy, config)

    return around


def _rotary(spec: Spec, layer: int) -> Rotary:
    return spec.adapters.rotary(spec.config.family.rotary(spec.config, layer))


def _core(spec: Spec, window: int | None) -> DenseCore:
    """Attention in the rows of a spec."""
    scope = (_heads(spec), window, spec.memory.attention_chunks)
    return DenseCore(*scope) if spec.packing is None else PackedCore(*scope, spec.packing)
