"""The shape of a model: Hugging Face `config.json`, read into one ModelConfig and written back.

transformers 4 spells `rope_theta`, `rope_scaling` and `torch_dtype`; transformers 5 spells `rope_parameters` and
`dtype`. Both are read, and both are written, so that an export loads in either. A key that is absent has the value
that transformers gives it for that architecture. Whatever a config asks for and the engine lacks is an error: a model
that loads is the same function here as there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from llmq.errors import DataError
from llmq.model.families import TORCH_NAMES, Family
from llmq.model.family_file import KEY, family_of
from llmq.model.family_table import FAMILIES
from llmq.model.harmless import HARMLESS
from llmq.model.rope_keys import LOCAL, NONE, ROPE, ROPE_KEYS, RopeConfig
from llmq.model.wiring import ACTIVATIONS, Scales


@dataclass(frozen=True)
class ModelConfig:
    """The facts of a Llama- or Qwen-class decoder that the engine needs. Sizes are unpadded."""

    architecture: str  # one of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    local_rope: RopeConfig | None = None  # of layers with a window, where theirs is another one
    unrotated: tuple[int, ...] = ()  # the layers without a rotary embedding
    windows: tuple[int | None, ...] = ()  # of each layer in tokens, itself included; None is full, () is all full
    dtype: str = "bf16"  # of the source's weights: bf16, fp16, fp32
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    scales: Scales = field(default_factory=Scales)
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the config.json as read, for the export

    def identity(self) -> dict[str, Any]:
        """What makes it compute what it computes: not the tokens that end texts, nor the export's source."""
        left_out = {"dtype", "bos_token_id", "eos_token_ids", "pad_token_id", "source", "max_position"}
        # What checkpoints of Llamas do not have.
        left_out |= {"scales"} if self.scales == Scales() else set()
        left_out |= {name for name in ("local_rope", "unrotated") if not getattr(self, name)}
        found = {name: value for name, value in asdict(replace(self, source={})).items() if name not in left_out}
        described = {KEY: self.source[KEY]} if KEY in self.source else {}
        return {**found, "rope": self.rope.identity(), **described}

    def with_vocabulary(self, size: int) -> ModelConfig:
        """The same with another vocabulary, without the special tokens that are not in it."""
        bos, pad = (one if one is None or one < size else None for one in (self.bos_token_id, self.pad_token_id))
        eos = tuple(one for one in self.eos_token_ids if one < size)
        return replace(self, vocab_size=size, bos_token_id=bos, eos_token_ids=eos, pad_token_id=pad)

    @property
    def family(self) -> Family:
        """How its facts are spelled, and what its layers are made of."""
        return _family(self.architecture, self.source)

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Ids of tokens that stand for images."""
        return self.family.within.placeholders(self.source)

    def table(self, layer: int) -> str:
        """The name of the constant by which a layer's queries and keys are turned."""
        is_local = self.local_rope is not None and self.window(layer) is not None
        is_turned = layer not in self.unrotated and not self.family.wiring.names.positions
        return LOCAL if is_turned and is_local else ROPE if is_turned else NONE

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full causal attention."""
        return self.windows[layer] if self.windows else None


# Elsewhere null is the same as absent; here it says: one for each head, no such token, no window.
NULL_IS_A_VALUE = {"num_key_value_heads", "bos_token_id", "eos_token_id", "pad_token_id", "sliding_window"}
ABSENT = "absent"

DEQUANTIZE = (
    "quantized weights cannot be trained: use the unquantized original, or convert the model with transformers "
    "(from_pretrained, dequantize(), save_pretrained). llmq holds that in few bits while adapters train: "
    "--lora-rank 16 --base-dtype {}"
)
IN_FEW_BITS = "nf4, mxfp4, int8 or e4m3"
# By quant_method: what holds the unquantized original in about as many bits.
HELD_LIKE = {**dict.fromkeys(("gptq", "awq", "bitnet", "hqq", "aqlm"), "nf4"), "mxfp4": "mxfp4"}
HELD_LIKE |= dict.fromkeys(("fp8", "fbgemm_fp8", "finegrained_fp8"), "e4m3")

# Keys that change the function a model computes, with the values that leave it alone, and what any other would need.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_bias": ((None, False), "biases on the attention projections are not supported for this architecture"),
    "mlp_bias": ((None, False), "biases in the MLP are not supported"),
    "attention_dropout": ((None, 0), "dropout is not supported; set it to 0.0 to train without"),
    **dict.fromkeys(
        ("resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout", "embedding_dropout"),
        ((None, 0), "dropout is not supported; set it to 0.0 to train without"),
    ),
    "lm_head_bias": ((None, False), "a bias of the head is not supported"),
    "use_mrope": ((None, False), "multimodal rotary embedding is not supported"),
    "attn_logit_softcapping": ((None, 0), "logit softcapping is not supported for this architecture"),
    "final_logit_softcapping": ((None, 0), "logit softcapping is not supported for this architecture"),
    "num_experts": ((None, 0), "mixtures of experts are not supported"),
    "num_local_experts": ((None, 0), "mixtures of experts are not supported"),
    "n_routed_experts": ((None, 0), "mixtures of experts are not supported"),
    "is_causal": ((None, True), "only causal attention is supported"),
    "use_bidirectional_attention": ((None, False), "only causal attention is supported"),
}
UNKNOWN_KEY = "llmq does not know this key of {}: remove it if it changes nothing in the model"
VISION_TOWER = (
    ": it is a vision tower alone, which has no language model: give the folder of one, or of both as one model"
)
# Keys of a source that are not true of what is trained from it (remote code is not copied, files are elsewhere).
NOT_EXPORTED = ("_name_or_path", "_commit_hash", "auto_map", "quantization_config", "rope_theta", "rope_scaling")


def from_folder(folder: Path, family: Mapping[str, Any] | None = None) -> ModelConfig:
    """Reads `config.json` of a model folder, of a described `family` where that is given; DataError where it is absent,
    not JSON, or asks for what we lack."""
    keys = read_json(Path(folder) / "config.json")
    return read_config(keys if family is None else {**keys, KEY: family}, where=str(Path(folder) / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; DataError naming the file where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is absent: a Hugging Face model folder has this file") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def read_config(mapping: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """A ModelConfig from a Hugging Face config mapping; DataError naming every key that is wrong or unsupported."""
    beside: list[str] = []  # of what is not the language model's
    architecture = _architecture(mapping, beside)
    family = _family(architecture, mapping)
    for key, said in family.within.problems(mapping).items():
        if said or not (key in HARMLESS or key.startswith("_")):
            beside.append(_problem(mapping, [key], said or UNKNOWN_KEY.format(architecture)))
    text, problems = family.within.text(mapping), list[str]()
    of_family = {info.alias or name for name, info in family.keys.model_fields.items()}
    for key, (harmless, message) in REFUSED.items():
        if text.get(key) not in harmless and key not in family.takes | of_family:
            problems.append(_problem(text, [key], message))
    for key in {"hidden_act", family.act_key}:
        given = text.get(key)
        if given is not None and (not isinstance(given, str) or ACTIVATIONS.get(given) != family.wiring.activation):
            problems.append(_problem(text, [key], f"only {family.wiring.activation} is supported for {architecture}"))
    quantized = [key for key in ("quantization_config", "compression_config") if text.get(key) is not None]
    problems += [_problem(text, [key], dequantize(text[key])) for key in quantized]
    known = HARMLESS | REFUSED.keys() | of_family | {"hidden_act", family.act_key, KEY, *quantized}
    for key in (key for key, value in text.items() if value is not None and not key.startswith("_")):
        if key not in known | family.takes:
            problems.append(_problem(text, [key], UNKNOWN_KEY.format(architecture)))
    try:
        keys = family.keys.model_validate(_used(text, family), context=family)
    except ValidationError as error:
        problems += problems_of(text, error)
    if beside or problems:
        lines = [*beside, *(family.within.named(line, mapping) for line in problems)]
        raise DataError(f"{where} cannot be used:\n" + "\n".join(f"  - {line}" for line in lines))
    facts = {name: value for name, value in keys if name in ModelConfig.__dataclass_fields__}
    scales = Scales(**{name: value for name, value in keys if name in Scales.__dataclass_fields__})
    return ModelConfig(architecture, source=dict(mapping), scales=scales, **family.facts, **facts)


def dequantize(about: Any) -> str:
    """What to do about a quantized model, by its `quantization_config`."""
    keys = about if isinstance(about, Mapping) else {}
    bits = {8: "int8", 4: "nf4"}.get(8 if keys.get("load_in_8bit") else 4 if keys.get("load_in_4bit") else 0)
    return DEQUANTIZE.format(bits or HELD_LIKE.get(str(keys.get("quant_method")), IN_FEW_BITS))


def _used(mapping: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The keys that count for a family, with its defaults; nulls are left out."""
    given = {key: value for key, value in mapping.items() if value is not None or key in NULL_IS_A_VALUE}
    found = family.counted({**family.defaults, **given})
    return {
        key: value
        for key, value in found.items()
        if value is not None and not (key.startswith("rope_") and value == {})
    }


