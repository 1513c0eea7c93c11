"""Model shape and precision made into sublayers and sites: the only place where one is chosen over another."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llmq.blocks.attention import Attention, DenseCore, Heads, NormedRotary, PackedCore, PrefixedRotary, Rotary
from llmq.blocks.cached import (
    CachedCore,
    NormedUnturned,
    PenalizedSampler,
    PromptCore,
    Sampler,
    Sampling,
    TokenHead,
    Unturned,
)
from llmq.blocks.embed import Embed, NoisyEmbed, PromptedEmbed
from llmq.blocks.head import Head, Totals, TotalsOfRows
from llmq.blocks.mlp import Mlp, TiledMlp
from llmq.errors import UsageError
from llmq.model.adapters import FILE, Adapters, Target, outputs_of
from llmq.model.decoder import Block, Model
from llmq.model.held import HELD_FORMS, held_form, is_layer_weight
from llmq.model.parameters import HEAD, fitted_rows, padded_vocab
from llmq.model.several import Several
from llmq.model.virtual_tokens import PREFIX, PROMPT, with_virtual
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec
from llmq.protocols import Core, Site
from llmq.row import Row
from llmq.sites.adalora import AdaLoraLinear
from llmq.sites.dora import DoraLinear
from llmq.sites.factories import FACTORIES
from llmq.sites.ia3 import GainLinear, GainPiece, InputGainLinear
from llmq.sites.linear import Linear
from llmq.sites.lora import DroppedLinear, LoraLinear, LowRank
from llmq.sites.several import OwnRows, SeveralLinear
from llmq.stores.moments import MASTER_FORM

Sites = Callable[[Spec, str], Site]  # what computes the linear map of a name
Cores = Callable[[int | None, int], Core]  # the attention of a layer, by its window and number

NOISE_STREAM = zlib.crc32(b"embedding noise")  # addresses its random bits, as a parameter's name does


def site_of(spec: Spec, name: str) -> Site:
    """The site of the linear map of a name."""
    p = spec.precision
    base = FACTORIES[p.dtype(name)](name, p.gradient, p.scaling)
    adapters = spec.adapters
    if adapters is None or name not in adapters.by_site:
        return base
    if adapters.method == "ia3":
        return _with_gains(spec, base, adapters.by_site[name])
    if isinstance(adapters, Several):
        return _several(spec, base, adapters)
    low_rank = _low_rank(p, base, adapters, spec.seed)
    return DoraLinear(low_rank, outputs_of(spec.config, name), p.stat) if adapters.dora else low_rank


def _low_rank(p: Precision, base: Linear, adapters: Adapters, seed: int) -> LoraLinear | DroppedLinear:
    """The site `base` with adapters, whose dropout draws by a seed."""
    about = (base, _pieces(adapters.by_site[base.name]), adapters.init, FILE, p.model)
    lora = LoraLinear(*about)
    if adapters.schedule is not None:
        lora = AdaLoraLinear(*about, stat=p.stat, orthogonality=adapters.orthogonality)
    return DroppedLinear(lora, rate=adapters.dropout, seed=seed) if adapters.dropout else lora


def _several(spec: Spec, base: Linear, several: Several) -> Site:
    """The site `base` with those adapters that have it among their targets."""
    found = [
        OwnRows(member.name, _low_rank(spec.precision, base, member.adapters, member.seed), start, stop)
        for member, start, stop in several.places
        if base.name in member.adapters.by_site
    ]
    return SeveralLinear(base, found, spec.batch_size)


def _with_gains(spec: Spec, base: Linear, targets: Sequence[Target]) -> Site:
    """The site `base` with IA3's gains on the outputs or the inputs of `targets`."""
    stat, first = spec.precision.stat, targets[0].module
    if targets[0].inward:
        return InputGainLinear(base, first.name, first.inputs, stat, FILE)
    pieces = [GainPiece(t.module.name, t.module.key, t.module.start, t.module.stop) for t in targets]
    return GainLinear(base, pieces, outputs_of(spec.config, base.name), stat, FILE)


def _pieces(targets: Sequence[Target]) -> list[LowRank]:
    """The adapters of a site's parts, whose A lie one after the other."""
    pieces, first = [], 0
    for target in targets:
        of = target.module
        place = (of.start, of.stop, first, target.rank, target.scale, target.present)
        pieces.append(LowRank(of.name, of.key, of.inputs, of.outputs, *place))
        first += target.rank
    return pieces


def rows_of(spec: Spec, model: Model) -> tuple[Row, ...]:
    """The parameters of a model, of which all are frozen but what the spec trains."""
    rows = with_virtual(fitted_rows(spec.config, model.sites), spec.adapters, spec.config)
    if spec.adapters is None:
        rows = tuple(replace(row, trainable=row.trainable and row.name not in spec.frozen) for row in rows)
        return tuple(map(_without_master, rows)) if spec.precision.master == "none" else rows
    return tuple(_held(spec, row) for row in spec.adapters.frozen(rows))


def _without_master(row: Row) -> Row:
    """A row whose value is held in 8 bits, if it is a trained weight of a layer's linear map."""
    return replace(row, stored=MASTER_FORM) if is_layer_weight(row) and row.trainable else row


