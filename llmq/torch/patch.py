"""What `patch_model` does: forwards of single modules are replaced by ones that call llmq's ops, and put back.

A module is replaced by its exact class in transformers, where its own code is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from inspect import unwrap
from types import MethodType
from typing import Any, NamedTuple

import torch

from llmq.errors import UsageError
from llmq.torch.forwards import (
    Forward,
    attention_forward,
    is_of_others,
    is_ours,
    mlp_forward,
    model_forward,
    norm_forward,
    why_attention_left,
    why_left,
    why_mlp_left,
    why_model_left,
    why_norm_left,
)
from llmq.torch.fp8 import forget_copy, forward_of, why_map_left
from llmq.torch.lora import lora_forward, why_lora_left

MODEL_TYPES = {f"{name}ForCausalLM": name.lower() for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
HEAD, LORA, E4M3, UNKNOWN = "head with loss", "LoRA", "maps in e4m3", "unknown"
PUT = "_llmq_put"  # of a module with another forward, what its own `forward` was before
MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Replacement(NamedTuple):
    """The kind that modules of a class are counted as, the new forward of one, and why one keeps its own."""

    kind: str
    forward: Callable[[Any], Forward]
    why_left: Callable[[Any], str | None] = lambda module: None


# by what follows the family in the name of a class
OF_FAMILY = {
    "RMSNorm": Replacement("RMSNorm", lambda module: norm_forward, why_norm_left),
    "Attention": Replacement("RoPE", attention_forward, why_attention_left),
    "MLP": Replacement("SwiGLU", lambda module: mlp_forward, why_mlp_left),
    "ForCausalLM": Replacement(HEAD, model_forward, why_model_left),
}
WITHOUT_KERNELS = {"Model", "DecoderLayer", "RotaryEmbedding"}
OF_MAPS = {name: Replacement(E4M3, partial(lambda name, module: forward_of(name), name), why_map_left) for name in MAPS}
OF_PEFT = Replacement(LORA, lambda module: lora_forward, why_lora_left)
OTHER = Replacement(
    UNKNOWN, lambda module: norm_forward, lambda module: f"a {_class(module)}, which llmq does not know"
)


class Change(NamedTuple):
    """A module that gets a new forward, counted as a kind."""

    kind: str
    name: str
    module: torch.nn.Module
    forward: Forward


@dataclass(eq=False)
class Patch:
    """What became of a model: `replaced` has names of modules by kind, `left` by name why another one was not.

    Its text is a summary, with one line for the modules of all layers. At the model's next call it follows what PEFT
    has added or removed.
    """

    replaced: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _model: Any = field(default=None, repr=False)
    _kinds: set[str] = field(default_factory=set, repr=False)
    _adapters: list[Any] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        lines = [f"{kind}: {len(names)} replaced" for kind, names in self.replaced.items()]
        reasons = Counter((_pattern(name), reason) for name, reason in self.left.items())
        lines += [f"{name}{f' ({n})' if n > 1 else ''}: left, {reason}" for (name, reason), n in reasons.items()]
        return "\n".join(lines)

    def change(self, changes: list[Change], left: dict[str, str]) -> None:
        """Replaces forwards, those that are replaced already aside."""
        self.replaced.clear()
        self.left = left
        for kind, name, module, forward in changes:
            _put(module, forward)
            self.replaced.setdefault(kind, []).append(name)

    def follow(self) -> None:
        """Looks again where adapters have come or gone since."""
        adapters = _adapters(self._model)
        if [*map(id, adapters)] == [*map(id, self._adapters)]:
            return
        self._adapters = adapters
        for module in self._model.modules():
            forget_copy(module)
            if getattr(module.forward, "__func__", None) is lora_forward:
                _take_out(module)
        self.change(*_found(self._model, self._kinds))

    def undo(self) -> None:
        """Puts every forward back; UsageError, before any is, where another library has replaced one since."""
        changed = [module for module in self._model.modules() if PUT in vars(module)]
        again = {type(module).__name__ for module in changed if module is not self._model and is_of_others(module)}
        if again:
            names = ", ".join(sorted(again))
            raise UsageError(f"forwards of {names} were replaced again after patch_model: undo that first")
        for module in changed:
            _take_out(module)
        del self._model._llmq_patch, self._model._llmq_loss
        self.replaced.clear()


def patch_model(
    model: torch.nn.Module, loss: bool = True, linear: str = "bf16", lora: bool = True, *, strict: bool = False
) -> Patch:
    """Puts llmq's kernels into a Hugging Face model of a family that llmq knows, with PEFT's adapters or without.

    RMSNorm, rotary embedding and SwiGLU; with `loss`, while the model trains on labels, the head with its loss in
    chunks: then there are no `logits`; with `lora` PEFT's LoRA; with `linear`="e4m3" products of the maps of attention
    and the MLP in fp8. A second call begins with what `unpatch_model` leaves. What has no kernel is left and named;
    UsageError instead with `strict`, for other values of `linear`, and for libraries that are not there.
    """
    if linear not in ("bf16", "e4m3"):
        raise UsageError(f"linear={linear!r} is not known: use 'bf16' or 'e4m3'")
    if find_spec("transformers") is None:
        raise UsageError("patch_model takes models of transformers, which is not there: pip install transformers")
    base = _base(model)
    unpatch_model(base)
    asked = {HEAD: loss, LORA: lora, E4M3: linear == "e4m3"}
    kinds = {"RMSNorm", "RoPE", "SwiGLU", UNKNOWN, *(kind for kind, is_asked in asked.items() if is_asked)}
    if _family(base) is None:
        changes: list[Change] = []
        left = {"": f"a {_class(base)}: llmq has kernels for {', '.join(MODEL_TYPES)}"}
    else:
        changes, left = _found(base, kinds)
    if strict and left:
        raise UsageError(f"patch_model(strict=True) replaces everything or nothing:\n{Patch({}, left)}")
    patch = Patch({}, left, base, kinds, _adapters(base))
    if changes:
        _check_libraries(base)
        patch.change(changes, left)
        base._llmq_patch, base._llmq_loss = patch, HEAD in patch.replaced
        if HEAD not in patch.replaced:  # adapters that come later are found at calls of the model
            _put(base, model_forward(base))
    return patch


def unpatch_model(model: torch.nn.Module) -> None:
    """Gives a model the forwards that it had before `patch_model`; nothing happens to one that has its own."""
    patch = getattr(_base(model), "_llmq_patch", None)
    if patch is not None:
        patch.undo()


def _base(model: Any) -> Any:
    """The model itself, of which PEFT's has the adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _family(base: Any) -> str | None:
    """The module of transformers that a known model is of."""
    name = MODEL_TYPES.get(type(base).__name__)
    module = f"transformers.models.{name}.modeling_{name}"
    return module if type(base).__module__ == module else None


