"""Checkpoints, from which a run continues with the same bits: when to save, what to resume from, what to keep.

A checkpoint is a folder `step-00000012` (the number of finished updates) in the checkpoint folder: tensors in
safetensors files, and a manifest (llmq/files/manifest.py). It appears whole or not at all (llmq/files/writers.py). One
run writes to a checkpoint folder at a time: it holds the lock of run_lock.py, so a hidden folder that it finds was left
by a process that is gone, and is removed. Reading (`find`, `load`) takes no lock and changes nothing.

The newest checkpoint is the one written last, not the one of the highest step: after `--continue 8`, step 10 is newer
than an abandoned step 12. Therefore manifests count the saves.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.disk import remove_folder, storage
from llmq.errors import DataError, UsageError
from llmq.files.manifest import MANIFEST, CheckpointManifest, Reader, canonical, found, read_manifest, sound
from llmq.files.tensor_files import ByteCount, verify
from llmq.files.writers import Keep, best_of, gain, remove_unfinished
from llmq.screen import StartTask, unshown

if TYPE_CHECKING:
    from llmq.options.run import CheckpointOptions

NEWEST, AUTO = "newest", "auto"
METRICS = {
    "eval_loss": "eval/loss",
    "eval_accuracy": "eval/accuracy",
}  # as manifests name them; others have their own names
SAVE_NOW = "save"  # the file beside the checkpoint folder that asks a run for a checkpoint
Warn = Callable[[str], None]
MOST_NAMED = 10  # differences from a checkpoint


class Checkpoints:
    """The checkpoints of one run, as its options ask."""

    def __init__(self, options: CheckpointOptions) -> None:
        self.folder = Path(options.checkpoint_dir)
        self.keep = Keep(
            options.ckpt_keep_n, options.ckpt_major, METRICS.get(options.save_best or "", options.save_best)
        )
        self.resets = frozenset(options.reset or ())
        self._interval = options.ckpt_interval
        self._continue = options.continue_
        self._best: float | None = None

    @property
    def starts_anew(self) -> bool:
        """Whether --continue auto finds nothing to resume from."""
        return self._continue == AUTO and not found(self.folder)

    @property
    def saves_best(self) -> bool:
        """Whether the best checkpoint by an evaluation is kept."""
        return self.keep.best is not None

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether to save after the update `step` (from 1): each n-th one, multiples of --ckpt-major, the last one."""
        return last or (self._interval > 0 and step % self._interval == 0) or self.keep.spares(step)

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is the best that a checkpoint was saved for, if that is kept; it then counts."""
        metric = self.keep.best
        if metric is None or (value := metrics.get(metric)) is None:
            return False
        if self._best is not None and gain(metric, value, self._best) <= 0:
            return False
        self._best = value
        return True

    def asked(self) -> bool:
        """Whether `touch RUN/save` asks for a checkpoint; the file is removed, and one that cannot be is no request."""
        with suppress(OSError):
            os.unlink(self.folder.parent / SAVE_NOW)
            return True
        return False

    def start(self, warn: Warn, task: StartTask = unshown, *, writes: bool = True) -> Path | None:
        """The checkpoint to continue from; None for a run from step 0.

        A run that `writes` holds the folder's lock, and first removes what killed writers left. It reads the whole
        checkpoint to verify it.
        """
        if writes and self.folder.is_dir():
            remove_unfinished(self.folder)
        kept = self.keep.best
        if kept and (best := best_of(filter(None, map(sound, found(self.folder).values())), kept)):
            self._best = best.metrics[kept]
        return None if self._continue is None else find(self.folder, self._continue, warn, task, verified=writes)

    def refuse_earlier(self) -> None:
        """UsageError if a fresh run would mix its checkpoints with those of an earlier one."""
        if self._continue is None and (there := found(self.folder)):
            raise UsageError(
                f"{self.folder} holds checkpoints of an earlier run ({_listed(there)}): resume from them with "
                "--continue, delete them and start over with --overwrite, or choose another --name or --checkpoint-dir"
            )

    def clear(self) -> list[Path]:
        """Deletes all checkpoints, and returns where they were. StorageError."""
        there = list(found(self.folder).values())
        for path in there:
            with storage(path, "the checkpoint cannot be deleted"):
                remove_folder(path)
        return there

    def others(self, step: int) -> str:
        """The checkpoints beside that of `step`, in words; empty if there are none."""
        there = {number: path for number, path in found(self.folder).items() if number != step}
        return _listed(there) if there else ""

    def peak_bytes(self, one: int, first: int, last: int) -> int:
        """Most bytes that the checkpoints of the steps first to last take at a time beyond what is there, `one` each.

        One more than is kept, because older ones go only after the new one is complete, and those of --ckpt-major and
        --save-best; with --ckpt-keep-n 0, which keeps all, only the first one is counted.
        """
        if not self.keep.newest:
            return one
        due = 1 + _multiples(self._interval, first, last - 1)
        rotated = max(1, min(due, self.keep.newest + 1 - len(found(self.folder))))
        return one * (rotated + _multiples(self.keep.major, first, last - 1) + self.saves_best)


def _multiples(of: int, first: int, last: int) -> int:
    """How many of the numbers first to last are multiples; none of 0."""
    return last // of - (first - 1) // of if of else 0


def find(
    folder: Path, which: str | int | Path, warn: Warn = print, task: StartTask = unshown, *, verified: bool = False
) -> Path | None:
    """The checkpoint to continue from: "newest" or "auto", of which auto is None if there are none; a step; or a path.

    Where the newest is damaged, `warn` names what is, and it is the one before. DataError if a checkpoint is not there,
    or one that was asked for by step or path is damaged, naming what is there. Damage is what is seen at first sight,
    or, `verified`, when all of it is read, a `task` that counts bytes.
    """
    folder = Path(folder)
    there = found(folder)
    if which in (NEWEST, AUTO):
        if there:
            return _first_sound(there.values(), warn, task, verified)
        if which == AUTO:
            return None
        raise DataError(_none_there(folder))
    if re.fullmatch(r"[0-9]{1,18}", str(which)):
        if (step := int(str(which))) not in there:
            raise DataError(f"there is no checkpoint of step {step} in {folder}: {_listed(there)}")
        path = there[step]
    else:
        path = Path(str(which))
        if not (path / MANIFEST).exists() and found(path):
            return find(path, NEWEST, warn, task, verified=verified)
        if not path.is_dir():
            raise DataError(f"there is no checkpoint at {path}; in {folder}: {_listed(there)}")
    with _naming_others(path):
        _check(path, task, verified)
    return path


def _first_sound(paths: Iterable[Path], warn: Warn, task: StartTask, verified: bool) -> Path:
    """The newest of `paths` that is not damaged; DataError, naming what is wrong with each, if all are."""
    # By the number of the save; those without one, which are damaged at first sight, before all others.
    numbers = {path: manifest.save if (manifest := sound(path)) else math.inf for path in paths}
    problems = []
    for path in sorted(numbers, key=lambda path: (numbers[path], path.name), reverse=True):
        try:
            _check(path, task, verified)
        except DataError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warn(f"{problem}: this run continues from the checkpoint before, {path}")
        return path
    raise DataError("every checkpoint is damaged:\n" + "\n".join(problems))


def _check(path: Path, task: StartTask, verified: bool) -> CheckpointManifest:
    """What a checkpoint says of itself; DataError if it is damaged."""
    manifest = read_manifest(path)
    if verified:
        with task(f"Verifying {path}") as report:
            verify(path, manifest.files, ByteCount(manifest.num_bytes, report).moved)
    return manifest


def load(path: Path, *, verified: bool = True) -> tuple[dict[str, Any], Reader]:
    """The state of a checkpoint as saved, with `step`, and a function that reads a tensor; first all is `verified`.

    DataError if anything is missing, damaged or of a newer schema, naming the other checkpoints there.
    """
    path = Path(path)
    with _naming_others(path):
        manifest = _check(path, unshown, verified)
    return {**manifest.state, "step": manifest.step}, Reader(path, manifest.tensors)


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """UsageError naming every option that must match its checkpoint and does not."""
    different = list(_differences(saved, now))
    if different:
        more = [f"  and {len(different) - MOST_NAMED} more"] if len(different) > MOST_NAMED else []
        raise UsageError(
            "the checkpoint was written with other options, and continuing with these would not be the same run:\n"
            + "\n".join([*different[:MOST_NAMED], *more])
        )


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """A line for each value that differs, down into mappings."""
    unset = "not set"
    for name in dict.fromkeys((*now, *saved)):
        old, new = saved.get(name, unset), now.get(name, unset)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{within}{name} ")
        elif canonical(old) != canonical(new):
            yield f"  {within}{name}: {old} in the checkpoint, {new} now"


def _none_there(folder: Path) -> str:
    """That there is no checkpoint in `folder`, and where a run of a name like it has some."""
    whole = folder.absolute()
    others = [path for path in whole.parent.parent.glob(f"*/{glob.escape(whole.name)}") if found(path)]
    text = f"there is no checkpoint in {folder} to continue from"
    if others:
        nearest = max(others, key=lambda path: SequenceMatcher(None, str(path), str(whole)).ratio())
        text += f"\n  {nearest} has some: continue them with --name {nearest.parent.name} ({_listed(found(nearest))})"
    return f"{text}\nWith --continue auto, a run starts from step 0 where there is none"


def _listed(there: Mapping[int, Path]) -> str:
    if not there:
        return "no checkpoints"
    return f"step{'' if len(there) == 1 else 's'} " + ", ".join(map(str, sorted(there)))


@contextmanager
def _naming_others(path: Path) -> Iterator[None]:
    """Adds to a DataError about one checkpoint which others could be used."""
    try:
        yield
    except DataError as error:
        there = {s: p for s, p in found(path.absolute().parent).items() if p != path.absolute()}
        others = {p: manifest.save for p in there.values() if (manifest := sound(p))}
        advice = f"Others there: {_listed({s: p for s, p in there.items() if p in others})}"
        if others:
            advice += f"; continue from the newest with --continue {max(others, key=lambda p: others[p])}"
        raise DataError(f"{error}. {advice}.") from error