def problems_of(mapping: Mapping[str, Any], error: ValidationError) -> list[str]:
    """A line for each value that a form of pydantic does not take."""
    return [_problem(mapping, one["loc"], _said(one)) for one in error.errors()]


def _problem(mapping: Any, place: Sequence[object], message: str) -> str:
    """`rope_scaling.factor (0): must be greater than or equal to 1`, with the value in the file."""
    found, keys = mapping, [str(key) for key in place if key not in ROPE_KEYS]
    for key in keys:
        found = found.get(key, ABSENT) if isinstance(found, Mapping) else ABSENT
    value = ABSENT if found is ABSENT else repr(found)
    return f"{'.'.join(keys)} ({value if len(value) <= 80 else value[:77] + '...'}): {message}"


def _said(error: Any) -> str:
    """A message of pydantic, worded like ours."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return str(error["msg"]).replace("Input should be", "must be").replace("Field required", "is needed")


def _architecture(mapping: Mapping[str, Any], problems: list[str]) -> str:
    """The one known architecture that `architectures` and `model_type` agree on; Llama with a problem noted if none."""
    if KEY in mapping:
        return _described(mapping)
    known = _known(FAMILIES)
    given = {key: repr(mapping[key]) for key in known if mapping.get(key) is not None}
    if any(value not in known[key] for key, value in given.items()):
        known = _known(FAMILIES.whole())
    named = [known[key][value] for key, value in given.items() if value in known[key]]
    for key in given or ["architectures"]:
        if given.get(key) not in known[key]:
            message = "is not supported" if key in given else "is needed"
            is_tower = {"patch_size", "image_size"} & mapping.keys() and not {
                "vocab_size",
                "text_config",
            } & mapping.keys()
            message += VISION_TOWER if is_tower else ""
            problems.append(_problem(mapping, [key], f"{message}; known are {', '.join(known[key])}"))
    if len(set(named)) > 1:
        problems.append(_problem(mapping, ["model_type"], f"contradicts architectures {mapping['architectures']!r}"))
    return named[0] if named else "LlamaForCausalLM"


def _described(mapping: Mapping[str, Any]) -> str:
    """The architecture of a config with a description. DataError."""
    match mapping:
        case {"architectures": [str(architecture)], "model_type": str()}:
            if architecture in FAMILIES.ours:
                raise DataError(f"{KEY}: llmq knows {architecture}: leave the description out")
            return architecture
    raise DataError(f"{KEY}: config.json needs architectures, a list of one name, and model_type")


def _family(architecture: str, source: Mapping[str, Any]) -> Family:
    """That of a config.json: described there, or known by its architecture."""
    return family_of(source[KEY], source["model_type"]) if KEY in source else FAMILIES[architecture]


def _known(families: Mapping[str, Family]) -> dict[str, dict[str, str]]:
    """Families' names by the values of config.json that name them, as they are written."""
    return {
        "architectures": {repr([name]): name for name in families},
        "model_type": {repr(family.model_type): name for name, family in families.items()},
    }


