"""transformers and torch.optim.AdamW as a judge: models from a config.json dict and named arrays, gradients, a run.

transformers computes norms, softmax, rotary tables and the loss in f32 whatever the model's dtype is. For references
that are exact to f64 its own code runs with `torch.float32` meaning f64 (`doubled`), and nothing else changed.
In bf16 runs the rotary frequencies stay f32, as they do when a bf16 model is loaded with from_pretrained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch", reason="the judges are torch and transformers")

import safetensors.torch
import torch
import transformers
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from golden import families

# transformers imports these when it first needs them; within `doubled` their tables and defaults would keep f64
LOADED = (safetensors.torch, modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3)


@contextmanager
def doubled() -> Iterator[None]:
    """Within, every request for f32 made by Python code is a request for f64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)  # patched name: restored below, outside of the patch
    torch.set_default_dtype(torch.float32)


def empty_model(config: dict[str, Any]) -> torch.nn.Module:
    """A transformers model of a config.json dict, in the default dtype, with weights of transformers' choosing, and
    without dropout."""
    # a copy: transformers writes into nested dicts that it is given
    fields = {k: deepcopy(v) for k, v in config.items() if k not in ("torch_dtype", "dtype")}
    parsed = transformers.AutoConfig.for_model(**fields)
    return transformers.AutoModelForCausalLM.from_config(parsed, attn_implementation="eager").eval()


def model_of(config: dict[str, Any], weights: dict[str, np.ndarray], dtype: str) -> torch.nn.Module:
    """The model of `config` with `weights` in `dtype` (float64, float32, bfloat16): all of them set, none left over.

    A float64 model must be made and run within `doubled()`.
    """
    model = empty_model(config)
    named = dict(model.named_parameters())
    assert {n: tuple(p.shape) for n, p in named.items()} == {n: a.shape for n, a in weights.items()}
    kept = {n: b.clone() for n, b in model.named_buffers()}
    model.to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(np.array(weights[name])))
        for name, buffer in model.named_buffers():
            buffer.data = kept[name]
    return model


def logits_of(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Logits (B,T,V) in f64."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.to(torch.float64).numpy()


def backward(model: torch.nn.Module, tokens: np.ndarray, targets: np.ndarray) -> float:
    """Leaves the gradients of the mean loss over trained tokens in the parameters; the loss."""
    model.zero_grad(set_to_none=True)
    logits = model(torch.from_numpy(tokens).long()).logits[:, -tokens.shape[1] :].float()  # not of virtual tokens
    flat = torch.from_numpy(targets).long().reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits.reshape(flat.numel(), -1), flat, ignore_index=-100)
    loss.backward()
    return loss.item()


def gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Name -> gradient in f64, after `backward`."""
    return {n: p.grad.to(torch.float64).numpy().copy() for n, p in model.named_parameters()}


def parameters(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Name -> value in f64."""
    return {n: p.detach().to(torch.float64).numpy().copy() for n, p in model.named_parameters()}


def adamw_run(
    model: torch.nn.Module, config: dict[str, Any], length: int = families.LENGTH
) -> tuple[list[float], list[float]]:
    """Trains in place for families.STEPS steps on batches 1, 2, ...; losses, and gradient norms before clipping.

    The clip factor is min(1, clip / norm): torch's own utility adds 1e-6 to the norm, which is its choice, not AdamW's.
    """
    a = families.ADAMW
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": a["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(a["beta_1"], a["beta_2"]), eps=a["epsilon"], foreach=False)
    losses, norms = [], []
    for step in range(1, families.STEPS + 1):
        losses.append(backward(model, *families.batch(config["vocab_size"], step, length=length)))
        norm = float(torch.sqrt(sum((p.grad.to(torch.float64) ** 2).sum() for p in model.parameters())))
        norms.append(norm)
        for p in model.parameters():
            p.grad.mul_(min(1.0, families.grad_clip(config) / norm))
        for group in optimizer.param_groups:
            group["lr"] = families.learning_rate(step)
        optimizer.step()
    return losses, norms
