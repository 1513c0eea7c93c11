"""Activations and their gradients: frames of slots by layer, and the constants and cells that every program shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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

    def renamed(self, names: Mapping[str, str]) -> Frame:
        """The frame in which slots have these names, each given with the one that it has here."""
        return Frame({**self._refs, **{name: self._refs[own] for name, own in names.items()}})

    def chunk(self, names: Iterable[str], start: int, count: int) -> Frame:
        """The frame with rows [start, start + count) in place of the slots `names`."""
        return Frame({**self._refs, **{name: self._refs[name].chunk(start, count) for name in names}})


class Frames:
    """The frames of one micro-step: `a[layer].mlp.x`, `a.embed`, `a.head`, and the same for gradients with `d`.

    Residual slots join neighbours: a sublayer's `out` is the next one's `res`, and only the stream entering a layer
    is kept whatever is recomputed. The x of attention is `attention_x` in the MLP, which reads it in parallel blocks.
    """

    def __init__(self, model: Any, shared: dict[str, Frame], b: int, t: int, hidden: int, act: str, stat: str) -> None:
        self._dtypes = {"act": act, "stat": stat, "int32": "int32"}
        self._shared = shared
        res = Slot("res", (b, t, hidden), ("residual",))
        self.a, self.d = (self._direction(model, prefix, res, b, t) for prefix in ("", "d."))

    def _direction(self, model: Any, prefix: str, res: Slot, b: int, t: int) -> Frame:
        """All frames of activations (no prefix) or of their gradients, by layer number, `embed` and `head`."""
        count = len(model.blocks)
        stream = [self._ref(prefix, layer, "attention.res", res, res.roles) for layer in range(count)]
        # No role: the head reads the last one at once, so there is no use in sending it to the host.
        stream.append(self._ref(prefix, None, "head.res", res, ()))
        embed = self._refs(prefix, None, "embed", model.embed.slots(b, t))
        frames: dict[Any, Any] = {"embed": self._frame({**embed, "out": stream[0]})}
        for layer, block in enumerate(model.blocks):
            # Between the sublayers of a layer: made again with --recompute-block, which keeps what enters the layer.
            middle = self._ref(prefix, layer, "mlp.res", res, ("block", *res.roles))
            joints = {"attention": (stream[layer], middle), "mlp": (middle, stream[layer + 1])}
            sublayers, own = {}, dict[str, Any]()
            for name, (before, after) in joints.items():
                own = {"attention_x": own.get("x"), **self._refs(prefix, layer, name, getattr(block, name).slots(b, t))}
                sublayers[name] = self._frame({**own, "res": before, "out": after})
            frames[layer] = Frame(sublayers)
        head = self._refs(prefix, None, "head", model.head.slots(b, t))
        frames["head"] = self._frame({**head, "res": stream[count]})
        return Frame(frames)

    def _refs(self, prefix: str, layer: int | None, sublayer: str, slots: tuple[Slot, ...]) -> dict[str, Ref]:
        return {slot.name: self._ref(prefix, layer, f"{sublayer}.{slot.name}", slot, slot.roles) for slot in slots}

    def _ref(self, prefix: str, layer: int | None, name: str, slot: Slot, roles: tuple[str, ...]) -> Ref:
        place = "" if layer is None else f"{layer}."
        return Ref(f"0/{place}{prefix}{name}", "activation", slot.shape, self._dtypes[slot.dtype], layer, roles)

    def _frame(self, refs: dict[str, Any]) -> Frame:
        return Frame({**self._shared, **refs})
