"""What generation has in place of training's cores and head: attention with a cache, and a head that takes a token."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmq.blocks.attention import DenseCore, Heads
from llmq.blocks.head import Chunk, Head, LogitsReader
from llmq.blocks.stream import RmsNorm
from llmq.protocols import Ops, Site, Slots
from llmq.tensor import Slot


@dataclass(frozen=True)
class Sampling:
    """How the next token is taken from the logits: see the ops `sample` and `penalize`; `logprobs`: with its log p."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: bool = False

    @property
    def numbers(self) -> dict[str, Any]:
        """As the keyword numbers of the op `sample`."""
        kept = ("temperature", "top_k", "top_p", "min_p", "seed")
        return {name: getattr(self, name) for name in kept}


class PromptCore:
    """Attention of prompts by another core, and their keys and values left in the cache of the layer."""

    def __init__(self, core: DenseCore, layer: int) -> None:
        self.core, self.layer = core, layer

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Results for b rows of t tokens."""
        return self.core.slots(b, t)

    def forward(self, ops: Ops, a: Slots) -> None:
        """a.att, a.cache of the layer <- a.rot, a.batch.positions, a.batch.sequences."""
        cache, batch = a.cache[self.layer], a.batch
        ops.cache_write(cache, a.rot, batch.positions, batch.sequences, **self.core.heads.numbers)
        self.core.forward(ops, a)

    def backward(self, ops: Ops, a: Slots, d: Slots) -> None:
        """There is none."""
        raise NotImplementedError("generation has no backward pass")


class CachedCore:
    """Attention of one new token per sequence to the cache of the layer, with its own key and value put there.

    `given` names the slot of q, k and v before the rotary embedding, and `table` the constant of that.
    """

    def __init__(self, heads: Heads, window: int | None, layer: int, given: str, table: str) -> None:
        self.heads, self.layer, self.given, self.table = heads, layer, given, table
        self.numbers: dict[str, Any] = {**heads.numbers, "window": window, **heads.scores}

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Results for b sequences of t = 1 tokens."""
        return (Slot("att", (b, t, self.heads.num_heads * self.heads.head_dim)),)

    def forward(self, ops: Ops, a: Slots) -> None:
        """a.att (B,1,Hq*Hd), a.cache of the layer <- q, k and v, a.cache, a.batch.positions."""
        cache, read = a.cache[self.layer], (a.const[self.table], a.batch.positions)
        ops.attention_cached(a.att, cache, a[self.given], cache, *read, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots) -> None:
        """There is none."""
        raise NotImplementedError("generation has no backward pass")


class Sampler(LogitsReader):
    """The next token of each sequence, and its position, in place of the last."""

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self.numbers: dict[str, Any] = {"vocab_size": vocab_size, **sampling.numbers}

    def forward(self, ops: Ops, at: Chunk) -> None:
        """The batch's tokens and positions <- at.a.logits and they themselves."""
        batch = at.a.batch
        ops.sample(batch.tokens, batch.positions, at.a.logits, batch.positions, batch.samples, **self.numbers)


class Penalized(LogitsReader):
    """Another sampler, from logits that are lower for tokens that a sequence has."""

    def __init__(self, sampler: LogitsReader, penalty: float) -> None:
        self.sampler, self.penalty = sampler, penalty

    def slots(self, logits: Slot) -> tuple[Slot, ...]:
        """penalized (B,1,Vp)."""
        return (*self.sampler.slots(logits), Slot("penalized", logits.shape, (), "stat"))

    def forward(self, ops: Ops, at: Chunk) -> None:
        """The batch's seen, and what the sampler writes, <- at.a.logits and the batch."""
        batch = at.a.batch
        ops.penalize(at.a.penalized, batch.seen, at.a.logits, batch.seen, batch.tokens, penalty=self.penalty)
        self.sampler.forward(ops, replace(at, a=at.a.renamed({"logits": "penalized"})))


class Scored(LogitsReader):
    """Another sampler, and -log p of the token that it takes: by the logits themselves, without penalty or cuts."""

    def __init__(self, sampler: LogitsReader, vocab_size: int) -> None:
        self.sampler, self.vocab_size = sampler, vocab_size

    def slots(self, logits: Slot) -> tuple[Slot, ...]:
        """Those of the sampler."""
        return self.sampler.slots(logits)

    def forward(self, ops: Ops, at: Chunk) -> None:
        """a.batch.loss (B,), and what the sampler writes, <- at.a.logits and the batch."""
        self.sampler.forward(ops, at)
        batch, rows = at.a.batch, (0, at.count)
        d_logits, logits = at.d.logits.chunk(*rows), at.a.logits.chunk(*rows)  # a gradient that is never made
        ops.cross_entropy(
            d_logits, batch.loss, None, logits, batch.tokens.flat(*rows), vocab_size=self.vocab_size, z_loss=0.0
        )


class TokenHead(Head):
    """The head of one token of each sequence: logits (B,1,Vp) in one chunk, which is the batch."""

    def __init__(self, hidden_size: int, padded_vocab: int, norm: RmsNorm, site: Site, reader: LogitsReader) -> None:
        super().__init__(hidden_size, padded_vocab, norm, 1, site, reader)
        self.ends = ("",)

    def logits(self, b: int, t: int) -> Slot:
        """Those of the batch."""
        return Slot("logits", (b, t, self.vp))

    def chunks(self, a: Slots, d: Slots) -> Iterator[Chunk]:
        """The whole frames."""
        yield Chunk(a, d, 0, a.loss.shape[0])