def to_hf(config: ModelConfig, dtype: str | None = None) -> dict[str, Any]:
    """The config.json of a model, for transformers 4 and 5 alike; `dtype` (default: the config's) is the weights'.

    Keys of the source that say nothing of what we write are kept as they were.
    """
    family, source = config.family, config.source
    text = replace(config, source=family.within.text(source))
    before = _text_keys(read_config(source), None) if text.source is not source else {}
    return family.within.written(source, before, _text_keys(text, dtype))


def _text_keys(config: ModelConfig, dtype: str | None) -> dict[str, Any]:
    """The keys of a language model, as a folder of its own has them."""
    family, eos = config.family, config.eos_token_ids
    torch_name = TORCH_NAMES[dtype or config.dtype]
    written: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        **_keys(family.keys, replace(config, dtype=torch_name)),
        **_keys(family.keys, config.scales),
        family.act_key: {**family.defaults, **config.source}.get(family.act_key)
        or next(name for name, ours in ACTIVATIONS.items() if ours == family.wiring.activation),
        **family.rope_keys(config),
        "torch_dtype": torch_name,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        **family.window_keys(config),
    }
    kept = {key: value for key, value in config.source.items() if key not in NOT_EXPORTED}
    return {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, **kept, **written}


OF_LAYERS = ("rope", "local_rope", "unrotated", "windows")  # that `window_keys` and `rope_keys` write


def _keys(form: type[BaseModel], config: object) -> dict[str, Any]:
    """The fields that a config shares with a form, by the form's keys."""
    fields = {info.alias or name: name for name, info in form.model_fields.items() if name not in OF_LAYERS}
    return {key: getattr(config, name) for key, name in fields.items() if hasattr(config, name)}
