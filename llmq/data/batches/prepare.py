"""`--data` of llmq-train: found, tokenized once with the model's own tokenizer into the cache, or read as a stream."""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.data.batches.first_fit import count_packs, fewest_docs, repeated
from llmq.data.batches.mixture import mix_file, read_mix
from llmq.data.batches.packing import piece_lengths
from llmq.data.batches.row_layout import PADDED, WINDOWS, RowLayout
from llmq.data.batches.streaming import open_stream
from llmq.data.batches.windows import Rows
from llmq.data.chat.encode import EncodeOptions
from llmq.data.chat.samples import printable
from llmq.data.rows.file_rows import FileRows
from llmq.data.rows.request import Request, parsed_mapping
from llmq.data.rows.sources import find_anything
from llmq.data.tokens.pipeline import RowWork, TextWork, tokenized
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenize import Say, cache_entry, cached, is_whole, settled
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import DataError, UsageError

if TYPE_CHECKING:
    from llmq.files.source import ModelSource
    from llmq.options.sections import SourceOptions

SAMPLE_TOKENS = 512  # of a document, printed when training starts


@dataclass(frozen=True)
class Tokenized:
    """What `--data` became: token files by source, or samples that are none."""

    train: tuple[str, ...] = ()  # a path or glob for each source
    evaluation: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None  # of a mix file
    samples: Any = None  # a Stream, or Estimated, where there are no token files

    def as_options(self) -> dict[str, Any]:
        """The token files as --train-file, --eval-file and --weight would name them."""
        found: dict[str, Any] = {"train_file": self.train, "eval_file": self.evaluation or None}
        return found if self.weights is None else {**found, "weight": self.weights}


