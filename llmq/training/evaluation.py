"""What takes place at an evaluation: the held-out loss, by the evaluation program over batches of held-out windows, and
with --sample-prompts completions of a file's prompts, both by the weights as they are then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import numpy as np

from llmq.comm.world import World
from llmq.data.batches.batch import Batch
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.engine.engine import Engine
from llmq.engine.generate import Generator, generate
from llmq.errors import UsageError
from llmq.files.source import ModelSource
from llmq.generation.prompts import PromptReader, Question, in_order, pieces
from llmq.generation.text import row_length, stop_tokens
from llmq.plan.spec import Completions
from llmq.screen import Report, counted, unreported
from llmq.tensor import IGNORED
from llmq.training.hooks import Hook, RunView
from llmq.training.log import RunLog
from llmq.training.progress import Progress
from llmq.training.records import EvalRecord, sample_line

if TYPE_CHECKING:
    from llmq.training.finish import RunData
    from llmq.training.ready import Ready

AT_A_TIME = 8  # sequences that are completed at once: more would take a larger cache from training
MULTIPLE = 4  # of sequences, as fp8 products with a scale per block need


def evaluate(
    run: Ready, engine: Engine, now: Progress, stopped: Callable[[], bool], *, is_last: bool
) -> tuple[Progress, EvalRecord] | None:
    """The progress after an evaluation on held-out data, of which --final-eval may take more, and its record; None once
    `stopped`."""
    world, data, start = run.ranks.world, run.data, time.perf_counter()
    count, batches = data.held_out(run.log.eval_steps(last=is_last))
    with run.log.task("Evaluating") as report:
        found = sums_of(engine, world, count, batches, stopped, report)
    if found is None:
        return None
    total, trained, tokens = found
    record = EvalRecord(
        step=now.step,
        epoch=data.epoch(now.position, now.stream),
        loss=total / max(trained, 1),
        train_loss=now.losses[0] / now.losses[1] if now.losses[1] else None,
        time_ms=1e3 * (time.perf_counter() - start),
        tokens=tokens,
        trained_tokens=trained,
    )
    return replace(now, losses=(0.0, 0), eval_loss=record.loss, evaluated=now.step), record


def sums_of(
    engine: Engine,
    world: World,
    count: int,
    batches: Iterable[Batch],
    stopped: Callable[[], bool] = lambda: False,
    report: Report = unreported,
) -> tuple[float, int, int] | None:
    """The sums of losses and of trained tokens of `count` batches, and all tokens that ranks read for them; None once
    `stopped`.

    Ranks take batches in turn; all of them run as often, as each run may gather weights. What they find is added up in
    the order of the batches.
    """
    sums, tokens = list[tuple[float, int]](), 0
    for batch in counted(_in_turn(batches, world), -(-count // world.size), report):
        if stopped():
            return None
        sums.append(engine.evaluate(batch))
        tokens += batch.num_tokens
    found = world.gather(sums)
    return *_added([part[place] for place in range(len(sums)) for part in found][:count]), tokens * world.size


def mean_loss(engine: Engine, batch: Batch, world: World) -> float | None:
    """Loss per trained token of the batch that each rank gives; None without trained tokens."""
    loss, count = _added(world.gather(engine.evaluate(batch)))
    return loss / count if count else None


def _added(sums: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """The sums of losses and tokens of all batches, in order."""
    return sum(loss for loss, _ in sums), sum(count for _, count in sums)


def _in_turn(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """This rank's batch of every `world.size`; where the last ones are too few, one without targets."""
    remaining = iter(batches)
    while turn := list(islice(remaining, world.size)):
        if world.rank < len(turn):
            yield turn[world.rank]
        else:
            yield replace(turn[0], targets=np.full_like(turn[0].targets, IGNORED))


@dataclass(frozen=True)
class SamplePrompts:
    """Prompts as tokens, and how they are completed: greedily, each by at most `max_tokens`."""

    questions: Sequence[Question]
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    reader: PromptReader
    stop: frozenset[int]

    def completions(self, *, packed: bool) -> Completions:
        """What the plan has to hold for them; `packed`: whether the device can read several prompts in a row."""
        sequences = min(AT_A_TIME, -(-len(self.prompts) // MULTIPLE) * MULTIPLE)
        longest = max(map(len, self.prompts))
        return Completions(sequences, longest + self.max_tokens, row_length(self.prompts, sequences), packed)


class SampleHook(Hook):
    """Completes the prompts at every evaluation, until the run `ends`; without prompts it does nothing."""

    def __init__(self, samples: SamplePrompts | None, log: RunLog, ends: Callable[[], bool]) -> None:
        self._samples, self._log, self._ends = samples, log, ends

    def on_evaluate(self, run: RunView, record: EvalRecord | None) -> None:
        """Writes the completions."""
        if (asked := self._samples) is None:
            return
        step, count, tokens = run.progress.step, len(asked.prompts), asked.max_tokens
        with self._log.task("Completing prompts") as report:
            found = generate(Generator.beside(run.engine), asked.prompts, max_tokens=tokens, stop=asked.stop)
            seen = takewhile(lambda _: not self._ends(), counted(found, None, report))
            written = pieces(asked.reader, seen, [(number, 0) for number in range(count)], tokens, set())
            answers = list(zip(asked.questions, in_order(written, count), strict=False))
        samples = [
            {**question.shown, "text": answer.text, "new_tokens": answer.tokens, "end": answer.finish_reason}
            for question, answer in answers
        ]
        for sample in samples:
            self._log.say(sample_line(step, sample))
        self._log.record("samples", step=step, samples=samples)


def open_samples(
    questions: Sequence[Question], max_tokens: int, source: ModelSource, trains: RunData
) -> SamplePrompts | None:
    """The questions (without any: None) by the model's tokenizer or the data's, and the template of its chats.

    UsageError for text without a tokenizer, an empty prompt, or more tokens than the model has positions.
    """
    if not questions:
        return None
    own = source.preset_tokenizer if any(question.tokens is None for question in questions) else None
    named, config = trains.tokenizer or own, trains.config
    tokenizer = None if named is None else TextTokenizer.open(str(named))
    template = (trains.templates or {}).get("default")
    reader = PromptReader(tokenizer, config.vocab_size, template, trains.data.train.num_virtual)
    prompts = [reader.tokens(question) for question in questions]
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UsageError(f"--sample-prompts: prompt {number} has no tokens: give it some text")
        if len(prompt) + max_tokens > config.max_position:
            raise UsageError(
                f"--sample-prompts: prompt {number} has {len(prompt):,} tokens, which with --sample-tokens "
                f"{max_tokens:,} is more than the {config.max_position:,} positions of {source.name}: use fewer"
            )
    return SamplePrompts(questions, prompts, max_tokens, reader, stop_tokens(config, source.folder, tokenizer))
