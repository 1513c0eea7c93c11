"""A model that is ready to write: found, planned for its prompts, loaded. For `llmq.generate`, and for a terminal: one
prompt as it comes, a file of them, a chat turn by turn."""

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, overload

from llmq.backends.opening import open_backend
from llmq.blocks.cached import Sampling
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.engine.advice import Limits, refuse_if_too_large
from llmq.engine.generate import Generator, Pace, generate, open_generator, plan_generation
from llmq.engine.stored import StoredPlan
from llmq.errors import StorageError, UsageError
from llmq.files.huggingface import end_tokens
from llmq.generation.prompts import Answer, PromptReader, Question, in_order, pieces, questions_of
from llmq.generation.weights import ModelWeights
from llmq.hardware import device as hardware
from llmq.model.config import ModelConfig
from llmq.model.optimizer import Hyperparameters
from llmq.options.commands import STREAMS, GenerateOptions
from llmq.options.field import section_of
from llmq.plan.decoding import Decoding
from llmq.plan.memory import Memory
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec

ROW = 2048  # tokens of prompts that are read together, where there are as many
STEP = 64  # lengths of rows are multiples of this
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


class Loaded(NamedTuple):
    """The weights of a model, and a plan on memory that holds them."""

    weights: ModelWeights
    holder: StoredPlan


class Writer:
    """Answers questions with a model. The plan is made for the first ones, or for chats of `max_length`.

    Without `reads_text` all questions are tokens: then the tokenizer of a preset is not fetched from the Hub. A model
    that is `loaded` is not loaded again.
    """

    def __init__(
        self,
        settings: GenerateOptions,
        *,
        logprobs: bool = False,
        reads_text: bool = True,
        loaded: Loaded | None = None,
    ) -> None:
        self.settings, self.course = settings, Pace()
        self.sampling = Sampling(**{name: getattr(settings, name) for name in SAMPLING}, logprobs=logprobs)
        names = ("adapter", "base_dtype", "revision", "from_scratch", "seed")
        self._device, self._loaded = hardware.pick(settings.device), loaded
        if loaded is None:
            self.weights = ModelWeights.find(settings.model, **{name: getattr(settings, name) for name in names})
            self.notes = [*self.weights.notes, *([self._device.note] if self._device.note else [])]  # for the user
        else:
            self.weights, self.notes = loaded.weights, []
        self._source = self.weights.source
        own = self._source.preset_tokenizer if reads_text or settings.stop else None
        named = settings.tokenizer or self._source.tokenizer_folder or own
        tokenizer = None if named is None else TextTokenizer.open(str(named))
        about = (self._source.config.vocab_size, settings.chat_template, self.weights.adapters.num_virtual)
        self.reader = PromptReader(tokenizer, *about)
        ends = stop_tokens(self._source.config, self._source.folder, tokenizer)
        special, self._stop_texts = self.reader.stops(settings.stop)
        self._stop = special if settings.ignore_end else special | ends
        self._generator: Generator | None = None
        self._asked = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return 0 if self._generator is None else self._generator.weight_bytes

    def answers(self, questions: Sequence[Question]) -> Iterator[Answer]:
        """The answers to all questions, in order, each as soon as it is whole."""
        return in_order(self.pieces(questions, live=False), len(questions), self.settings.samples)

    def pieces(self, questions: Sequence[Question], *, live: bool = True) -> Iterator[Answer]:
        """Pieces of the answers, as their tokens come; not `live`: whole answers, as they end."""
        settings = self.settings
        prompts = [self.reader.tokens(question) for question in questions]
        if self._generator is None:
            each = [prompt for prompt in prompts for _ in range(settings.samples)]
            batch_size = min(settings.batch_size, len(prompts)) * settings.samples
            longest = max(map(len, prompts))
            self._open(batch_size, longest + settings.max_tokens, (row_length(each, batch_size),))
        return self._taken(prompts, settings.max_tokens, live)

    def chat_pieces(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Answer]:
        """Pieces of the answer to the last message of a chat, of whatever length there is left."""
        limit = min(self.settings.max_length, self._source.config.max_position)
        prompt = self.reader.chat(messages)
        if len(prompt) >= limit:
            raise UsageError(f"the chat has {len(prompt):,} tokens, and --max-length is {limit:,}: begin a new one")
        if self._generator is None:
            count = max(0, math.ceil(math.log(limit / STEP, 4)))
            self._open(1, limit, tuple(_rounded(min(STEP * 4**n, limit)) for n in range(count + 1)))
        return self._taken([prompt], min(self.settings.max_tokens, limit - len(prompt)), live=True)

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
        sizes = (batch_size, length)
        spec = Spec(config, precision, Memory(), Hyperparameters(), *sizes, adapters=self.weights.adapters)
        packed = hardware.packing_problem(where, dtype) is None
        decoding = Decoding(spec, self.sampling, rows, packed)
        check = partial(refuse_if_too_large, room=Limits(hardware.memory_bytes(where)[1]))
        if self._loaded is not None:
            self._generator = Generator.on(self._loaded.holder, decoding, check)
        else:
            backend = open_backend(where.backend)
            check(plan_generation(decoding, backend.scratch_bytes))
            values = self.weights.values()
            self._generator = open_generator(decoding, backend, lambda plan: values(plan.rows))
        self._generator.warm_up()

    def _taken(self, prompts: Sequence[Sequence[int]], max_tokens: int, live: bool) -> Iterator[Answer]:
        assert self._generator is not None
        samples, over = self.settings.samples, set[int]()
        places = [(index, sample) for index in range(len(prompts)) for sample in range(samples)]
        found = generate(
            self._generator,
            [prompts[index] for index, _ in places],
            max_tokens=max_tokens,
            stop=self._stop,
            over=over,
            course=self.course,
            numbers=[self._asked + index + sample * STREAMS for index, sample in places],
        )
        self._asked += len(prompts)
        return pieces(self.reader, found, places, max_tokens, over, stop=self._stop_texts, live=live)