@dataclass(frozen=True, eq=False)
class Named:
    """The data that `--data` names, before the sequence length is known."""

    names: tuple[str, ...]
    weights: tuple[float, ...] | None
    tokenizer: TextTokenizer
    encode: EncodeOptions
    eval_fraction: float | None
    skip_bad_rows: int
    streaming: bool
    plan_only: bool
    say: Say

    def requests(self, seq_len: int) -> list[Request]:
        """Finds the data: what is to be tokenized, by source."""
        encode = replace(self.encode, seq_len=seq_len)
        requests = []
        for name in self.names:
            found = find_anything(name, self.eval_fraction, streaming=self.streaming)
            requests.append(settled(Request(found, self.tokenizer, found.known(encode), self.skip_bad_rows)))
        return requests

    def tokenized(self, requests: Sequence[Request], layout: RowLayout, **sizes: Any) -> Tokenized:
        """Tokenizes the data, each source once; with `plan_only`, only says what would be done.

        `sizes` are those of the rows: `seq_len`, `vocab_size`, `max_docs` and the `seed` that packs them.
        """
        if self.streaming:
            return self._stream(requests[0], layout, **sizes)
        if self.plan_only and (fresh := [request for request in requests if not is_whole(cache_entry(request))]):
            return Tokenized(samples=self._estimated(requests, fresh, layout, sizes["seq_len"], sizes["max_docs"]))
        train, evaluation = [], []
        for request in requests:
            files = self._cached(request)
            train.append(_pattern([file for file in files if file.name.startswith("train")]))
            evaluation += [glob.escape(str(file)) for file in files if file.name.startswith("eval")]
        return Tokenized(tuple(train), tuple(evaluation), self.weights)

    def _cached(self, request: Request) -> list[Path]:
        name = ", ".join(request.found.asked)
        entry = cache_entry(request)
        if is_whole(entry):
            self.say(f"{name}: tokenized before, in {entry}")
        else:
            self.say(f"{name}: tokenizing into {entry}\n{request.found.rule}")
        with _progress(name) as on_progress:
            return cached(request, on_progress=on_progress, say=self.say)

    def _stream(self, request: Request, layout: RowLayout, **sizes: Any) -> Tokenized:
        stream = open_stream(request, say=self.say, layout=layout, **sizes)
        evaluation: list[str] = []
        if request.found.evaluation is not None and not self.plan_only:
            held = replace(request.found, train=request.found.evaluation, evaluation=None, numbered=False)
            held = replace(held, rule=f"{held.rule}; its part for evaluation")
            files = self._cached(replace(request, found=held))
            evaluation = [glob.escape(str(file)) for file in files]
        return Tokenized((), tuple(evaluation), None, stream)

    def _estimated(
        self,
        requests: Sequence[Request],
        fresh: Sequence[Request],
        layout: RowLayout,
        seq_len: int,
        max_docs: int | None,
    ) -> Estimated:
        """What would be tokenized, said; and about how much it is."""
        for request in fresh:
            found = request.found
            self.say(f"{', '.join(found.asked)}: would be tokenized into {cache_entry(request)}\n{found.rule}")
            encoder = request.encoder()
            if encoder is not None:
                self.say(encoder.describe())
        counts, lengths = zip(*map(_about, requests), strict=True)
        tokens = sum(counts)
        self.say(f"about {tokens:,} tokens for training, by a sample of its beginning")
        pieces = piece_lengths(np.concatenate(lengths), seq_len)
        files = list(zip(map(cache_entry, requests), counts, strict=True))
        if layout.kind == WINDOWS or not len(pieces):
            return Estimated(seq_len, tokens, max(tokens - 1, 0) // seq_len, files=files)
        docs = 1 if layout.kind == PADDED else max_docs or fewest_docs(repeated(pieces, seq_len), seq_len)
        num_rows = count_packs(pieces, seq_len, docs) * tokens // int(pieces.sum())
        limits = (docs, int(pieces.max())) if docs > 1 else None
        return Estimated(seq_len, tokens, max(num_rows, 1), limits, files=files)


def open_named(options: SourceOptions, source: ModelSource, *, plan_only: bool, say: Say) -> Named | None:
    """The data of `--data` with the tokenizer of the model, or None if there is none.

    Raises UsageError where the model has no tokenizer, and what reading a mix file or the tokenizer raises.
    """
    if options.data is None:
        return None
    folder = source.tokenizer_folder
    if folder is None:
        raise UsageError(
            f"--data is tokenized with the model's own tokenizer, but {source.name} has none: give a model with a "
            "tokenizer, or make token files with tokenize-data and give them as --train-file"
        )
    names, weights = options.data, None
    if mix := mix_file(names):
        entries = read_mix(mix)
        if files := [entry.name for entry in entries if entry.data is None]:
            raise UsageError(f"{mix}: {', '.join(files)}: --data takes no token files: name text or rows as data")
        if len(names) > 1:
            raise UsageError(f"--data {mix} describes a whole mixture: leave out the others, or put them into it")
        if options.streaming and len(entries) > 1:
            raise UsageError(
                f"--streaming reads one data set, but {mix} names {len(entries)}: leave --streaming out, or give one"
            )
        names, weights = tuple(entry.name for entry in entries), tuple(entry.weight for entry in entries)
    encode = EncodeOptions(
        data_format=options.data_format,
        mapping=parsed_mapping(options.map_ or ()),
        chat_template=options.chat_template,
        train_on=options.train_on,
        overlong=options.overlong,
    )
    return Named(
        names,
        weights,
        TextTokenizer.open(str(folder)),
        encode,
        options.eval_fraction,
        options.skip_bad_rows,
        options.streaming,
        plan_only,
        say,
    )


def _pattern(files: Sequence[Path]) -> str:
    """One path or glob for the training files of a source, as a mixture needs it."""
    if len(files) == 1:
        return glob.escape(str(files[0]))
    return glob.escape(str(files[0].parent)) + "/train-*.bin"


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int | None], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task(f"tokenizing {name}", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def _about(request: Request) -> tuple[int, np.ndarray]:
    """About how many tokens there are for training, by the first batch; and the lengths (n,) of its documents."""
    found = request.found
    if isinstance(found.train, tuple):
        work: Any = TextWork(found.train, request.tokenizer)
        total = sum(document.num_bytes for document in found.train)
    elif isinstance(found.train, FileRows):
        encoder = request.encoder()
        assert encoder is not None
        work, total = RowWork(found.train, encoder), found.train.about()
    else:
        return found.limit or 0, np.empty(0, np.int64)
    batches = tokenized(work)
    try:
        first = next(batches, None)
    finally:
        batches.close()
    if first is None:
        return 0, np.empty(0, np.int64)
    done = first.num_bytes if isinstance(found.train, tuple) else first.counts.rows
    lengths = np.diff(first.stops, prepend=0, append=len(first.ids))
    return len(first.ids) * total // max(done, 1), lengths[lengths > 0]


@dataclass(frozen=True, eq=False)
class Estimated:
    """Samples of data that is not tokenized yet, for a plan: how many there will be, about, and their documents."""

    seq_len: int
    num_tokens: int
    num_windows: int
    limits: tuple[int, int] | None = None
    token_files: tuple[TokenFile, ...] = ()
    files: list[tuple[Path, int]] = field(default_factory=list)

    def read(self, samples: np.ndarray) -> Rows:
        """Nothing can be read."""
        raise DataError("the data is not tokenized yet: run without --dry-run")


def sample_text(files: Sequence[TokenFile], tokenizer_folder: Callable[[], Path | None]) -> str | None:
    """The first document of masked data as text, with what is trained in marks; None where all is trained."""
    masked = next((file for file in files if file.mask_bits is not None and file.num_documents), None)
    folder = tokenizer_folder() if masked is not None else None
    if masked is None or folder is None:
        return None
    stop = int(masked.document_starts[1])
    ids, trained = np.asarray(masked.tokens[: min(stop, SAMPLE_TOKENS)]), masked.trained(0, min(stop, SAMPLE_TOKENS))
    decode = TextTokenizer.open(str(folder)).encoder.decode
    borders = np.flatnonzero(np.diff(trained)) + 1
    parts = []
    for piece, is_trained in zip(np.split(ids, borders), trained[[0, *borders]], strict=True):
        text = printable(decode(piece.tolist(), skip_special_tokens=False))
        parts.append(f"[[{text}]]" if is_trained else text)
    more = f" ... ({stop - SAMPLE_TOKENS} more tokens)" if stop > SAMPLE_TOKENS else ""
    return f"[Sample] of {masked.path.name}, with what is trained in [[ ]]:\n{''.join(parts)}{more}"
