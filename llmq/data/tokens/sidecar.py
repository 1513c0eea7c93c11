"""What a token file does not say of itself: `train.bin.json` beside `train.bin`, and the tokenizer in `tokenizer/`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from llmq.disk import reading, replace_folder, storage, temporary_name, write_whole
from llmq.errors import DataError
from llmq.files.hub import model_folder
from llmq.files.huggingface import tokenizer_files

SUFFIX = ".json"
GENERATION_CONFIG = "generation_config.json"  # says which tokens end a text, where the source has it


class TokenizerNote(BaseModel):
    """Which tokenizer made the ids. `sha256` is that of tokenizer.json; `folder` is relative to the token file."""

    model_config = ConfigDict(frozen=True)

    source: str  # hub name or folder, as resolved
    revision: str | None  # commit, for a hub name
    sha256: str
    folder: str
    vocab_size: int  # largest id + 1, added tokens included
    eos_token: str
    eos_token_id: int


class TemplateNote(BaseModel):
    """The chat template that rendered the rows, and the one for rows with tools, if that was another."""

    model_config = ConfigDict(frozen=True)

    origin: str  # where it is from, in words
    default: str  # in Jinja
    tool_use: str | None = None

    def sources(self) -> dict[str, str]:
        """The templates in Jinja by the names that transformers gives them."""
        return {"default": self.default, **({} if self.tool_use is None else {"tool_use": self.tool_use})}


class Sidecar(BaseModel):
    """Where the tokens of a token file come from."""

    model_config = ConfigDict(frozen=True)

    sidecar_version: int = 1
    num_tokens: int
    num_documents: int
    document_rule: str
    text: tuple[str, ...]  # the inputs as given, or the data set's name
    bad_rows: int = 0  # left out, of all the data that the file is a part of
    end_token_ids: tuple[int, ...] = ()  # every token that ends a trained turn or document
    tokenizer: TokenizerNote
    chat_template: TemplateNote | None = None  # None where no row was a chat, and in files of older versions

    def ends(self) -> tuple[int, ...]:
        """The tokens that end documents and trained turns."""
        return self.end_token_ids or (self.tokenizer.eos_token_id,)

    def write(self, token_file: Path) -> None:
        """Writes this beside `token_file`."""
        write_whole(sidecar_name(token_file), self.model_dump_json(indent=1).encode() + b"\n")

    @classmethod
    def read(cls, token_file: Path, num_tokens: int) -> Sidecar | None:
        """What lies beside `token_file`, or None; DataError if it is unreadable or of another file."""
        path = sidecar_name(token_file)
        fix = "make the token file again, or delete the sidecar to use the tokens without it"
        try:
            with reading(path, fix):
                if not path.exists():
                    return None
                sidecar = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise DataError(f"{path} is not a sidecar of a token file ({where}: {first['msg']}): {fix}") from None
        if sidecar.sidecar_version != 1:
            raise DataError(f"{path} has sidecar_version {sidecar.sidecar_version}, but only 1 can be read: {fix}")
        if sidecar.num_tokens != num_tokens:
            raise DataError(f"{path} is of {sidecar.num_tokens} tokens, but {token_file.name} has {num_tokens}: {fix}")
        return sidecar


def sidecar_name(token_file: Path) -> Path:
    return token_file.with_name(token_file.name + SUFFIX)


def tokenizer_folder(token_file: Path, sidecar: Sidecar) -> Path:
    """The folder with the tokenizer's files: the copy beside the token file, or, if that is gone, the source itself.

    Raises DataError if it cannot be found, or is not the tokenizer that made the ids.
    """
    note = sidecar.tokenizer
    folder = token_file.parent / note.folder
    if not folder.is_dir():
        folder = model_folder(note.source, note.revision, kind="tokenizer")
    found = tokenizer_hash(folder)
    if found != note.sha256:
        raise DataError(
            f"{folder} has another tokenizer than the one that made {token_file} (sha256 of tokenizer.json "
            f"{found[:12]}..., not {note.sha256[:12]}...): put the files of {note.source} there, or tokenize again"
        )
    return folder


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 of a folder's tokenizer.json, in hex; DataError if it cannot be read."""
    path = folder / "tokenizer.json"
    with reading(path, "give a folder with a tokenizer.json"):
        return hashlib.sha256(path.read_bytes()).hexdigest()


def same_ids(one: Path, other: Path) -> bool:
    """Whether the tokenizer.json of two folders give the same ids: their parts that decide on ids are equal.

    The same tokenizer saved by another version of a library has another hash: keys in another order, merges as pairs.
    """
    try:
        found = [json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) for folder in (one, other)]
        return len({json.dumps([_deciding(content)], sort_keys=True) for content in found}) == 1
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _deciding(content: dict[str, Any]) -> dict[str, Any]:
    parts = {name: content.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    model = dict(parts["model"] or {})
    if "merges" in model:
        model["merges"] = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return {**parts, "model": model}


def copied_files(folder: Path) -> list[Path]:
    """The files of a tokenizer's folder that go with the tokens."""
    generation = folder / GENERATION_CONFIG
    return [*tokenizer_files(folder), *([generation] if generation.is_file() else [])]


def copy_tokenizer(source: Path, target: Path) -> None:
    """Makes `target` a folder with the tokenizer's files of `source`, whole or not at all; both may be the same."""
    if target.is_dir() and target.samefile(source):
        return
    fresh = temporary_name(target)
    with storage(target):
        try:
            fresh.mkdir(parents=True)
            for path in copied_files(source):
                copy = fresh / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
            replace_folder(target, fresh)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
