"""Token embedding."""

from __future__ import annotations

from typing import Any


class Embed:
    """res = weight[tokens]."""

    def forward(self, ops: Any, a: Any, w: Any) -> None:
        """a.out (B,T,C) <- a.batch.tokens (B,T)."""
        ops.embedding_forward(a.out, a.batch.tokens, w.weight)

    def backward(self, ops: Any, a: Any, d: Any, w: Any, dw: Any) -> None:
        """dw.weight (Vp,C) <- d.out (B,T,C)."""
        ops.embedding_backward(dw.weight, d.out, a.batch.tokens)
