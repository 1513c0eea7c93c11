"""Levels of sharing: the options resolved, and what each takes of a rank's memory and sends in a step, for the table
of a dry run.

The level that a run has is planned. The others are estimated by plans of a quarter of the layers, as each further layer
takes the same bytes. What a few layers need most memory for, such as the embedding, may be something else than in the
whole model: an estimate is the plan's own number or less, and by a quarter it was the same wherever that was compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmq.comm.world import Copying
from llmq.errors import UsageError
from llmq.ops.record import Call
from llmq.ops.seam import record
from llmq.options.maths import ShardingOptions
from llmq.plan.names import own_scales
from llmq.plan.plan import Plan, Scratch, make_plan
from llmq.plan.spec import Spec
from llmq.stores.sharding import Sharding
from llmq.tensor import Form, stored_bytes

SHARE = 4  # an estimate is by one in this many of the layers that a model has
LEVELS = range(4)
LEAST_LAYERS, MORE = 4, 2  # an estimate is by at least this many layers, and by two more
COMPRESSED = {"none": None, "e4m3": Form("e4m3", "row", "tilewise")}


@dataclass(frozen=True)
class LevelNeeds:
    """Bytes of a rank at a `level`: on the device, by category of the allocator table, in host memory, and sent to
    others in an optimizer step."""

    level: str
    table: Mapping[str, int]
    host_bytes: int
    sent_bytes: int
    is_planned: bool

    @property
    def total_bytes(self) -> int:
        """Bytes on the device."""
        return sum(self.table.values())


def resolve(options: ShardingOptions, rank: int, size: int) -> Sharding:
    """What rank `rank` of `size` holds; a single one holds all."""
    if size == 1:
        return Sharding()
    level = options.zero_level
    return Sharding(
        rank,
        size,
        states=level >= 1,
        gradients=level >= 2 or options.shard_gradients,
        weights=level >= 3 or options.shard_weights,
        reduce_dtype=options.reduce_dtype,
        all_to_all=options.all_to_all_reduce or options.gradient_compression != "none",
        compressed=COMPRESSED[options.gradient_compression],
    )


def copying(options: ShardingOptions) -> Copying:
    """What copy engines move between the GPUs of a run; nothing is timed for an exchange that the run does not make."""
    exchanges = resolve(options, 0, 2).all_to_all
    return Copying(options.memcpy_all_gather, options.memcpy_send_recv if exchanges else False)


def refuse_copies(options: ShardingOptions, kind: str) -> None:
    """UsageError if copy engines are asked for on a device that has none."""
    given = Copying(options.memcpy_all_gather, options.memcpy_send_recv).demanded
    if kind == "cpu" and given:
        raise UsageError(f"{' and '.join(given)}: copy engines are parts of GPUs: leave it out, or use --device cuda")


def at_level(sharding: Sharding, level: int) -> Sharding:
    """The same ranks at level 0 to 3."""
    return replace(sharding, states=level >= 1, gradients=level >= 2, weights=level >= 3)


def name_of(sharding: Sharding) -> str:
    """`3`, or `1 with weights` for what is between two levels."""
    levels = (level for level in LEVELS if at_level(sharding, level) == sharding)
    return str(next(levels, "1 with weights"))


def needs_by_level(plan: Plan, scratch_bytes: Scratch, micro_steps: int) -> list[LevelNeeds]:
    """What a rank needs at each level, and as `plan` has it, in steps of `micro_steps`."""
    found = [_planned(plan, micro_steps)]
    for level in LEVELS:
        sharding = at_level(plan.spec.sharding, level)
        if sharding != plan.spec.sharding:
            found.append(_estimated(plan, sharding, scratch_bytes, micro_steps))
    return sorted(found, key=lambda needs: needs.level)


def _planned(plan: Plan, micro_steps: int) -> LevelNeeds:
    """The needs of a plan of all layers."""
    about = plan.table(), plan.host_bytes, sent_bytes(plan, micro_steps)
    return LevelNeeds(name_of(plan.spec.sharding), *about, is_planned=True)


def sent_bytes(plan: Plan, micro_steps: int) -> int:
    """Bytes that a rank sends in an optimizer step of `micro_steps`."""
    names, size = [*micro_programs(micro_steps), "update"], plan.spec.sharding.size
    by_name = {name: sum(sent_by(call, size) for call in plan.programs[name].calls) for name in {*names}}
    return sum(by_name[name] for name in names)


def micro_programs(micro_steps: int) -> list[str]:
    """The programs of a step with `micro_steps`, in order."""
    return ["only"] if micro_steps == 1 else ["first", *["middle"] * (micro_steps - 2), "last"]


def sent_by(call: Call, size: int) -> int:
    """Bytes that each of `size` ranks sends for a call, on average; 0 for what is no collective.

    A gather sends each rank's share to all others, a sum each rank's part of the others' shares.
    """
    if not record(call.op).is_collective:
        return 0
    given = call.written if record(call.op).gathers else [ref for ref in call.inputs if ref is not None]
    scales = [own_scales(ref) for ref in given if ref.form is not None and ref.form.owns_scales]
    return sum(map(stored_bytes, (*given, *scales))) * (size - 1) // size


def _estimated(plan: Plan, sharding: Sharding, scratch_bytes: Scratch, micro_steps: int) -> LevelNeeds:
    """The needs at another level."""
    spec = replace(plan.spec, sharding=sharding)
    layers = spec.config.num_layers
    least = max(LEAST_LAYERS, layers // SHARE)
    if least + MORE >= layers:
        return _planned(make_plan(spec, scratch_bytes), micro_steps)
    plans = [make_plan(with_layers(spec, count), scratch_bytes) for count in (least, least + MORE)]
    few, more = ({**one.table(), "host": one.host_bytes, "sent": sent_bytes(one, micro_steps)} for one in plans)
    # Linear, as all layers are of the same shapes.
    table = {name: round(few[name] + (layers - least) * (more[name] - few[name]) / MORE) for name in few}
    host, sent = table.pop("host"), table.pop("sent")
    return LevelNeeds(name_of(sharding), table, host, sent, is_planned=False)


def with_layers(spec: Spec, layers: int) -> Spec:
    """The first `layers` of a model."""
    return replace(spec, config=replace(spec.config, num_layers=layers, windows=spec.config.windows[:layers]))
