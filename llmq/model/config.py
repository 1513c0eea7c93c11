"""The shape of a model: Hugging Face `config.json`, read into one ModelConfig and written back.

transformers 4 spells `rope_theta`, `rope_scaling` and `torch_dtype`; transformers 5 spells `rope_parameters` and
`dtype`. Both are read, and both are written, so that an export loads in either. A key that is absent has the value
that transformers gives it for that architecture. Whatever a config asks for and the engine lacks is an error: a model
that loads is the same function here as there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmq.errors import DataError
from llmq.tensor import DTYPES


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is `default`, `linear` (positions / factor) or `llama3` (frequency-dependent factor)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """What the engine needs to know of a Llama- or Qwen-class decoder. Sizes are unpadded."""

    architecture: str  # LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[
        int | None, ...
    ] = ()  # per layer: sliding window in tokens (self included), None is full; () is all full
    dtype: str = "bf16"  # of the source's weights: bf16, fp16, fp32
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the config.json as read, for the export

    def identity(self) -> dict[str, Any]:
        """What makes it compute what it computes: not the tokens that end texts, nor the export's source."""
        left_out = ("dtype", "bos_token_id", "eos_token_ids", "pad_token_id", "source", "max_position")
        return {name: value for name, value in asdict(replace(self, source={})).items() if name not in left_out}

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full causal attention."""
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True)
class Family:
    """An architecture that we have, and what transformers takes for keys that its config.json leaves out."""

    model_type: str
    num_kv_heads: int | None = None  # None: as many as num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    max_position: int = 2048
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family("llama", bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": Family("mistral", num_kv_heads=8, max_position=131072, bos_token_id=1, eos_token_id=2),
    "Qwen2ForCausalLM": Family("qwen2", num_kv_heads=32, max_position=32768, qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", num_kv_heads=32, head_dim=128, max_position=32768, qk_norm=True),
}
TORCH_NAMES = {name: DTYPES[name].name for name in ("bf16", "fp16", "fp32")}
DTYPE_NAMES = {torch: ours for ours, torch in TORCH_NAMES.items()}
LARGEST = 2**31 - 1  # token ids and sizes are held in int32
MAX_LAYERS = 10_000
SLIDING_DEFAULT = 4096  # transformers' value where `sliding_window` is absent (null means none)

# Keys that change the function a model computes, with the values that leave it alone, and what any other would need.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": ((None, "silu", "swish"), "only silu is supported"),
    "attention_bias": ((None, False), "biases on the attention projections are not supported for this architecture"),
    "mlp_bias": ((None, False), "biases in the MLP are not supported"),
    "attention_dropout": ((None, 0), "dropout is not supported; set it to 0.0 to train without"),
    "partial_rotary_factor": ((None, 1), "partial rotary embedding is not supported"),
    "use_mrope": ((None, False), "multimodal rotary embedding is not supported"),
    "attn_logit_softcapping": ((None, 0), "logit softcapping is not supported"),
    "final_logit_softcapping": ((None, 0), "logit softcapping is not supported"),
    "num_experts": ((None, 0), "mixtures of experts are not supported"),
    "num_local_experts": ((None, 0), "mixtures of experts are not supported"),
    "n_routed_experts": ((None, 0), "mixtures of experts are not supported"),
    "is_causal": ((None, True), "only causal attention is supported"),
    "use_bidirectional_attention": ((None, False), "only causal attention is supported"),
}
# Keys of a source that are not true of what is trained from it (remote code is not copied, files are elsewhere).
NOT_EXPORTED = ("_name_or_path", "_commit_hash", "auto_map", "quantization_config", "rope_theta", "rope_scaling")
DEQUANTIZE = (
    "quantized weights cannot be trained: use the unquantized original, or convert the model with transformers "
    "(from_pretrained, dequantize(), save_pretrained)"
)


class _Reader:
    """Reads keys of one mapping and collects what is wrong with them, so that all of it is said at once."""

    def __init__(self, mapping: Mapping[str, Any], prefix: str = "", problems: list[str] | None = None) -> None:
        self.mapping, self.prefix = mapping, prefix
        self.problems: list[str] = [] if problems is None else problems

    def problem(self, key: str, message: str) -> None:
        value = repr(self.mapping[key]) if key in self.mapping else "absent"
        self.problems.append(f"{self.prefix}{key} ({value if len(value) <= 80 else value[:77] + '...'}): {message}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = LARGEST) -> int:
        """The integer at `key` (`default` where absent or null), or `low` with a problem noted."""
        value = self.mapping.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.problem(key, f"must be an integer from {low} to {high}")
        return low

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, strict: bool = True) -> float:
        """The finite number above `low` (or equal to it, unless `strict`) at `key`, or 1.0 with a problem noted."""
        value = self.mapping.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            value = low - 1
        if low < value < 1e30 or (value == low and not strict):  # false for NaN
            return float(value)
        self.problem(key, f"must be a finite number {'above' if strict else 'of at least'} {low:g}")
        return 1.0

    def boolean(self, key: str) -> bool:
        value = self.mapping.get(key)
        if value is not None and not isinstance(value, bool):
            self.problem(key, "must be true or false")
        return value is True


def from_folder(folder: Path) -> ModelConfig:
    """Reads `config.json` of a model folder; DataError where it is absent, not JSON, or asks for what we lack."""
    return read_config(read_json(Path(folder) / "config.json"), where=str(Path(folder) / "config.json"))


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
    read = _Reader(mapping)
    architecture = _architecture(read)
    family = FAMILIES[architecture]
    for key, (harmless, message) in REFUSED.items():
        ignored = key == "attention_bias" and family.qkv_bias  # Qwen2 has its biases whatever this key says
        if mapping.get(key) not in harmless and not ignored:
            read.problem(key, message)
    if mapping.get("quantization_config") is not None:
        read.problem("quantization_config", DEQUANTIZE)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    kv_default = heads if "num_key_value_heads" in mapping else family.num_kv_heads or heads
    kv_heads = read.integer("num_key_value_heads", kv_default)
    if heads % kv_heads:
        read.problem("num_key_value_heads", f"does not divide num_attention_heads ({heads})")
    if mapping.get("head_dim") is None and family.head_dim is None and hidden % heads:
        read.problem("hidden_size", f"is not a multiple of num_attention_heads ({heads}), and there is no head_dim")
    head_dim = read.integer("head_dim", family.head_dim or max(hidden // heads, 1))
    if head_dim % 2:
        read.problem("head_dim", f"is {head_dim}, but rotary embedding needs an even number")
    layers = read.integer("num_hidden_layers", high=MAX_LAYERS)
    bos, eos, pad = _token_ids(read, family)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        max_position=read.integer("max_position_embeddings", family.max_position),
        rope=_rope(read),
        tie_embeddings=read.boolean("tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        windows=_windows(read, family, layers),
        dtype=_dtype(read),
        bos_token_id=bos,
        eos_token_ids=eos,
        pad_token_id=pad,
        source=dict(mapping),
    )
    if read.problems:
        raise DataError(f"{where} cannot be used:\n" + "\n".join(f"  - {p}" for p in read.problems))
    return config


def _architecture(read: _Reader) -> str:
    """The one known architecture that `architectures` and `model_type` agree on; Llama with a problem noted if none."""
    known = ", ".join(FAMILIES)
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    listed, model_type = read.mapping.get("architectures"), read.mapping.get("model_type")
    named: set[str] = set()
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], str):
            read.problem("architectures", f"must be a list of one name of {known}")
        elif listed[0] not in FAMILIES:
            read.problem("architectures", f"is not supported; known are {known}")
        else:
            named.add(listed[0])
    if model_type is not None:
        if not isinstance(model_type, str) or model_type not in by_type:
            read.problem("model_type", f"is not supported; known are {', '.join(by_type)}")
        else:
            named.add(by_type[model_type])
    if listed is None and model_type is None:
        read.problem("architectures", f"is needed, one of {known}")
    if len(named) > 1:
        read.problem("model_type", f"contradicts architectures {listed!r}")
    return sorted(named)[0] if named else "LlamaForCausalLM"


def _dtype(read: _Reader) -> str:
    """Storage type of the source's weights from `torch_dtype` and `dtype`; fp32 where neither says, as transformers."""
    found: dict[str, str] = {}
    for key in ("torch_dtype", "dtype"):
        value = read.mapping.get(key)
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if isinstance(name, str) and name in DTYPE_NAMES:
            found[key] = DTYPE_NAMES[name]
        elif value is not None:
            read.problem(key, f"is not supported; known are {', '.join(DTYPE_NAMES)}")
    if len(set(found.values())) > 1:
        read.problem("dtype", f"contradicts torch_dtype ({read.mapping['torch_dtype']!r}): remove one")
    return next(iter(found.values()), "fp32")