def _held(spec: Spec, row: Row) -> Row:
    """A row in the form that the base is held in, if it is a frozen weight of a layer's linear map."""
    base, p = None if spec.adapters is None else spec.adapters.base, spec.precision
    if base not in (None, *HELD_FORMS, p.model):
        raise UsageError(f"--base-dtype {base} does not multiply with --model-dtype {p.model}: give both the same")
    if base not in HELD_FORMS or row.trainable or not is_layer_weight(row):
        return row
    # Where fp8 sites read one scale for the whole, they read the held bytes of fp8 as they are.
    single = p.dtype(row.site or "") == "e4m3" and p.scaling in ("delayed", "current")
    return replace(row, stored=held_form(base, row, single=single))


def build_model(spec: Spec, sites: Sites = site_of) -> Model:
    """The objects whose forward and backward are recorded in training. UsageError for what cannot be combined."""
    site = partial(sites, spec)
    config, precision, memory, hyper = spec.config, spec.precision, spec.memory, spec.hyper
    if precision.head == "e4m3" and precision.scaling == "blockwise":
        raise UsageError(
            "--head-dtype e4m3 needs one scale per tensor or row, as cuBLASLt takes 1x128 scales neither for a chunk "
            "of the head's input nor for one token: use --fp8-scaling rowwise, or leave the head in bf16"
        )
    layers = _blocks(spec, lambda window, layer: _core(spec, window), _rotary(spec), sites, memory.seq_tiles)
    c, padded = config.hidden_size, padded_vocab(config)
    sizes = (c, config.vocab_size, padded, config.rms_norm_eps, memory.head_chunks, hyper.z_loss)
    head = Head(*sizes, site(HEAD), _totals(spec.adapters))
    return Model(_embed(spec), layers, head)


def _totals(adapters: Adapters | None) -> Totals:
    """What the losses of a micro-batch are added up to."""
    if not isinstance(adapters, Several):
        return Totals()
    return TotalsOfRows({member.name: (start, stop) for member, start, stop in adapters.places})


def build_decoder(spec: Spec, sampling: Sampling, sites: Sites = site_of) -> Model:
    """The objects whose forward is recorded for the next token."""
    heads = _heads(spec)
    rotary = NormedUnturned(heads, spec.config.rms_norm_eps) if spec.config.qk_norm else Unturned()
    given = "normed" if spec.config.qk_norm else "qkv"

    def core(window: int | None, layer: int) -> Core:
        return CachedCore(heads, window, layer, given)

    return _generator(spec, Embed(), core, rotary, sampling, sites)


def build_prompt_reader(spec: Spec, sampling: Sampling, sites: Sites = site_of) -> Model:
    """The objects whose forward is recorded for prompts, whose head is not."""

    def core(window: int | None, layer: int) -> Core:
        return PromptCore(_core(spec, window), layer)

    return _generator(spec, _embed(spec), core, _rotary(spec), sampling, sites)


def _generator(spec: Spec, embed: Embed, cores: Cores, rotary: Any, sampling: Sampling, sites: Sites) -> Model:
    config = spec.config
    kind = Sampler if sampling.repetition_penalty == 1 else PenalizedSampler
    sampler, site = kind(config.vocab_size, sampling), sites(spec, HEAD)
    head = TokenHead(config.hidden_size, padded_vocab(config), config.rms_norm_eps, site, sampler)
    return Model(embed, _blocks(spec, cores, rotary, sites), head)


def _blocks(spec: Spec, cores: Cores, rotary: Any, sites: Sites, tiles: int = 1) -> tuple[Block, ...]:
    """The layers, with attention by `cores`, and the MLP in so many tiles."""
    config, heads, site = spec.config, _heads(spec), partial(sites, spec)
    c, eps = config.hidden_size, config.rms_norm_eps
    found = []
    for layer in range(config.num_layers):
        core, at = cores(config.window(layer), layer), f"layers.{layer}"
        attention = Attention(c, heads, eps, site(f"{at}.attention.qkv"), site(f"{at}.attention.o"), rotary, core)
        mlp = c, config.intermediate_size, eps, site(f"{at}.mlp.up"), site(f"{at}.mlp.down")
        found.append(Block(attention, Mlp(*mlp) if tiles == 1 else TiledMlp(*mlp, tiles=tiles)))
    return tuple(found)


def _heads(spec: Spec) -> Heads:
    return Heads(spec.config.num_heads, spec.config.num_kv_heads, spec.config.head_dim)


def _embed(spec: Spec) -> Embed:
    c, alpha = spec.config.hidden_size, spec.hyper.neftune_alpha
    base = NoisyEmbed(c, alpha, spec.seed, NOISE_STREAM) if alpha else Embed()
    count = _num_virtual(spec, PROMPT)
    return PromptedEmbed(base, c, count) if count else base


def _rotary(spec: Spec) -> Rotary | NormedRotary | PrefixedRotary:
    base = NormedRotary(_heads(spec), spec.config.rms_norm_eps) if spec.config.qk_norm else Rotary(_heads(spec))
    count = _num_virtual(spec, PREFIX)
    return PrefixedRotary(base, count) if count else base


def _num_virtual(spec: Spec, method: str) -> int:
    """Virtual tokens of a method."""
    return spec.adapters.num_virtual if spec.adapters is not None and spec.adapters.method == method else 0


def _core(spec: Spec, window: int | None) -> DenseCore:
    """Attention in the rows of a spec."""
    scope = (_heads(spec), window, spec.memory.attention_chunks)
    return DenseCore(*scope) if spec.packing is None else PackedCore(*scope, spec.packing)
