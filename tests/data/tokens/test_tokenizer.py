"""Opening tokenizers: where they come from, which token is EOS; sidecars and the tokenizer's copy."""

import json
import shutil
from pathlib import Path

import pytest
from small_tokenizers import EOS, byte_level, save, sidecar
from tokenizers import processors

from llmq.data.tokens.tokenizer import (
    SHORT_NAMES,
    Sidecar,
    TextTokenizer,
    copy_tokenizer,
    sidecar_name,
    tokenizer_folder,
    tokenizer_hash,
)
from llmq.errors import DataError, UsageError


@pytest.fixture
def hub(tmp_path: Path, monkeypatch, small_tokenizer: Path) -> list[tuple[str, str | None, str]]:
    """What is asked of the Hub, where every name is the small tokenizer, at one commit."""
    asked: list[tuple[str, str | None, str]] = []
    commit = shutil.copytree(small_tokenizer, tmp_path / "snapshots/0123abcd")

    def model_folder(name: str, revision: str | None, kind: str) -> Path:
        asked.append((name, revision, kind))
        return commit

    monkeypatch.setattr("llmq.data.tokens.tokenizer.model_folder", model_folder)
    return asked


def test_a_folder_is_opened_as_it_is_and_comes_before_a_short_name(tmp_path, monkeypatch, small_tokenizer) -> None:
    opened = TextTokenizer.open(str(small_tokenizer))
    assert (opened.eos_token, opened.eos_token_id, opened.in_pieces, opened.revision) == (EOS, 0, True, None)
    assert opened.source == str(small_tokenizer) and opened.vocab_size == opened.encoder.get_vocab_size()
    with pytest.raises(UsageError, match="--revision main is for models of the Hub"):
        TextTokenizer.open(str(small_tokenizer), "main")
    monkeypatch.chdir(tmp_path)
    for name in SHORT_NAMES:
        save(byte_level(), tmp_path / name)
        assert TextTokenizer.open(name).source == str(tmp_path / name)


def test_truncation_padding_and_special_tokens_in_the_text_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    opened = TextTokenizer.open(str(save(tokenizer, tmp_path)))
    ids = opened.encoder.encode(f"a{EOS}b, many more than four tokens", add_special_tokens=False).ids
    assert 12 < len(ids) < 64 and 0 not in ids


BEGINS = {"$A": (), f"$A {EOS}": (), f"king $A {EOS}": ("king",), "king queen $A": ("king", "queen")}


def begins_with(single: str, folder: Path) -> Path:
    tokenizer = byte_level(added=("king", "queen"))
    known = [(token, tokenizer.token_to_id(token)) for token in ("king", "queen", EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=known)
    return save(tokenizer, folder, {"eos_token": EOS})


@pytest.mark.parametrize(("single", "begins"), BEGINS.items())
def test_what_the_tokenizer_puts_before_a_text_is_known(tmp_path: Path, single: str, begins: tuple[str, ...]) -> None:
    opened = TextTokenizer.open(str(begins_with(single, tmp_path)))
    assert tuple(map(opened.encoder.id_to_token, opened.begin_ids)) == begins


@pytest.mark.judge
@pytest.mark.parametrize("single", BEGINS)
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_transformers_begins_a_text_so_too(tmp_path: Path, single: str, config: dict) -> None:
    transformers = pytest.importorskip("transformers", reason="the judge is transformers")
    folder = begins_with(single, tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "bos_token": "king", **config}))
    opened = TextTokenizer.open(str(folder))
    ids = opened.encoder.encode("say", add_special_tokens=False).ids
    judged = transformers.AutoTokenizer.from_pretrained(folder)("say").input_ids
    assert judged[: len(opened.begin_ids) + len(ids)] == [*opened.begin_ids, *ids]


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config.json": {"eos_token": "king"}}, "king"),
        ({"tokenizer_config.json": {"eos_token": {"content": "king", "lstrip": False}}}, "king"),
        ({"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": {"eos_token": "king"}}, "king"),
        ({"generation_config.json": {"eos_token_id": [5, 0]}, "config.json": {"eos_token_id": 0}}, 5),
        ({"config.json": {"eos_token_id": 7}}, 7),
        ({}, EOS),
    ],
)
def test_eos_is_found_in_the_files(tmp_path: Path, files: dict, eos: str | int) -> None:
    tokenizer = byte_level(added=("king", "queen"))
    save(tokenizer, tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    opened = TextTokenizer.open(str(tmp_path))
    assert eos in (opened.eos_token, opened.eos_token_id)
    assert opened.encoder.token_to_id(opened.eos_token) == opened.eos_token_id
    assert TextTokenizer.open(str(tmp_path), eos_token="queen").eos_token == "queen"


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        *(("config.json", "eos_token_id", value) for value in (99999, [], "0", True, [[0]])),
        *(("tokenizer_config.json", "eos_token", value) for value in ("[none]", ["a"], {"content": {}}, "")),
        ("generation_config.json", "eos_token_id", {}),
    ],
)
def test_an_eos_that_is_no_token_is_refused(tmp_path: Path, file: str, key: str, value: object) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / file).write_text(json.dumps({key: value}))
    with pytest.raises(
        DataError, match=rf"{file} names the {key} .*, which is not in the vocabulary: set \"eos_token\""
    ):
        TextTokenizer.open(str(tmp_path))


