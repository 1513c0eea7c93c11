"""What each level of sharing takes of a rank's memory and sends in a step, for the table of a dry run.

The level that a run has is planned. The others are estimated: each further layer takes and sends the same bytes, so that
two plans of fewer layers say what all take. What a few layers need most memory for, as the embedding at level 2, may be
something else than in the whole model; a quarter of the layers was enough wherever it was compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmq.ops.record import Call
from llmq.ops.seam import record
from llmq.plan.names import own_scales
from llmq.plan.plan import Plan, Scratch, make_plan
from llmq.stores.sharding import Sharding
from llmq.tensor import Ref, stored_bytes

LEAST_LAYERS, SHARE, MORE = 4, 4, 2  # an estimate is by plans of a fourth of the layers, and of two more
LEVELS = range(4)


@dataclass(frozen=True)
class LevelNeeds:
    """Bytes of a rank at a `level`: by category of the allocator table, and sent to others in an optimizer step."""

    level: str
    table: Mapping[str, int]
    sent_bytes: int
    is_planned: bool

    @property
    def total_bytes(self) -> int:
        """Bytes on the device."""
        return sum(self.table.values())


def at_level(sharding: Sharding, level: int) -> Sharding:
    """The same ranks at level 0 to 3."""
    return replace(sharding, states=level >= 1, gradients=level >= 2, weights=level >= 3)


def name_of(sharding: Sharding) -> str:
    """`3`, or `1 with weights` for what is between two levels."""
    levels = (level for level in LEVELS if at_level(sharding, level) == sharding)
    return str(next(levels, "1 with weights"))


def needs_by_level(plan: Plan, scratch_bytes: Scratch, micro_steps: int) -> list[LevelNeeds]:
    """What a rank needs at each level, and as `plan` has it, in steps of so many micro-steps."""
    found = [LevelNeeds(name_of(plan.spec.sharding), plan.table(), sent_bytes(plan, micro_steps), is_planned=True)]
    for level in LEVELS:
        sharding = at_level(plan.spec.sharding, level)
        if sharding != plan.spec.sharding:
            found.append(_estimated(plan, sharding, scratch_bytes, micro_steps))
    return sorted(found, key=lambda needs: needs.level)


def sent_bytes(plan: Plan, micro_steps: int) -> int:
    """Bytes that a rank sends in an optimizer step of so many micro-steps."""
    names = ["first", *["middle"] * (micro_steps - 2), "last"] if micro_steps > 1 else ["only"]
    by_name = {
        name: sum(sent_by(call, plan.spec.sharding.size) for call in plan.programs[name].calls)
        for name in {*names, "update"}
    }
    return sum(by_name[name] for name in (*names, "update"))


def sent_by(call: Call, size: int) -> int:
    """Bytes that each of `size` ranks sends for a call, on average; 0 for what is no collective.

    A gather sends each rank's share to all others, a sum each rank's part of the others' shares.
    """
    if not record(call.op).is_collective:
        return 0
    given = call.written if record(call.op).gathers else [ref for ref in call.inputs if ref is not None]
    return sum(map(_bytes, given)) * (size - 1) // size


def _bytes(ref: Ref) -> int:
    owned = stored_bytes(own_scales(ref)) if ref.form is not None and ref.form.owns_scales else 0
    return stored_bytes(ref) + owned


def _estimated(plan: Plan, sharding: Sharding, scratch_bytes: Scratch, micro_steps: int) -> LevelNeeds:
    """What plans of fewer layers say of all layers; of a model that has no more, its own plan."""
    spec = replace(plan.spec, sharding=sharding)
    layers = spec.config.num_layers
    least = max(LEAST_LAYERS, layers // SHARE)
    counts = [least, least + MORE] if least + MORE < layers else [layers]
    configs = [replace(spec.config, num_layers=n, windows=spec.config.windows[:n]) for n in counts]
    plans = [make_plan(replace(spec, config=config), scratch_bytes) for config in configs]
    found = [{**one.table(), "sent": sent_bytes(one, micro_steps)} for one in plans]
    each = {name: (found[-1][name] - number) / MORE for name, number in found[0].items()}
    table = {name: round(number + (layers - counts[0]) * each[name]) for name, number in found[0].items()}
    sent = table.pop("sent")
    return LevelNeeds(name_of(sharding), table, sent, is_planned=counts == [layers])
