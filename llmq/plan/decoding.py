"""The programs that write text, as recorded: a cache of keys and values, and what prompts and next tokens go through.

`prompt N` reads rows of N tokens and leaves their keys and values in the cache; it has no head, as `decode` starts from
the last token of each prompt. `decode` takes the next token of every sequence and leaves it where it reads its input,
so that it can run again and again as one captured graph, with no word from the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmq.blocks.cached import Sampling
from llmq.blocks.packed import Packing
from llmq.model.decoder import Model
from llmq.model.parameters import padded_vocab
from llmq.model.rope import table_refs
from llmq.ops.record import Call, Recorder
from llmq.plan.build import build_decoder, build_prompt_reader
from llmq.plan.spec import Spec
from llmq.protocols import WeightStore
from llmq.stores.activations import Frame, Frames
from llmq.tensor import Ref


@dataclass(frozen=True)
class Decoding:
    """`spec.batch_size` sequences of at most `spec.seq_len` tokens, prompt and answer.

    Prompts are read in rows of one of `prompt_lengths` tokens; `packed`: several in a row.
    """

    spec: Spec
    sampling: Sampling
    prompt_lengths: tuple[int, ...]
    packed: bool = True


def completions_of(spec: Spec) -> Decoding | None:
    """What a run that trains by `spec` writes, by the sites of its evaluations. None: nothing."""
    if spec.completions is None:
        return None
    sizes = {"batch_size": spec.completions.sequences, "seq_len": spec.completions.length}
    # Chunks are of attention's backward, and there is none.
    whole = replace(spec.memory, attention_chunks=1)
    own = replace(spec.without_noise(), **sizes, memory=whole, packing=None, completions=None)  # type: ignore[arg-type]
    sampling = Sampling(temperature=spec.completions.temperature, seed=spec.seed)
    return Decoding(own, sampling, (spec.completions.row,), spec.completions.packed)


def prompt_name(length: int) -> str:
    """The program for rows of `length` tokens."""
    return f"prompt {length}"


class DecodingRecordings:
    """Records the programs on `weights`."""

    def __init__(self, decoding: Decoding, weights: WeightStore) -> None:
        self.decoding, self._weights = decoding, weights
        self.spec, self.sampling = decoding.spec, decoding.sampling
        spec, config, b = self.spec, self.spec.config, self.spec.batch_size
        self._ropes = table_refs(config, spec.seq_len, spec.precision.stat, "decode.")
        kept = (b, spec.seq_len, 2 * config.num_kv_heads * config.head_dim)
        layers = range(config.num_layers)
        cache: dict[Any, Ref] = {n: Ref(f"layers.{n}", "cache", kept, spec.precision.model, n) for n in layers}
        self._cache = Frame(cache)
        shapes = {"tokens": (b, 1), "positions": (b, 1), "samples": (b,)}
        if self.sampling.repetition_penalty != 1:
            shapes["seen"] = (b, padded_vocab(config))
        loss = {"loss": Ref("decode.loss", "batch", (b,), spec.precision.stat)} if self.sampling.logprobs else {}
        self._inputs = {"decode": _inputs("decode", shapes, **loss)}
        for length in decoding.prompt_lengths:
            rows: dict[str, tuple[int, ...]] = dict.fromkeys(("tokens", "positions", "sequences"), (1, length))
            if (packing := self._packing(length)) is not None:
                rows["borders"] = (1, packing.max_docs + 1)
            self._inputs[prompt_name(length)] = _inputs(prompt_name(length), rows)

    @property
    def cells(self) -> Mapping[str, Any]:
        """Handles of what the engine writes and reads."""
        return {"decode_ropes": self._ropes, **self._inputs}

    def programs(self) -> dict[str, list[Call]]:
        """All of them, by name."""
        ops, model = Recorder(), build_decoder(self.spec, self.sampling)
        frames = self._frames(model, self._inputs["decode"], self.spec.batch_size, 1)
        model.infer(ops, frames.a, frames.d, self._weights)
        return {"decode": ops.calls, **{prompt_name(n): self._prompt(n) for n in self.decoding.prompt_lengths}}

    def _prompt(self, length: int) -> list[Call]:
        """The cache of one row of prompts."""
        ops, spec = Recorder(), replace(self.spec, packing=self._packing(length))
        model = build_prompt_reader(spec, self.sampling)
        model.read(ops, self._frames(model, self._inputs[prompt_name(length)], 1, length).a, self._weights)
        return ops.calls

    def _packing(self, length: int) -> Packing | None:
        return Packing(self.spec.batch_size + 1, length) if self.decoding.packed else None  # one is the padding

    def _frames(self, model: Model, inputs: Frame, b: int, t: int) -> Frames:
        spec, p = self.spec, self.spec.precision
        shared = {"batch": inputs, "const": Frame(self._ropes), "cache": self._cache}
        return Frames(model, shared, b, t, spec.config.hidden_size, p.model, p.stat)


def _inputs(name: str, shapes: Mapping[str, tuple[int, ...]], **more: Ref) -> Frame:
    return Frame({key: Ref(f"{name}.{key}", "batch", shape, "int32") for key, shape in shapes.items()} | more)
