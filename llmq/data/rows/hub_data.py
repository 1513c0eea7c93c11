"""Data sets of the Hugging Face Hub by name: which files a config and a split are, and how they are had.

Files of rows are read as they are. Where a repository has none (its data comes from a loading script, or in another
form), the Hub's own conversion to parquet (refs/convert/parquet) is read instead: no code of a repository ever runs.
What the Hub said is kept, so that data that was used once can be used offline.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

from llmq.data.rows.row_files import RowFile
from llmq.data.rows.row_sequences import FileRows, sliced
from llmq.data.tokens.cache import json_or_none, key_of
from llmq.disk import cache_folder, write_whole
from llmq.errors import DataError, UsageError
from llmq.files.hub import TIMEOUT_S, ask, fetch

CONVERTED = "refs/convert/parquet"
KINDS = ("parquet", "jsonl", "csv", "json")  # in the order of choice where a repository does not say
NOT_DATA = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json"})
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
_BORDER = r"(-?(?:\d{1,2}%|100%|\d+))?"
_SPEC = re.compile(
    r"([^:\[\]@]+)(?:@([^:\[\]]+))?(?::([^:\[\]]*))?(?::([^:\[\]]+)(?:\[" + _BORDER + ":" + _BORDER + r"\])?)?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")

Layout = dict[str, dict[str, list[str]]]  # config -> split -> files


@dataclass(frozen=True)
class HubSpec:
    """NAME[@REVISION][:CONFIG[:SPLIT[SLICE]]], as asked for."""

    name: str
    revision: str = "main"
    config: str | None = None
    split: str | None = None
    borders: tuple[str, str] = ("", "")  # of a slice of it

    @classmethod
    def parse(cls, text: str) -> HubSpec:
        """UsageError if `text` is not of that form."""
        found = _SPEC.fullmatch(text)
        if not found or found[1].count("/") > 1:
            raise UsageError(
                f"{text} is neither a path nor a data set of the Hub: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, the "
                "last also with a slice: SPLIT[100:200] or SPLIT[-10%:]"
            )
        name, revision, config, split, start, stop = found.groups()
        return cls(name, revision or "main", config or None, split, (start or "", stop or ""))


@dataclass(frozen=True)
class HubFile:
    """A file of a data set at a commit. With `streaming` it is on the disk only while it is read."""

    repo: str
    commit: str
    path: str
    size: int
    streaming: bool = False

    @property
    def name(self) -> str:
        return f"{self.repo}/{self.path}"

    def identity(self) -> Any:
        """What its rows depend on, as JSON."""
        return ["hub", self.repo, self.commit, self.path]

    @contextmanager
    def fetched(self) -> Iterator[RowFile]:
        """The file on this machine while the context is open; the errors are those of llmq.files.hub."""
        if not self.streaming:
            folder = fetch(self.repo, self.commit, [self.path], {self.path: self.size}, "dataset")
            yield cast(RowFile, RowFile.of(folder / self.path, self.name))
            return
        from huggingface_hub import hf_hub_download

        cache_folder("streaming").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder("streaming")) as folder_name:
            where = {"revision": self.commit, "repo_type": "dataset", "local_dir": folder_name}
            request = partial(hf_hub_download, self.repo, self.path, **where)
            path = ask(self.repo, self.commit, self.path, request, "dataset")
            yield cast(RowFile, RowFile.of(Path(path), self.name))


@dataclass(frozen=True)
class HubSet:
    """A config of a data set: the files of its splits."""

    repo: str
    commit: str
    config: str
    splits: Mapping[str, Sequence[HubFile]]

    def chosen(self, split: str | None) -> str:
        """The name of a split; without one asked for, train or the only one. DataError."""
        chosen = split or (next(iter(self.splits)) if len(self.splits) == 1 else "train")
        if chosen not in self.splits:
            raise DataError(
                f"{self.repo} (config {self.config}) has no split {chosen}, but {', '.join(self.splits)}: "
                f"give {self.repo}:{self.config}:SPLIT"
            )
        return chosen

    def rows(self, split: str, borders: tuple[str, str] = ("", "")) -> FileRows:
        """Those of a split, or of a slice of it."""
        return sliced(self.splits[self.chosen(split)], borders)


def open_hub_set(spec: HubSpec, *, streaming: bool = False) -> HubSet:
    """Asks the Hub (offline: our notes of an earlier answer) what there is; see `llmq.files.hub.ask` for the errors."""
    listing = _listing(spec.name, spec.revision)
    configs = layout(spec.name, listing["files"], listing["configs"])
    if not configs:
        listing = _listing(spec.name, CONVERTED)
        configs = converted_layout(spec.name, listing["files"])
    chosen = _config(spec, configs, listing["default"])
    splits = {
        split: [HubFile(listing["repo"], listing["commit"], p, listing["files"][p], streaming) for p in paths]
        for split, paths in configs[chosen].items()
    }
    return HubSet(listing["repo"], listing["commit"], chosen, splits)


def _config(spec: HubSpec, configs: Layout, default: str | None) -> str:
    for name in [spec.config] if spec.config else [default, "default", *(configs if len(configs) == 1 else ())]:
        if name in configs:
            return name
    names = ", ".join(list(configs)[:20]) + (" ..." if len(configs) > 20 else "")
    if spec.config is None:
        raise DataError(f"{spec.name} has several configs: give {spec.name}:CONFIG with one of {names}")
    is_split = any(spec.config in splits for splits in configs.values())
    hint = f"; for the split of that name {spec.name}::{spec.config}" if is_split else ""
    raise DataError(f"{spec.name} has no config {spec.config}: give one of {names}{hint}")


def _listing(name: str, revision: str) -> dict[str, Any]:
    """Commit, files with sizes, and the configs that the data set's card names; no files where none were converted."""
    from huggingface_hub import HfApi, constants, errors

    note = cache_folder("hub") / f"{key_of([constants.ENDPOINT, name, revision])}.json"
    known = json_or_none(note)
    if isinstance(known, dict) and (constants.HF_HUB_OFFLINE or _COMMIT.fullmatch(revision)):
        return known
    if constants.HF_HUB_OFFLINE:
        raise DataError(
            f"{name} was not used before (no notes in {note.parent}), and HF_HUB_OFFLINE forbids looking it up: "
            "unset it, or give a local path"
        )

    def look() -> Any:
        try:
            return HfApi().dataset_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        except errors.RevisionNotFoundError:
            if revision != CONVERTED:
                raise
            return None

    info = ask(name, revision, "", look, "dataset")
    if info is None:
        return {"files": {}}
    card = info.card_data.to_dict() if info.card_data else {}
    configs = card.get("configs")
    configs = [entry for entry in configs if isinstance(entry, dict)] if isinstance(configs, list) else []
    listing = {
        "repo": info.id or name,
        "commit": info.sha,
        "files": {entry.rfilename: entry.size or 0 for entry in info.siblings or []},
        "configs": configs,
        "default": next((str(c.get("config_name")) for c in configs if c.get("default")), None),
    }
    write_whole(note, json.dumps(listing).encode())
    return listing


