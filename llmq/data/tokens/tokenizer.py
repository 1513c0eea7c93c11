"""A tokenizer of a Hugging Face folder, as it is used for training: ordinary text, and what begins and ends it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from llmq.data.tokens.sidecar import tokenizer_hash
from llmq.data.tokens.text import tokenizes_in_pieces
from llmq.errors import DataError, UsageError
from llmq.files.hub import model_folder
from llmq.model.config import read_json

# Ungated repositories; llm.q has the same short names for the same tokenizers.
SHORT_NAMES = {"qwen": "Qwen/Qwen2.5-0.5B", "llama": "unsloth/llama-2-7b"}
CONFIG = "tokenizer_config.json"
# Where a folder can say which token ends a document, in the order in which it counts.
EOS_KEYS = (
    *((CONFIG, "eos_token"), ("special_tokens_map.json", "eos_token")),
    *(("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id")),
)
# What end-of-text is called in the families that name it nowhere but among the added tokens.
KNOWN_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


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
        path = folder / "tokenizer.json"
        sha256 = tokenizer_hash(folder)
        try:
            content = path.read_text(encoding="utf-8")
            encoder = tokenizers.Tokenizer.from_str(content)
            in_pieces = tokenizes_in_pieces(json.loads(content))
        except Exception as error:  # the library raises bare Exceptions, with the reason
            raise DataError(
                f"{path} cannot be loaded ({error}): get the tokenizer's files again, or upgrade the tokenizers package"
            ) from None
        encoder.no_truncation()
        encoder.no_padding()
        encoder.encode_special_tokens = True
        vocabulary = encoder.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{path} has an empty vocabulary: get the tokenizer's files again")
        added = {token.content for token in encoder.get_added_tokens_decoder().values()}
        eos = _eos_token(folder, vocabulary, added, eos_token)
        # The special tokens that the post-processor puts before a text, which alone decides it in transformers 5, too.
        encoding = encoder.encode("a")
        special = encoding.special_tokens_mask
        begin_ids = tuple(encoding.ids[: special.index(0)]) if 0 in special else ()
        return cls(
            folder=folder,
            source=str(folder.resolve()) if is_local else source,
            revision=None if is_local else folder.name,  # the hub's cache has a folder for each commit
            sha256=sha256,
            encoder=encoder,
            vocab_size=max(vocabulary.values()) + 1,
            eos_token=eos,
            eos_token_id=vocabulary[eos],
            begin_ids=begin_ids,
            in_pieces=in_pieces,
        )


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
    names = {number: token for token, number in vocabulary.items()}
    for name, key in EOS_KEYS:
        value = json_if_there(folder / name).get(key)
        if isinstance(value, dict) and key == "eos_token":
            value = value.get("content")
        if isinstance(value, list) and value and key == "eos_token_id":
            value = value[0]
        if value is None:
            continue
        kind, kind_name = (str, "text") if key == "eos_token" else (int, "id")
        token = names.get(value) if type(value) is int else value
        if type(value) is not kind or token not in vocabulary:
            wrong = "not in the vocabulary" if type(value) is kind else f"no {kind_name}"
            raise DataError(f"{folder / name} names the {key} {value!r}, which is {wrong}: {advice}")
        return str(token)
    known = [token for token in KNOWN_EOS if token in added]
    if len(known) != 1:
        found = f"has {' and '.join(known)}" if known else f"has none of {', '.join(KNOWN_EOS)}"
        raise DataError(f"{folder} does not say which token ends a document, and its tokenizer {found}: {advice}")
    return known[0]


def json_if_there(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one if the file is absent; DataError if it is something else."""
    return read_json(path) if path.is_file() else {}
