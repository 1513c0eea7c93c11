"""What the finished model is: its config, its tokenizer and templates, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llmq.adapters.merge import MergedExport, untied
from llmq.adapters.resolve import merges
from llmq.data.batches.loader import Data
from llmq.data.batches.named_data import NamedData
from llmq.data.batches.trained_template import ExportedTemplates, exported_templates
from llmq.data.tokens.tokenizer import json_if_there
from llmq.errors import UsageError
from llmq.files.huggingface import Export, open_export
from llmq.files.source import ModelSource, Values
from llmq.model.config import ModelConfig
from llmq.model.parameters import parameter_rows, rows_of_file
from llmq.options.parse import Options
from llmq.plan.plan import Plan

Tokens = tuple[Path | None, ExportedTemplates]  # the tokenizer of an exported model, and its templates
MERGED = "merged"  # the folder of the merged model, in that of the adapter


def exported_config(source: ModelSource, data: Data, notices: list[str]) -> ModelConfig:
    """The config of the trained and exported model, with the ends of the data's texts and its length."""
    config = _with_end_tokens(source, data.end_token_ids())
    if data.seq_len <= config.max_position:
        return config
    notices.append(
        f"--seq-len {data.seq_len} exceeds the max_position_embeddings {config.max_position} of {source.name}: "
        f"the exported model says {data.seq_len}"
    )
    return replace(config, max_position=data.seq_len)


def _with_end_tokens(source: ModelSource, ends: tuple[int, ...]) -> ModelConfig:
    """The config of the exported model: it ends texts as its data does, and one trained before as then, too."""
    config = source.config
    if set(ends) <= set(config.eos_token_ids):
        return config
    if source.from_scratch:
        return replace(config, eos_token_ids=ends, bos_token_id=None, pad_token_id=None)
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))


def exported_tokenizer(source: ModelSource, named: NamedData | None, data: Data) -> Tokens:
    """The tokenizer of the exported model, and its templates.

    Of a run from scratch the one that made the data, unless --tokenizer chose one.
    """
    folder = source.tokenizer_folder
    if source.from_scratch and not source.tokenizer_asked:
        folder = data.tokenizer_folder() or (named.tokenizer.folder if named else folder)
    if folder is not None:
        json_if_there(folder / "tokenizer.json")  # a torn file is refused now, and not when the run has ended
    return folder, exported_templates(data.train, folder)


@dataclass(frozen=True)
class OpenedExports:
    """Where a run's results go, and what the user should know of them."""

    exports: tuple[Export, ...]
    notices: tuple[str, ...] = ()


def open_model(
    options: Options, source: ModelSource, tokens: Tokens, plan: Plan, model: Values, *, replaces: bool
) -> OpenedExports:
    """Where the model goes, or its adapter, and with --merge both as one.

    All have the tokenizer and its templates. `model` gives the values of the model's rows as they were before the run.
    """
    tokenizer, templates = tokens
    config, adapters = plan.spec.config, plan.spec.adapters
    about = (tokenizer, templates.sources)
    if not adapters.freezes:
        export = open_export(options.export, config, rows_of_file(plan.rows), *about, replaces=replaces)
        return OpenedExports((export,), templates.notices)
    revision = None if source.revision is None else source.revision.partition(",")[0]
    before = None if plan.held_base.is_quantized else model
    rows, make = adapters.file(plan.rows, config, source.name, revision, before)
    export = open_export(options.export, config, rows, *about, replaces=replaces, default="fp32", make=make)
    return OpenedExports((export, *_merged(options, export, plan)), templates.notices)


def _merged(options: Options, export: Export, plan: Plan) -> Iterator[Export]:
    """Where the merged model of --merge goes, if it is asked for, beside an adapter's `export`."""
    adapters = plan.spec.adapters
    if not merges(options.adapters):
        return
    if adapters.unmergeable:
        raise UsageError(f"--merge adds adapters to weights, and this run trains {adapters.unmergeable}: leave it out")
    config = untied(plan.spec.config, [adapters])
    make = partial(MergedExport, adapters=adapters, held=plan.rows)
    about = (export.tokenizer_folder, export.chat_templates)
    found = open_export(options.export, config, parameter_rows(config), *about, replaces=export.overwrite, make=make)
    yield replace(found, folder=export.folder / MERGED)
