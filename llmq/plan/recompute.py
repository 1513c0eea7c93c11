"""Which intermediates are kept for backward, which are dropped and made anew, and what each recompute flag frees.

Reads a recording of one training program in which nothing is recomputed. A slot of a layer is dropped when one of its
roles is; what backward reads of it is then made anew by its producer, whose inputs are needed in turn. A copy (a
quantized form) whose value is kept anyway is dropped as well: casting it again costs less than keeping it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmq.ops.record import Call, Recompute
from llmq.ops.seam import record
from llmq.tensor import Form, Ref

# flag -> the roles it drops, as sublayers tag them on their slots
ROLES: dict[str, frozenset[str]] = {
    "recompute_swiglu": frozenset({"swiglu"}),
    "recompute_norm": frozenset({"norm"}),
    "recompute_ffn": frozenset({"swiglu", "ffn"}),
    "recompute_qkv": frozenset({"qkv"}),
    "recompute_att": frozenset({"qkv", "att"}),
    "recompute_block": frozenset({"swiglu", "norm", "ffn", "qkv", "att", "block"}),
}


@dataclass(frozen=True)
class Fates:
    """Outcome of the analysis: what is `kept` (slot, form) between forward and backward, and what is made anew."""

    kept: frozenset[tuple[str, Form | None]]
    recompute: Recompute


def decide(calls: Sequence[Call], roles: Iterable[str], drop: Iterable[str] = ()) -> Fates:
    """Fates of all layer intermediates when `roles`, and the slots named in `drop`, are recomputed.

    `calls` is a recording of forward and backward without replays.
    """
    active, named = frozenset(roles), frozenset(drop)
    producers: dict[str, tuple[Call, str]] = {}
    slots: dict[str, Ref] = {}
    needed: set[tuple[str, Form | None]] = set()
    pending: list[tuple[str, Form | None]] = []
    for call in calls:
        if call.phase == "forward":
            for name, ref in zip(record(call.op).outputs, call.outputs, strict=True):
                if ref is not None and ref.space == "activation" and ref.layer is not None:
                    producers[ref.name], slots[ref.name] = (call, name), ref
        else:
            pending += [(ref.name, ref.form) for ref in call.inputs if ref is not None and ref.name in producers]

    def is_dropped(name: str) -> bool:
        return name in named or not active.isdisjoint(slots[name].roles)

    while pending:
        item = pending.pop()
        if item in needed:
            continue
        needed.add(item)
        name, form = item
        if is_dropped(name):
            call, output = producers[name]
            pending += [(ref.name, ref.form) for ref in call.inputs if ref is not None and ref.name in producers]
            if not record(call.op).writes(output, form):
                pending.append((name, None))
    dropped: dict[str, set[Form | None]] = defaultdict(set)
    copies = set()
    for name, form in needed:
        if is_dropped(name):
            dropped[name].add(form)
        elif form is not None and (name, None) in needed:
            dropped[name].add(form)
            copies.add(name)
    kept = frozenset((name, form) for name, form in needed if form not in dropped.get(name, ()))
    return Fates(kept, Recompute({name: frozenset(forms) for name, forms in dropped.items()}, frozenset(copies)))
