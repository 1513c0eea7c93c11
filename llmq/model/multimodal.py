"""Language models inside multimodal folders: where their keys lie in config.json, and the names of their tensors.

The language model is trained as one of its family. What lies beside it, a vision tower and what projects its outputs,
is frozen: an export has its keys and tensors as they were. Names are those of transformers' modules, as PEFT has them;
files may have older ones, which `Spelling` in llmq/files/carried.py knows.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar

INSIDE = "model.language_model."  # how names of the language model's tensors begin
TEXT = "text_config"
DTYPE_KEYS = ("dtype", "torch_dtype")
# Keys that a multimodal config has once for all of it, or in the part of the language model.
SHARED = (
    *(*DTYPE_KEYS, "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("quantization_config", "compression_config"),
)
PLACEHOLDERS = ("image_token_index", "image_token_id", "video_token_id")


@dataclass(frozen=True)
class TextOnly:
    """A config.json whose keys are all a language model's."""

    is_all: ClassVar[bool] = True  # that a folder has

    def text(self, mapping: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keys of the language model, as a folder of its own has them."""
        return mapping

    def named(self, problem: str, mapping: Mapping[str, Any]) -> str:
        """A problem with a key of `text`, by its place in the file."""
        return problem

    def problems(self, mapping: Mapping[str, Any]) -> dict[str, str]:
        """What is wrong with keys that are not the language model's; "" of unknown ones."""
        return {}

    def written(self, source: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json whose language model has the keys `now`, and had those `before` in the `source`."""
        return dict(now)

    def placeholders(self, source: Mapping[str, Any]) -> tuple[int, ...]:
        """Ids of tokens that stand for images."""
        return ()


@dataclass(frozen=True)
class Within(TextOnly):
    """A multimodal config.json that has the keys of a language model of `model_type` in `text_config`, or, if it may be
    `flat`, beside the `others`."""

    model_type: str
    others: Set[str]
    flat: bool = False

    is_all: ClassVar[bool] = False

    def text(self, mapping: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keys in `text_config`, with those that the file has for all of the model."""
        if self.flat and TEXT not in mapping:
            return {key: value for key, value in mapping.items() if key not in self.others}
        own = mapping.get(TEXT)
        shared = {key: mapping[key] for key in SHARED if mapping.get(key) is not None}
        left_out = DTYPE_KEYS if any(key in shared for key in DTYPE_KEYS) else ()
        inner = own.items() if isinstance(own, Mapping) else ()  # release 4 has some of the others there, too
        return {**{key: value for key, value in inner if key not in {*left_out, *self.others}}, **shared}

    def named(self, problem: str, mapping: Mapping[str, Any]) -> str:
        """By its name in `text_config`, if it is there."""
        key = problem.partition(" ")[0].partition(".")[0]
        is_outer = TEXT not in mapping or (key in SHARED and mapping.get(key) is not None)
        return problem if is_outer else f"{TEXT}.{problem}"

    def problems(self, mapping: Mapping[str, Any]) -> dict[str, str]:
        """Another language model than one of the family's, and keys that may change what the model computes."""
        if TEXT not in mapping:
            return {} if self.flat else {TEXT: "is needed: it has the keys of the language model"}
        own, known = mapping[TEXT], {TEXT, *SHARED, *self.others}
        if not isinstance(own, Mapping):
            return {TEXT: "must be an object, with the keys of the language model"}
        known |= set(own) if self.flat else set()  # release 4 has them twice, and those outside count for nothing
        found = {key: "" for key, value in mapping.items() if value is not None and key not in known}
        if own.get("model_type", self.model_type) != self.model_type:
            found[TEXT] = f"has model_type {own['model_type']!r}, and only {self.model_type} is supported there"
        return found

    def written(self, source: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """The source, of which only what has changed is another."""
        changed = {key: value for key, value in now.items() if key not in before or before[key] != value}
        if TEXT not in source:
            return {**source, **changed}
        own = source[TEXT]
        outer = {key: value for key, value in changed.items() if key in SHARED or key in source}
        inner = {key: value for key, value in changed.items() if key not in SHARED or key in own}
        return {**source, **outer, TEXT: {**own, **inner}}

    def placeholders(self, source: Mapping[str, Any]) -> tuple[int, ...]:
        """Those that the config names."""
        return tuple(source[key] for key in PLACEHOLDERS if isinstance(source.get(key), int))


TEXT_ONLY = TextOnly()
