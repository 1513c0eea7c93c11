"""A plan that does not fit: what makes it fit by itself, how many bytes are missing, and which remedies would help."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmq.backends import Backend
from llmq.disk import MIB, shown
from llmq.engine.cost import Costs
from llmq.engine.predict import sustained
from llmq.engine.search import Available, Search, Setting
from llmq.errors import MemoryLimitError, RefusedMemoryError
from llmq.hardware import cards
from llmq.hardware.cards import Card
from llmq.hardware.host_memory import host_memory_bytes
from llmq.plan.plan import Plan, Scratch
from llmq.plan.remedies import IN_TILES, NOTHING, WHOLE, Terms, alternatives, last_alternatives
from llmq.tensor import stored_bytes

BEST = 3  # remedies that are listed
KEEPING = 2  # of them such that change no number, where there are others
MUCH = 0.02  # of the room: attention workspace above that is worth doing without
USUAL_STEPS = 4  # micro-batches of a step, where that is not known
LONG = 8192  # tokens of a row whose MLP is worth tiles
UNKNOWN = 2**62  # bytes of a host that is not known
LIBRARY_BYTES = 256 << 20  # room that is advised to be left where a library does not say what it lacks
USUAL_CARD = "H200"  # by whose rates remedies are in order where no card is known


@dataclass(frozen=True)
class Limits:
    """What there is for a run, and how it runs.

    `free_bytes` of the device, and of the host what each of `processes` on it may keep; None: not known.
    `in_one`: the device is the host, as on the CPU. Plans are made with `scratch_bytes`; `relaxed_scratch` is the same
    for a run that need not repeat its bits, None where there is no such run. `has_global_batch`: the number of
    micro-batches follows from their size. The logits are cut by `gpu_bytes`, attention's backward in as few chunks as
    fit (`auto_chunks`), or as is given. Times are those of a `card`, or not said.
    """

    free_bytes: int
    scratch_bytes: Scratch | None = None
    relaxed_scratch: Scratch | None = None
    host_bytes: int | None = None
    processes: int = 1
    in_one: bool = False
    micro_steps: int = USUAL_STEPS
    has_global_batch: bool = False
    gpu_bytes: int = 0
    auto_chunks: bool = False
    card: Card | None = None

    @property
    def room(self) -> Available:
        """What is free, as a search compares costs with it."""
        known = self.host_bytes is not None and not self.in_one
        return Available(self.free_bytes, max(self.host_bytes or 0, 0) if known else UNKNOWN, self.in_one)

    @property
    def costs(self) -> dict[bool, Costs]:
        """What prices plans of a run that repeats its bits, and of one that need not (True), if there is one."""
        rates = sustained(cards.rated(self.card or cards.named(USUAL_CARD)))  # type: ignore[arg-type]
        assert rates is not None
        scratches = {False: self.scratch_bytes, True: self.relaxed_scratch}
        return {key: Costs(one, one, rates) for key, one in scratches.items() if key is False or one is not None}


def table(best: Sequence[Setting], processes: int = 1, *, has_rates: bool = True) -> list[str]:
    """Settings by rank, with what they cost: bytes of the host are of all processes together."""
    host = f"host of {processes}" if processes > 1 else "host"
    rows = [("", "tokens/s", "device", host, "settings")]
    for number, one in enumerate(best, 1):
        rate = f"{one.tokens / one.cost.seconds:,.0f}" if has_rates else "-"
        rows.append((f"{number}", rate, shown(one.cost.num_bytes), shown(processes * one.cost.host_bytes), one.flags))
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  ".join([*(f"{c:>{w}}" for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]


def lacking(plan: Plan, room: Limits) -> str:
    """What the plan lacks of the device, or of the host if that is known; empty where it fits."""
    chunks, free = plan.spec.memory.attention_chunks, room.free_bytes
    if (missing := plan.total_bytes - free) > 0:
        chunked = f" with attention's backward in {chunks} chunks" if chunks > 1 else ""
        needs = f"the run needs {shown(plan.total_bytes)}{chunked}"
        return f"{needs}, {shown(free)} are free, {shown(missing)} are missing"
    host = UNKNOWN if room.host_bytes is None else max(room.host_bytes - room.in_one * plan.total_bytes, 0)
    if plan.host_bytes and (missing := plan.host_bytes - host) > 0:
        count = room.processes
        each = f", {shown(plan.host_bytes)} in each of {count} processes" if count > 1 else ""
        return (
            f"the run keeps {shown(count * plan.host_bytes)} in host memory{each}, {shown(count * host)} are free "
            f"there, {shown(count * missing)} are missing"
        )
    return ""


def refuse_if_too_large(plan: Plan, room: Limits) -> None:
    """MemoryLimitError if the plan needs more than there is, with the remedies that fit."""
    if lack := lacking(plan, room):
        home = "device" if plan.total_bytes > room.free_bytes else "host"
        raise MemoryLimitError(lack, "\n".join((*advice(plan, room), requests(plan, home))))


def shortage(
    plan: Plan, backend: Backend, error: RefusedMemoryError | MemoryError, *, is_held: bool
) -> MemoryLimitError:
    """Memory that is refused though the plan fitted, because another program took it meanwhile, or a library asks for
    more, as one error: what was planned, what is free now, what is missing, the nearest setting that fits, and what
    asks for how much. `is_held`: the plan's own memory is allocated."""
    if isinstance(error, MemoryError):
        text = f"the host has no more memory ({error or 'an array was refused'})"
        home = "host" if backend.takes_scratch else "device"
        error = RefusedMemoryError(text, home=home, free_bytes=host_memory_bytes()[1])
    on_device = error.home == "device"
    planned = plan.total_bytes if on_device else plan.host_bytes
    wanted = error.num_bytes if error.num_bytes is not None else LIBRARY_BYTES if is_held else planned
    missing = max(wanted - error.free_bytes, 0)
    numbers = (
        f"{shown(planned)} were planned{' and are held' if is_held else ''}, {shown(error.free_bytes)} are free now"
    )
    if error.num_bytes is not None or not is_held:
        numbers += f", {shown(missing)} are missing" if missing else ", but not in one piece"
    place = "this GPU" if on_device and backend.takes_scratch else "the host"
    cause = f"another program on {place} may have taken memory since the plan was made: end it"
    left = error.free_bytes + planned - wanted if is_held else error.free_bytes
    free, host = (left, None) if on_device else (plan.total_bytes, left)
    room = Limits(free, backend.scratch_bytes, host_bytes=host, in_one=not backend.takes_scratch)
    table = "\n".join((*advice(plan, room), requests(plan, error.home)))
    return MemoryLimitError(f"{error}: {numbers}; {cause}, or change the run", table)


