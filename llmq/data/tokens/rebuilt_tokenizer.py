"""Qwen tokenizers that transformers 5 rebuilds: it takes vocabulary and merges from tokenizer.json, and nothing else.

Where a tokenizer.json has another normalizer or pre-tokenizer than its class, Qwen2Tokenizer, a model gets other ids
there than it was trained on: DeepSeek-R1-Distill-Qwen does, as of transformers 5.23. Nothing is imported of
transformers: the parts are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmq.data.tokens.text import QWEN2_PATTERN
from llmq.data.tokens.tokenizer import json_if_there
from llmq.model.config import read_json

QWEN = "Qwen2Tokenizer"
FORCED, USUAL = ("qwen2",), ("qwen2", "qwen3")  # model types with this class whatever is named, or if none is
READS_THE_FILE = ("mistral",)  # a model type whose class does
IRRELEVANT = ("trim_offsets", "str_rep")  # keys, to ids
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}


def rebuilt_warning(folder: Path | None, model_type: str | None = None) -> str | None:
    """A warning that transformers 5 changes the Qwen tokenizer in `folder`; None if it does not.

    `model_type` is that of the model that it is for, where config.json is not there to name it. DataError for a JSON
    file that cannot be read.
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
    content, rebuilt = read_json(path), {"normalizer": [{"type": "NFC"}], "pre_tokenizer": [SPLIT, level]}
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
