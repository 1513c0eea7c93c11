"""The plan of generation: frozen weights, a cache of keys and values, and the programs of llmq/plan/decoding.py."""

from dataclasses import replace

from llmq.adapters.method import Tracked
from llmq.errors import MemoryLimitError
from llmq.plan.arena import aligned
from llmq.plan.build import build_decoder, rows_of
from llmq.plan.decoding import Decoding, DecodingRecordings
from llmq.plan.passes.fates import Fates
from llmq.plan.passes.forms import forms, prune
from llmq.plan.passes.fuse import fuse
from llmq.plan.plan import Plan, Scratch, finished, persistent_storages
from llmq.stores.activations import Frame
from llmq.stores.fetched_weights import FetchedWeights
from llmq.tensor import stored_bytes

MIB = 2**20


def plan_generation(decoding: Decoding, scratch_bytes: Scratch | None = None) -> Plan:
    """Decides everything. `scratch_bytes` is the backend's: what a call needs beside its arguments."""
    spec = decoding.spec
    model = build_decoder(spec, decoding.sampling)
    rows = tuple(replace(row, trainable=False) for row in rows_of(spec, model))
    weights = FetchedWeights(rows, spec.precision.model, spec.precision.model)
    recorded = DecodingRecordings(decoding, weights)
    programs = {name: finished(name, forms(fuse(prune(calls)), {})) for name, calls in recorded.programs().items()}
    persistent = persistent_storages(programs.values(), weights.refs.values(), scratch_bytes)
    cells = Frame(dict(recorded.cells))
    return Plan(spec, rows, programs, persistent, (), Fates(), {}, {}, cells, weights.refs, {}, {}, Tracked())


def parts(plan: Plan) -> dict[str, int]:
    """Bytes of the weights, the cache, and everything else."""
    sizes = dict.fromkeys(("weights", "cache", "activations"), 0)
    for ref in plan.persistent.values():
        name = {"weight": "weights", "cache": "cache"}.get(ref.space, "activations")
        sizes[name] += aligned(stored_bytes(ref))
    sizes["activations"] += plan.arena_bytes()
    return sizes


def refuse_if_too_large(plan: Plan, free: int) -> None:
    """MemoryLimitError if the plan does not fit into the `free` bytes."""
    if plan.total_bytes <= free:
        return
    sizes = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in parts(plan).items())
    missing = (plan.total_bytes - free) / MIB
    raise MemoryLimitError(
        f"generation needs {plan.total_bytes / MIB:,.0f} MiB ({sizes}), {missing:,.0f} MiB more than are free: use a "
        "smaller --batch-size, --samples, --max-tokens or --max-length, or --dtype bf16"
    )