def test_two_known_names_of_eos_none_at_all_and_a_broken_configuration_are_refused(tmp_path: Path) -> None:
    path = save(byte_level(), tmp_path / "none") / "tokenizer.json"
    path.write_text(path.read_text().replace(EOS, "<|other|>"))
    with pytest.raises(DataError, match=r"has none of .*: set \"eos_token\" in .*, or give tokenize-data --eos"):
        TextTokenizer.open(str(path.parent))
    assert TextTokenizer.open(str(path.parent), eos_token="<|other|>").eos_token_id == 0
    with pytest.raises(UsageError, match="--eos-token nope is not in the vocabulary"):
        TextTokenizer.open(str(path.parent), eos_token="nope")
    save(byte_level(added=("</s>",)), tmp_path)
    with pytest.raises(DataError, match=r"has <\|endoftext\|> and </s>.*config.json, or give tokenize-data --eos"):
        TextTokenizer.open(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match="holds a JSON list, not an object"):
        TextTokenizer.open(str(tmp_path))


def test_a_piece_of_ordinary_text_is_no_eos(tmp_path: Path) -> None:
    """Qwen has the token `</s>` of ordinary text, made of `</` and `s>`."""
    tokenizer = byte_level()
    save(tokenizer, tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    for one, other in (("<", "/"), ("</", "s"), ("</s", ">")):
        content["model"]["vocab"][one + other] = len(content["model"]["vocab"])
        content["model"]["merges"].append([one, other])
    path.write_text(json.dumps(content))
    opened = TextTokenizer.open(str(tmp_path))
    assert opened.encoder.token_to_id("</s>") is not None and opened.eos_token == EOS
    path.write_text(json.dumps(content).replace(EOS, "<|other|>"))
    with pytest.raises(DataError, match="its tokenizer has none of"):
        TextTokenizer.open(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"version": "1.0"}', b'{"model": null}'])
def test_a_tokenizer_that_does_not_load_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be loaded"):
        TextTokenizer.open(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "repository"), [("qwen", "Qwen/Qwen2.5-0.5B"), ("llama", "unsloth/llama-2-7b"), ("me/mine", "me/mine")]
)
def test_other_names_go_to_the_hub_and_the_commit_is_noted(tmp_path: Path, hub, name: str, repository: str) -> None:
    opened = TextTokenizer.open(name, "main")
    assert hub == [(repository, "main", "tokenizer")]
    folder = tmp_path / "snapshots/0123abcd"
    assert (opened.source, opened.revision, opened.folder) == (repository, "0123abcd", folder)


def test_a_sidecar_is_read_as_written(tmp_path: Path) -> None:
    token_file = tmp_path / "train.bin"
    assert Sidecar.read(token_file, 7) is None
    sidecar().write(token_file)
    assert list(tmp_path.iterdir()) == [sidecar_name(token_file)] == [tmp_path / "train.bin.json"]
    assert Sidecar.read(token_file, 7) == sidecar()
    assert json.loads(sidecar_name(token_file).read_text())["tokenizer"]["eos_token_id"] == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(num_tokens=8), r"is of 8 tokens, but train\.bin has 7"),
        (lambda d: d.update(sidecar_version=2), "sidecar_version: Input should be 1"),
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


def test_the_tokenizer_is_found_beside_the_file_or_at_its_source(tmp_path: Path, hub) -> None:
    found = tmp_path / "snapshots/0123abcd"
    folder = shutil.copytree(found, tmp_path / "tokenizer")
    right, token_file = sidecar(tokenizer_hash(folder)), tmp_path / "train.bin"
    assert tokenizer_folder(token_file, right) == folder
    with pytest.raises(DataError, match="another tokenizer than the one that made"):
        tokenizer_folder(token_file, sidecar())
    shutil.rmtree(folder)
    assert tokenizer_folder(token_file, right) == found and hub == [("me/model", "abc", "tokenizer")]
