"""Activations and their gradients: frames of slots by layer, and the constants and cells that every program shares."""

from __future__ import annotations

from typing import Any

from llmq.model import Model
from llmq.tensor import Ref, Slot


class Frame:
    """Slots by attribute or index: `a.x`; `a.batch`, `a.const` and `a.total` are shared by the whole program."""

    def __init__(self, refs: dict[str, Any]) -> None:
        self._refs = refs

    def __getattr__(self, name: str) -> Any:
        try:
            return self._refs[name]
        except KeyError:
            raise AttributeError(f"no slot {name!r}; there are {sorted(self._refs)}") from None

    def __getitem__(self, key: Any) -> Any:
        return self._refs[key]


class Frames:
    """The frames of one micro-step: `a[layer].mlp.x`, `a.embed`, `a.head`, and the same for gradients with `d`.

    Residual slots join neighbours: a sublayer's `out` is the next one's `res`, and only the stream entering a layer
    is kept whatever is recomputed.
    """

    def __init__(
        self, model: Model, shared: dict[str, Frame], b: int, t: int, hidden: int, act: str, stat: str, micro_step: int = 0
    ) -> None:
        self._dtypes = {"act": act, "stat": stat, "int32": "int32"}
        self._shared, self._micro_step = shared, micro_step
        res = Slot("res", (b, t, hidden))
        self.a, self.d = {}, {}
        count = len(model.blocks)
        entering = [(layer, "attention.res", ()) for layer in range(count)] + [(None, "head.res", ())]
        for prefix, frames in (("", self.a), ("d.", self.d)):
            stream = [self._ref(prefix, layer, name, res, roles) for layer, name, roles in entering]
            frames["embed"] = self._frame({"out": stream[0]})
            for layer, block in enumerate(model.blocks):
                middle = self._ref(prefix, layer, "mlp.res", res, ("block",))
                sublayers = {
                    "attention": (block.attention, stream[layer], middle),
                    "mlp": (block.mlp, middle, stream[layer + 1]),
                }
                frames[layer] = Frame(
                    {
                        name: self._frame({**self._refs(prefix, layer, name, sub.slots(b, t)), "res": before, "out": after})
                        for name, (sub, before, after) in sublayers.items()
                    }
                )
            head = self._refs(prefix, None, "head", model.head.slots(b, t))
            frames["head"] = self._frame({**head, "res": stream[count]})

    def _refs(self, prefix: str, layer: int | None, sublayer: str, slots: tuple[Slot, ...]) -> dict[str, Ref]:
        return {slot.name: self._ref(prefix, layer, f"{sublayer}.{slot.name}", slot, slot.roles) for slot in slots}

    def _ref(self, prefix: str, layer: int | None, name: str, slot: Slot, roles: tuple[str, ...]) -> Ref:
        place = "" if layer is None else f"{layer}."
        full = f"{self._micro_step}/{place}{prefix}{name}"
        return Ref(full, "activation", slot.shape, self._dtypes[slot.dtype], layer, roles)

    def _frame(self, refs: dict[str, Any]) -> Frame:
        return Frame({**self._shared, **refs})
