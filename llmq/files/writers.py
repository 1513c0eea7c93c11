"""How a checkpoint is written: each writer's tensors into files of its own, then one commit.

    saving = begin(folder, step, world)                     one rank, which sends `saving` to the others
    part = write_part(saving, rank, slices, tensors)        every rank
    hand_over(saving, rank, part); part_of(saving, rank)    a rank leaves word of its part for the one that commits
    commit(saving, parts, state)                            one rank, with the parts of all

Until the commit nothing has the checkpoint's name: what a killed writer leaves is a hidden folder, which the next save
removes. The commit writes the manifest last, renames the folder, and only then deletes older checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from llmq.disk import check_free_space, remove_folder, remove_leftovers, replace_folder, storage, temporary_name
from llmq.errors import StorageError
from llmq.files.manifest import (
    FOLDER_NAME,
    Box,
    CheckpointManifest,
    Placed,
    WholeTensor,
    folder_name,
    found,
    sound,
    write_manifest,
)
from llmq.files.tensor_files import Moved, Piece, Shard, cut, file_name, files_bytes, places, unwatched, write_files

FILE_BYTES = 1 << 30
PART = "part-{:05d}.json"  # what a rank tells the one that commits
MANIFEST_BYTES = 1 << 20  # allowed for the manifest in estimates; it holds no tensors
_not_written = partial(
    storage,
    failed="the checkpoint cannot be written",
    kept="; earlier checkpoints are as they were",
    room="free some space, lower --ckpt-keep-n",
    advice="choose another --checkpoint-dir",
)


@dataclass(frozen=True)
class TensorSlice:
    """What one writer has of a tensor of the run: the indices from `start` on, of this `shape`."""

    tensor: Piece
    start: Box
    shape: Box

    @classmethod
    def whole(cls, tensor: Piece) -> TensorSlice:
        """All of it."""
        return cls(tensor, (0,) * len(tensor.shape), tensor.shape)

    @property
    def piece(self) -> Piece:
        """What its file has: `name`, or `name[0:64,0:128]` where it is not all of the tensor."""
        if self.shape == self.tensor.shape:
            return self.tensor
        ranges = ",".join(f"{at}:{at + count}" for at, count in zip(self.start, self.shape, strict=True))
        return Piece(f"{self.tensor.name}[{ranges}]", self.shape, self.tensor.dtype)


@dataclass(frozen=True)
class Saving:
    """A checkpoint that `world` ranks write: the folder that it will be, and the hidden one until then."""

    path: Path
    hidden: Path
    step: int
    world: int
    needed: int  # bytes


@dataclass(frozen=True)
class WrittenPart:
    """What a rank has written: its files, and its slices of tensors, as the manifest says them."""

    rank: int
    files: tuple[Shard, ...]
    tensors: dict[str, WholeTensor]


@dataclass(frozen=True)
class Keep:
    """The checkpoints that outlive a newer one: the `newest`, multiples of `major` steps, the `best` by a metric.

    With `newest` 0 all of them do.
    """

    newest: int = 0
    major: int = 0
    best: str | None = None

    def spares(self, step: int) -> bool:
        """Whether the checkpoint of a step stays for its number."""
        return self.major > 0 and step % self.major == 0


def begin(folder: Path, step: int, world: int = 1, *, needed: int = 0) -> Saving:
    """Makes the hidden folder, if there are `needed` bytes free. StorageError.

    The caller holds the lock of `folder`, or knows that no other process writes to it.
    """
    folder = Path(folder)
    path = folder / folder_name(step)
    with _not_written(folder, needed=needed):
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        check_free_space({"the checkpoint": (folder, needed)})
        hidden = temporary_name(path)
        hidden.mkdir()
    return Saving(path, hidden, step, world, needed)


def write_part(
    saving: Saving,
    rank: int,
    slices: Sequence[TensorSlice],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    in_memory: bool = False,
    moved: Moved = unwatched,
) -> WrittenPart:
    """Writes `tensors`, which are what `slices` say, in this order, into files of this rank. StorageError.

    One value is in memory at a time, or all are: then several files are written at once.
    """
    parts = cut((each.piece for each in slices), FILE_BYTES)
    files = [(f"tensors-{rank:05d}-{n:05d}.safetensors", pieces) for n, pieces in enumerate(parts, 1)]
    with _not_written(saving.path.parent, needed=saving.needed):
        shards = write_files(saving.hidden, files, _checked(slices, tensors), moved, in_memory=in_memory)
    at = [(name, place) for name, pieces in files for place in places(pieces)]
    placed = {
        each.tensor.name: WholeTensor(
            file_name(each.tensor.dtype), each.tensor.shape, (Placed(name, place, each.start, each.shape),)
        )
        for each, (name, place) in zip(slices, at, strict=True)
    }
    return WrittenPart(rank, tuple(shards), placed)


def _checked(slices: Sequence[TensorSlice], tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[np.ndarray]:
    for each, (name, array) in zip(slices, tensors, strict=True):
        assert Piece(name, array.shape, array.dtype) == replace(each.tensor, shape=each.shape), f"{name} is not {each}"
        yield array


def hand_over(saving: Saving, rank: int, part: WrittenPart | str) -> None:
    """Leaves word beside a rank's files that they are complete, or why not, for the rank that commits. StorageError."""
    with _not_written(saving.path.parent):
        target = saving.hidden / PART.format(rank)
        target.with_suffix(".new").write_bytes(_PART.dump_json(part))
        target.with_suffix(".new").replace(target)


