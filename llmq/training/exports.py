"""What a run trains on, and what the finished model is: its config, its tokenizer and templates, and where it goes."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llmq.adapters.merge import MergedExport, untied
from llmq.adapters.resolve import merges
from llmq.data.batches.loader import Data
from llmq.data.batches.named_data import NamedData
from llmq.data.batches.rows import RowSource
from llmq.data.chat.template import OWN, open_template
from llmq.data.tokens.tokenizer import TemplateNote
from llmq.errors import DataError, UsageError
from llmq.files.huggingface import Export, open_export
from llmq.files.source import ModelSource, Values
from llmq.model.config import ModelConfig
from llmq.model.parameters import parameter_rows, rows_of_file
from llmq.options.parse import Options
from llmq.plan.plan import Plan
from llmq.training.schedule import Schedule

MERGED = "merged"  # the folder of the merged model, in that of the adapter


Say = Callable[[str], None]


@dataclass(frozen=True)
class RunData:
    """The data of a run, its schedule, and what the finished model is: its config, and the folder of its tokenizer.

    `templates` in Jinja by name are None where the tokenizer's files are exported as they are.
    """

    data: Data
    schedule: Schedule
    config: ModelConfig
    tokenizer: Path | None
    templates: Mapping[str, str] | None


def exported_config(source: ModelSource, data: Data, say: Say) -> ModelConfig:
    """The config of the trained and exported model: it ends texts as its data does, and one trained before as then,
    too, and is as long as the data."""
    config, ends = source.config, tuple(sorted(data.train.end_token_ids))
    if not set(ends) <= set(config.eos_token_ids):
        if source.from_scratch:
            config = replace(config, eos_token_ids=ends, bos_token_id=None, pad_token_id=None)
        else:
            config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))
    if data.seq_len <= config.max_position:
        return config
    say(
        f"--seq-len {data.seq_len} exceeds the max_position_embeddings {config.max_position} of {source.name}: "
        f"the exported model says {data.seq_len}"
    )
    return replace(config, max_position=data.seq_len)


def exported_tokenizer(source: ModelSource, named: NamedData | None, data: Data) -> Path | None:
    """The tokenizer of the exported model: of a run from scratch the one that made the data, unless --tokenizer chose
    one."""
    if source.from_scratch and not source.tokenizer_asked:
        return data.tokenizer_folder() or (named.tokenizer.folder if named else source.tokenizer_folder)
    return source.tokenizer_folder


def exported_templates(train: RowSource, tokenizer_folder: Path | None, say: Say) -> Mapping[str, str] | None:
    """The templates of a model that is trained on `train`, if they are not those of its tokenizer.

    Of several, those with the largest share of the trained data win, which is said.
    """
    found: dict[tuple[str, str], tuple[float, TemplateNote]] = {}
    for note, share in train.templates():
        before, first = found.get(key := (note.default, note.tool_use or ""), (0.0, note))
        found[key] = (before + share, first)
    if not found or tokenizer_folder is None:
        return None
    ranked = sorted(found.values(), key=lambda one: -one[0])
    chosen = ranked[0][1]
    if len(ranked) > 1:
        named = ", ".join(f"{note.origin} ({100 * share:.1f}% of the tokens)" for share, note in ranked)
        say(f"The training data is of {len(ranked)} chat templates: {named}. The exported model has the first of them")
    own = None
    with suppress(DataError):  # the tokenizer has no templates, or none by default
        own = open_template(tokenizer_folder, OWN).note
    if own is not None and own.sources() == chosen.sources():
        return None
    if len(ranked) == 1:
        instead = ", in place of the tokenizer's own" if own else ""
        say(f"The exported model has the chat template of its training data ({chosen.origin}){instead}")
    return chosen.sources()


def open_exports(
    options: Options, source: ModelSource, trains: RunData, plan: Plan, model: Values, *, replaces: bool
) -> tuple[Export, ...]:
    """Where the model goes, or its adapter, and with --merge both as one.

    All have the tokenizer and its templates. `model` gives the values of the model's rows as they were before the run.
    """
    config, adapters = plan.spec.config, plan.spec.adapters
    about = (trains.tokenizer, trains.templates)
    if not adapters.freezes:
        return (open_export(options.export, config, rows_of_file(plan.rows), *about, replaces=replaces),)
    revision = None if source.revision is None else source.revision.partition(",")[0]
    before = None if plan.held_base.is_quantized else model
    found = adapters.file(plan.rows, config, before)
    make = found.export(source.name, revision)
    export = open_export(options.export, config, found.rows, *about, replaces=replaces, default="fp32", make=make)
    if not merges(options.adapters):
        return (export,)
    if adapters.unmergeable:
        raise UsageError(f"--merge adds adapters to weights, and this run trains {adapters.unmergeable}: leave it out")
    config, merged = untied(config, [adapters]), partial(MergedExport, adapters=adapters, held=plan.rows)
    rows = parameter_rows(config)
    whole = open_export(options.export, config, rows, *about, replaces=export.overwrite, make=merged)
    return export, replace(whole, folder=export.folder / MERGED)
