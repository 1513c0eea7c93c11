"""How documents lie in the rows that a run trains on: cut into windows, packed whole, or padded, one to a row.

A run has one layout, for training and evaluation and for all sources of a mixture. Where --packing leaves it open, the
data decides: rows of a data set are documents of their own and stay whole (a chat cut in two leaves an answer without
its question); text files and token files are read as one long text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.errors import UsageError

WINDOWS, PACKED, PADDED = "windows", "packed rows", "padded rows"
OPTIONS = {WINDOWS: "--packing=windows", PACKED: "--packing", PADDED: "--no-packing"}
KINDS = {"windows": WINDOWS, True: PACKED, False: PADDED}  # by the value of --packing


@dataclass(frozen=True)
class RowLayout:
    """The layout of a run's rows, and why it is that one, in words."""

    kind: str = WINDOWS
    why: str = ""

    @classmethod
    def asked_for(cls, packing: bool | str) -> RowLayout:
        """That of a value of --packing."""
        return cls(KINDS[packing], f"by {OPTIONS[KINDS[packing]]}")

    def refuse_other(self, state: Mapping[str, Any]) -> None:
        """UsageError if a checkpoint, of which this is the `state`, was trained on another layout."""
        # Runs that did not store it had windows where --packing was left open.
        saved = state.get("row_layout") or KINDS.get(state["options"].get("packing"), WINDOWS)
        if saved != self.kind:
            fix = (
                f"add {OPTIONS[saved]} to continue it" if saved in OPTIONS else "give each adapter the data that it had"
            )
            raise UsageError(
                f"the checkpoint was trained on {saved}, and this run would train on {self.kind} ({self.why}): {fix}"
            )


@dataclass(frozen=True)
class RowForm:
    """What rows are made of documents: their layout's kind, their length, and for packed rows the most documents.

    Each document begins with `num_virtual` positions that no token has: those of virtual tokens. UsageError for packed
    or padded rows of one token.
    """

    seq_len: int
    vocab_size: int
    kind: str = WINDOWS
    seed: int = 0  # decides which documents share a row
    max_docs: int | None = None  # None: as few as fill the rows
    num_virtual: int = 0

    def __post_init__(self) -> None:
        if self.seq_len == 1 and self.kind != WINDOWS:
            raise UsageError("--seq-len 1: a document of one token has no target: use 2 or more, or --packing=windows")

    @property
    def docs(self) -> int | None:
        """Most documents of a packed or padded row, as far as that is known."""
        return 1 if self.kind == PADDED else self.max_docs

    @property
    def room(self) -> int:
        """Most tokens of a document in a row."""
        return self.seq_len - self.num_virtual

    def limits(self, longest: int | None = None) -> tuple[int, int] | None:
        """Most documents of a row, and most tokens of a document, which are at most `longest`; None for rows without
        borders."""
        return (self.docs, longest or self.seq_len) if self.docs is not None and self.docs > 1 else None


def choose_row_layout(
    packing: bool | str | None, max_docs: int | None, *, has_rows: bool, cannot_pack: str | None = None
) -> RowLayout:
    """The layout that --packing asks for, or else that of the data: `has_rows` if any of it is rows of a data set.

    `cannot_pack` says why the device cannot run packed rows, if it cannot: then rows are padded, unless packing was
    asked for, which is a UsageError, as is `max_docs` without packed rows.
    """
    if packing is True and cannot_pack:
        raise UsageError(f"--packing: {cannot_pack}: use --no-packing, which pads rows, or --model-dtype fp32")
    if packing is not None:
        found = RowLayout.asked_for(packing)
    elif not has_rows:
        found = RowLayout(WINDOWS, "text and token files run on across documents; --packing keeps these whole")
    elif cannot_pack:
        found = RowLayout(PADDED, f"the data is rows, which stay whole, and {cannot_pack}")
    else:
        found = RowLayout(PACKED, "the data is rows, which stay whole; --packing=windows cuts them")
    if max_docs is not None and found.kind != PACKED:
        fix = "leave it out" if cannot_pack else "add --packing, or leave it out"
        raise UsageError(f"--max-docs {max_docs} is for packed rows: {fix}")
    return found
