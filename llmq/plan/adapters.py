"""The options on adapters made into their targets, and into the values that a run begins with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from llmq.errors import UsageError
from llmq.files.adapters import open_adapter
from llmq.files.first_adapter import FirstAdapter
from llmq.files.source import ModelSource, Values, uniform_block
from llmq.files.virtual_tokens import begun_as
from llmq.model.adalora import INIT, Budget
from llmq.model.adapters import (
    LM_HEAD,
    Adapters,
    Module,
    chosen,
    scaled,
    targets,
    trained_in_full,
    untied_only,
    with_triplets,
    without_head,
)
from llmq.model.config import ModelConfig
from llmq.model.first_adapter import TAKEN_OUT
from llmq.model.held import HELD_FORMS, HeldBase
from llmq.model.lisa import Lisa
from llmq.model.parameters import left_out, num_parameters
from llmq.model.several import Several
from llmq.model.virtual_tokens import PREFIX, PROMPT, PROMPT_ROW
from llmq.options.adapters import OF_BUDGET
from llmq.row import Row

if TYPE_CHECKING:
    from llmq.options.adapters import AdapterOptions
    from llmq.plan.plan import Plan

_Number = TypeVar("_Number", int, float)


def resolve(options: AdapterOptions, config: ModelConfig, steps: int = 0) -> Adapters | None:
    """The adapters that the options ask for on a model; None for a run that trains the model. UsageError, DataError.

    `steps` are those of the run, which the schedule of AdaLoRA ends with; 0 where they are not known.
    """
    if options.adapter is not None:
        stored = open_adapter(Path(options.adapter), config)
        found, trained_on = stored.adapters, stored.trained_on
        dropout = found.dropout if options.lora_dropout is None else options.lora_dropout
        base = options.base_dtype or (trained_on.held.base if trained_on else None)
        return replace(found, base=base, dropout=dropout, plus=options.lora_plus_ratio or 1.0)
    if options.ia3 is not None:
        return _gains(options, config)
    if count := options.prompt_tuning or options.prefix_tuning:
        method = PROMPT if options.prompt_tuning else PREFIX
        return Adapters(0, 1.0, (), method=method, num_virtual=count, base=options.base_dtype)
    if options.lora_rank is None:
        return None
    assert options.lora_targets is not None
    modules, rank, alpha = chosen(options.lora_targets, config), _rank(options), options.lora_alpha or 0.0
    if options.dora:
        without_head(modules)
    if options.lora_init in TAKEN_OUT and config.tie_embeddings:
        untied_only(modules, options.lora_init)
    if not rank and config.tie_embeddings and any(module.name == LM_HEAD for module in modules):
        raise UsageError(
            f"--lora-rank auto looks at gradients of maps, and that of {LM_HEAD} is the embedding's too: leave it out "
            "of --lora-targets"
        )
    every = targets(
        modules,
        rank,
        alpha,
        rslora=options.rslora,
        ranks=_patterns("--lora-rank-pattern", options.lora_rank_pattern, int),
        alphas=_patterns("--lora-alpha-pattern", options.lora_alpha_pattern, float),
    )
    schedule = _schedule(options, rank, steps) if options.adalora else None
    return Adapters(
        rank,
        alpha,
        every if schedule is None else with_triplets(every),
        budget=options.lora_budget,
        schedule=schedule,
        dropout=options.lora_dropout or 0.0,
        bias=options.lora_bias or "none",
        rslora=options.rslora,
        init=options.lora_init or "kaiming" if schedule is None else INIT,
        base=options.base_dtype,
        also=_in_full(options, config, modules),
        dora=options.dora,
        plus=options.lora_plus_ratio or 1.0,
        rho=options.eva_rho or 1.0,
    )


def _rank(options: AdapterOptions) -> int:
    """The rank that is asked for; 0 is yet to be found."""
    return options.lora_rank if isinstance(options.lora_rank, int) else 0


def _schedule(options: AdapterOptions, rank: int, steps: int) -> Budget:
    """AdaLoRA's. UsageError."""
    said: list[Any] = [*(getattr(options, key) for key in OF_BUDGET), steps]
    found = Budget(*said)
    found.check(rank)
    return found


def _gains(options: AdapterOptions, config: ModelConfig) -> Adapters:
    """IA3's. UsageError."""
    modules = chosen(options.ia3 or "", config, "--ia3")
    without_head(modules, "--ia3")
    also = _in_full(options, config, modules)
    return Adapters(0, 1.0, scaled(modules), method="ia3", base=options.base_dtype, also=also)


def _in_full(options: AdapterOptions, config: ModelConfig, modules: Sequence[Module]) -> frozenset[str]:
    """The rows of --train-also. UsageError."""
    return trained_in_full(options.train_also, config, modules) if options.train_also else frozenset()


def _patterns(option: str, text: str | None, kind: Callable[[str], _Number]) -> dict[str, _Number]:
    """What `PATTERN=NUMBER` with commas between says, in order. UsageError for what is no number above 0, and for a
    pattern with two numbers."""
    found: dict[str, _Number] = {}
    for one in text.split(",") if text else ():
        name, _, said = one.strip().rpartition("=")
        try:
            number = kind(said)
        except ValueError:
            number = kind("0")
        if not name or not 0 < number < math.inf:
            raise UsageError(f"{option} {one.strip()}: write PATTERN=NUMBER with a number above 0, such as q_proj=32")
        if found.setdefault(name, number) != number:
            raise UsageError(f"{option} gives {name} twice, as {found[name]:g} and as {number:g}: remove one")
    return found


