"""A tokenizer of a Hugging Face folder, as it is used for training, and what a token file says of it.

What a token file does not say itself lies beside it: `train.bin.json` beside `train.bin`, and `tokenizer/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import tokenizers
from pydantic import BaseModel, ValidationError

from llmq.data.tokens.text import QWEN2_PATTERN, tokenizes_in_pieces
from llmq.disk import reading, storage, whole_folder, write_whole
from llmq.errors import DataError, UsageError
from llmq.files.hub import model_folder
from llmq.files.huggingface import tokenizer_files
from llmq.model.config import read_json
from llmq.redact import redacted

# Ungated repositories; llm.q has the same short names for the same tokenizers.
SHORT_NAMES = {"qwen": "Qwen/Qwen2.5-0.5B", "llama": "unsloth/llama-2-7b"}
CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"  # says which tokens end a text, where the source has it
# Where a folder can say which token ends a document, in the order in which it counts.
EOS_KEYS = (
    *((CONFIG, "eos_token"), ("special_tokens_map.json", "eos_token")),
    *((GENERATION_CONFIG, "eos_token_id"), ("config.json", "eos_token_id")),
)
# What end-of-text is called in the families that name it nowhere but among the added tokens.
KNOWN_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
FOLDER = "tokenizer"  # of the tokenizer's files, beside the token files
SUFFIX = ".json"  # of a sidecar
# Of the warning of tokenizers that transformers 5 rebuilds.
QWEN = "Qwen2Tokenizer"
FORCED, USUAL = ("qwen2",), ("qwen2", "qwen3")  # model types with this class whatever is named, or if none is
READS_THE_FILE = ("mistral",)  # a model type whose class does
IRRELEVANT = ("trim_offsets", "str_rep")  # keys, to ids
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """An open tokenizer: text that spells a special token is ordinary text, and nothing is cut or padded."""

    folder: Path
    source: str  # hub name, or the folder's absolute path
    revision: str | None  # commit, if from the hub
    sha256: str
    encoder: tokenizers.Tokenizer
    vocab_size: int  # largest id + 1
    eos_token: str
    eos_token_id: int
    begin_ids: tuple[int, ...]  # what the tokenizer itself puts before a text, at inference too: BOS, or nothing
    in_pieces: bool  # long text may be cut at the places of text.pieces

    @classmethod
    def open(cls, name: str, revision: str | None = None, eos_token: str | None = None) -> TextTokenizer:
        """Opens the tokenizer of a folder, a hub name or one of SHORT_NAMES; a folder comes before a short name.

        Raises DataError if it cannot be had or read, or has no EOS, and UsageError if `eos_token` is not in it.
        """
        is_local = Path(os.path.expanduser(name)).is_dir()
        source = name if is_local else SHORT_NAMES.get(name, name)
        folder = model_folder(source, revision, kind="tokenizer")
        path, sha256 = folder / "tokenizer.json", tokenizer_hash(folder)
        try:
            encoder = _encoder(folder)
            in_pieces = tokenizes_in_pieces(_described(encoder))
        except Exception as error:  # the library raises bare Exceptions, with the reason
            raise DataError(
                f"{path} cannot be loaded ({error}): get the tokenizer's files again, or upgrade the tokenizers package"
            ) from None
        vocabulary = encoder.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{path} has an empty vocabulary: get the tokenizer's files again")
        added = {token.content for token in encoder.get_added_tokens_decoder().values()}
        eos = _eos_token(folder, vocabulary, added, eos_token)
        # The special tokens that the post-processor puts before a text, which alone decides it in transformers 5, too.
        encoding = encoder.encode("a")
        special = encoding.special_tokens_mask
        return cls(
            folder=folder,
            source=str(folder.resolve()) if is_local else source,
            revision=None if is_local else folder.name,  # the hub's cache has a folder for each commit
            sha256=sha256,
            encoder=encoder,
            vocab_size=max(vocabulary.values()) + 1,
            eos_token=eos,
            eos_token_id=vocabulary[eos],
            begin_ids=tuple(encoding.ids[: special.index(0)]) if 0 in special else (),
            in_pieces=in_pieces,
        )

    def note(self) -> TokenizerNote:
        """What a token file says of it; its files lie in FOLDER."""
        return TokenizerNote.model_validate({**vars(self), "folder": FOLDER})

    def reads_special(self) -> tokenizers.Tokenizer:
        """An encoder of the same model that reads special tokens where text spells them, as templates do.

        The model itself is shared: it takes a second to make another.
        """
        encoder = tokenizers.Tokenizer(self.encoder.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (value := getattr(self.encoder, part)) is not None:
                setattr(encoder, part, value)
        added = self.encoder.get_added_tokens_decoder()
        in_order = [token for _, token in sorted(added.items())]
        for special, tokens in groupby(in_order, lambda token: token.special):  # each call compiles what finds them all
            (encoder.add_special_tokens if special else encoder.add_tokens)(list(tokens))
        if encoder.get_added_tokens_decoder() != added:  # their ids are not in the order in which they can be added
            encoder = deepcopy(self.encoder)
            encoder.encode_special_tokens, encoder.post_processor = False, None
        return encoder

    def __getstate__(self) -> dict[str, Any]:
        """All but the encoder, which the process that it is sent to opens."""
        return {**vars(self), "encoder": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, encoder=_encoder(state["folder"]))


def _encoder(folder: Path) -> tokenizers.Tokenizer:
    encoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = True
    return encoder


def _described(encoder: tokenizers.Tokenizer) -> dict[str, Any]:
    """What its tokenizer.json says of it but for the vocabulary, which takes long to read."""
    parts = {name: getattr(encoder, name) for name in ("normalizer", "pre_tokenizer")}
    states = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
    names = ("content", "special", "lstrip", "rstrip")
    added = [{name: getattr(token, name) for name in names} for token in encoder.get_added_tokens_decoder().values()]
    return {**states, "added_tokens": added, "model": {"dropout": getattr(encoder.model, "dropout", None)}}


def num_ids(source: str) -> int:
    """How large a vocabulary has all ids of a tokenizer."""
    return TextTokenizer.open(source).vocab_size


def _eos_token(folder: Path, vocabulary: dict[str, int], added: Collection[str], wanted: str | None) -> str:
    """The token that ends a document: as asked, as the folder's files say, or the only known name that it has.

    Only the `added` tokens are looked through for known names: Qwen's `</s>` is a piece of ordinary text.
    """
    advice = f'set "eos_token" in {folder / CONFIG}, or give tokenize-data --eos-token'
    if wanted is not None:
        if wanted not in vocabulary:
            raise UsageError(f"--eos-token {wanted} is not in the vocabulary of {folder}: give one of its tokens")
        return wanted
    for name, key in EOS_KEYS:
        value = json_if_there(folder / name).get(key)
        if isinstance(value, dict) and key == "eos_token":
            value = value.get("content")
        if isinstance(value, list) and value and key == "eos_token_id":
            value = value[0]
        if value is None:
            continue
        pairs = vocabulary.items() if not isinstance(value, bool) else ()
        found = [token for token, number in pairs if value == (token if key == "eos_token" else number)]
        if not found:
            raise DataError(f"{folder / name} names the {key} {value!r}, which is not in the vocabulary: {advice}")
        return found[0]
    known = [token for token in KNOWN_EOS if token in added]
    if len(known) != 1:
        has = f"has {' and '.join(known)}" if known else f"has none of {', '.join(KNOWN_EOS)}"
        raise DataError(f"{folder} does not say which token ends a document, and its tokenizer {has}: {advice}")
    return known[0]


def json_if_there(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one if the file is absent; DataError if it is something else."""
    return read_json(path) if path.is_file() else {}


