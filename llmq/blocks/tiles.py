"""A feed-forward sublayer in tiles of tokens, for what a micro-batch's intermediates take."""

from dataclasses import replace

from llmq.protocols import PiecedSublayer, Slots
from llmq.tensor import Slot


class Tiled:
    """The sublayer `base`, of which no token sees another, in tiles of tokens: each has slots of its own, is made again
    on its own, and goes back before the next one is made. Gradients of weights are sums over tiles."""

    def __init__(self, base: PiecedSublayer, tiles: int) -> None:
        self.base, self.tiles, self.sites = base, tiles, base.sites
        self.forward, self.backward = base.forward, base.backward  # of a tile's frames

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates of every tile, of b * t / tiles tokens."""
        of_one = self.base.slots(1, b * t // self.tiles)
        shapes = {slot.name: slot.shape if slot.of_weights else slot.shape[1:] for slot in of_one}
        return tuple(
            replace(slot, name=f"{slot.name}#{i}", shape=shapes[slot.name])
            for i in range(self.tiles)
            for slot in of_one
        )

    def pieces(self, a: Slots) -> list[Slots]:
        """A frame for each tile, in order."""
        rows = a.res.shape[0] * a.res.shape[1] // self.tiles
        names = [slot.name for slot in self.base.slots(1, rows)]
        cuts = (a.chunk(("res", "out", "attention_x"), i * rows, rows) for i in range(self.tiles))
        return [cut.renamed({name: f"{name}#{i}" for name in names}) for i, cut in enumerate(cuts)]
