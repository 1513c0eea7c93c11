"""The head: final norm, logits and loss in chunks of tokens, so that a micro-batch's logits never exist at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmq.op_protocol import Ops
from llmq.protocols import Parameters, Site, Slots
from llmq.tensor import Ref, Slot


class Totals:
    """One loss and number of trained tokens for all rows of a batch."""

    def of(self, a: Slots) -> Iterator[tuple[Ref, Ref, Ref, Ref]]:
        """The sums of losses and tokens, and the losses and targets that they are of."""
        yield a.total.loss, a.total.tokens, a.loss, a.batch.targets


class TotalsOfRows(Totals):
    """Those of each of several adapters, by its name and its rows [start, stop) of the batch."""

    def __init__(self, rows: Mapping[str, tuple[int, int]]) -> None:
        self.rows = dict(rows)

    def of(self, a: Slots) -> Iterator[tuple[Ref, Ref, Ref, Ref]]:
        """The same for each of them."""
        length = a.loss.shape[-1]
        for name, (start, stop) in self.rows.items():
            total, at = a.total[name], (start * length, (stop - start) * length)
            yield total.loss, total.tokens, a.loss.flat(*at), a.batch.targets.flat(*at)


class Head:
    """loss = cross entropy(W rmsnorm(res)), with its gradient made in the same pass over each chunk.

    res, x (B,T,C); loss (B,T) per token; logits of chunk i (B*T/chunks, Vp).
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        padded_vocab: int,
        eps: float,
        chunks: int,
        z_loss: float,
        site: Site,
        totals: Totals,
    ) -> None:
        self.c, self.vp, self.eps, self.chunks, self.site = hidden_size, padded_vocab, eps, chunks, site
        self.totals = totals
        self.numbers: dict[str, Any] = {"vocab_size": vocab_size, "z_loss": z_loss}

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens."""
        logits = (b * t // self.chunks, self.vp)
        return (
            self._x(b, t),
            Slot("rstd", (b, t), (), "stat"),
            Slot("loss", (b, t), (), "stat"),
            *(Slot(f"logits#{i}", logits) for i in range(self.chunks)),
            *self.site.slots(self._x(b, t)),
        )

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.res, dw and the step's loss and token count <- a.res, a.batch.targets."""
        ops.rmsnorm_forward(a.x, a.rstd, a.res, w.norm, eps=self.eps)
        for i, start, count in self._chunks(a):
            logits, d_logits, x = a[f"logits#{i}"], d[f"logits#{i}"], a.x.chunk(start, count)
            targets = a.batch.targets.flat(start, count)
            at, d_at = (self._cut(frame, start, count) for frame in (a, d))
            self.site.forward(ops, at, logits, x, w)
            ops.cross_entropy(d_logits, a.loss.flat(start, count), logits, targets, **self.numbers)
            self.site.backward(ops, at, d_at, d.x.chunk(start, count), dw, d_logits, x, w)
        for loss, tokens, losses, targets in self.totals.of(a):
            ops.loss_sum(loss, tokens, losses, targets)
        ops.rmsnorm_backward(d.res, dw.norm, d.x, None, a.res, w.norm, a.rstd)

    def evaluate(self, ops: Ops, a: Slots, w: Parameters, d: Slots) -> None:
        """The batch's loss and token count <- a.res, a.batch.targets; no gradient."""
        ops.rmsnorm_forward(a.x, a.rstd, a.res, w.norm, eps=self.eps)
        for i, start, count in self._chunks(a):
            logits, targets = a[f"logits#{i}"], a.batch.targets.flat(start, count)
            self.site.forward(ops, self._cut(a, start, count), logits, a.x.chunk(start, count), w)
            loss = a.loss.flat(start, count)  # of the data alone, whatever training adds to it
            ops.cross_entropy(d[f"logits#{i}"], loss, logits, targets, **{**self.numbers, "z_loss": 0.0})
        for loss, tokens, losses, targets in self.totals.of(a):
            ops.loss_sum(loss, tokens, losses, targets)

    def _x(self, b: int, t: int) -> Slot:
        return Slot("x", (b, t, self.c))

    def _cut(self, a: Slots, start: int, count: int) -> Slots:
        """The frame for `count` rows of the site's input, which cut its own slots of tokens too."""
        own = self.site.slots(self._x(*a.loss.shape))
        return a.chunk([slot.name for slot in own if not slot.of_weights], start, count)

    def _chunks(self, a: Slots) -> list[tuple[int, int, int]]:
        count = a.loss.shape[0] * a.loss.shape[1] // self.chunks
        return [(i, i * count, count) for i in range(self.chunks)]
