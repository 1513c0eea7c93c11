"""How a family's layers are made: facts of which llmq has an object each, and the names of its tensors in files."""

from dataclasses import dataclass

ACTIVATIONS = {  # by transformers' names
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class Names:
    """Tensors of a model in files, those of a layer below `layers`. Maps that are computed as one are several tensors,
    or one that is fused in the file, too. Where there is a table of learned `positions`, no layer has a rotary
    embedding."""

    embed: str = "model.embed_tokens"
    positions: str = ""
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
    """The facts. Norms lie before a sublayer ("pre"), after it ("post"), or on both sides ("both"), and multiply by
    w + `norm_offset`; `layernorm` are others than RMSNorms, with a bias (`norm_bias`). In `parallel` blocks attention
    and MLP read one norm, and both are added to what it read. `activation` is that of the MLP's gate, if it is `gated`.
    The embedding may be `scaled` by sqrt(C), and there may be a norm over all heads of q and one over all of k
    (`wide_qk_norm`). The layers' matrices may be `transposed` in files, (K,N). All of their maps have a bias where that
    of q, k and v has one, if it is for `all_biased`.
    """

    names: Names = Names()
    norms: str = "pre"
    norm_offset: float = 0.0
    layernorm: bool = False
    norm_bias: bool = True
    parallel: bool = False
    activation: str = "silu"
    gated: bool = True
    scaled: bool = False
    wide_qk_norm: bool = False
    transposed: bool = False
    all_biased: bool = False


LLAMA = Wiring()


@dataclass(frozen=True)
class Scales:
    """Multipliers and soft-caps, by their keys in config.json."""

    attention_multiplier: float | None = None  # of scores; None: 1 / sqrt(Hd)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a sublayer adds to the stream
    logits_scaling: float = 1.0  # by which logits are divided
    logit_scale: float = 1.0
    query_pre_attn_scalar: float | None = None  # scores are divided by its root
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    @property
    def of_scores(self) -> float | None:
        """What scores are multiplied by; None: 1 / sqrt(Hd)."""
        root = self.query_pre_attn_scalar
        return self.attention_multiplier if root is None else root**-0.5

    @property
    def of_logits(self) -> float:
        """What logits are multiplied by."""
        return self.logit_scale / self.logits_scaling
