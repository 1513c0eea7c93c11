"""Trained rows for tokens that were added to a frozen model, in place of those that its embedding and head have."""

from collections.abc import Iterator
from dataclasses import dataclass

from llmq.blocks.embed import Embed
from llmq.protocols import Ops, Parameters, Slots
from llmq.row import Row
from llmq.sites.lora import cut
from llmq.tensor import Ref, Slot


class AddedEmbed(Embed):
    """res = weight[tokens], and w.added[token - start] (N,C) of the N tokens from `start` on."""

    def __init__(self, hidden_size: int, rows: range) -> None:
        self.hidden_size = hidden_size
        self.numbers = {"num_virtual": len(rows), "channels": hidden_size, "start": rows.start}

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """known (B,T,C): rows of the weight."""
        return (Slot("known", (b, t, self.hidden_size)),)

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.out (B,T,C) <- a.batch.tokens (B,T)."""
        super().forward(ops, a.renamed({"out": "known"}), w)
        ops.virtual_tokens_forward(a.out, a.known, w.added, a.batch.tokens, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """dw.added (N,C) <- d.out (B,T,C)."""
        ops.virtual_tokens_backward(d.known, dw.added, d.out, a.batch.tokens, **self.numbers)
        super().backward(ops, a, d.renamed({"out": "known"}), w, dw)


@dataclass(frozen=True)
class AddedOutputs:
    """Beside the head: the logits of added tokens, x w.added^T, whose rows in the weight are zero."""

    columns: tuple[int, int]  # first logit, and how many

    fills, covers = False, True

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """None."""
        return ()

    def rows(self, layer: int | None) -> Iterator[Row]:
        """None: a tied head has those of the embedding."""
        yield from ()

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None) -> None:
        """The tokens' columns of y (...,Vp) <- x (...,C), those of residual (...,Vp) or None."""
        ops.linear_forward(cut(y, self.columns), x, w.added, None, cut(residual, self.columns))

    def backward(
        self, ops: Ops, a: Slots, d: Slots, d_x: Ref, dw: Parameters, d_y: Ref, x: Ref, w: Parameters, plus: Ref | None
    ) -> None:
        """d_x (...,C), dw.added (N,C) <- d_y (...,Vp), x (...,C), plus (...,C) or None."""
        own = cut(d_y, self.columns)
        ops.linear_wgrad(dw.added, own, x)
        ops.linear_dgrad(d_x, own, w.added, plus)
