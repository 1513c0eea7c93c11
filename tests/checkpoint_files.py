"""Checkpoints of a few tensors, saved as a run on one rank saves them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmq.files.tensor_files import Piece
from llmq.files.writers import Keep, Saver, Snapshot, TensorSlice
from llmq.screen import StartTask, unshown


def slices_of(tensors: Mapping[str, np.ndarray]) -> list[TensorSlice]:
    """What one writer has of tensors that are its own."""
    return [TensorSlice.whole(Piece(name, array.shape, array.dtype)) for name, array in tensors.items()]


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, np.ndarray],
    state: Mapping[str, Any] | None = None,
    *,
    metrics: Mapping[str, float] | None = None,
    keep: Keep | None = None,
    values: Iterable[tuple[str, np.ndarray]] | None = None,
    in_memory: bool = False,
    task: StartTask = unshown,
) -> Path:
    """Writes a checkpoint and returns its folder; `values` may be others than were planned for `tensors`."""

    def copies(into: Any) -> Iterable[tuple[str, np.ndarray]]:
        for name, array in tensors.items() if values is None else values:
            if into is not None:
                into(name)[...] = array
            yield name, array if into is None else into(name)

    memory = (lambda num_bytes: np.empty(num_bytes, np.uint8)) if in_memory else None
    with Saver(Path(folder), print, memory, task) as saver:
        saver.save(Snapshot(step, slices_of(tensors), copies, state or {}, metrics or {}), keep or Keep())
        path = saver.finished(wait=True)
    assert path is not None
    return path
