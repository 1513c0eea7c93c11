"""Focal loss (Lin et al., 2017): -(1 - p)^gamma log p of the target, so that tokens which are sure count for less."""

from typing import Any


def focal(xp: Any, logits: Any, targets: Any, gamma: float = 2.0) -> tuple[Any, Any]:
    """Losses (M,) and d_logits (M,V) <- logits (M,V) f32, targets (M,) int32; `xp` is NumPy or CuPy."""
    rows = xp.arange(len(targets))
    columns = xp.where(targets < 0, 0, targets)  # llmq leaves out the rows of targets that are -100
    p = xp.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    own = xp.maximum(p[rows, columns], 1e-30)
    rest, log = xp.maximum(1 - own, 1e-7), xp.log(own)
    # d loss / d log p, and from that softmax's own gradient, onehot - p.
    slope = gamma * own * rest ** (gamma - 1) * log - rest**gamma if gamma else -xp.ones_like(own)
    d_logits = -slope[:, None] * p
    d_logits[rows, columns] += slope
    return -(rest**gamma) * log, d_logits
