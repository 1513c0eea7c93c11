"""What the finished model is: its config, its tokenizer and templates, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llmq.adapters.merge import MergedExport, untied
from llmq.adapters.resolve import merges
from llmq.data.batches.loader import Data
from llmq.data.batches.named_data import NamedData
from llmq.data.batches.rows import RowSource
from llmq.data.chat.template import OWN, open_templates
from llmq.data.tokens.tokenizer import TemplateNote
from llmq.errors import DataError, UsageError
from llmq.files.huggingface import Export, open_export
from llmq.files.source import ModelSource, Values
from llmq.model.config import ModelConfig
from llmq.model.parameters import parameter_rows, rows_of_file
from llmq.options.parse import Options
from llmq.plan.plan import Plan

MERGED = "merged"  # the folder of the merged model, in that of the adapter


@dataclass(frozen=True)
class ExportedTemplates:
    """The templates in Jinja by name where the export does not have the tokenizer's own, and what a user should know.

    `sources` is None where the tokenizer's files are exported as they are.
    """

    sources: dict[str, str] | None = None
    notices: tuple[str, ...] = ()


Tokens = tuple[Path | None, ExportedTemplates]  # the tokenizer of an exported model, and its templates


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
    return folder, _exported_templates(data.train, folder)


def _exported_templates(train: RowSource, tokenizer_folder: Path | None) -> ExportedTemplates:
    """The templates of a model that is trained on `train` and exported with the tokenizer of `tokenizer_folder`.

    Of several, those with the largest share of the trained data win, with a notice that names all.
    """
    found: dict[tuple[str, str], tuple[float, TemplateNote]] = {}
    for note, share in train.templates():
        before, first = found.get(key := (note.default, note.tool_use or ""), (0.0, note))
        found[key] = (before + share, first)
    if not found or tokenizer_folder is None:
        return ExportedTemplates()
    ranked = sorted(found.values(), key=lambda one: -one[0])
    chosen = ranked[0][1]
    notices = []
    if len(ranked) > 1:
        named = ", ".join(f"{note.origin} ({100 * share:.1f}% of the tokens)" for share, note in ranked)
        notices.append(
            f"The training data is of {len(ranked)} chat templates: {named}. The exported model has the first of them"
        )
    own = None
    with suppress(DataError):  # the tokenizer has no templates, or none by default
        own = open_templates(tokenizer_folder, OWN).note
    if own is not None and own.sources() == chosen.sources():
        return ExportedTemplates(None, tuple(notices))
    if len(ranked) == 1:
        instead = ", in place of the tokenizer's own" if own else ""
        notices.append(f"The exported model has the chat template of its training data ({chosen.origin}){instead}")
    return ExportedTemplates(chosen.sources(), tuple(notices))


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
    found = adapters.file(plan.rows, config, before)
    make = found.export(source.name, revision)
    export = open_export(options.export, config, found.rows, *about, replaces=replaces, default="fp32", make=make)
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
