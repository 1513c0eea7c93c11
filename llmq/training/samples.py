"""--sample-prompts: completions of a file's prompts by the weights that a run trains, as they are at an evaluation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.engine.engine import Engine
from llmq.engine.generate import Drawn, Generator, generate
from llmq.errors import UsageError
from llmq.files.source import ModelSource
from llmq.generation.prompts import PromptReader, Question, drafts, in_order, pieces
from llmq.generation.text import row_length, stop_tokens
from llmq.plan.spec import Completions
from llmq.screen import Report
from llmq.training.exports import RunData
from llmq.training.hooks import Hook, RunView
from llmq.training.log import RunLog
from llmq.training.records import EvalRecord

AT_A_TIME = 8  # sequences: more would take a larger cache from training
MULTIPLE = 4  # of sequences, as fp8 products with a scale per block need


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

    def write(self, engine: Engine, stopped: Callable[[], bool], report: Report) -> Iterator[Mapping[str, Any]]:
        """A record for each prompt, in order, until `stopped`; `report` gets the tokens that are done."""
        found = generate(Generator.beside(engine), self.prompts, max_tokens=self.max_tokens, stop=self.stop)
        seen = takewhile(lambda _: not stopped(), _reported(found, report))
        count = len(self.prompts)
        written = pieces(seen, drafts(self.reader, count), self.max_tokens, set(), live=False)
        for question, answer in zip(self.questions, in_order(written, count), strict=False):
            about = {"text": answer.text, "new_tokens": answer.tokens, "end": answer.finish_reason}
            yield {**question.shown, **about}


class SampleHook(Hook):
    """Completes the prompts at every evaluation, until the run `ends`; without prompts it does nothing."""

    def __init__(self, samples: SamplePrompts | None, log: RunLog, ends: Callable[[], bool]) -> None:
        self._samples, self._log, self._ends = samples, log, ends

    def on_evaluate(self, run: RunView, record: EvalRecord | None) -> None:
        """Writes the completions."""
        if self._samples is not None:
            with self._log.task("Completing prompts") as report:
                self._log.samples(run.progress.step, list(self._samples.write(run.engine, self._ends, report)))


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


def _reported(found: Iterator[Drawn], report: Report) -> Iterator[Drawn]:
    for count, event in enumerate(found, 1):
        yield event
        report(count, None)
