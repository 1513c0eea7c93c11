"""The options on adapters made into their targets, and into the values that a run begins with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from llmq.adapters.adalora import AdaLora, with_triplets
from llmq.adapters.budget import Budget
from llmq.adapters.first_values import FirstAdapter
from llmq.adapters.ia3 import Gains, scaled
from llmq.adapters.lora import Lora
from llmq.adapters.method import NO_ADAPTERS, Method
from llmq.adapters.peft import open_adapter
from llmq.adapters.taken_out import TAKEN_OUT
from llmq.adapters.targets import (
    LM_HEAD,
    Module,
    chosen,
    targets,
    trained_in_full,
    untied_only,
    without_head,
)
from llmq.adapters.virtual_tokens import PROMPT_ROW, Prefix, Prompt, begun_as
from llmq.errors import UsageError
from llmq.files.source import ModelSource, Values, uniform_block
from llmq.model.config import ModelConfig
from llmq.model.held import HeldBase
from llmq.model.parameters import left_out, num_parameters
from llmq.options.adapters import OF_BUDGET
from llmq.row import Row

if TYPE_CHECKING:
    from llmq.options.adapters import AdapterOptions

_Number = TypeVar("_Number", int, float)


def resolve(options: AdapterOptions, config: ModelConfig, steps: int = 0) -> Method:
    """What the options ask for on a model. UsageError, DataError.

    `steps` are those of the run, which the schedule of AdaLoRA ends with; 0 where they are not known.
    """
    if options.adapter is not None:
        return _stored(options, Path(options.adapter), config)
    if options.ia3 is not None:
        return _gains(options, config)
    if count := options.prompt_tuning or options.prefix_tuning:
        return (Prompt if options.prompt_tuning else Prefix)(count, base=options.base_dtype)
    return NO_ADAPTERS if options.lora_rank is None else _lora(options, config, steps)


def _stored(options: AdapterOptions, folder: Path, config: ModelConfig) -> Method:
    """The adapter of a folder, on a base that is held as it was unless the options say otherwise."""
    stored = open_adapter(folder, config)
    found, trained_on = stored.adapters, stored.trained_on
    found = replace(found, base=options.base_dtype or (trained_on.held.base if trained_on else None))
    if not isinstance(found, Lora):
        return found
    dropout = found.dropout if options.lora_dropout is None else options.lora_dropout
    return replace(found, dropout=dropout, plus=options.lora_plus_ratio or 1.0)


def _lora(options: AdapterOptions, config: ModelConfig, steps: int) -> Lora:
    """LoRA's, or AdaLoRA's."""
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
    about: dict[str, Any] = {
        "dropout": options.lora_dropout or 0.0,
        "bias": options.lora_bias or "none",
        "base": options.base_dtype,
        "also": _in_full(options, config, modules),
        "plus": options.lora_plus_ratio or 1.0,
    }
    if options.adalora:
        return AdaLora(rank, alpha, with_triplets(every), schedule=_schedule(options, rank, steps), **about)
    return Lora(
        rank,
        alpha,
        every,
        rslora=options.rslora,
        init=options.lora_init or "kaiming",
        dora=options.dora,
        rho=options.eva_rho or 1.0,
        budget=options.lora_budget,
        **about,
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


def _gains(options: AdapterOptions, config: ModelConfig) -> Gains:
    """IA3's. UsageError."""
    modules = chosen(options.ia3 or "", config, "--ia3")
    without_head(modules, "--ia3")
    also = _in_full(options, config, modules)
    return Gains(scaled(modules), base=options.base_dtype, also=also)


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


def frozen(options: AdapterOptions, config: ModelConfig) -> frozenset[str]:
    """The names of the model's rows that --train-only leaves frozen. UsageError."""
    return frozenset() if options.train_only is None else left_out(options.train_only, config)


def merges(options: AdapterOptions) -> bool:
    """Whether the finished run leaves the merged model, too."""
    return options.merge


def first_values(
    options: AdapterOptions,
    adapters: Method,
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
        return FirstAdapter(adapters, config, model, given).values
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


def base_notes(options: AdapterOptions, source: ModelSource, held: HeldBase, seed: int) -> Iterator[str]:
    """What the user should know of the base of --adapter, which this run holds so. DataError for a model that has the
    adapter in its weights."""
    if options.adapter is None:
        return
    stored = open_adapter(Path(options.adapter), source.config)
    if other := stored.check_base(source, seed):
        yield other
    if (trained_on := stored.trained_on) is None:
        return
    if trained_on.held != held:
        yield f"{options.adapter} was trained on a base in {trained_on.held}, and this run holds it in {held}"
    elif held.is_quantized and options.base_dtype is None:
        yield f"The base is held in {held}, as {options.adapter} was trained on it (--base-dtype {held.base})"


def note(adapters: Method, rows: Sequence[Row]) -> str:
    """One line on what is trained: `Adapters of rank 16 on 196 linear maps: 40,370,176 of 7,656,... parameters`."""
    trained, every = (num_parameters(kept) for kept in ([row for row in rows if row.trainable], rows))
    counts = f"{trained:,} of {every:,} parameters are trained ({trained / every:.2%}), the others frozen"
    return f"{adapters.words()}: {counts}"
