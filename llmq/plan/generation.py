"""The plan of generation: weights, a cache of keys and values, and a program for prompts and for the next token.

A program `prompt N` reads rows of N tokens and leaves their keys and values in the cache; it has no head, as `decode`
starts from the last token of each prompt. `decode` takes the next token of every sequence and leaves it where it reads
its input, so that it can run again and again as one captured graph, with no word from the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmq.blocks.attention import Packing
from llmq.blocks.cached import Sampling
from llmq.errors import MemoryLimitError
from llmq.model.decoder import Model
from llmq.model.parameters import fitted_rows, padded_vocab
from llmq.ops.record import Call, Recorder
from llmq.plan.arena import aligned
from llmq.plan.build import build_decoder, build_prompt_reader
from llmq.plan.passes.fates import Fates
from llmq.plan.passes.forms import forms
from llmq.plan.passes.fuse import fuse
from llmq.plan.passes.prune import prune
from llmq.plan.plan import Plan, Scratch, finished, persistent_storages
from llmq.plan.spec import Spec
from llmq.row import Row
from llmq.stores.activations import Frame, Frames
from llmq.stores.weights import ReplicatedWeights
from llmq.tensor import Ref, stored_bytes

MIB = 2**20


@dataclass(frozen=True)
class Decoding:
    """`spec.batch_size` sequences of at most `spec.seq_len` tokens, prompt and answer.

    Prompts are read in rows of one of `prompt_lengths` tokens; `packed`: several in a row.
    """

    spec: Spec
    sampling: Sampling
    prompt_lengths: tuple[int, ...]
    packed: bool = True


def plan_generation(decoding: Decoding, scratch_bytes: Scratch | None = None) -> Plan:
    """Decides everything. `scratch_bytes` is the backend's: what a call needs beside its arguments."""
    recorded = _Recordings(decoding)
    calls = {"decode": recorded.decode(), **{prompt_name(n): recorded.prompt(n) for n in decoding.prompt_lengths}}
    programs = {name: finished(name, forms(fuse(prune(found)), {})) for name, found in calls.items()}
    frozen = [recorded.weights.refs[row.name] for row in recorded.rows]
    persistent = persistent_storages(programs.values(), frozen, scratch_bytes)
    cells = Frame({"rope": recorded.rope, **recorded.inputs})
    return Plan(
        decoding.spec, recorded.rows, programs, persistent, (), Fates(), {}, {}, cells, recorded.weights.refs, {}, {}
    )


def prompt_name(length: int) -> str:
    """The program for rows of so many tokens."""
    return f"prompt {length}"


def parts(plan: Plan) -> dict[str, int]:
    """Bytes of the weights, the cache, and everything else."""
    sizes = dict.fromkeys(("weights", "cache", "activations"), 0)
    for ref in plan.persistent.values():
        name = {"weight": "weights", "cache": "cache"}.get(ref.space, "activations")
        sizes[name] += aligned(stored_bytes(ref))
    sizes["activations"] += plan.arena_bytes()
    return sizes


def refuse_if_too_large(plan: Plan, free: int) -> None:
    """MemoryLimitError if the plan does not fit into so many bytes."""
    if plan.total_bytes <= free:
        return
    sizes = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in parts(plan).items())
    missing = (plan.total_bytes - free) / MIB
    raise MemoryLimitError(
        f"generation needs {plan.total_bytes / MIB:,.0f} MiB ({sizes}), {missing:,.0f} MiB more than are free: use a "
        "smaller --batch-size, --max-tokens or --max-length, or --dtype bf16"
    )


class _Recordings:
    """Records the programs."""

    def __init__(self, decoding: Decoding) -> None:
        self.spec, self.sampling, self.packed = decoding.spec, decoding.sampling, decoding.packed
        spec, config = self.spec, self.spec.config
        self._decoder = build_decoder(spec, self.sampling)
        self.rows: tuple[Row, ...] = tuple(
            replace(row, trainable=False) for row in fitted_rows(config, self._decoder.sites)
        )
        self.weights = ReplicatedWeights(self.rows, spec.precision.model, spec.precision.model)
        self.rope = Ref("rope", "const", (spec.seq_len, config.head_dim), spec.precision.stat)
        kept = (spec.batch_size, spec.seq_len, 2 * config.num_kv_heads * config.head_dim)
        layers = range(config.num_layers)
        cache: dict[Any, Ref] = {n: Ref(f"layers.{n}", "cache", kept, spec.precision.model, n) for n in layers}
        self.cache = Frame(cache)
        b = spec.batch_size
        shapes = {"tokens": (b, 1), "positions": (b, 1), "samples": (b,)}
        if self.sampling.repetition_penalty != 1:
            shapes["seen"] = (b, padded_vocab(config))
        self.inputs = {"decode": _inputs("decode", shapes)}

    def decode(self) -> list[Call]:
        """The next token of every sequence."""
        ops = Recorder()
        frames = self._frames(self._decoder, self.inputs["decode"], self.spec.batch_size, 1)
        self._decoder.infer(ops, frames.a, self.weights)
        return ops.calls

    def prompt(self, length: int) -> list[Call]:
        """The cache of one row of prompts."""
        spec, name = self.spec, prompt_name(length)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("tokens", "positions", "sequences"), (1, length))
        packing = Packing(spec.batch_size + 1, length) if self.packed else None  # one is the padding
        if packing is not None:
            shapes["borders"] = (1, packing.max_docs + 1)
        self.inputs[name] = _inputs(name, shapes)
        model = build_prompt_reader(replace(spec, packing=packing), self.sampling)
        ops = Recorder()
        model.read(ops, self._frames(model, self.inputs[name], 1, length).a, self.weights)
        return ops.calls

    def _frames(self, model: Model, inputs: Frame, b: int, t: int) -> Frames:
        spec, p = self.spec, self.spec.precision
        shared = {"batch": inputs, "const": Frame({"rope": self.rope}), "cache": self.cache}
        return Frames(model, shared, b, t, spec.config.hidden_size, p.model, p.stat)


def _inputs(name: str, shapes: dict[str, tuple[int, ...]]) -> Frame:
    return Frame({key: Ref(f"{name}.{key}", "batch", shape, "int32") for key, shape in shapes.items()})
