"""What takes place at an evaluation: the held-out loss, by the evaluation program over batches of held-out windows, and
with --sample-prompts completions of a file's prompts, both by the weights as they are then; and what callbacks ask of
both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.comm.world import World
from llmq.data.batches.batch import Batch
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.engine.engine import Engine
from llmq.engine.generate import Generator, check_prompts, generate
from llmq.engine.token_sums import TokenSums
from llmq.errors import UsageError
from llmq.files.source import ModelSource
from llmq.generation.prompts import Answer, PromptReader, Question, in_order, pieces
from llmq.generation.text import row_length, stop_tokens
from llmq.options.commands import STREAMS
from llmq.plan.spec import Completions
from llmq.screen import Report, counted, unreported
from llmq.tensor import IGNORED
from llmq.training.hooks import Hook, RunView
from llmq.training.log import RunLog
from llmq.training.progress import Progress
from llmq.training.records import EvalRecord, sample_line

if TYPE_CHECKING:
    from llmq.data.batches.loader import Data
    from llmq.generation.answers import Exercise
    from llmq.training.finish import RunData
    from llmq.training.ready import Ready

AT_A_TIME = 8  # sequences that are completed at once: more would take a larger cache from training
PROMPTS_OF_STEP = 2**10  # numbers of sequences, which address what is drawn, from one step to the next
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
    sums, tokens = found
    record = EvalRecord(
        step=now.step,
        epoch=data.epoch(now.position, now.stream),
        loss=sums.mean_loss,
        train_loss=now.losses[0] / now.losses[1] if now.losses[1] else None,
        time_ms=1e3 * (time.perf_counter() - start),
        tokens=tokens,
        trained_tokens=sums.tokens,
        accuracy=sums.accuracy,
    )
    newest = replace(now, eval_loss=record.loss, eval_accuracy=record.accuracy, evaluated=now.step)
    return replace(newest, losses=(0.0, 0)), record


def sums_of(
    engine: Engine,
    world: World,
    count: int,
    batches: Iterable[Batch],
    stopped: Callable[[], bool] = lambda: False,
    report: Report = unreported,
) -> tuple[TokenSums, int] | None:
    """The sums over `count` batches, and all tokens that ranks read for them; None once `stopped`.

    Ranks take batches in turn; all of them run as often, as each run may gather weights. What they find is added up in
    the order of the batches.
    """
    sums, tokens = list[TokenSums](), 0
    for batch in counted(_in_turn(batches, world), -(-count // world.size), report):
        if stopped():
            return None
        sums.append(engine.evaluate(batch))
        tokens += batch.num_tokens
    found = world.gather(sums)
    return _added([part[place] for place in range(len(sums)) for part in found][:count]), tokens * world.size


def mean_loss(engine: Engine, batch: Batch, world: World) -> float | None:
    """Loss per trained token of the batch that each rank gives; None without trained tokens."""
    found = _added(world.gather(engine.evaluate(batch)))
    return found.mean_loss if found.tokens else None


def _added(sums: Sequence[Sequence[Any]]) -> TokenSums:
    """The sums over all batches, in order."""
    losses, tokens, hits = zip(*sums, strict=True) if sums else ((), (), ())
    return TokenSums(sum(losses), sum(tokens), None if None in hits else sum(hits))


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
    """What the model writes while it trains, drawn at a `temperature` (0: greedily): after prompts of --sample-prompts,
    if there are any, at most `max_tokens`; what callbacks ask; and the `exercises` of --eval-metrics. `length` are the
    tokens of a prompt and its answer.
    """

    questions: Sequence[Question]
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    length: int
    reader: PromptReader
    stop: frozenset[int]
    of_callbacks: bool
    temperature: float
    exercises: Sequence[Exercise] = ()

    def completions(self, *, packed: bool) -> Completions:
        """What the plan has to hold for them; `packed`: whether the device can read several prompts in a row."""
        others = self.of_callbacks or bool(self.exercises)
        most = AT_A_TIME if others else -(-len(self.prompts) // MULTIPLE) * MULTIPLE
        sequences = min(AT_A_TIME, most)
        row = row_length([*self.prompts, *[range(self.length - 1)] * others], sequences)
        asked = {"sample_prompts": bool(self.prompts), "sample_length": self.of_callbacks}
        asked["eval_metrics"] = bool(self.exercises)
        options = tuple(name for name, given in asked.items() if given)
        return Completions(sequences, self.length, row, packed, options, self.temperature)

    def answers(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        step: int,
        stop: Sequence[str] = (),
        samples: int = 1,
        *,
        ends: Callable[[], bool] = lambda: False,
        report: Report = unreported,
    ) -> list[Answer]:
        """Some `samples` of answers to each prompt, of which texts `stop` end some, in order; those before the run
        `ends`. What is drawn is another at each step, and the same in a resumed run."""
        special, texts = self.reader.stops(stop)
        over, ends_at = set[int](), self.stop | special
        places = [(number, sample) for number in range(len(prompts)) for sample in range(samples)]
        numbers = [step * PROMPTS_OF_STEP + number + sample * STREAMS for number, sample in places]
        each = [prompts[number] for number, _ in places]
        writer = Generator.beside(engine)
        found = generate(writer, each, max_tokens=max_tokens, stop=ends_at, over=over, numbers=numbers)
        seen = takewhile(lambda _: not ends(), counted(found, None, report))
        written = pieces(self.reader, seen, places, max_tokens, over, stop=texts)
        return list(in_order(written, len(prompts), samples))


class SampleHook(Hook):
    """Completes the prompts at every evaluation, until the run `ends`; without prompts it does nothing."""

    def __init__(self, samples: SamplePrompts | None, log: RunLog, ends: Callable[[], bool]) -> None:
        self._samples, self._log, self._ends = samples, log, ends

    def on_evaluate(self, run: RunView, record: EvalRecord | None) -> None:
        """Writes the completions."""
        if (asked := self._samples) is None or not asked.prompts:
            return
        step = run.progress.step
        with self._log.task("Completing prompts") as report:
            answers = asked.answers(run.engine, asked.prompts, asked.max_tokens, step, ends=self._ends, report=report)
        samples = [
            {**question.shown, "text": answer.text, "new_tokens": answer.tokens, "end": answer.finish_reason}
            for question, answer in zip(asked.questions, answers, strict=False)
        ]
        for sample in samples:
            self._log.say(sample_line(step, sample))
        self._log.record("samples", step=step, samples=samples)


def open_samples(
    questions: Sequence[Question], log: RunLog, source: ModelSource, trains: RunData
) -> SamplePrompts | None:
    """The questions, and room for others if callbacks or --eval-metrics ask some (without any: None), by the model's
    tokenizer or the data's, and the template of its chats.

    UsageError for text without a tokenizer, an empty prompt, or more tokens than the model has positions.
    """
    if not questions and log.sample_length is None and not log.eval_metrics:
        return None
    own = source.preset_tokenizer if any(question.tokens is None for question in questions) else None
    named, config, max_tokens = trains.tokenizer or own, trains.config, log.sample_tokens
    tokenizer = None if named is None else TextTokenizer.open(str(named))
    template = (trains.templates or {}).get("default")
    reader = PromptReader(tokenizer, config.vocab_size, template, trains.data.train.num_virtual)
    prompts = [reader.tokens(question) for question in questions]
    positions = f"positions of {source.name}: use fewer"
    limits = (max_tokens, config.max_position, f"--sample-tokens {max_tokens:,}", positions)
    check_prompts(prompts, *limits, where="--sample-prompts: ")
    if (log.sample_length or 0) > config.max_position:
        raise UsageError(
            f"--sample-length {log.sample_length:,} is more than the {config.max_position:,} positions of "
            f"{source.name}: use fewer"
        )
    exercises = _exercises(log, trains.data, reader, max_tokens) if log.eval_metrics else []
    of_metrics = [len(one.prompt) + trains.data.train.num_virtual + max_tokens for one in exercises]
    length = max([log.sample_length or 0, *(len(prompt) + max_tokens for prompt in prompts), *of_metrics])
    ends = stop_tokens(config, source.folder, tokenizer)
    about = (log.sample_length is not None, log.sample_temperature, exercises)
    return SamplePrompts(questions, prompts, max_tokens, length, reader, ends, *about)


def _exercises(log: RunLog, data: Data, reader: PromptReader, max_tokens: int) -> list[Exercise]:
    """Questions of the held-out documents, spread evenly over them, that --eval-metrics asks; a plan without data has
    one that is as long as any. UsageError where there are none, and for answers that are no text."""
    from llmq.generation.answers import Exercise, exercises

    room = data.tokens_per_row
    if not data.is_there:
        return [Exercise((0,) * (room - max_tokens), "")]
    if not reader.has_tokenizer:
        raise UsageError("--eval-metrics: neither the model nor the data has a tokenizer, which makes text of answers")
    assert data.eval is not None, "without evaluations it is refused"
    vocab, files = data.eval.form.vocab_size, data.eval.token_files
    places = [(file, number) for file in files for number in range(file.num_documents)]
    step = max(len(places) // log.eval_answers, 1)
    spread = [*places[::step], *(place for at, place in enumerate(places) if at % step)]
    found = exercises((file.document(number, vocab) for file, number in spread), reader.text)
    kept = list(islice((one for one in found if len(one.prompt) < room), log.eval_answers))
    if not kept:
        raise UsageError(
            f"--eval-metrics: no held-out row has a prompt of fewer than {room} tokens and an answer: give rows that "
            "have, or leave it out"
        )
    return kept