def layout(name: str, files: Mapping[str, int], configs: Sequence[Mapping[str, Any]]) -> Layout:
    """Which files each config and split is: as the card says, or as the files' names do. Empty: not to be had so."""
    named = {str(config.get("config_name") or "default"): _card_splits(config, files) for config in configs}
    if configs or f"{PurePosixPath(name).name}.py" in files:
        return {config: splits for config, splits in named.items() if splits}
    usable = [path for path in sorted(files) if PurePosixPath(path).name not in NOT_DATA and _kind(path)]
    for kind in KINDS:
        if chosen := [path for path in usable if _kind(path) == kind]:
            return {"default": by_split(chosen)}
    return {}


def _card_splits(config: Mapping[str, Any], files: Mapping[str, int]) -> dict[str, list[str]]:
    """The splits of a config in a card: patterns, or {split, path} objects, below data_dir."""
    folder = str(config.get("data_dir") or "").strip("/")
    entries = config.get("data_files") or (["**"] if folder else [])
    if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        return by_split(_matched(entries, folder, files))
    splits: dict[str, list[str]] = {}
    for entry in entries:
        if matched := _matched(entry.get("path") or [], folder, files):
            splits.setdefault(str(entry.get("split") or "train"), []).extend(matched)
    return splits


def _matched(patterns: Any, folder: str, files: Mapping[str, int]) -> list[str]:
    """Files of rows that a pattern or several name, sorted within each, as `HfFileSystem.glob` matches them.

    By its rule, but on the listing, which is there offline too.
    """
    from fsspec.utils import glob_translate

    found: dict[str, None] = {}
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        parts = f"{folder}/{pattern}".lstrip("/").split("/")
        # ** crosses folders only by itself, and is * beside other characters, which fsspec refuses
        plain = "/".join(part if part == "**" else re.sub(r"\*+", "*", part) for part in parts)
        expression = re.compile(glob_translate(plain))
        found.update(dict.fromkeys(path for path in sorted(files) if expression.match(path) and _kind(path)))
    return list(found)


def _kind(path: str) -> str | None:
    file = RowFile.of(Path(path))
    return file.kind if file else None


def converted_layout(name: str, files: Mapping[str, int]) -> Layout:
    """The Hub's conversion: CONFIG/SPLIT/0000.parquet. DataError where it holds only the beginning of a split."""
    found: Layout = {}
    for path in sorted(files):
        words = path.split("/")
        if len(words) == 3 and path.endswith(".parquet"):
            found.setdefault(words[0], {}).setdefault(words[1], []).append(path)
    if cut := sorted({split for splits in found.values() for split in splits if split.startswith("partial-")}):
        raise DataError(
            f"the Hub has converted only the beginning of {name} to parquet ({', '.join(cut)}), and "
            "loading scripts of data sets are never run: give the whole data as files"
        )
    if not found:
        raise DataError(
            f"{name} has no files of rows (parquet, jsonl, csv, json), and the Hub has not converted it to parquet: "
            "convert it and give the files; loading scripts of data sets are never run"
        )
    return found


def by_split(paths: Sequence[str]) -> dict[str, list[str]]:
    """Files by the split that a word of their path names; all of them are train where none names one."""
    found: dict[str, list[str]] = {}
    for path in paths:
        words = re.split(r"[^a-z]+", path.lower())
        split = next((split for split, names in SPLITS.items() if any(word in names for word in words)), "train")
        found.setdefault(split, []).append(path)
    return {split: found[split] for split in SPLITS if split in found}