def part_of(saving: Saving, rank: int) -> WrittenPart | None:
    """What another rank has written; None if it is not done. StorageError if it has failed."""
    path = saving.hidden / PART.format(rank)
    with _not_written(saving.path.parent):
        if not path.exists():
            return None
        part = _PART.validate_json(path.read_bytes())
        path.unlink()
    if isinstance(part, str):
        raise StorageError(f"rank {rank} has not written its part of {saving.path}: {part}")
    return part


def commit(
    saving: Saving,
    parts: Sequence[WrittenPart],
    state: Mapping[str, Any],
    *,
    metrics: Mapping[str, float] | None = None,
    keep: Keep | None = None,
) -> Path:
    """Gives the checkpoint its name, with the parts of all ranks; then deletes those that `keep` does not spare.

    `state` is JSON without non-finite numbers. A checkpoint of this step that is there already is replaced.
    StorageError leaves the earlier checkpoints as they were.
    """
    absent = sorted(set(range(saving.world)) - {part.rank for part in parts})
    assert not absent and len(parts) == saving.world, f"a part of each of {saving.world} ranks, {absent} are absent"
    folder, tensors = saving.path.parent, _joined(parts)
    files = tuple(shard for part in sorted(parts, key=lambda part: part.rank) for shard in part.files)
    with _not_written(folder):
        saved = (manifest.save for path in found(folder).values() if (manifest := sound(path)))
        number = 1 + max(saved, default=0)
        write_manifest(
            saving.hidden, CheckpointManifest(saving.step, number, files, tensors, dict(state), dict(metrics or {}))
        )
        replace_folder(saving.path, saving.hidden)
    try:
        _rotate(saving.path, keep or Keep())
    except OSError as error:
        raise StorageError(f"{saving.path} is complete, but an older checkpoint cannot be deleted: {error}") from error
    return saving.path


def _joined(parts: Sequence[WrittenPart]) -> dict[str, WholeTensor]:
    """The tensors that the slices of all writers make up."""
    whole: dict[str, WholeTensor] = {}
    for name, mine in (tensor for part in parts for tensor in part.tensors.items()):
        before = whole.setdefault(name, replace(mine, slices=()))
        assert (before.dtype, before.shape) == (mine.dtype, mine.shape), f"two ranks disagree about {name}"
        whole[name] = replace(mine, slices=tuple(sorted((*before.slices, *mine.slices), key=lambda at: at.start)))
    return whole


def checkpoint_bytes(pieces: Iterable[Piece]) -> int:
    """Disk that one checkpoint of these tensors takes (an upper bound by < 1 MiB)."""
    return files_bytes(cut(pieces, FILE_BYTES)) + MANIFEST_BYTES


def remove_unfinished(folder: Path) -> None:
    """Deletes what dead writers left, and finishes replacements that were cut off. StorageError."""
    with _not_written(folder):
        left = {match.group() for path in folder.glob(".step-*") if (match := FOLDER_NAME.search(path.name))}
        for name in left:
            remove_leftovers(folder / name)


def best_of(manifests: Iterable[CheckpointManifest], metric: str) -> CheckpointManifest | None:
    """The checkpoint with the lowest value of a metric, the earlier one of two that are alike."""
    known = [manifest for manifest in manifests if metric in manifest.metrics]
    return min(known, key=lambda manifest: (manifest.metrics[metric], manifest.save), default=None)


def _rotate(newest: Path, keep: Keep) -> None:
    """Deletes what newer checkpoints replace, first those that are damaged at first sight."""
    if not keep.newest:
        return
    manifests = {path: sound(path) for path in found(newest.parent).values() if path != newest}
    numbers = {path: manifest.save if manifest else 0 for path, manifest in manifests.items()}
    others = sorted(numbers, key=lambda path: (numbers[path], path.name))
    rotated = others[: max(len(others) - keep.newest + 1, 0)]
    known = [manifest for manifest in (*manifests.values(), sound(newest)) if manifest]
    best = best_of(known, keep.best) if keep.best else None
    for path in rotated:
        manifest = manifests[path]
        if manifest is None or not (keep.spares(manifest.step) or (best and manifest.step == best.step)):
            remove_folder(path)


_PART: TypeAdapter[WrittenPart | str] = TypeAdapter(WrittenPart | str)