class TokenizerNote(BaseModel, frozen=True):
    """Which tokenizer made the ids. `sha256` is that of tokenizer.json; `folder` is relative to the token file."""

    source: str  # hub name or folder, as resolved
    revision: str | None  # commit, for a hub name
    sha256: str
    folder: str
    vocab_size: int  # largest id + 1, added tokens included
    eos_token: str
    eos_token_id: int


class TemplateNote(BaseModel, frozen=True):
    """The chat template that rendered the rows, and the one for rows with tools, if that was another."""

    origin: str  # where it is from, in words
    default: str  # in Jinja
    tool_use: str | None = None

    def sources(self) -> dict[str, str]:
        """The templates in Jinja by the names that transformers gives them."""
        return {"default": self.default, **({} if self.tool_use is None else {"tool_use": self.tool_use})}


class Sidecar(BaseModel, frozen=True):
    """Where the tokens of a token file come from."""

    sidecar_version: Literal[1] = 1
    num_tokens: int
    num_documents: int
    document_rule: str
    text: tuple[str, ...]  # the inputs as given, or the data set's name
    bad_rows: int = 0  # left out, of all the data that the file is a part of
    end_token_ids: tuple[int, ...]  # every token that ends a trained turn or document
    tokenizer: TokenizerNote
    chat_template: TemplateNote | None = None  # None where no row was a chat

    def write(self, token_file: Path) -> None:
        """Writes this beside `token_file`."""
        write_whole(sidecar_name(token_file), redacted(self.model_dump_json(indent=1)).encode() + b"\n")

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
    """Whether the tokenizer.json of two folders give the same ids: their parts that decide on ids are equal, but for
    tokens that were added to the `other`.

    The same tokenizer saved by another version of a library has another hash: keys in another order, merges as pairs.
    """

    def deciding(folder: Path) -> tuple[Any, list[Any]]:
        content = read_json(folder / "tokenizer.json")
        model = dict(content.get("model") or {})
        if "merges" in model:
            model["merges"] = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        return (model, content.get("normalizer"), content.get("pre_tokenizer")), content.get("added_tokens") or []

    if not (one / "tokenizer.json").is_file():
        return False
    (parts, added), (others, more) = deciding(one), deciding(other)
    return parts == others and added == more[: len(added)]