def lisa(options: AdapterOptions, config: ModelConfig, seed: int) -> Lisa | None:
    """Which layers train at a time, if not all do. UsageError for more than there are."""
    if options.lisa is None:
        return None
    if options.lisa > config.num_layers:
        raise UsageError(f"--lisa {options.lisa}: the model has {config.num_layers} layers: use so many at most")
    assert options.lisa_interval is not None
    return Lisa(options.lisa, options.lisa_interval, seed)


def frozen(options: AdapterOptions, config: ModelConfig, seed: int = 0, step: int = 0) -> frozenset[str]:
    """The names of the model's rows that --train-only leaves frozen, or --lisa in a step. UsageError."""
    if (drawn := lisa(options, config, seed)) is not None:
        return drawn.frozen(config, step)
    return frozenset() if options.train_only is None else left_out(options.train_only, config)


def merges(options: AdapterOptions) -> bool:
    """Whether the finished run leaves the merged model, too."""
    return options.merge


def first_values(
    options: AdapterOptions,
    adapters: Adapters | None,
    source: ModelSource,
    model: Values,
    seed: int,
    given: Mapping[str, np.ndarray],
) -> Values:
    """The values of all rows before the first step: the model's, and those of --adapter, or of new adapters, of which
    some may be `given` by the names of their tensors. DataError, UsageError."""
    config = source.config
    if options.prompt_init_text is not None or options.prompt_init == "sample_vocab":
        return begun_as(partial(_prompt_tokens, options, source, seed), config, model)
    if options.adapter is None:
        return model if adapters is None else FirstAdapter(adapters, config, model, given).values
    return open_adapter(Path(options.adapter), config).values(model)


def _prompt_tokens(options: AdapterOptions, source: ModelSource, seed: int) -> list[int]:
    """The tokens that a prompt begins as: those of a text, repeated or cut, or drawn. UsageError."""
    count, vocab_size, text = options.prompt_tuning or 0, source.config.vocab_size, options.prompt_init_text
    if text is None:
        drawn = (uniform_block(seed, PROMPT_ROW, 0, count).astype(np.float64) + 1) / 2 * vocab_size
        return drawn.astype(int).tolist()
    folder = source.tokenizer_folder or source.preset_tokenizer
    if folder is None:
        raise UsageError(f"--prompt-init-text {text!r} needs a tokenizer, and {source.name} has none: add --tokenizer")
    from llmq.data.tokens.tokenizer import TextTokenizer  # a sixth of a second, for a plan that seldom needs it

    tokenizer = TextTokenizer.open(str(folder))
    ids = [*tokenizer.begin_ids, *tokenizer.encoder.encode(text, add_special_tokens=False).ids]
    if not ids or max(ids) >= vocab_size:
        raise UsageError(f"--prompt-init-text {text!r} has no tokens of the model's vocabulary: give another text")
    return [ids[place % len(ids)] for place in range(count)]


def held_by(plan: Plan) -> HeldBase:
    """How a run holds the frozen model."""
    base = None if plan.spec.adapters is None else plan.spec.adapters.base
    forms = {row.name: row.stored for row in plan.rows if row.stored is not None}
    single = (name for name, form in forms.items() if form.dtype == "e4m3" and form.scaling != "tilewise")
    return HeldBase(base if base in HELD_FORMS else None, plan.spec.precision.model, frozenset(single))


def base_notes(options: AdapterOptions, source: ModelSource, plan: Plan) -> Iterator[str]:
    """What the user should know of the base of --adapter, and how this run holds it. DataError for a model that has the
    adapter in its weights."""
    if options.adapter is None:
        return
    stored, held = open_adapter(Path(options.adapter), source.config), held_by(plan)
    if other := stored.check_base(source, plan.spec.seed):
        yield other
    if (trained_on := stored.trained_on) is None:
        return
    if trained_on.held != held:
        yield f"{options.adapter} was trained on a base in {trained_on.held}, and this run holds it in {held}"
    elif held.is_quantized and options.base_dtype is None:
        yield f"The base is held in {held}, as {options.adapter} was trained on it (--base-dtype {held.base})"


def note(adapters: Adapters | None, rows: Sequence[Row]) -> str:
    """One line on what is trained: `adapters of rank 16 on 196 linear maps: 40,370,176 of 7,656,... parameters`."""
    trained, every = (num_parameters(kept) for kept in ([row for row in rows if row.trainable], rows))
    counts = f"{trained:,} of {every:,} parameters are trained ({trained / every:.2%}), the others frozen"
    if adapters is None:
        return f"A part of the model: {counts}"
    if adapters.method == "ia3":
        return f"Gains (IA3) on {len(adapters.targets)} linear maps: {counts}"
    if adapters.num_virtual:
        kind = "Embeddings" if adapters.method == PROMPT else "Keys and values in every layer"
        return f"{kind} of {adapters.num_virtual} virtual tokens before each document: {counts}"
    ranks = sorted({target.rank for target in adapters.targets})
    if isinstance(adapters, Several):
        return f"{len(adapters.members)} adapters at once: {counts}"
    said = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    biases = "" if adapters.bias == "none" else " with biases"
    full = f", beside {len(adapters.also)} parameters in full" if adapters.also else ""
    kind = "Adapters with magnitudes" if adapters.dora else "Adapters"
    if adapters.schedule is not None:
        kind = "Adapters with singular values (AdaLoRA)"
        said += "" if adapters.schedule.spent else f" at first and {adapters.schedule.target_rank} on average at last"
    return f"{kind} of {said} on {len(adapters.targets)} linear maps{biases}{full}: {counts}"
