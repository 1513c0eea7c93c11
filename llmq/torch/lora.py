"""PEFT's LoRA of a linear map as one op: y = x W^T + bias + scale (x A^T) B^T, and its gradients.

The product of few terms is written first, and the map's own adds to it: y is read under arithmetic, not in a pass of
its own. A and B may be in f32 beside a map in bf16, as PEFT has them: products are in the map's dtype, as under
autocast.
"""

from __future__ import annotations

from typing import Any

import torch

from llmq.torch.forwards import is_of_others, ours
from llmq.torch.fp8 import columns_of, forget_copy, input_copies, product, quantize_e4m3, weight_copy
from llmq.torch.kernels import product_dtype, ready, run, takes
from llmq.torch.library import op

ONE_PASS = (16, 32)  # ranks with a kernel that reads d_y once for both gradients through B
WHOLE = 8  # what widths are multiples of for that
Two = tuple[torch.Tensor, torch.Tensor]
Many = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: Any, a: torch.Tensor, b: torch.Tensor, *_: Any) -> Two:
    return x.new_empty((*x.shape[:-1], weight.shape[0])), x.new_empty((*x.shape[:-1], a.shape[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Two) -> None:
    x, weight, bias, a, b, ctx.scale, _, _, *copy = inputs
    reads_x = a.requires_grad or weight.requires_grad
    ctx.save_for_backward(x if reads_x else x.new_empty(0), weight, a, b, output[1], *copy)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.needs = [x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad, reads_x]


def _backward(ctx: Any, d_y: torch.Tensor, _: Any) -> tuple[Any, ...]:
    of_x, of_weight, of_bias, _ = ctx.needs
    *tensors, w_rows, w_scale = ctx.saved_tensors
    d_x, d_weight, d_bias, d_a, d_b = lora_linear_backward(d_y, *tensors, w_rows, w_scale, ctx.scale, *ctx.needs)
    a_and_b = (d_a if ctx.needs_input_grad[3] else None, d_b if ctx.needs_input_grad[4] else None)
    return (d_x if of_x else None, d_weight if of_weight else None, d_bias if of_bias else None, *a_and_b, *[None] * 5)


@op(
    "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, float scale, Tensor? x_rows,"
    " Tensor? x_scale, Tensor? w_rows, Tensor? w_scale) -> (Tensor, Tensor)",
    _fake,
    _keep,
    _backward,
)
def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    x_rows: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_rows: torch.Tensor | None,
    w_scale: torch.Tensor | None,
) -> Two:
    """y (...,N), low (...,R) <- x (...,K), weight (N,K), bias (N,) or None, a (R,K), b (N,R), copies in e4m3."""
    rows, up, leading = x.reshape(-1, x.shape[-1]), b.to(x.dtype).T, x.shape[:-1]
    low = torch.mm(rows, a.to(x.dtype).T)
    if w_rows is not None and w_scale is not None and x_rows is not None and x_scale is not None:
        y = product(x_rows, w_rows, (x_scale, w_scale), x.dtype, bias)
        y.addmm_(low, up, alpha=scale)
    else:
        y = x.new_empty((rows.shape[0], weight.shape[0]))
        first, beta = (y, 0) if bias is None else (bias, 1)
        torch.addmm(first, low, up, beta=beta, alpha=scale, out=y)
        y.addmm_(rows, weight.T)
    return y.view(*leading, y.shape[1]), low.view(*leading, low.shape[1])


def _fake_backward(d_y: torch.Tensor, _: Any, weight: torch.Tensor, *given: Any) -> Many:
    a, b, *_, of_x, of_weight, of_bias, of_a = given
    return (
        d_y.new_empty((*d_y.shape[:-1], weight.shape[1]) if of_x else 0),
        weight.new_empty(weight.shape if of_weight else 0),
        d_y.new_empty(weight.shape[0] if of_bias else 0),
        a.new_empty(a.shape if of_a else 0),
        b.new_empty(b.shape),
    )


@op(
    "lora_linear_backward(Tensor d_y, Tensor x, Tensor weight, Tensor a, Tensor b, Tensor low, Tensor? w_rows,"
    " Tensor? w_scale, float scale, bool of_x, bool of_weight, bool of_bias, bool of_a)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
)
def lora_linear_backward(
    d_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    low: torch.Tensor,
    w_rows: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    scale: float,
    of_x: bool,
    of_weight: bool,
    of_bias: bool,
    of_a: bool,
) -> Many:
    """Gradients of x, weight, bias, a and b, empty where not asked for <- d_y (...,N), what `lora_linear` has."""
    d_x, d_weight, d_bias, d_a, d_b = _fake_backward(
        d_y, x, weight, a, b, low, w_rows, w_scale, scale, of_x and w_rows is None, of_weight, of_bias, of_a
    )
    d_rows, low = ready(d_y).view(-1, d_y.shape[-1]), low.view(-1, low.shape[-1])
    rows, up = x.reshape(-1, weight.shape[1]), b.to(low.dtype)
    d_low = torch.empty_like(low)
    if d_rows.is_cuda and takes_one_pass(d_rows, up):
        run("low_rank_backward", (d_low, d_b), (d_rows, low, ready(up)), alpha=scale)
    else:
        torch.addmm(d_low, d_rows, up, beta=0, alpha=scale, out=d_low)
        d_b.copy_((d_rows.T @ low).mul_(scale))
    if of_a:
        d_a.copy_(d_low.T @ rows)
    if of_x and w_rows is not None and w_scale is not None:
        copy, _, d_scale = quantize_e4m3(d_rows, False)
        flat = product(copy, columns_of(w_rows, w_scale, d_y.dtype), (d_scale, w_scale), d_y.dtype)
        d_x = flat.addmm_(d_low, a.to(low.dtype)).view(*d_y.shape[:-1], weight.shape[1])
    elif of_x:
        flat = d_x.view(-1, d_x.shape[-1])
        torch.mm(d_low, a.to(low.dtype), out=flat)
        flat.addmm_(d_rows, weight)
    if of_weight:
        torch.mm(d_rows.T, rows, out=d_weight)
    if of_bias:
        torch.sum(d_rows, 0, out=d_bias)
    return d_x, d_weight, d_bias, d_a, d_b


def takes_one_pass(d_y: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether the kernel that reads d_y (M,N) once has this rank and width."""
    return d_y.dtype is torch.bfloat16 and up.shape[1] in ONE_PASS and not up.shape[0] % WHOLE


def why_lora_left(layer: Any) -> str | None:
    """Why PEFT's own forward stays for a layer of its LoRA; None where llmq's takes its place."""
    from peft.tuners.lora import Linear

    if type(layer) is not Linear:
        return f"a {type(layer).__name__} of {type(layer).__module__}, not LoRA of a torch.nn.Linear"
    base = layer.base_layer
    if type(base) is not torch.nn.Linear:
        return f"its base is a {type(base).__name__}, not a torch.nn.Linear"
    if is_of_others(base):
        return "the forward of its base was replaced by another library"
    if layer.fan_in_fan_out:
        return "its weight is transposed (fan_in_fan_out)"
    if any(type(dropout) is not torch.nn.Identity for dropout in layer.lora_dropout.values()):
        return "it has a dropout: use lora_dropout=0"
    if layer.lora_variant:
        return f"it is a {type(next(iter(layer.lora_variant.values()))).__name__}, not plain LoRA"
    if any(layer.lora_bias.values()):
        return "B has a bias (lora_bias)"
    return None


@ours
def lora_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of a PEFT layer with one active adapter; what else it can be asked for is PEFT's own."""
    names = [name for name in self.active_adapters if name in self.lora_A]
    base, read = self.base_layer, x.to(product_dtype(x))
    is_shared = getattr(base.forward, "is_shared", None)  # of a map in e4m3
    is_plain = not (args or kwargs or self.disable_adapters or self.merged) and len(names) == 1
    if not is_plain or not takes(read, base.weight) or (is_shared is not None and base.weight.requires_grad):
        merged = bool(self.merged)  # into a weight that PEFT may take apart again in this call, and has before the next
        if merged:
            forget_copy(base)
        own: torch.Tensor = type(self).forward(self, x, *args, **kwargs)
        if merged:
            forget_copy(base)
        return own
    (name,) = names
    a, b = self.lora_A[name].weight, self.lora_B[name].weight
    copies: tuple[torch.Tensor | None, ...] = (None,) * 4
    if is_shared is not None:
        x_rows, _, x_scale = input_copies(read, False, is_shared)
        copies = (x_rows, x_scale, *weight_copy(base, read.dtype))
    y: torch.Tensor = lora_linear(read, base.weight, base.bias, a, b, self.scaling[name], *copies)[0]
    return y
