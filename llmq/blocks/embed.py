"""Token embedding."""

from typing import Any

from llmq.protocols import Ops, Parameters, Slots
from llmq.tensor import Slot


class Embed:
    """res = weight[tokens]."""

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """No intermediates."""
        return ()

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.out (B,T,C) <- a.batch.tokens (B,T)."""
        ops.embedding_forward(a.out, a.batch.tokens, w.weight)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """dw.weight (Vp,C) <- d.out (B,T,C)."""
        ops.embedding_backward(dw.weight, d.out, a.batch.tokens)


class NoisyEmbed(Embed):
    """What `base` makes of the tokens + noise, for training (NEFTune); the gradient passes the noise unchanged."""

    def __init__(self, base: Embed, hidden_size: int, alpha: float, seed: int, stream: int) -> None:
        self.base, self.backward, self.hidden_size = base, base.backward, hidden_size  # type: ignore[method-assign]
        self.numbers: dict[str, Any] = {"alpha": alpha, "seed": seed, "stream": stream}

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """clean (B,T,C), beside the slots of the base."""
        return (*self.base.slots(b, t), Slot("clean", (b, t, self.hidden_size)))

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.out (B,T,C) <- a.batch.tokens (B,T), a.batch.samples (B,)."""
        self.base.forward(ops, a.renamed({"out": "clean"}), w)
        ops.embedding_noise(a.out, a.clean, a.batch.samples, **self.numbers)
