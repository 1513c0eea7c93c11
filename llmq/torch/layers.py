"""RMSNorm, rotary embedding and SwiGLU as ops of torch."""

from typing import Any

import torch

from llmq.torch.kernels import ALIGNMENT, ready, run
from llmq.torch.library import op

Pair = tuple[torch.Tensor, torch.Tensor]


def _statistics(x: torch.Tensor) -> torch.Tensor:
    """Empty: a number of each row, in f64 for f64, else in f32."""
    return x.new_empty(x.shape[:-1], dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)


def _like(x: torch.Tensor) -> torch.Tensor:
    """Empty and contiguous, with the shape and dtype of x."""
    return x.new_empty(x.shape)


# RMSNorm


@op(
    "rmsnorm_backward(Tensor d_y, Tensor x, Tensor weight, Tensor rstd, bool weighs) -> (Tensor, Tensor)",
    lambda d_y, x, weight, rstd, weighs: (_like(x), weight.new_empty(weight.shape if weighs else 0)),
)
def rmsnorm_backward(
    d_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, weighs: bool
) -> Pair:
    """d_x like x, d_weight (C,) or (0,) <- d_y like x, x (...,C), weight (C,), rstd (...)."""
    d_x, d_weight = _like(x), weight.new_empty(weight.shape if weighs else 0)
    wanted = d_weight if weighs else None
    run("rmsnorm_backward", (d_x, wanted), (ready(d_y), None, ready(x), ready(weight), rstd))
    return d_x, d_weight


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.weighs = weight.requires_grad


def _norm_backward(ctx: Any, d_y: torch.Tensor, _: Any) -> tuple[Any, ...]:
    d_x, d_weight = rmsnorm_backward(d_y, *ctx.saved_tensors, ctx.weighs)
    return d_x, d_weight if ctx.weighs else None, None


@op(
    "rmsnorm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, weight, eps: (_like(x), _statistics(x)),
    _keep_norm,
    _norm_backward,
)
def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    """y like x, rstd (...) <- x (...,C), weight (C,)."""
    y, rstd = _like(x), _statistics(x)
    run("rmsnorm_forward", (y, rstd), (ready(x), ready(weight)), eps=eps)
    return y, rstd


# rotary embedding


@op(
    "rope_backward(Tensor d_q, Tensor d_k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    lambda d_q, d_k, cos, sin: (_like(d_q), _like(d_k)),
)
def rope_backward(d_q: torch.Tensor, d_k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """The turn of `rope` backwards."""
    return _turned("rope_heads_backward", d_q, d_k, cos, sin)


def _keep_angles(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    ctx.save_for_backward(*inputs[2:])


def _rope_backward(ctx: Any, d_q: torch.Tensor, d_k: torch.Tensor) -> tuple[Any, ...]:
    return (*rope_backward(d_q, d_k, *ctx.saved_tensors), None, None)


@op(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    lambda q, k, cos, sin: (_like(q), _like(k)),
    _keep_angles,
    _rope_backward,
)
def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """q', k' like q (B,T,Hq,Hd) and k (B,T,Hkv,Hd), contiguous <- q, k, cos and sin (B or 1,T,Hd) of equal halves."""
    return _turned("rope_heads_forward", q, k, cos, sin)


def _turned(name: str, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    out = _like(q), _like(k)
    run(name, out, (_heads(q), _heads(k), ready(cos), ready(sin)))
    return out


def _heads(x: torch.Tensor) -> torch.Tensor:
    """Heads in whatever order they lie, each in one piece."""
    return x if x.stride(-1) == 1 and not x.data_ptr() % ALIGNMENT else ready(x)


# SwiGLU


@op(
    "swiglu_backward(Tensor d_act, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    lambda d_act, gate, up: (_like(gate), _like(up)),
)
def swiglu_backward(d_act: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Pair:
    """d_gate, d_up <- d_act, gate, up, all of one shape."""
    d_gate, d_up = _like(gate), _like(up)
    run("swiglu_apart_backward", (d_gate, d_up), (ready(d_act), ready(gate), ready(up)))
    return d_gate, d_up


@op(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    lambda gate, up: _like(gate),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lambda ctx, d_act: swiglu_backward(d_act, *ctx.saved_tensors),
)
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, all of one shape (...,F)."""
    act = _like(gate)
    run("swiglu_apart_forward", (act,), (ready(gate), ready(up)))
    return act
