"""Sidecars and the copy of the tokenizer: written whole, read back, and refused when they are of something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_tokenizers import sidecar

from llmq.data.tokens.sidecar import Sidecar, copy_tokenizer, sidecar_name, tokenizer_folder, tokenizer_hash
from llmq.errors import DataError


def test_it_is_read_as_written(tmp_path: Path) -> None:
    token_file = tmp_path / "train.bin"
    assert Sidecar.read(token_file, 7) is None
    sidecar().write(token_file)
    assert sidecar_name(token_file).name == "train.bin.json" and list(tmp_path.iterdir()) == [sidecar_name(token_file)]
    assert Sidecar.read(token_file, 7) == sidecar()
    assert json.loads(sidecar_name(token_file).read_text())["tokenizer"]["eos_token_id"] == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(num_tokens=8), r"is of 8 tokens, but train\.bin has 7"),
        (lambda d: d.update(sidecar_version=2), "sidecar_version 2"),
        (lambda d: d["tokenizer"].pop("sha256"), r"tokenizer\.sha256: Field required"),
        *((content, "is not a sidecar") for content in (b"", b"[]", b"\xff\xfe", b'{"num_tokens": 7', b"null")),
    ],
)
def test_a_foreign_or_broken_sidecar_is_refused(tmp_path: Path, change, says: str) -> None:
    content = sidecar().model_dump(mode="json")
    if not isinstance(change, bytes):
        change(content)
    (tmp_path / "train.bin.json").write_bytes(change if isinstance(change, bytes) else json.dumps(content).encode())
    with pytest.raises(DataError, match=says):
        Sidecar.read(tmp_path / "train.bin", 7)


def test_the_copy_has_the_tokenizers_files_alone_and_replaces_an_older_one(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "out/tokenizer"
    source.mkdir()
    (source / "additional_chat_templates").mkdir()
    copied = {"tokenizer.json", "generation_config.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"}
    for name in (*copied, "model.safetensors", "config.json"):
        (source / name).write_text(name)
    target.mkdir(parents=True)
    (target / "vocab.json").write_text("of an older tokenizer")
    copy_tokenizer(source, target)
    there = {path.relative_to(target).as_posix(): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert there == {name: name for name in copied}
    assert list(target.parent.iterdir()) == [target]
    copy_tokenizer(target, target)
    assert len(list(target.iterdir())) == 4


def test_the_tokenizer_is_found_beside_the_file_or_at_its_source(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    right = sidecar(tokenizer_hash(folder))
    token_file = tmp_path / "train.bin"
    assert tokenizer_folder(token_file, right) == folder
    with pytest.raises(DataError, match="another tokenizer than the one that made"):
        tokenizer_folder(token_file, sidecar())
    folder.rename(tmp_path / "moved")
    asked = []

    def model_folder(name: str, revision: str | None, kind: str) -> Path:
        asked.append((name, revision, kind))
        return tmp_path / "moved"

    monkeypatch.setattr("llmq.data.tokens.sidecar.model_folder", model_folder)
    assert tokenizer_folder(token_file, right) == tmp_path / "moved"
    assert asked == [("me/model", "abc", "tokenizer")]