def copied_files(folder: Path) -> list[Path]:
    """The files of a tokenizer's folder that go with the tokens."""
    generation = folder / GENERATION_CONFIG
    return [*tokenizer_files(folder), *([generation] if generation.is_file() else [])]


def copy_tokenizer(source: Path, target: Path) -> None:
    """Makes `target` a folder with the tokenizer's files of `source`, whole or not at all; both may be the same."""
    if target.is_dir() and target.samefile(source):
        return
    with storage(target), whole_folder(target) as fresh:
        for path in copied_files(source):
            copy = fresh / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def rebuilt_warning(
    folder: Path | None, model_type: str | None = None, opened: TextTokenizer | None = None
) -> str | None:
    """A warning that transformers 5 changes the Qwen tokenizer in `folder`; None if it does not.

    transformers 5 takes vocabulary and merges from tokenizer.json, and nothing else. Where that has another normalizer
    or pre-tokenizer than its class, Qwen2Tokenizer, a model gets other ids there than it was trained on:
    DeepSeek-R1-Distill-Qwen does, as of transformers 5.23. Nothing is imported of transformers: the parts are compared.
    `model_type` is that of the model that it is for, where config.json is not there to name it; a tokenizer that is
    `opened` need not be read again. DataError for a JSON file that cannot be read.
    """
    if folder is None or not (path := folder / "tokenizer.json").is_file():
        return None
    settings, config = (json_if_there(folder / name) for name in ("tokenizer_config.json", "config.json"))
    model_type = model_type or config.get("model_type")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    is_named = isinstance(named, str) and named.removesuffix("Fast") == QWEN and model_type not in READS_THE_FILE
    if not is_named and model_type not in (FORCED if named else USUAL):
        return None
    level = {"type": "ByteLevel", "add_prefix_space": bool(settings.get("add_prefix_space")), "use_regex": False}
    content = read_json(path) if opened is None else _described(opened.encoder)
    rebuilt = {"normalizer": [{"type": "NFC"}], "pre_tokenizer": [SPLIT, level]}
    if not (different := [part for part, steps in rebuilt.items() if _steps(content.get(part)) != steps]):
        return None
    fix = (
        f"load it with PreTrainedTokenizerFast.from_pretrained in place of AutoTokenizer, which takes {QWEN} for every "
        f"{model_type} model"
        if model_type in FORCED
        else 'set "tokenizer_class": "PreTrainedTokenizerFast" in '
        f"{folder / 'tokenizer_config.json'} and in models trained with it"
    )
    return (
        f"transformers 5 gives other tokens than {path}, which is trained: its {QWEN} has a pre-tokenizer of its own. "
        f"Different: {', '.join(different)}. To get the trained tokens there, {fix}"
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a list, sequences opened, with the keys that decide on ids."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for one in part.get("normalizers", part.get("pretokenizers", ())) for step in _steps(one)]
    kept = {key: value for key, value in part.items() if key not in IRRELEVANT}
    return [{"use_regex": True, **kept} if part.get("type") == "ByteLevel" else kept]
