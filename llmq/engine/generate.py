"""Text after prompts: a plan of generation on memory, and the loop that takes token after token from it.

The device never waits for the host: each step leaves its tokens where the next one reads them, and the host looks at
them one step behind. It runs at most one step too many, whose tokens are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from llmq.adapters.method import Tracked
from llmq.adapters.virtual_tokens import VIRTUAL
from llmq.backends import Backend
from llmq.engine.engine import Engine
from llmq.engine.stored import StoredPlan
from llmq.errors import UsageError
from llmq.plan.build import build_decoder, rows_of
from llmq.plan.decoding import Decoding, DecodingRecordings, completions_of, prompt_name
from llmq.plan.passes.fates import Fates
from llmq.plan.passes.forms import forms, prune
from llmq.plan.passes.fuse import fuse
from llmq.plan.plan import Plan, Scratch, finished, persistent_storages
from llmq.row import Row
from llmq.stores.activations import Frame
from llmq.stores.fetched_weights import FetchedWeights
from llmq.tensor import stored_bytes

Prompt = Sequence[int]  # with an adapter of virtual tokens, VIRTUAL for each of these first


class Drawn(NamedTuple):
    """The next token after a prompt (its index), None for one of `stop`, and its log p if the plan computes that."""

    prompt: int
    token: int | None
    logprob: float | None = None


class Generator(StoredPlan):
    """Runs the programs of a plan of generation for up to a batch of sequences at a time."""

    def __init__(self, plan: Plan, decoding: Decoding, backend: Backend) -> None:
        super().__init__(plan, backend)
        self._make_whole: Callable[[], None] = lambda: None
        self._begin(decoding)

    @classmethod
    def beside(cls, trainer: Engine) -> Generator:
        """One that writes with the weights of a plan that trains, as they are whenever it is asked, in its memory."""
        decoding = completions_of(trainer.plan.spec)
        assert decoding is not None, "the plan has no programs that write"
        generator = cls.__new__(cls)
        generator._view(trainer)
        generator._make_whole = trainer.gather
        generator._begin(decoding)
        return generator

    @classmethod
    def on(cls, holder: StoredPlan, decoding: Decoding, check: Callable[[Plan], None]) -> Generator:
        """One that writes with the frozen weights of another plan on memory; `check` gets its plan without them."""
        backend = holder._backend

        def opened(plan: Plan) -> Generator:
            check(plan)
            return cls(plan, decoding, backend)

        return holder.lend(plan_generation(decoding, backend.scratch_bytes), opened)

    def _begin(self, decoding: Decoding) -> None:
        spec = decoding.spec
        self.batch_size, self.most_tokens = spec.batch_size, spec.seq_len
        self._prompt_lengths, self._packed = sorted(decoding.prompt_lengths), decoding.packed
        self._decodes_by = {call.op for call in self.plan.programs["decode"].calls}
        self._write_tables(self._cells.decode_ropes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that the next token is computed from: all but an embedding that is no head."""
        calls = (call for call in self.plan.programs["decode"].calls if call.op != "embedding_forward")
        refs = {ref.name: ref for call in calls for ref in call.inputs if ref is not None and ref.space == "weight"}
        return sum(map(stored_bytes, refs.values()))

    def load(self, parameters: Iterable[tuple[Row, np.ndarray]]) -> None:
        """Sets the weights from whole parameters (padded, any float dtype)."""
        self._set(parameters, self.plan.rows)

    def warm_up(self) -> None:
        """Runs every program twice: kernels are compiled by the first run, and captured by the second."""
        for length in self._prompt_lengths:
            for _ in range(2):
                self._read_row([], [], length)
        self.start([[0]], [0])
        for _ in range(2):
            self.run("decode")

    def start(self, prompts: Sequence[Prompt], numbers: Sequence[int]) -> None:
        """Begins sequences with `prompts`, none of them empty; their `numbers` address what is drawn for them."""
        self._make_whole()
        assert len(prompts) <= self.batch_size and all(prompts), "at most a batch of prompts, with tokens"
        for row in self._rows(prompts):
            total = sum(len(prompts[index]) - 1 for index in row)
            length = next(length for length in self._prompt_lengths if length >= total)
            self._read_row([prompts[index][:-1] for index in row], row, length)
        decode, rest = self._cells.decode, [0] * (self.batch_size - len(prompts))
        self.write(decode.tokens, np.array([[prompt[-1]] for prompt in prompts] + [[0]] * len(rest), np.int32))
        self.write(decode.positions, np.array([[len(prompt) - 1] for prompt in prompts] + [[0]] * len(rest), np.int32))
        self.write(decode.samples, np.array([*numbers, *rest], np.int64).astype(np.int32))
        if "penalize" in self._decodes_by:
            seen = np.zeros(decode.seen.shape, np.int32)
            for index, prompt in enumerate(prompts):
                seen[index, [token for token in prompt if token != VIRTUAL]] = 1
            self.write(decode.seen, seen)

    def step(self) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Takes the next token of every sequence; what is returned waits for them (batch_size,), and for -log p of each
        (batch_size,), or of none if the plan does not compute it."""
        self.run("decode")
        decode = self._cells.decode
        tokens = self.start_read(decode.tokens)
        losses = self.start_read(decode.loss) if "cross_entropy" in self._decodes_by else lambda: np.zeros(0)
        return lambda: (tokens()[:, 0], losses())

    def _rows(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The prompts, by index, that are read together: those that fit into a row one after the other."""
        rows: list[list[int]] = []
        room = 0
        for index, prompt in enumerate(prompts):
            needs = len(prompt) - 1
            if needs == 0:
                continue  # the decoder reads the last token
            if needs > room or not self._packed:
                rows.append([])
                room = self._prompt_lengths[-1]
            assert needs <= room, f"a prompt of {len(prompt)} tokens"
            rows[-1].append(index)
            room -= needs
        return rows

    def _read_row(self, prompts: Sequence[Prompt], sequences: Sequence[int], length: int) -> None:
        """Fills the cache of `sequences` from prompts that lie one after the other in a row."""
        name = prompt_name(length)
        inputs = self._cells[name]
        tokens, positions = np.zeros((2, 1, length), np.int32)
        owners = np.full((1, length), -1, np.int32)
        borders = [0]
        for prompt, sequence in zip(prompts, sequences, strict=True):
            place = slice(borders[-1], borders[-1] + len(prompt))
            real = [0 if token == VIRTUAL else token for token in prompt]
            tokens[0, place], positions[0, place], owners[0, place] = real, np.arange(len(prompt)), sequence
            borders.append(place.stop)
        self.write(inputs.tokens, tokens)
        self.write(inputs.positions, positions)
        self.write(inputs.sequences, owners)
        if self._packed and self._has(inputs.borders):  # a model of one layer attends to no prompt
            padded = borders + [length] * (inputs.borders.shape[1] - len(borders))
            self.write(inputs.borders, np.array([padded], np.int32))
        self.run(name)