def row_length(prompts: Sequence[Sequence[int]], batch_size: int) -> int:
    """Tokens of the rows in which prompts are read: all of a batch in one, where they are not many."""
    waves = [sum(map(len, prompts[n : n + batch_size])) for n in range(0, len(prompts), batch_size)]
    return _rounded(min(max(waves), max(*map(len, prompts), ROW)))


def stop_tokens(config: ModelConfig, folder: Path | None, tokenizer: TextTokenizer | None) -> frozenset[int]:
    """Tokens that end a text, by the model's config and the files in its folder, and by its tokenizer."""
    return frozenset((*end_tokens(config, folder), *([] if tokenizer is None else [tokenizer.eos_token_id])))


def _rounded(length: int) -> int:
    return -(-length // STEP) * STEP


def continue_prompts(writer: Writer, questions: Sequence[Question]) -> None:
    """Prints what follows a prompt as it comes; of several answers each when it is whole, below its number."""
    samples = writer.settings.samples
    if len(questions) * samples == 1:
        for piece in writer.pieces(questions):
            print(piece.text or "", end="", flush=True)
        print(flush=True)
        return
    for answer in writer.answers(questions):
        numbers = [f"prompt {answer.index + 1}"] if len(questions) > 1 else []
        numbers += [f"sample {answer.sample + 1}"] if samples > 1 else []
        print(f"[{', '.join(numbers)}]\n{answer.text}", flush=True)


def answer_all(writer: Writer, questions: Sequence[Question], out: str | None) -> None:
    """Writes a JSON line for each answer, in order, to `out` or stdout."""
    with nullcontext(sys.stdout) if out is None else _opened(out) as file:
        for answer in writer.answers(questions):
            which = {"sample": answer.sample} if writer.settings.samples > 1 else {}
            row = {**questions[answer.index].shown, **which, "text": answer.text, "new_tokens": answer.tokens}
            scores = {"logprobs": answer.logprobs} if writer.sampling.logprobs else {}
            row |= {**scores, "finish_reason": answer.finish_reason}
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)


