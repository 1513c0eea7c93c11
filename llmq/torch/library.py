"""Where torch finds llmq's ops: `torch.ops.llmq.*`, with fake kernels and gradients.

An op is a function of tensors on the CPU and on CUDA. What is called eagerly goes around torch's dispatcher: of an op
of two tensors that does nothing, forward and backward take 40 us in place of 80, and 180 as a `custom_op` (PyTorch
2.13, one core). A layer has four of them, and small models wait for the host.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from llmq.errors import UsageError

LIBRARY = torch.library.Library("llmq", "DEF")
PLAIN = (torch.Tensor, torch.nn.Parameter)
Function = Callable[..., Any]


def op(schema: str, fake: Function, setup: Function | None = None, backward: Function | None = None) -> Any:
    """Makes the decorated function the op of this schema, whose first argument is a tensor, and calls it.

    `fake` makes empty results of the right shapes, `setup(ctx, inputs, output)` keeps what `backward(ctx, *gradients)`
    needs.
    """
    name = schema.partition("(")[0]

    def defined(run: Function) -> Any:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, run, device)
        torch.library.register_fake(f"llmq::{name}", fake, lib=LIBRARY)
        direct = run
        if backward is not None and setup is not None:
            torch.library.register_autograd(f"llmq::{name}", backward, setup_context=setup, lib=LIBRARY)
            direct = _differentiated(name, run, setup, backward)
        through_torch = getattr(torch.ops.llmq, name).default

        @wraps(run)
        def call(first: torch.Tensor, *others: Any) -> Any:
            return (direct if _is_eager(first) else through_torch)(first, *others)

        return call

    return defined


def _differentiated(name: str, run: Function, setup: Function, backward: Function) -> Function:
    """The function with its gradient, for torch's own tensors."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        setup(ctx, inputs, output)  # here, as torch would look up the signature at each call
        return output

    def backward_once(ctx: Any, *gradients: Any) -> Any:
        if (
            torch.is_grad_enabled()
        ):  # the ops that it calls are not recorded: torch would take their results as constant
            raise UsageError(f"llmq's {name} has no second gradient (create_graph=True): call unpatch_model first")
        return backward(ctx, *gradients)

    ways = {"forward": staticmethod(forward), "backward": staticmethod(backward_once)}
    found: Function = type(name, (torch.autograd.Function,), ways).apply  # type: ignore[attr-defined]
    return found


def _is_eager(x: torch.Tensor) -> bool:
    """Whether a call computes now, on memory, and nothing looks on: no tracing, no mode, no subclass."""
    if torch.compiler.is_compiling():
        return False
    return type(x) in PLAIN and not torch._C._len_torch_dispatch_stack()