def plan_generation(decoding: Decoding, scratch_bytes: Scratch | None = None) -> Plan:
    """The plan of generation alone: frozen weights, a cache of keys and values, and the programs that write text.

    `scratch_bytes` is the backend's: what a call needs beside its arguments.
    """
    spec = decoding.spec
    rows = tuple(replace(row, trainable=False) for row in rows_of(spec, build_decoder(spec, decoding.sampling)))
    weights = FetchedWeights(rows, spec.precision.model, spec.precision.model)
    recorded = DecodingRecordings(decoding, weights)
    programs = {name: finished(name, forms(fuse(prune(calls)), {})) for name, calls in recorded.programs().items()}
    persistent = persistent_storages(programs.values(), weights.refs.values(), scratch_bytes)
    cells = Frame(dict(recorded.cells))
    return Plan(spec, rows, programs, persistent, (), Fates(), {}, {}, cells, weights.refs, {}, {}, Tracked())


def open_generator(decoding: Decoding, backend: Backend, parameters: Callable[[Plan], Iterable]) -> Generator:
    """A generator with the weights that `parameters` gives for its plan."""
    plan = plan_generation(decoding, backend.scratch_bytes)
    generator = Generator(plan, decoding, backend)
    generator.load(parameters(plan))
    return generator


@dataclass
class Pace:
    """What was generated so far, and how long it took: seconds to the first tokens, and of the steps after those."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    first_s: float = 0.0
    steps: int = 0
    steps_s: float = 0.0
    tokens_of_steps: int = 0

    def line(self, weight_bytes: int) -> str:
        """One line for the user."""
        text = f"{self.prompt_tokens:,} prompt tokens, {self.new_tokens:,} new; first token after {self.first_s:.3f} s"
        if not self.steps_s:
            return text
        rate, read = self.tokens_of_steps / self.steps_s, self.steps * weight_bytes / self.steps_s / 1e9
        step_ms = 1e3 * self.steps_s / self.steps
        return f"{text}; then {rate:,.1f} tokens/s, {step_ms:.2f} ms a step, weights read at {read:,.0f} GB/s"


def generate(
    generator: Generator,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    over: Collection[int] = (),
    course: Pace | None = None,
    numbers: Sequence[int] | None = None,
) -> Iterator[Drawn]:
    """Yields tokens as they come, at most `max_tokens` for each prompt. A text ends before a token of `stop`, or when
    its index is in `over`, which the caller may fill while tokens come.

    What is drawn depends on a prompt's number (by default its index) and not on the batch that it is in. UsageError for
    a prompt that is empty, or too long.
    """
    limit = "of --max-length: use a larger one, or a smaller --max-tokens"
    check_prompts(prompts, max_tokens, generator.most_tokens, f"{max_tokens:,} new ones", limit)
    course = course or Pace()
    for begin in range(0, len(prompts), generator.batch_size):
        wave = prompts[begin : begin + generator.batch_size]
        began = last = time.perf_counter()
        generator.start(wave, (numbers or range(len(prompts)))[begin : begin + len(wave)])
        course.prompt_tokens += sum(token != VIRTUAL for prompt in wave for token in prompt)
        live = set(range(len(wave)))
        pending = generator.step()
        for count in range(1, max_tokens + 1):
            ahead = generator.step() if count < max_tokens else None
            (tokens, losses), now = pending(), time.perf_counter()
            if count == 1:
                course.first_s = course.first_s or now - began
            else:
                course.steps, course.steps_s = course.steps + 1, course.steps_s + now - last
                course.tokens_of_steps += len(live)
            last = now
            for index in sorted(live):
                token = int(tokens[index])
                if token in stop:
                    live.discard(index)
                    yield Drawn(begin + index, None)
                    continue
                course.new_tokens += 1
                yield Drawn(begin + index, token, 0.0 - float(losses[index]) if losses.size else None)
                if begin + index in over:
                    live.discard(index)
            if not live or ahead is None:
                break
            pending = ahead


def check_prompts(
    prompts: Sequence[Sequence[int]], max_tokens: int, most: int, new: str, limit: str, where: str = ""
) -> None:
    """UsageError for an empty prompt, and one that is longer than `most` with the `new` tokens; `limit` says of what,
    and what to do."""
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UsageError(f"{where}prompt {number} has no tokens: a model without a begin token needs some text")
        if len(prompt) + max_tokens > most:
            raise UsageError(
                f"{where}prompt {number} has {len(prompt):,} tokens, which with {new} is more than the {most:,} {limit}"
            )
