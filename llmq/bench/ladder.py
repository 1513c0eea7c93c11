"""Where a micro-batch's time goes, family by family of ops, and what each would take at the measured ceilings.

The work of a call comes from its op's record. Its roofline is the larger of its FLOPs at the rate of the card's
large matrix product and its bytes at the rate of the card's large copy: a better kernel or another order of calls could
win the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from llmq.backends import arguments
from llmq.bench.ceilings import Ceilings
from llmq.engine.measure import Speed, zipf_batch
from llmq.ops.record import Call
from llmq.ops.seam import record
from llmq.plan.names import storage_name
from llmq.plan.passes.place import Placement
from llmq.plan.plan import Plan
from llmq.plan.spec import Spec

COMPUTING = "computing"  # the rung of all ops
HEAD = (".head.", "head.logits", "head.weight", "embed.weight")  # in the names of what the head's linear map writes


@dataclass(frozen=True)
class CallWork:
    """What a call has to do: FLOPs of products in `dtype`, and bytes to move at least."""

    dtype: str
    flops: int
    num_bytes: int


@dataclass(frozen=True)
class Rung:
    """A family: milliseconds of a micro-batch, measured and at the ceilings, and its work in the same unit."""

    family: str
    calls: int  # in one micro-step or update
    ms: float
    roofline_ms: float
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class Ladder:
    """All families, the longest first, of a micro-batch that takes `micro_batch_ms` in training."""

    rungs: tuple[Rung, ...]
    micro_batch_ms: float

    @property
    def gaps_ms(self) -> float:
        """What training takes beyond its ops run one by one; negative where they overlap."""
        return self.micro_batch_ms - sum(rung.ms for rung in self.rungs)

    @property
    def share(self) -> float:
        """Share of the ceilings: the rooflines of all calls over the time that training takes."""
        return sum(rung.roofline_ms for rung in self.rungs) / self.micro_batch_ms


def family(op: str, written: str) -> str:
    """The family that a call is counted in, by its op and the name of what it writes first."""
    known = record(op)
    return "head" if known.is_linear and any(part in written for part in HEAD) else known.family


def ladder(speed: Speed, ceilings: Ceilings) -> Ladder:
    """The ladder of the calls that were timed, on generated tokens; one rung if none were."""
    if not speed.calls:
        roofline = computing_roofline_ms(speed.plan, speed.tokens_per_step, ceilings)
        return Ladder((Rung(COMPUTING, 0, speed.micro_batch_ms, roofline, 0.0, 0.0),), speed.micro_batch_ms)
    spec, parts = speed.plan.spec, dict[str, list[tuple[float, ...]]]()
    share_of_update, used = spec.batch_size * spec.seq_len / speed.tokens_per_step, different_tokens(spec)
    for timed in speed.calls:
        program = speed.plan.programs[timed.program]
        call = program.calls[timed.index]
        work = work_of(call, program.places, used)
        part = (timed.ms, 1e3 * roofline_s(work, ceilings), work.flops, work.num_bytes)
        times = share_of_update if timed.program == "update" else 1.0
        parts.setdefault(family(call.op, written(call)), []).append(tuple(times * number for number in part))
    rungs = [Rung(name, len(found), *map(sum, zip(*found, strict=True))) for name, found in parts.items()]
    return Ladder(tuple(sorted(rungs, key=lambda rung: -rung.ms)), speed.micro_batch_ms)


def computing_roofline_ms(plan: Plan, tokens_per_step: int, ceilings: Ceilings) -> float:
    """Least milliseconds of a micro-batch in a rank's steps of `tokens_per_step`, without communication."""
    spec, used, total = plan.spec, different_tokens(plan.spec), 0.0
    for name, times in (("middle", 1.0), ("update", spec.batch_size * spec.seq_len / tokens_per_step)):
        program = plan.programs[name]
        calls = [call for call in program.calls if record(call.op).family != "collectives"]
        total += times * sum(roofline_s(work_of(call, program.places, used), ceilings) for call in calls)
    return 1e3 * total


def different_tokens(spec: Spec) -> int:
    """How many different tokens a generated micro-batch has."""
    return np.unique(zipf_batch(spec.config.vocab_size, spec.batch_size, spec.seq_len, spec.seed).tokens).size


def written(call: Call) -> str:
    """The name of what a call writes first."""
    return next(result.ref.name for result in call.outputs if result is not None)


def roofline_s(work: CallWork, ceilings: Ceilings) -> float:
    """Least seconds of a call at the ceilings."""
    multiplying = work.flops / ceilings.flops[work.dtype] if work.flops else 0.0
    return max(multiplying, work.num_bytes / ceilings.bytes_per_s)


def work_of(call: Call, places: Mapping[str, Placement], used: float) -> CallWork:
    """The work of a call: `places` show what is computed in place; an embedding op touches `used` rows of its table."""
    op = record(call.op)
    given = replace(arguments(call), in_place=_in_place(call, places), different_tokens=used)
    return CallWork(op.rate_dtype(given), op.flops(given), op.num_bytes(given))


def _in_place(call: Call, places: Mapping[str, Placement]) -> frozenset[str]:
    """The outputs of a call whose value lies where the input does that they may share with."""
    op = record(call.op)
    results = dict(zip(op.outputs, call.outputs, strict=True))
    inputs = dict(zip(op.inputs, call.inputs, strict=True))
    found = set()
    for output, source in op.shares.items():
        result, given = results[output], inputs[source]
        at = places.get(storage_name(given)) if given is not None else None
        is_value = result is not None and None in result.forms
        if at is not None and result is not None and is_value and places.get(storage_name(result.ref)) == at:
            found.add(output)
    return frozenset(found)
