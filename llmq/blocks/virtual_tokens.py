"""Trained vectors in place of what the model makes of the first positions of each document."""

from dataclasses import replace

from llmq.blocks.attention import Rotary
from llmq.blocks.embed import Embed
from llmq.protocols import Ops, Parameters, Slots
from llmq.tensor import Slot


class PromptedEmbed(Embed):
    """The same by `base`, and trained vectors in place of the first N tokens of each document: w.prompt (N,C).

    Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning", 2021.
    """

    def __init__(self, base: Embed, hidden_size: int, num_virtual: int) -> None:
        self.base, self.hidden_size = base, hidden_size
        self.numbers = {"num_virtual": num_virtual, "channels": hidden_size}

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """words (B,T,C), beside the slots of the base."""
        return (*self.base.slots(b, t), Slot("words", (b, t, self.hidden_size)))

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.out (B,T,C) <- a.batch.tokens (B,T), a.batch.positions (B,T)."""
        self.base.forward(ops, a.renamed({"out": "words"}), w)
        ops.virtual_tokens_forward(a.out, a.words, w.prompt, a.batch.positions, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """dw <- d.out (B,T,C)."""
        ops.virtual_tokens_backward(d.words, dw.prompt, d.out, a.batch.positions, **self.numbers)
        self.base.backward(ops, a, d.renamed({"out": "words"}), w, dw)


class PrefixedRotary(Rotary):
    """The same by `base`, and trained keys and values in place of those of the first N positions of each document (Li
    and Liang, "Prefix-Tuning", 2021): w.prefix (N,2*Hkv*Hd), as attention reads them.

    What the model computes at these positions is read by nothing else.
    """

    def __init__(self, base: Rotary, num_virtual: int) -> None:
        super().__init__(heads := base.heads, base.table)
        self.base = base
        self.numbers = {"num_virtual": num_virtual, "channels": 2 * heads.num_kv_heads * heads.head_dim}

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens: `turned` is what the base computes."""
        *others, rot = self.base.slots(b, t)
        return (*others, replace(rot, name="turned"), rot)

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.rot <- a.qkv."""
        self.base.forward(ops, a.renamed({"rot": "turned"}), w)
        ops.virtual_tokens_forward(a.rot, a.turned, w.prefix, a.batch.positions, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.qkv, dw <- d.rot."""
        ops.virtual_tokens_backward(d.turned, dw.prefix, d.rot, a.batch.positions, **self.numbers)
        self.base.backward(ops, a, d.renamed({"rot": "turned"}), w, dw)