def chat(writer: Writer, system: str | None) -> None:
    """Answers each line of input that is not empty, with all turns before it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for line in filter(str.strip, _lines()):
        messages.append({"role": "user", "content": line})
        texts = []
        for piece in writer.chat_pieces(messages):
            texts.append(piece.text or "")
            print(texts[-1], end="", flush=True)
        print(flush=True)
        messages.append({"role": "assistant", "content": "".join(texts)})


def _opened(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"--out {path}: cannot be written ({error.strerror})") from None


def _lines() -> Iterator[str]:
    """Lines of input, asked for where that is a terminal."""
    asked = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(asked)
        except EOFError:
            return


@overload
def write(
    model: str | os.PathLike[str], prompts: object, *, stream: Literal[False] = False, **settings: Any
) -> list[Answer]: ...
@overload
def write(
    model: str | os.PathLike[str], prompts: object, *, stream: Literal[True], **settings: Any
) -> Iterator[Answer]: ...
def write(
    model: str | os.PathLike[str],
    prompts: object,
    *,
    stop: str | Sequence[str] | None = None,
    samples: int = 1,
    stream: bool = False,
    logprobs: bool = True,
    **settings: Any,
) -> list[Answer] | Iterator[Answer]:
    """The answers of a model to a prompt or a list of them: a list, by prompt and sample, also for one prompt.

    model: a folder, or a name on the Hub.
    prompts: a text, a chat (a list of messages with `role` and `content`), a list of token ids, or a list of these.
    stop: a text or texts that end an answer and are cut from it.
    samples: answers to each prompt; more than one need a `temperature`.
    stream: returns an iterator instead, with a piece of an answer for each token as it comes.
    logprobs: whether answers have the log p of their tokens, which takes one more pass over each token's logits.
    settings: the other options of `llmq-generate` by name: `max_tokens`, `temperature`, `seed`, `device`, ...

    A warning says where an adapter's base is another than it was trained on, and how it is held if that is quantized.
    UsageError for what cannot be done; other errors are LlmqErrors, too.
    """
    if not isinstance(model, str | os.PathLike):
        raise UsageError(f"the model is {model!r}: give the path of a folder, or a name")
    return written(prompts, stream=stream, logprobs=logprobs, model=model, stop=stop, samples=samples, **settings)


def written(
    prompts: object, *, stream: bool = False, logprobs: bool = True, loaded: Loaded | None = None, **settings: Any
) -> list[Answer] | Iterator[Answer]:
    """The same by all settings, perhaps of a model that is loaded."""
    known = GenerateOptions.model_fields.keys()
    if unknown := settings.keys() - known - {"sampling"}:
        near = {name: get_close_matches(name, known, n=1) for name in sorted(unknown)}
        said = (name + "".join(f" (did you mean {one}?)" for one in close) for name, close in near.items())
        raise UsageError(f"llmq.generate has no setting {', '.join(said)}")
    questions, drawn = questions_of(prompts), settings.pop("sampling", Sampling())
    if not isinstance(drawn, Sampling):
        raise UsageError(f"sampling is {drawn!r}: give temperature, top_k and others by their names")
    sampled = {name: getattr(drawn, name) for name in SAMPLING}
    ends = {"stop": ()} if settings.get("stop") is None else {}
    about = section_of(GenerateOptions, {**sampled, **settings, **ends})
    if not questions:
        return iter(()) if stream else []
    reads_text = any(question.tokens is None for question in questions)
    writer = Writer(about, logprobs=logprobs, reads_text=reads_text, loaded=loaded)
    for note in writer.notes:
        warnings.warn(note, stacklevel=3)
    return writer.pieces(questions) if stream else list(writer.answers(questions))