def advice(plan: Plan, room: Limits) -> list[str]:
    """The best remedies, in lines."""
    if "update" not in plan.programs:
        return ["Use a smaller --batch-size, --samples, --max-tokens or --max-length, or --dtype bf16"]
    found = remedies(plan, room)
    if not found:
        adapter = "" if plan.spec.freezes else "an adapter or "
        less = " leave out --offload options," if plan.host_bytes and plan.total_bytes <= room.free_bytes else ""
        return [
            f"No memory option makes it fit:{less} train {adapter}a smaller model, or use a device with more memory"
        ]
    title = "What fits, by predicted speed:" if room.card else "What fits, the fastest first:"
    lines = [title, *table(found, room.processes, has_rates=room.card is not None)]
    return [*lines, "--fit compares more settings"] if room.card else lines


def requests(plan: Plan, home: str = "device") -> str:
    """A table of what the run asks of a home, by segment of the plan, the largest first."""
    found = [(size, name) for name, size in plan.table(home).items() if size]
    lines = [f"  {'segment':<14}{'MiB':>12}"]
    lines += [f"  {name:<14}{size / MIB:>12,.1f}" for size, name in sorted(found, key=lambda one: (-one[0], one[1]))]
    lines.append(f"  {'all':<14}{sum(size for size, _ in found) / MIB:>12,.1f}")
    return "\n".join(lines)


def remedies(plan: Plan, room: Limits) -> list[Setting]:
    """The fastest combinations of remedies that fit, such that keep all numbers first, in micro-batches that are no
    larger."""
    spec = plan.spec
    half = next((n for n in range(spec.batch_size // 2, 0, -1) if spec.batch_size % n == 0), 1)
    terms = Terms(
        spec.batch_size * room.micro_steps,
        tuple(dict.fromkeys((spec.batch_size, half, 1))),
        (WHOLE, (2, 1, 1), (spec.batch_size, 1, 1), *([IN_TILES] if spec.seq_len >= LONG else [])),
        counts_steps=not room.has_global_batch,
        gpu_bytes=room.gpu_bytes,
        may_undo=room.host_bytes is not None and plan.host_bytes > room.host_bytes,
        may_host=not room.in_one,
        auto_chunks=room.auto_chunks,
    )
    workspace = sum(stored_bytes(ref) for ref in plan.persistent.values() if ref.space == "workspace")
    whole = workspace * spec.memory.attention_chunks
    # Where there is an attention that need not repeat its bits, and a workspace worth doing without.
    may_relax = room.relaxed_scratch is not None and whole > MUCH * room.free_bytes
    search, usual = Search(spec, terms, room.room, room.costs), alternatives(spec, may_relax=may_relax)
    keeping = search.best([NOTHING], KEEPING)
    within_s = keeping[0].cost.seconds if keeping else math.inf
    others = (*usual, *([] if keeping else last_alternatives(spec, terms)))  # the mildest first
    changing = (search.best([one], BEST - len(keeping), within_s) for one in others)
    return [*keeping, *next(filter(None, changing), [])]
