"""The head: final norm, logits in chunks of tokens, so that a micro-batch's never exist at once, and what reads them.

A reader is a loss, which makes the gradient in the same pass, or in generation a sampler (llmq/blocks/cached.py). What
changes logits before any of these is a reader around it, with slots of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmq.blocks.stream import RmsNorm
from llmq.protocols import Ops, Parameters, Site, Slots
from llmq.tensor import Ref, Slot


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + count) of a batch: frames in which x, logits and the site's own slots are theirs."""

    a: Slots
    d: Slots
    start: int
    count: int

    def of(self, ref: Ref) -> Ref:
        """Their numbers of a tensor (B,T)."""
        return ref.flat(self.start, self.count)


class LogitsReader:
    """What is made of logits. `counts` are the numbers of tokens that it sums, beside the losses, by name."""

    counts: tuple[str, ...] = ("tokens",)

    def slots(self, logits: Slot) -> tuple[Slot, ...]:
        """Intermediates of a chunk with these logits: none."""
        return ()

    def forward(self, ops: Ops, at: Chunk) -> None:
        """What it leaves of a chunk, and at.d.logits, <- at.a.logits."""
        raise NotImplementedError

    def total(self, ops: Ops, a: Slots) -> None:
        """What it leaves of the batch: nothing more."""


class CrossEntropy(LogitsReader):
    """The loss -log p of targets, and `z_loss` times the squared log-partition: a.loss, a.hits (B,T) per token."""

    counts = ("tokens", "hits")

    def __init__(self, vocab_size: int, z_loss: float) -> None:
        self.numbers: dict[str, Any] = {"vocab_size": vocab_size, "z_loss": z_loss}

    def forward(self, ops: Ops, at: Chunk) -> None:
        """at.d.logits, the tokens' losses and hits <- at.a.logits, targets."""
        of_tokens = (at.of(at.a.loss), at.of(at.a.hits))
        ops.cross_entropy(at.d.logits, *of_tokens, at.a.logits, at.of(at.a.batch.targets), **self.numbers)

    def total(self, ops: Ops, a: Slots) -> None:
        """The sums of losses, trained tokens and hits."""
        ops.loss_sum(a.total.loss, a.total.tokens, a.total.hits, a.loss, a.batch.targets, a.hits)


class Head:
    """What `reader` makes of the logits W rmsnorm(res), chunk by chunk.

    res, x (B,T,C); loss, hits (B,T) of each token; logits of a chunk (B*T/num_chunks, Vp).
    """

    def __init__(
        self, hidden_size: int, padded_vocab: int, norm: RmsNorm, num_chunks: int, site: Site, reader: LogitsReader
    ) -> None:
        self.c, self.vp, self.norm, self.num_chunks = hidden_size, padded_vocab, norm, num_chunks
        self.site, self.reader = site, reader
        self.ends = tuple(f"#{i}" for i in range(num_chunks))  # of the names of each chunk's slots

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens."""
        x = Slot("x", (b, t, self.c))
        of_tokens = (Slot("loss", (b, t), (), "stat"), Slot("hits", (b, t), (), "int32"))
        of_batch = (x, *self.norm.stats(b, t, ()), *of_tokens, *self.site.slots(x))
        logits = self.logits(b, t)
        of_chunk = (logits, *self.reader.slots(logits))
        return (*of_batch, *(replace(slot, name=f"{slot.name}{end}") for end in self.ends for slot in of_chunk))

    def logits(self, b: int, t: int) -> Slot:
        """Those of a chunk."""
        return Slot("logits", (b * t // self.num_chunks, self.vp))

    def forward(self, ops: Ops, a: Slots, d: Slots, w: Parameters) -> None:
        """What the reader leaves <- a.res."""
        self.norm.forward(ops, a, w)
        for at in self.chunks(a, d):
            self.read(ops, at, w)
        self.reader.total(ops, a)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.res, dw, and what the reader leaves, <- a.res."""
        self.norm.forward(ops, a, w)
        for at in self.chunks(a, d):
            self.read(ops, at, w)
            self.site.backward(ops, at.a, at.d, at.d.x, dw, at.d.logits, at.a.x, w)
        self.reader.total(ops, a)
        self.norm.backward(ops, a, d, w, dw, None)

    def read(self, ops: Ops, at: Chunk, w: Parameters) -> None:
        """What the reader leaves of a chunk <- at.a.x."""
        self.site.forward(ops, at.a, at.a.logits, at.a.x, w)
        self.reader.forward(ops, at)

    def chunks(self, a: Slots, d: Slots) -> Iterator[Chunk]:
        """All of them, in order."""
        b, t = a.loss.shape
        of_tokens = ["x", *(slot.name for slot in self.site.slots(Slot("x", (b, t, self.c))) if not slot.of_weights)]
        logits, count = self.logits(b, t), b * t // self.num_chunks
        names = [logits.name, *(slot.name for slot in self.reader.slots(logits))]
        for i, end in enumerate(self.ends):
            own, start = {name: f"{name}{end}" for name in names}, i * count
            at, d_at = (frame.chunk(of_tokens, start, count).renamed(own) for frame in (a, d))
            yield Chunk(at, d_at, start, count)