def _token_ids(read: _Reader, family: Family) -> tuple[int | None, tuple[int, ...], int | None]:
    """(bos, all eos, pad); negative ids are an old way to say "none"."""

    def ids(key: str, default: int | None) -> tuple[int, ...]:
        value = read.mapping.get(key, default)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if all(isinstance(v, int) and not isinstance(v, bool) and v <= LARGEST for v in values):
            return tuple(v for v in values if v >= 0)
        read.problem(key, "must be a token id, a list of token ids, or null")
        return ()

    bos, eos = ids("bos_token_id", family.bos_token_id), ids("eos_token_id", family.eos_token_id)
    pad = ids("pad_token_id", None)
    return (bos or (None,))[0], eos, (pad or (None,))[0]


def _windows(read: _Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, () where all attend in full."""
    mapping, window = read.mapping, None
    uses = family.model_type == "mistral" or (family.model_type != "llama" and read.boolean("use_sliding_window"))
    if uses and mapping.get("sliding_window", SLIDING_DEFAULT) is not None:
        window = read.integer("sliding_window", SLIDING_DEFAULT)
    first = 0
    if uses and family.model_type != "mistral":
        first = read.integer("max_window_layers", 28, low=0)
    kinds = ["sliding_attention" if window and n >= first else "full_attention" for n in range(layers)]
    listed = mapping.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != layers:
            read.problem("layer_types", f"must be a list of num_hidden_layers ({layers}) names")
        elif unknown := sorted({repr(k) for k in listed} - {"'sliding_attention'", "'full_attention'"}):
            read.problem("layer_types", f"{', '.join(unknown)} is not supported")
        elif "sliding_attention" in listed and window is None:
            read.problem("layer_types", "asks for sliding_attention, but no sliding window is in use")
        elif family.model_type == "mistral" and listed != kinds:
            read.problem("layer_types", f"contradicts sliding_window ({window}), which holds for all layers of Mistral")
        else:
            kinds = listed
    return tuple(window if k == "sliding_attention" else None for k in kinds) if "sliding_attention" in kinds else ()


def _rope(read: _Reader) -> RopeConfig:
    """Rotary embedding from `rope_theta` and `rope_scaling` (4) and `rope_parameters` (5), which must agree."""
    thetas: dict[str, float] = {}
    if read.mapping.get("rope_theta") is not None:
        thetas["rope_theta"] = read.number("rope_theta")
    scalings: dict[str, RopeConfig] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = read.mapping.get(key)
        if not isinstance(value, dict):
            if value is not None:
                read.problem(key, "must be an object or null")
        elif value and all(isinstance(v, dict) for v in value.values()):
            read.problem(key, "rotary embedding that differs between layers is not supported")
        elif value:
            inner = _Reader(value, f"{key}.", read.problems)
            if value.get("rope_theta") is not None:
                thetas[f"{key}.rope_theta"] = inner.number("rope_theta")
            scalings[key] = _rope_scaling(inner)
    if len(set(thetas.values())) > 1:
        said = ", ".join(f"{key} is {theta:g}" for key, theta in thetas.items())
        read.problems.append(f"the rotary base contradicts itself: {said}")
    if len(set(scalings.values())) > 1:
        read.problem("rope_parameters", f"contradicts rope_scaling ({read.mapping['rope_scaling']!r})")
    scaling = next(iter(scalings.values()), RopeConfig())
    theta = next(iter(thetas.values()), 10000.0)
    return replace(scaling, theta=theta)


def _rope_scaling(read: _Reader) -> RopeConfig:
    """One `rope_scaling` or `rope_parameters` object, without its base."""
    mapping = read.mapping
    key = "rope_type" if mapping.get("rope_type") is not None or mapping.get("type") is None else "type"
    kind = mapping.get(key)
    if key == "rope_type" and mapping.get("type") not in (None, kind):
        read.problem("type", f"contradicts rope_type ({kind!r})")
    if mapping.get("partial_rotary_factor") not in (None, 1):
        read.problem("partial_rotary_factor", "partial rotary embedding is not supported")
    if kind is None and mapping.get("factor") is None:
        kind = "default"
    if kind == "default":
        return RopeConfig()
    if kind == "linear":
        return RopeConfig(kind="linear", factor=read.number("factor", low=1.0, strict=False))
    if kind != "llama3":
        read.problem(key, "is not supported; known are default, linear, llama3")
        return RopeConfig()
    rope = RopeConfig(
        kind="llama3",
        factor=read.number("factor", low=1.0, strict=False),
        low_freq_factor=read.number("low_freq_factor"),
        high_freq_factor=read.number("high_freq_factor"),
        original_max_position=read.integer("original_max_position_embeddings"),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        read.problem("high_freq_factor", f"must be above low_freq_factor ({rope.low_freq_factor:g})")
    return rope


def to_hf(config: ModelConfig, dtype: str | None = None) -> dict[str, Any]:
    """The config.json of a model, for transformers 4 and 5 alike; `dtype` (default: the config's) is the weights'.

    Keys of the source that say nothing of what we write are kept as they were.
    """
    family, rope = FAMILIES[config.architecture], config.rope
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
        scaling["original_max_position_embeddings"] = rope.original_max_position
    eos = config.eos_token_ids
    torch_name = TORCH_NAMES[dtype or config.dtype]
    written: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
        "dtype": torch_name,
        "torch_dtype": torch_name,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
        **_window_keys(config, family),
    }
    kept = {key: value for key, value in config.source.items() if key not in NOT_EXPORTED}
    return {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, **kept, **written}


def _window_keys(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys that say which layers have which sliding window."""
    window = next(filter(None, config.windows), None)
    if family.model_type == "llama":
        return {}
    if family.model_type == "mistral":
        return {"sliding_window": window}
    if window is None:
        return {"use_sliding_window": False}
    sliding = [w is not None for w in config.windows]
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": sliding.index(True),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
    }
