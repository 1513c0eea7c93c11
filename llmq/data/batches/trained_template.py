"""The chat template that the training data was rendered with: the one that the exported model has."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmq.data.batches.rows import Samples
from llmq.data.batches.streaming import StreamedRows
from llmq.data.chat.template import OWN, open_templates, template_note
from llmq.data.tokens.sidecar import TemplateNote
from llmq.errors import DataError


@dataclass(frozen=True)
class ExportedTemplates:
    """The templates in Jinja by name where the export does not have the tokenizer's own, and what a user should know.

    `sources` is None where the tokenizer's files are exported as they are.
    """

    sources: dict[str, str] | None = None
    notices: tuple[str, ...] = ()


def exported_templates(train: Samples | StreamedRows, tokenizer_folder: Path | None) -> ExportedTemplates:
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
        own = template_note(open_templates(tokenizer_folder, OWN))
    if own is not None and own.sources() == chosen.sources():
        return ExportedTemplates(None, tuple(notices))
    if len(ranked) == 1:
        instead = ", in place of the tokenizer's own" if own else ""
        notices.append(f"The exported model has the chat template of its training data ({chosen.origin}){instead}")
    return ExportedTemplates(chosen.sources(), tuple(notices))
