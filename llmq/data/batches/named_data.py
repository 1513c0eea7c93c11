"""`--data` of llmq-train: tokenized once with the model's own tokenizer into the cache, or read as a stream."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmq.data.batches.packing import count_packs, repeated, sizes_in_rows, with_docs
from llmq.data.batches.rows import WINDOWS, RowForm, Samples
from llmq.data.batches.streaming import StreamedRows, open_stream
from llmq.data.chat.encode import EncodeOptions
from llmq.data.chat.template import read_prompt_template
from llmq.data.rows.file_rows import FileRows
from llmq.data.rows.find_sources import NAMES, Request, find_anything, parsed_mapping
from llmq.data.stream import START
from llmq.data.tokens.pipeline import tokenized
from llmq.data.tokens.text import Texts
from llmq.data.tokens.tokenize import Say, cached
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import UsageError
from llmq.screen import StartTask, unshown

if TYPE_CHECKING:
    from llmq.files.source import ModelSource
    from llmq.options.data import SourceOptions


@dataclass(frozen=True, eq=False)
class NamedData:
    """What `--data` names: `find` looks for it, `open` makes it what is trained on.

    `say` shows a line now, of work that takes place, `task` its progress; `note` a line on what the data is, where that
    is shown.
    """

    options: SourceOptions
    tokenizer: TextTokenizer
    plan_only: bool
    say: Say
    note: Say
    task: StartTask
    requests: tuple[Request, ...] = ()  # what is to be tokenized, by name

    @property
    def names(self) -> Sequence[str]:
        """What is named, in order."""
        return self.options.data or ()

    def find(self, seq_len: int) -> NamedData:
        """Itself, with requests for rows of `seq_len` tokens; see `find_anything` for the errors."""
        options = self.options
        for name in (name for name in self.names if name in NAMES and Path(name).exists()):
            self.note(f"--data {name} is {Path(name).absolute()}, not the data set of that name")
        encode = encode_options(options, seq_len)
        found = [find_anything(name, options.eval_fraction, streaming=options.streaming) for name in self.names]
        asked = (Request(one, self.tokenizer, one.known(encode), options.skip_bad_rows) for one in found)
        return replace(self, requests=tuple(one.settled() for one in asked))

    def open(self, form: RowForm) -> tuple[list[list[str]] | StreamedRows | Estimated, list[str]]:
        """What is trained on, as token files by name unless it is read or only planned; and files to evaluate on."""
        if self.options.streaming:
            (request,) = self.requests
            return open_stream(request, form, self.note), self._evaluation_of(request)
        if self.plan_only and not all(request.is_made for request in self.requests):
            return self._estimated(form), []
        made = [self._cached(request) for request in self.requests]
        train = [[name for name in files if Path(name).name.startswith("train")] for files in made]
        return train, [name for files in made for name in files if Path(name).name.startswith("eval")]

    def _evaluation_of(self, request: Request) -> list[str]:
        """The token files to evaluate on of a stream, if it has a part for that."""
        found = request.found
        if found.evaluation is None or self.plan_only:
            return []
        rule = f"{found.rule}; its part for evaluation"
        held = replace(found, train=found.evaluation, evaluation=None, numbered=False, rule=rule)
        return self._cached(replace(request, found=held))

    def _cached(self, request: Request) -> list[str]:
        """The names of a request's token files, as patterns."""
        name, entry, is_made = request.found.name, request.entry, request.is_made
        say, task = (self.note, unshown) if is_made else (self.say, self.task)
        about = f"tokenizing into {entry}\n{request.found.rule}"
        with task(f"Tokenizing {name}") as on_progress:
            say(f"{name}: tokenized before, in {entry}" if is_made else f"{name}: {about}")
            return [glob.escape(str(file)) for file in cached(request, on_progress=on_progress, say=say)]

    def _estimated(self, form: RowForm) -> Estimated:
        """What would be tokenized, said; and about how much it is."""
        for request in self.requests:
            if not request.is_made:
                self.note(f"{request.found.name}: would be tokenized into {request.entry}\n{request.found.rule}")
                if encoder := request.encoder():
                    self.note(encoder.describe())
        counts, lengths = zip(*map(_about, self.requests), strict=True)
        tokens = sum(counts)
        self.note(f"about {tokens:,} tokens for training, by a sample of its beginning")
        files = [(request.entry, count) for request, count in zip(self.requests, counts, strict=True)]
        sizes = sizes_in_rows(np.concatenate(lengths), form) if form.kind != WINDOWS else np.empty(0)
        if not len(sizes):
            return Estimated(form, max(tokens - 1, 0) // form.room, files)
        form = with_docs(form, repeated(sizes, form.seq_len))
        assert form.docs is not None
        real = int(sizes.sum()) - form.num_virtual * len(sizes)
        num_rows = count_packs(sizes, form.seq_len, form.docs) * tokens // real
        return Estimated(form, max(num_rows, 1), files, form.limits(int(sizes.max())))


def encode_options(options: SourceOptions, seq_len: int | None) -> EncodeOptions:
    """How rows become tokens; those of more than `seq_len` tokens are too long."""
    return EncodeOptions(
        data_format=options.data_format,
        mapping=parsed_mapping(options.map_ or ()),
        chat_template=options.chat_template,
        train_on=options.train_on,
        overlong=options.overlong,
        seq_len=seq_len,
        prompt_template=read_prompt_template(options.prompt_template) if options.prompt_template else None,
        preamble=options.preamble,
    )


def open_named(
    options: SourceOptions, source: ModelSource, *, plan_only: bool, say: Say, note: Say, task: StartTask
) -> NamedData | None:
    """The data of `--data` with the tokenizer of the model, or None if there is none.

    Raises UsageError where the model has no tokenizer, or the one of --tokenizer has ids that the model does not have,
    and what reading the tokenizer raises.
    """
    if options.data is None:
        return None
    if (name := source.tokenizer_folder or source.preset_tokenizer) is None:
        fix = "name one with --tokenizer" if source.from_scratch else "give a model with a tokenizer"
        raise UsageError(
            f"--data is tokenized with the model's own tokenizer, but {source.name} has none: {fix}, or make token "
            "files with tokenize-data and give them as --train-file"
        )
    tokenizer, known = TextTokenizer.open(str(name)), source.config.vocab_size
    if source.tokenizer_asked and tokenizer.vocab_size > known:
        raise UsageError(
            f"--tokenizer {tokenizer.folder} has {tokenizer.vocab_size} ids, but {source.name} has a vocabulary of "
            f"{known}: add --vocab-size tokenizer, or give a smaller tokenizer"
        )
    return NamedData(options, tokenizer, plan_only, say, note, task)


def _about(request: Request) -> tuple[int, np.ndarray]:
    """About how many tokens there are for training, by the first batch; and the lengths (n,) of its documents."""
    train = request.found.train
    if isinstance(train, Texts):
        total = train.num_bytes
    elif isinstance(train, FileRows):
        total = train.about()
    else:
        return request.found.limit or 0, np.empty(0, np.int64)
    with closing(tokenized(request.work(train, request.encoder()))) as batches:
        _, first = next(batches, (START, None))
    if first is None:
        return 0, np.empty(0, np.int64)
    done = first.num_bytes if isinstance(train, Texts) else first.counts.rows
    lengths = np.diff(first.stops, prepend=0, append=len(first.ids))
    return len(first.ids) * total // max(done, 1), lengths[lengths > 0]


class Estimated(Samples):
    """Samples of data that is not tokenized yet, for a plan: how many there will be, about, and their documents."""

    def __init__(
        self, form: RowForm, num_windows: int, files: list[tuple[Path, int]], limits: tuple[int, int] | None = None
    ) -> None:
        super().__init__(form)
        self.num_windows, self.files, self.limits = num_windows, files, limits
