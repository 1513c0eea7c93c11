"""Tokenizers that transformers 5 rebuilds: it takes vocabulary and merges from tokenizer.json, and nothing else.

Some tokenizer classes of transformers 5 have a normalizer and a pre-tokenizer in their code and do not read those of
tokenizer.json, which transformers 4, the tokenizers library and llmq use. Where the two differ, a model gets other ids
there than it was trained on. This module compares the classes that our architectures have, as of transformers 5.23
(AutoTokenizer in models/auto/tokenization_auto.py, and models/{qwen2,gpt2,llama}/tokenization_*.py).

Nothing is imported of transformers, and no text is tokenized: what decides on ids is compared part by part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmq.data.tokens.text import QWEN2_PATTERN
from llmq.data.tokens.tokenizer import json_if_there
from llmq.model.config import read_json

Parts = dict[str, Any]  # name of a part -> its steps, in order, or a flag

# The class of a model type, which tokenizer_class cannot change for qwen2.
BY_MODEL = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
FORCED = ("qwen2",)
READ_AS_IT_IS = ("mistral",)
# What the library takes for a key that a tokenizer.json leaves out.
DEFAULTS: dict[str, Parts] = {
    "ByteLevel": {"use_regex": True},
    "Metaspace": {"prepend_scheme": "always", "split": True},
}
IRRELEVANT = ("trim_offsets", "str_rep")  # to ids
SEQUENCES = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}  # where a part holds several
MODEL_DEFAULTS = {"byte_fallback": False, "fuse_unk": False, "ignore_merges": False}


def rebuilt_warning(folder: Path | None, model_type: str | None = None) -> str | None:
    """A warning that transformers 5 changes the tokenizer in `folder`; None if it does not.

    `model_type` is that of the model that it is for, where config.json is not there to name it. DataError for a JSON
    file that cannot be read.
    """
    path = folder / "tokenizer.json" if folder is not None else None
    if folder is None or path is None or not path.is_file():
        return None
    content, settings = read_json(path), json_if_there(folder / "tokenizer_config.json")
    config = json_if_there(folder / "config.json")
    model_type = model_type or config.get("model_type")
    name = _class_name(model_type, settings.get("tokenizer_class") or config.get("tokenizer_class"), path)
    rebuilt = _rebuilt(name, settings)
    if rebuilt is None or (content.get("model") or {}).get("type", "BPE") != "BPE":
        return None
    own = _own(content)
    different = [part for part, value in rebuilt.items() if own[part] != value]
    if not different:
        return None
    fix = (
        f"load it with PreTrainedTokenizerFast.from_pretrained in place of AutoTokenizer, which takes {name} for every "
        f"{model_type} model"
        if model_type in FORCED
        else 'set "tokenizer_class": "PreTrainedTokenizerFast" in '
        f"{folder / 'tokenizer_config.json'} and in models trained with it"
    )
    return (
        f"transformers 5 gives other tokens than {path}, which is trained: its {name} has a pre-tokenizer of its own. "
        f"Different: {', '.join(different)}. To get the trained tokens there, {fix}"
    )


def _class_name(model_type: Any, tokenizer_class: Any, path: Path) -> str | None:
    """The class that AutoTokenizer opens a folder with; None or an unknown name: one that reads tokenizer.json."""
    named = tokenizer_class.removesuffix("Fast") if isinstance(tokenizer_class, str) else None
    if model_type in READ_AS_IT_IS:
        return None
    if model_type in FORCED or named is None:
        return BY_MODEL.get(model_type)
    if named == "LlamaTokenizer" and b'"ByteLevel"' in path.read_bytes():
        return None
    return named


def _rebuilt(name: str | None, settings: dict[str, Any]) -> Parts | None:
    """What a class builds; None for one that reads tokenizer.json or is not known here."""
    prefix = settings.get("add_prefix_space")
    if name == "LlamaTokenizer":
        scheme = "never" if prefix is False else "always" if settings.get("legacy", False) else "first"
        # Never that of Llama 2, whose normalizer puts a space before text that begins with one, too.
        space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
        return {"normalizer": [], "pre_tokenizer": [space], **MODEL_DEFAULTS, "byte_fallback": True, "fuse_unk": True}
    level = {"type": "ByteLevel", "add_prefix_space": bool(prefix), "use_regex": name == "GPT2Tokenizer"}
    split = {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}
    # Bytes are never unknown, so byte_fallback and fuse_unk change nothing.
    if name == "GPT2Tokenizer":
        return {"normalizer": [], "pre_tokenizer": [level], "ignore_merges": False}
    if name == "Qwen2Tokenizer":
        return {"normalizer": [{"type": "NFC"}], "pre_tokenizer": [split, level], "ignore_merges": False}
    return None


def _own(content: dict[str, Any]) -> Parts:
    """The same parts of a tokenizer.json."""
    model = content.get("model") or {}
    parts: Parts = {name: model.get(name, value) for name, value in MODEL_DEFAULTS.items()}
    return parts | {part: _steps(content.get(part), name) for part, name in SEQUENCES.items()}


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a list, sequences opened, with the keys that decide on ids."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for one in part.get(inner, ()) for step in _steps(one, inner)]
    kept = {key: value for key, value in part.items() if key not in IRRELEVANT}
    return [{**DEFAULTS.get(str(part.get("type")), {}), **kept}]
