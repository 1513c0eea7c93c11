"""The head with its loss, in chunks of tokens: logits exist for a chunk, and make the gradients in the same pass."""

from typing import Any

import torch

from llmq.tensor import IGNORED
from llmq.torch.kernels import product_dtype, ready, run
from llmq.torch.library import op

CHUNK_BYTES = 160 * 2**20  # of logits: 512 tokens of 152k words in bf16
OF_WEIGHT = 3  # or this part of the weight's bytes: each chunk reads and writes the gradient, which is as large
WHOLE = 8  # what kernels read of a row's words at a time
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def chunk_tokens(words: int, width: int, itemsize: int) -> int:
    """Tokens whose logits are made at a time, of a head with a weight (words, width): a power of two."""
    return 1 << max(4, max(CHUNK_BYTES // (words * itemsize), width // OF_WEIGHT).bit_length() - 1)


def _fake(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, of_x: bool, of_weight: bool) -> Three:
    loss = x.new_empty((), dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)
    return loss, x.new_empty(x.shape if of_x else 0), x.new_empty(weight.shape if of_weight else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # of these two: zeros as large as the weight
    ctx.wanted = inputs[3:]


def _backward(ctx: Any, d_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    # In place: a second gradient of the weight would be the largest tensor of the step. The gradients are this node's
    # own, and of a graph that is kept (`retain_graph`) torch refuses a second pass, as they have changed.
    # A graph that is traced decides by itself what it overwrites.
    scale = torch.Tensor.mul_ if type(d_loss) is torch.Tensor else torch.mul
    found = (
        scale(gradient, d_loss) if wanted else None
        for gradient, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return (*found, None, None, None)


@op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, bool of_x, bool of_weight)"
    " -> (Tensor, Tensor, Tensor)",
    _fake,
    _keep,
    _backward,
)
def _linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, of_x: bool, of_weight: bool
) -> Three:
    """Sum of losses (), d_x (M,C), d_weight (V,C) <- x (M,C), weight (V,C), targets (M,) int32, -100: not trained."""
    loss, d_x, d_weight = _fake(x, weight, targets, of_x, of_weight)
    (count, width), words = x.shape, weight.shape[0]
    losses = x.new_empty(count, dtype=loss.dtype)
    step = chunk_tokens(words, width, x.element_size())
    room = x.new_empty((min(step, count), -(-words // WHOLE) * WHOLE))
    for start in range(0, count, step):
        rows, ids = x[start : start + step], targets[start : start + step]
        padded = room[: rows.shape[0]]
        logits = torch.mm(rows, weight.T, out=padded[:, :words])
        # The gradient takes the place of the logits.
        d_logits = padded if of_x or of_weight else None
        numbers = {"vocab_size": words, "z_loss": 0.0}
        run("cross_entropy", (d_logits, losses[start : start + step], None), (padded, ready(ids)), **numbers)
        if of_x:
            torch.mm(logits, weight, out=d_x[start : start + step])
        if of_weight and start:
            d_weight.addmm_(logits.T, rows)
        elif of_weight:
            torch.mm(logits.T, rows, out=d_weight)
    torch.sum(losses, 0, out=loss)
    return loss, d_x, d_weight


def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the losses of targets (M,), -100 where not trained, in f32 <- x (M,C), weight (V,C)."""
    dtype = product_dtype(x)
    x, weight = x.to(dtype), weight.to(dtype)
    train = torch.is_grad_enabled()
    of_x, of_weight = train and x.requires_grad, train and weight.requires_grad
    loss: torch.Tensor = _linear_cross_entropy(x, weight, targets, of_x, of_weight)[0]
    return loss


def causal_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """What transformers' ForCausalLMLoss computes, of x (B,T,C), the input of the head with weight (V,C).

    Where no label is trained the loss is NaN, and gradients are 0. RuntimeError for labels that are no words.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shift_labels.reshape(-1).to(x.device, torch.int32)
    words, trained = weight.shape[0], targets != IGNORED
    is_word = ~trained | ((targets >= 0) & (targets < words))
    torch._assert_async(is_word.all(), f"labels are {IGNORED} (not trained) or from 0 to {words - 1}")
    total = linear_cross_entropy(x.reshape(-1, x.shape[-1]), weight, targets)
    if num_items_in_batch is None:
        items = trained.sum()
    elif isinstance(num_items_in_batch, torch.Tensor):
        items = num_items_in_batch.to(x.device)
    else:
        items = torch.full((), num_items_in_batch, device=x.device)
    is_none = items == 0
    return torch.where(is_none, torch.nan, total / (items + is_none))
