"""A model that is ready to write: found, planned for its prompts, loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from llmq.backends import open_backend
from llmq.blocks.cached import Sampling
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.engine.generate import Generator, Pace, generate, open_generator
from llmq.errors import UsageError
from llmq.files.huggingface import end_tokens
from llmq.files.source import ModelSource, find_source, initial_parameters
from llmq.generation.prompts import PromptReader, Question, TextStream
from llmq.hardware import device as hardware
from llmq.model.optimizer import Hyperparameters
from llmq.plan.generation import Decoding, plan_generation, refuse_if_too_large
from llmq.plan.memory import Memory
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec

ROW = 2048  # tokens of prompts that are read together, where there are as many
STEP = 64  # lengths of rows are multiples of this


@dataclass(frozen=True)
class Settings:
    """What to run, and how; `max_length` bounds a whole chat. None of a `dtype`: bf16 on a GPU, fp32 on the CPU."""

    model: str
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
    """Answers questions with a model. The plan is made for the first ones, or for chats of `max_length`."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.course = settings, Pace()
        self._source = find_source(settings.model, revision=settings.revision, from_scratch=settings.from_scratch)
        self._device = hardware.pick(settings.device)
        named = settings.tokenizer or (str(self._source.tokenizer_folder) if self._source.tokenizer_folder else None)
        tokenizer = None if named is None else TextTokenizer.open(named)
        self.reader = PromptReader(tokenizer, self._source.config.vocab_size, settings.chat_template)
        self._stop = frozenset() if settings.ignore_end else frozenset(_ends(self._source, tokenizer))
        self._generator: Generator | None = None
        self._asked = 0

    @property
    def note(self) -> str | None:
        """What the user should know of the device."""
        return self._device.note

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
            waves = [sum(map(len, prompts[n : n + batch_size])) for n in range(0, len(prompts), batch_size)]
            longest = max(map(len, prompts))
            row = _rounded(min(max(waves), max(longest, ROW)))
            self._open(batch_size, longest + settings.max_tokens, (row,))
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
        spec = Spec(config, precision, Memory(), Hyperparameters(), batch_size, length)
        packed = hardware.packing_problem(where, dtype) is None
        decoding = Decoding(spec, self.settings.sampling, rows, packed)
        free = hardware.memory_bytes(where)[1]
        backend = open_backend(where.kind)
        refuse_if_too_large(plan_generation(decoding, backend.scratch_bytes), free)
        values = partial(initial_parameters, self._source, seed=self.settings.sampling.seed)
        self._generator = open_generator(decoding, backend, lambda plan: values(rows=plan.rows))
        self._generator.warm_up()

    def _taken(
        self, prompts: list[tuple[int, ...]], count: int, show: Callable[[str], None] | None
    ) -> Iterator[Answer]:
        assert self._generator is not None
        tokens: list[list[int]] = [[] for _ in prompts]
        ended, done = set[int](), 0
        stream = TextStream(self.reader) if show is not None else None
        found = generate(
            self._generator,
            prompts,
            max_tokens=count,
            stop=self._stop,
            course=self.course,
            first_number=self._asked,
        )
        self._asked += len(prompts)
        for index, token in found:
            if token is None:
                ended.add(index)
            else:
                tokens[index].append(token)
                if stream is not None and show is not None:
                    show(stream.add(token))
            while done < len(prompts) and (done in ended or len(tokens[done]) == count):
                if stream is not None and show is not None:
                    show(stream.rest())
                text = self.reader.text(tokens[done]) if self.reader.has_tokenizer else None
                yield Answer(text, tuple(tokens[done]), "stop" if done in ended else "length")
                done += 1


def _ends(source: ModelSource, tokenizer: TextTokenizer | None) -> set[int]:
    """Tokens that end a text, by the model's files and by its tokenizer."""
    return {*end_tokens(source.config, source.folder), *([tokenizer.eos_token_id] if tokenizer is not None else [])}


def _rounded(length: int) -> int:
    return -(-length // STEP) * STEP


def write(model: str, prompts: Sequence[str], **settings: object) -> list[Answer]:
    """The answer of a model to each prompt; `settings` are those of `Settings`, `sampling` among them."""
    questions = [Question({}, text=prompt) for prompt in prompts]
    return list(Writer(Settings(model, **settings)).answers(questions)) if questions else []  # type: ignore[arg-type]
