"""A model that is ready to write: found, planned for its prompts, loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmq.adapters.base_record import as_held, held_for
from llmq.adapters.method import NO_ADAPTERS
from llmq.adapters.peft import StoredAdapter, open_adapter
from llmq.backends import open_backend
from llmq.blocks.cached import Sampling
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.engine.generate import Drawn, Generator, Pace, generate, open_generator
from llmq.errors import UsageError
from llmq.files.huggingface import end_tokens
from llmq.files.source import Values, find_source, open_parameters
from llmq.generation.prompts import PromptReader, Question, TextStream
from llmq.hardware import device as hardware
from llmq.model.config import ModelConfig
from llmq.model.optimizer import Hyperparameters
from llmq.plan.decoding import Decoding
from llmq.plan.generation import plan_generation, refuse_if_too_large
from llmq.plan.memory import Memory
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec

ROW = 2048  # tokens of prompts that are read together, where there are as many
STEP = 64  # lengths of rows are multiples of this


@dataclass(frozen=True)
class Settings:
    """What to run, and how; `max_length` bounds a whole chat. None of a `dtype`: bf16 on a GPU, fp32 on the CPU; of a
    `base_dtype`: as the adapter's base was held when it was trained."""

    model: str
    adapter: str | None = None
    base_dtype: str | None = None
    revision: str | None = None
    from_scratch: bool = False
    tokenizer: str | None = None
    chat_template: str | None = None
    device: str = "auto"
    dtype: str | None = None
    batch_size: int = 8
    max_tokens: int = 256
    max_length: int = 4096
    ignore_end: bool = False
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Answer:
    """What a model wrote after a prompt; `end` says whether a token of its own ended it: stop, else length."""

    text: str | None
    tokens: tuple[int, ...]
    end: str


class Writer:
    """Answers questions with a model. The plan is made for the first ones, or for chats of `max_length`.

    Without `reads_text` all questions are tokens: then the tokenizer of a preset is not fetched from the Hub.
    """

    def __init__(self, settings: Settings, *, reads_text: bool = True) -> None:
        self.settings, self.course = settings, Pace()
        self._source = find_source(settings.model, revision=settings.revision, from_scratch=settings.from_scratch)
        self._adapter: StoredAdapter | None = None
        if settings.adapter is not None:
            self._adapter = open_adapter(Path(settings.adapter), self._source.config)
        trained_on = self._adapter.trained_on if self._adapter else None
        self._held = held_for([trained_on], settings.base_dtype, None)
        base = self._adapter and self._adapter.check_base(self._source, settings.sampling.seed)
        held = f"The weights of the layers are held in {self._held}" if self._held.is_quantized else None
        self._device = hardware.pick(settings.device)
        self.notes = [text for text in (self._device.note, base, held) if text]  # what the user should know
        own = self._source.preset_tokenizer if reads_text else None
        named = settings.tokenizer or self._source.tokenizer_folder or own
        tokenizer = None if named is None else TextTokenizer.open(str(named))
        num_virtual = self._adapter.adapters.num_virtual if self._adapter else 0
        self.reader = PromptReader(tokenizer, self._source.config.vocab_size, settings.chat_template, num_virtual)
        ends = stop_tokens(self._source.config, self._source.folder, tokenizer)
        self._stop = frozenset[int]() if settings.ignore_end else ends
        self._generator: Generator | None = None
        self._asked = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return 0 if self._generator is None else self._generator.weight_bytes

    def answers(self, questions: Sequence[Question], show: Callable[[str], None] | None = None) -> Iterator[Answer]:
        """The answer to each question, in order; `show` gets the text of a single one as it comes."""
        settings = self.settings
        prompts = [self.reader.tokens(question) for question in questions]
        if self._generator is None:
            batch_size = min(settings.batch_size, len(prompts))
            longest = max(map(len, prompts))
            self._open(batch_size, longest + settings.max_tokens, (row_length(prompts, batch_size),))
        return self._taken(prompts, settings.max_tokens, show)

    def chat_answer(self, messages: list[dict[str, str]], show: Callable[[str], None]) -> Answer:
        """The answer to the last message of a chat, of whatever length there is left."""
        limit = min(self.settings.max_length, self._source.config.max_position)
        prompt = self.reader.chat(messages)
        if len(prompt) >= limit:
            raise UsageError(f"the chat has {len(prompt):,} tokens, and --max-length is {limit:,}: begin a new one")
        if self._generator is None:
            count = max(0, math.ceil(math.log(limit / STEP, 4)))
            self._open(1, limit, tuple(_rounded(min(STEP * 4**n, limit)) for n in range(count + 1)))
        (answer,) = self._taken([prompt], min(self.settings.max_tokens, limit - len(prompt)), show)
        return answer

    def _open(self, batch_size: int, length: int, rows: tuple[int, ...]) -> None:
        """Plans, allocates and loads. UsageError beyond the model's positions, MemoryLimitError beyond the memory."""
        config, where = self._source.config, self._device
        if length > config.max_position:
            raise UsageError(
                f"the longest prompt and --max-tokens {self.settings.max_tokens} make {length:,} tokens, and "
                f"{self._source.name} has {config.max_position:,} positions: use a smaller --max-tokens"
            )
        dtype = self.settings.dtype or ("bf16" if where.kind == "cuda" else "fp32")
        precision = Precision(dtype, dtype, m=dtype, v=dtype, master=dtype, grad=dtype)
        adapters = NO_ADAPTERS if self._adapter is None else self._adapter.adapters.without_dropout()
        spec = Spec(config, precision, Memory(), Hyperparameters(), batch_size, length, adapters=adapters)
        packed = hardware.packing_problem(where, dtype) is None
        decoding = Decoding(spec, self.settings.sampling, rows, packed)
        free = hardware.memory_bytes(where)[1]
        backend = open_backend(where.kind)
        refuse_if_too_large(plan_generation(decoding, backend.scratch_bytes), free)
        values = self.values()
        self._generator = open_generator(decoding, backend, lambda plan: values(plan.rows))
        self._generator.warm_up()

    def values(self) -> Values:
        """The weights that it writes with, and the adapter's."""
        model = open_parameters(self._source, self.settings.sampling.seed)
        return as_held(self._held, model) if self._adapter is None else self._adapter.values(model, self._held)

    def _taken(
        self, prompts: list[tuple[int, ...]], count: int, show: Callable[[str], None] | None
    ) -> Iterator[Answer]:
        assert self._generator is not None
        numbers = range(self._asked, self._asked + len(prompts))
        about: dict[str, Any] = {"max_tokens": count, "stop": self._stop, "course": self.course}
        found = generate(self._generator, prompts, numbers=numbers, **about)
        self._asked += len(prompts)
        return answers(found, len(prompts), count, self.reader, show)


