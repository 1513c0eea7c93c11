"""The forwards that take the place of those of transformers' modules, and why a module keeps its own.

What a call needs that llmq's ops do not have (another dtype, logits, labels of another kind) goes to the module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch

from llmq.torch.head import causal_loss
from llmq.torch.kernels import NAMES, product_dtype, takes
from llmq.torch.layers import rmsnorm, rope, swiglu

TURN = "apply_rotary_pos_emb"  # that transformers' attention calls
OF_LOSS = {"num_items_in_batch", "shift_labels", "logits_to_keep"}  # arguments that the model below the head lacks
BEFORE_LABELS = 5  # arguments of a model's forward
Forward = Callable[..., Any]


def ours(forward: Forward) -> Forward:
    """Marks a forward as one of these. A pickled model has its own again: methods are stored by their name."""
    vars(forward)["of_llmq"] = forward  # itself: what wraps it has a copy of its attributes
    forward.__name__ = "forward"
    return forward


def is_ours(forward: Any) -> bool:
    """Whether a forward, or a module's bound one, is one of these."""
    function = getattr(forward, "__func__", forward)
    return function is not None and getattr(function, "of_llmq", None) is function


def is_of_others(module: torch.nn.Module) -> bool:
    """Whether another library has replaced a module's forward."""
    forward = vars(module).get("forward")
    is_own = forward is None or getattr(forward, "__func__", None) is type(module).forward
    return not is_own and not is_ours(forward)


@ours
def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """RMSNorm."""
    if not takes(hidden_states, self.weight):
        return type(self).forward(self, hidden_states)
    y: torch.Tensor = rmsnorm(hidden_states, self.weight, self.variance_epsilon)[0]
    return y


@ours
def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU between whatever maps the module has."""
    gate, up = self.gate_proj(x), self.up_proj(x)
    act = swiglu(gate, up) if takes(gate, up) else self.act_fn(gate) * up
    y: torch.Tensor = self.down_proj(act)
    return y


def why_norm_left(module: Any) -> str | None:
    """For a norm of other maths than Llama's, such as Gemma's, whose weight is added to 1."""
    return None if hasattr(module, "variance_epsilon") else f"{type(module).__name__} is not the RMSNorm of Llama"


def why_mlp_left(module: Any) -> str | None:
    """For another activation than SwiGLU's."""
    act = module.config.hidden_act
    return None if act in ("silu", "swish") else f"its activation is {act}, not silu"


def attention_forward(module: torch.nn.Module) -> Forward:
    """A module's own forward, with llmq's rotary embedding in the place of transformers'.

    The rest of it differs between versions of transformers, and is none of ours.
    """
    own: Any = type(module).forward
    theirs = own.__globals__[TURN]

    def turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        if not takes(q, k):
            return theirs(q, k, cos, sin)
        # The heads of a token lie together in memory, of which attention has a transposed view.
        heads = rope(q.transpose(1, 2), k.transpose(1, 2), cos.to(q.dtype), sin.to(q.dtype))
        return tuple(x.transpose(1, 2) for x in heads)

    # Where there is no `__name__`, TorchDynamo looks names up in this scope, and not in transformers' module.
    scope = {name: value for name, value in own.__globals__.items() if name != "__name__"}
    found = FunctionType(own.__code__, {**scope, TURN: turned}, own.__name__, own.__defaults__, own.__closure__)
    found.__kwdefaults__ = own.__kwdefaults__
    return ours(found)


def why_attention_left(module: Any) -> str | None:
    """For a forward that calls no function of that name."""
    own: Any = type(module).forward
    known = isinstance(own, FunctionType) and TURN in own.__code__.co_names and TURN in own.__globals__
    return None if known else f"its forward does not call {TURN}"


def model_forward(model: Any) -> Forward:
    """The model's forward: while it trains on labels the head with its loss, which makes no logits, else its own."""
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils.generic import can_return_tuple

    theirs = vars(model).get("forward")  # another library's
    own = type(model).forward if theirs is None else _of_any(theirs)

    @ours
    @can_return_tuple
    @wraps(type(model).forward)
    def forward(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        patch = getattr(self, "_llmq_patch", None)
        if patch is not None and not torch.compiler.is_compiling():
            patch.follow()
        shifted = kwargs.get("shift_labels")
        trains = patch is not None and self._llmq_loss and self.training and (labels is not None or shifted is not None)
        if not trains or len(args) > BEFORE_LABELS or _is_special(self, kwargs):
            given = kwargs if labels is None else {**kwargs, "labels": labels}
            return own(self, *args, **given)
        found = self.model(*args, **{name: value for name, value in kwargs.items() if name not in OF_LOSS})
        x, weight = found.last_hidden_state, self.lm_head.weight
        loss = causal_loss(x, weight, labels, shifted, kwargs.get("num_items_in_batch"))
        rest = {name: getattr(found, name, None) for name in ("past_key_values", "hidden_states", "attentions")}
        return CausalLMOutputWithPast(loss=loss, logits=None, **rest)

    return forward


def _of_any(forward: Any) -> Forward:
    """A module's forward as a function of the module, of which a copy is another one."""
    return getattr(forward, "__func__", None) or (lambda self, *args, **kwargs: forward(*args, **kwargs))


def _is_special(model: Any, given: dict[str, Any]) -> bool:
    """Whether a call asks for some logits, for TRL's head, or for another loss, or the head has been replaced."""
    keep = given.get("logits_to_keep")
    if isinstance(keep, torch.Tensor) or keep or "fused_lm_head" in given or "ignore_index" in given:
        return True
    weight = model.lm_head.weight
    return why_model_left(model) is not None or not takes(weight) or product_dtype(weight) not in NAMES


def why_model_left(model: Any) -> str | None:
    """For a head or a loss of another kind."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.lm_head
    if type(head) is not torch.nn.Linear or head.bias is not None:
        return f"its head is a {type(head).__name__}, not a torch.nn.Linear without bias"
    if is_of_others(head) or head._forward_hooks or head._forward_pre_hooks:
        return "the forward of its head was replaced by another library, or has hooks"
    if any(parameter.dtype is not head.weight.dtype for parameter in model.model.norm.parameters()):
        return f"its head is in {head.weight.dtype}, and the norm before in another dtype"
    return None if model.loss_function is ForCausalLMLoss else "its loss_function is not transformers' ForCausalLMLoss"


def why_left(module: torch.nn.Module) -> str | None:
    """For a module of any class."""
    if is_of_others(module) and not is_ours(unwrap(vars(module)["forward"], stop=is_ours)):
        return "its forward was replaced by another library: call patch_model before"
    parameters = getattr(module, "lm_head", module).parameters()  # of maps that are quantized as well, in any dtype
    is_half = any(parameter.dtype is torch.float16 for parameter in parameters)
    return "its parameters are in torch.float16, which llmq's kernels lack: use bf16" if is_half else None
