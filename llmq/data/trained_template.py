"""The chat template that the training data was rendered with: the one that the exported model has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmq.data.batches.mixture import Mixture
from llmq.data.batches.stream import Stream
from llmq.data.batches.windows import Samples
from llmq.data.chat.template import OWN, open_templates, template_note
from llmq.data.tokens.sidecar import Sidecar, TemplateNote
from llmq.errors import DataError


@dataclass(frozen=True)
class ExportedTemplates:
    """The templates in Jinja by name where the export does not have the tokenizer's own, and what a user should know.

    `sources` is None where the tokenizer's files are exported as they are.
    """

    sources: dict[str, str] | None = None
    notices: tuple[str, ...] = ()


def exported_templates(train: Samples | Stream, tokenizer_folder: Path | None) -> ExportedTemplates:
    """The templates of a model that is trained on `train` and exported with the tokenizer of `tokenizer_folder`.

    Of several, those with the largest share of the trained data win, with a notice that names all.
    """
    shares: dict[tuple[str, ...], float] = {}
    notes: dict[tuple[str, ...], TemplateNote] = {}
    for note, share in _trained(train):
        key = (note.default, note.tool_use or "")
        notes.setdefault(key, note)
        shares[key] = shares.get(key, 0.0) + share
    if not notes or tokenizer_folder is None:
        return ExportedTemplates()
    order = sorted(notes, key=lambda key: -shares[key])
    chosen = notes[order[0]]
    notices = []
    if len(order) > 1:
        named = ", ".join(f"{notes[key].origin} ({100 * shares[key]:.1f}% of the tokens)" for key in order)
        notices.append(
            f"The training data is of {len(order)} chat templates: {named}. The exported model has the first of them"
        )
    if (own := _own(tokenizer_folder)) is not None and own.sources() == chosen.sources():
        return ExportedTemplates(None, tuple(notices))
    if len(order) == 1:
        instead = ", in place of the tokenizer's own" if own else ""
        notices.append(f"The exported model has the chat template of its training data ({chosen.origin}){instead}")
    return ExportedTemplates(chosen.sources(), tuple(notices))


def _own(tokenizer_folder: Path) -> TemplateNote | None:
    """The templates that a tokenizer's folder gives by default; None if it has none, or none by default."""
    try:
        return template_note(open_templates(tokenizer_folder, OWN))
    except DataError:
        return None


def _trained(train: Samples | Stream) -> Iterator[tuple[TemplateNote, float]]:
    """The templates of each file, with the part of the trained tokens that is from it."""
    if isinstance(train, Stream):
        if train.chat_template is not None:
            yield train.chat_template, 1.0
        return
    sources = [(train, 1.0)]
    if isinstance(train, Mixture):
        parts = (part / train.period for part in train.parts)
        sources = list(zip(train.sources, parts, strict=True))
    for samples, share in sources:
        for file in samples.token_files:
            sidecar = Sidecar.read(file.path, file.num_tokens)
            if sidecar is not None and sidecar.chat_template is not None:
                yield sidecar.chat_template, share * file.num_tokens / samples.num_tokens