def _put(module: torch.nn.Module, forward: Forward) -> None:
    """Gives a module a forward, unless one of these lies already within that of another library, such as accelerate."""
    before = vars(module).get("forward")
    if before is None or not is_ours(unwrap(before, stop=is_ours)):
        vars(module)[PUT] = before if is_of_others(module) else None
        module.forward = MethodType(forward, module)
        vars(module)["_replicate_for_data_parallel"] = MethodType(_replicate_for_data_parallel, module)


def _take_out(module: torch.nn.Module) -> None:
    """Undoes `_put`. Within another library's forward ours stays, and passes calls on."""
    own = vars(module).pop(PUT)
    if not is_of_others(module):
        vars(module).pop("forward", None)
        if own is not None:
            module.forward = own
    vars(module).pop("_replicate_for_data_parallel", None)
    forget_copy(module)


def _replicate_for_data_parallel(self: Any) -> torch.nn.Module:
    """The copy of a module that torch.nn.DataParallel calls on another GPU: its forward is of the copy."""
    found: torch.nn.Module = type(self)._replicate_for_data_parallel(self)
    if isinstance(self.forward, MethodType):
        found.forward = MethodType(self.forward.__func__, found)
    return found


def _adapters(base: Any) -> list[Any]:
    """The configs of PEFT's adapters in a model. One that is added again under its name has another."""
    return [*(getattr(base, "peft_config", None) or {}).values()]


def _class(module: Any) -> str:
    return f"{type(module).__name__} of {type(module).__module__.partition('.')[0]}"


def _pattern(name: str) -> str:
    """A module's name, with a star in place of the number of its layer."""
    return ".".join("*" if part.isdecimal() else part for part in name.split(".")) if name else "the model"


def _check_libraries(base: torch.nn.Module) -> None:
    """UsageError for a model on a GPU without what launches kernels there."""
    # The last part first: a checkout of llmq has a folder named cuda.
    missing = [
        name for name in ("cupy", "cuda.bindings") if not (find_spec(name.partition(".")[0]) and find_spec(name))
    ]
    if missing and any(parameter.is_cuda for parameter in base.parameters()):
        what = f"kernels on CUDA need CuPy and NVRTC, and the module {missing[0]} is not there"
        raise UsageError(f"{what}: pip install 'llmq-train[cuda13]', or [cuda12]")


def _found(base: Any, kinds: set[str]) -> tuple[list[Change], dict[str, str]]:
    """What of these kinds is to be replaced in a model, and why the rest is left."""
    changes, left = [], {}
    for name, module in base.named_modules():
        rule = _rule(base, name, module)
        if rule is None or rule.kind not in kinds:
            continue
        reason = rule.why_left(module) or why_left(module)
        if reason is not None:
            left[name] = reason
        else:
            changes.append(Change(rule.kind, name, module, rule.forward(module)))
    return changes, left


def _rule(base: Any, name: str, module: Any) -> Replacement | None:
    """What becomes of a module; None for one that has nothing to replace."""
    if type(module) is torch.nn.Linear:
        *_, parent, last = ("", *name.split("."))
        return OF_MAPS.get(parent if last == "base_layer" else last)
    cls, package = type(module), type(module).__module__
    if package == _family(base):
        part = cls.__name__.removeprefix(type(base).__name__.removesuffix("ForCausalLM"))
        return None if part in WITHOUT_KERNELS else OF_FAMILY.get(part, OTHER)
    if package.startswith("peft.tuners."):
        return OF_PEFT if hasattr(module, "base_layer") else None
    return None if package.startswith(("torch.nn.", "transformers.activations", "peft.")) else OTHER
