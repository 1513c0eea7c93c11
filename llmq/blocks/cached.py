"""What generation has in place of training's cores and head: attention with a cache, and a head that takes a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmq.blocks.attention import DenseCore, Heads
from llmq.op_protocol import Ops
from llmq.protocols import Parameters, Site, Slots
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


class Unturned:
    """No rotary embedding of its own: the cached core turns queries and keys."""

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """No intermediates."""
        return ()

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """Nothing."""


class NormedUnturned:
    """rmsnorm per head of q and k (Qwen3), as `NormedRotary` without the rotary embedding."""

    def __init__(self, heads: Heads, eps: float) -> None:
        self.heads, self.eps = heads, eps

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for b sequences of t tokens."""
        h = self.heads
        rstd = Slot("qk_rstd", (b, t, h.num_heads + h.num_kv_heads), (), "stat")
        return (Slot("normed", (b, t, h.packed)), rstd)

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.normed <- a.qkv."""
        ops.qk_norm_forward(a.normed, a.qk_rstd, a.qkv, w.q_norm, w.k_norm, eps=self.eps, **self.heads.numbers)


class CachedCore:
    """Attention of one new token per sequence to the cache of the layer, with its own key and value put there.

    `given` names the slot of q, k and v before the rotary embedding.
    """

    def __init__(self, heads: Heads, window: int | None, layer: int, given: str) -> None:
        self.heads, self.layer, self.given = heads, layer, given
        self.numbers: dict[str, Any] = {**heads.numbers, "window": window, "softmax_scale": heads.head_dim**-0.5}

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Results for b sequences of t = 1 tokens."""
        return (Slot("att", (b, t, self.heads.num_heads * self.heads.head_dim)),)

    def forward(self, ops: Ops, a: Slots) -> None:
        """a.att (B,1,Hq*Hd), a.cache of the layer <- q, k and v, a.cache, a.batch.positions."""
        cache, read = a.cache[self.layer], (a.const.rope, a.batch.positions)
        ops.attention_cached(a.att, cache, a[self.given], cache, *read, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots) -> None:
        """There is none."""
        raise NotImplementedError("generation has no backward pass")


class Sampler:
    """The next token of each sequence, and its position, in place of the last."""

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self.numbers: dict[str, Any] = {"vocab_size": vocab_size, **sampling.numbers}

    def slots(self, logits: Slot) -> tuple[Slot, ...]:
        """No intermediates."""
        return ()

    def forward(self, ops: Ops, a: Slots) -> None:
        """a.batch.tokens, a.batch.positions <- a.logits and they themselves."""
        batch = a.batch
        ops.sample(batch.tokens, batch.positions, a.logits, batch.positions, batch.samples, **self.numbers)


class PenalizedSampler(Sampler):
    """The same from logits that are lower for tokens that a sequence has."""

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        super().__init__(vocab_size, sampling)
        self.penalty = sampling.repetition_penalty

    def slots(self, logits: Slot) -> tuple[Slot, ...]:
        """penalized (B,1,Vp)."""
        return (Slot("penalized", logits.shape, (), "stat"),)

    def forward(self, ops: Ops, a: Slots) -> None:
        """a.batch.tokens, a.batch.positions, a.batch.seen <- a.logits and they themselves."""
        batch = a.batch
        ops.penalize(a.penalized, batch.seen, a.logits, batch.seen, batch.tokens, penalty=self.penalty)
        ops.sample(batch.tokens, batch.positions, a.penalized, batch.positions, batch.samples, **self.numbers)


class ScoredSampler:
    """Another sampler, and -log p of the token that it takes: by the logits themselves, without penalty or cuts."""

    def __init__(self, sampler: Sampler, padded_vocab: int) -> None:
        self.sampler, self.vp = sampler, padded_vocab
        self.numbers: dict[str, Any] = {"vocab_size": sampler.numbers["vocab_size"], "z_loss": 0.0}

    def slots(self, logits: Slot) -> tuple[Slot, ...]:
        """d_logits (B,Vp), which nothing reads: it is never made."""
        return (*self.sampler.slots(logits), Slot("d_logits", (logits.shape[0], self.vp)))

    def forward(self, ops: Ops, a: Slots) -> None:
        """a.batch.loss (B,), and what the sampler writes, <- a.logits and a.batch."""
        self.sampler.forward(ops, a)
        batch, (count,) = a.batch, a.batch.loss.shape
        ops.cross_entropy(a.d_logits, batch.loss, a.logits.chunk(0, count), batch.tokens.flat(0, count), **self.numbers)


class TokenHead:
    """The next token from W rmsnorm(res). res, x (B,1,C); logits (B,1,Vp)."""

    def __init__(
        self, hidden_size: int, padded_vocab: int, eps: float, site: Site, sampler: Sampler | ScoredSampler
    ) -> None:
        self.c, self.vp, self.eps, self.site, self.sampler = hidden_size, padded_vocab, eps, site, sampler

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens."""
        x, logits = Slot("x", (b, t, self.c)), Slot("logits", (b, t, self.vp))
        return (x, Slot("rstd", (b, t), (), "stat"), logits, *self.site.slots(x), *self.sampler.slots(logits))

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.batch <- a.res."""
        ops.rmsnorm_forward(a.x, a.rstd, a.res, w.norm, eps=self.eps)
        self.site.forward(ops, a, a.logits, a.x, w)
        self.sampler.forward(ops, a)
