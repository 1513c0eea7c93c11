"""How a family's layers are made: facts of which llmq has an object each, and the names of its tensors in files."""

from dataclasses import dataclass

ACTIVATIONS = {  # by transformers' names
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class Names:
    """Tensors of a model in files, those of a layer below `layers`. Maps that are computed as one are several tensors,
    or one that is fused in the file, too."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True)
class Wiring:
    """The facts. `activation` is that of the MLP's gate; the layers' matrices may be `transposed` in files, (K,N)."""

    names: Names = Names()
    activation: str = "silu"
    transposed: bool = False


LLAMA = Wiring()


@dataclass(frozen=True)
class Scales:
    """Multipliers, by their keys in config.json."""

    attention_multiplier: float | None = None  # of scores; None: 1 / sqrt(Hd)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a sublayer adds to the stream
    logits_scaling: float = 1.0  # by which logits are divided