def answers(
    found: Iterable[Drawn],
    num_prompts: int,
    max_tokens: int,
    reader: PromptReader,
    show: Callable[[str], None] | None = None,
) -> Iterator[Answer]:
    """The answer to each prompt, in order, from what `generate` yields; `show` gets the text of a single one."""
    tokens: list[list[int]] = [[] for _ in range(num_prompts)]
    ended, done = set[int](), 0
    stream = TextStream(reader) if show is not None else None
    for index, token, _ in found:
        if token is None:
            ended.add(index)
        else:
            tokens[index].append(token)
            if stream is not None and show is not None:
                show(stream.add(token))
        while done < num_prompts and (done in ended or len(tokens[done]) == max_tokens):
            if stream is not None and show is not None:
                show(stream.rest())
            text = reader.text(tokens[done]) if reader.has_tokenizer else None
            yield Answer(text, tuple(tokens[done]), "stop" if done in ended else "length")
            done += 1


def row_length(prompts: Sequence[Sequence[int]], batch_size: int) -> int:
    """Tokens of the rows in which prompts are read: all of a batch in one, where they are not many."""
    waves = [sum(map(len, prompts[n : n + batch_size])) for n in range(0, len(prompts), batch_size)]
    return _rounded(min(max(waves), max(*map(len, prompts), ROW)))


def stop_tokens(config: ModelConfig, folder: Path | None, tokenizer: TextTokenizer | None) -> frozenset[int]:
    """Tokens that end a text, by the model's config and the files in its folder, and by its tokenizer."""
    return frozenset((*end_tokens(config, folder), *([] if tokenizer is None else [tokenizer.eos_token_id])))


def _rounded(length: int) -> int:
    return -(-length // STEP) * STEP


def write(model: str, prompts: Sequence[str], **settings: object) -> list[Answer]:
    """The answer of a model to each prompt; `settings` are those of `Settings`, `sampling` among them."""
    questions = [Question({}, text=prompt) for prompt in prompts]
    return list(Writer(Settings(model, **settings)).answers(questions)) if questions else []  # type: ignore[arg-type]
