"""`--data` of llmq-train: tokenized once with the model's own tokenizer into the cache, or read as a stream.

With `--streaming`, rows of data are read, tokenized and trained in one go, and no token file is kept. There is no table
of them, so nothing is permuted: rows are trained in the order of the stream, and the stream should be shuffled where it
is stored. A data set of the Hub is downloaded file by file, each only for as long as it is read. What a run needs to
resume is where its next row begins: which pass, shard, row, and token; and when it was begun, for templates that write
the date.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmq.data.batches.packing import cut_documents, lay, pack_documents, with_docs
from llmq.data.batches.rows import PACKED, WINDOWS, RowForm, Rows, RowSource, aim, mixed
from llmq.data.chat.encode import Encoder
from llmq.data.chat.encoded import Counts, EncodeOptions, notes
from llmq.data.chat.template import read_prompt_template
from llmq.data.rows.find_sources import NAMES, Request, find_anything, parsed_mapping
from llmq.data.rows.row_files import BadRows
from llmq.data.rows.row_sequences import FileRows
from llmq.data.stream import START, Position
from llmq.data.tokens.pipeline import RowWork, TokenSpan, tokenized
from llmq.data.tokens.token_file import OF_IMAGES
from llmq.data.tokens.tokenize import Say, cached
from llmq.data.tokens.tokenizer import TemplateNote, TextTokenizer
from llmq.errors import DataError, UsageError
from llmq.screen import StartTask, unshown

if TYPE_CHECKING:
    from llmq.files.source import ModelSource
    from llmq.options.data import SourceOptions

Place = dict[str, int]
PLACE = ("epoch", "shard", "row", "overall", "token")  # where a row begins
GROUP_TOKENS = 1 << 18  # packed together: the last row of a group may be hardly filled
GROUP_ROWS = 16  # at least
ROWS_AT_ONCE = 64  # tokenized together: few, so that training begins soon


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

    def find(self, seq_len: int) -> NamedData:
        """Itself, with requests for rows of `seq_len` tokens; see `find_anything` for the errors."""
        options, names = self.options, self.options.data or ()
        for name in (name for name in names if name in NAMES and Path(name).exists()):
            self.note(f"--data {name} is {Path(name).absolute()}, not the data set of that name")
        encode = encode_options(options, seq_len)
        found = [find_anything(name, options.eval_fraction, streaming=options.streaming) for name in names]
        asked = (Request(one, self.tokenizer, one.known(encode), options.skip_bad_rows) for one in found)
        return replace(self, requests=tuple(one.settled() for one in asked))

    def open(self, form: RowForm) -> tuple[list[list[str]] | RowSource, list[str]]:
        """What is trained on, as token files by name unless it is read or only planned; and files to evaluate on."""
        if self.options.streaming:
            (request,) = self.requests
            found, stream = request.found, open_stream(request, form, self.note)
            if found.evaluation is None or self.plan_only:
                return stream, []
            rule = f"{found.rule}; its part for evaluation"
            held = replace(found, train=found.evaluation, evaluation=None, numbered=False, rule=rule)
            return stream, self._cached(replace(request, found=held))
        if self.plan_only and not all(request.is_made for request in self.requests):
            return self._planned(form), []
        made = [self._cached(request) for request in self.requests]
        train = [[name for name in files if Path(name).name.startswith("train")] for files in made]
        return train, [name for files in made for name in files if Path(name).name.startswith("eval")]

    def _cached(self, request: Request) -> list[str]:
        """The names of a request's token files, as patterns."""
        name, entry, is_made = request.found.name, request.entry, request.is_made
        say, task = (self.note, unshown) if is_made else (self.say, self.task)
        about = f"tokenizing into {entry}\n{request.found.rule}"
        with task(f"Tokenizing {name}") as on_progress:
            say(f"{name}: tokenized before, in {entry}" if is_made else f"{name}: {about}")
            return [glob.escape(str(file)) for file in cached(request, on_progress, say)]

    def _planned(self, form: RowForm) -> RowSource:
        """The shape of rows that are not tokenized yet, by the first of them; what would be tokenized is said."""
        for request in self.requests:
            if not request.is_made:
                self.note(f"{request.found.name}: would be tokenized into {request.entry}\n{request.found.rule}")
                if encoder := request.encoder():
                    self.note(encoder.describe())
        self.note("how many tokens and steps there are is known when it is tokenized")
        documents = _first_documents(self.requests)
        longest = int(cut_documents(documents, form.room)[1].max(initial=1)) + form.num_virtual
        return no_rows(with_docs(form, documents, is_sample=True), longest)


def encode_options(options: SourceOptions, seq_len: int | None) -> EncodeOptions:
    """How rows become tokens; those of more than `seq_len` tokens are too long."""
    shared = ("data_format", "chat_template", "train_on", "overlong", "preamble")
    return EncodeOptions(
        **{name: getattr(options, name) for name in shared},
        mapping=parsed_mapping(options.map_ or ()),
        seq_len=seq_len,
        prompt_template=read_prompt_template(options.prompt_template) if options.prompt_template else None,
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


def open_beside(
    name: str, options: SourceOptions, source: ModelSource, room: int, *, say: Say, task: StartTask
) -> list[str]:
    """The token files, as patterns, of data that is named beside a run's own, and read and tokenized as that is: all of
    it is for one use. Errors as of `open_named`."""
    whole = options.model_copy(update={"data": (name,), "streaming": False, "eval_fraction": 0.0})
    named = open_named(whole, source, plan_only=False, say=say, note=lambda text: None, task=task)
    assert named is not None
    (request,) = named.find(room).requests
    return named._cached(request)


def no_rows(form: RowForm, longest: int | None = None) -> RowSource:
    """The shape of rows of documents of at most `longest` tokens, for a plan. UsageError for packed rows, if it is not
    known how many documents they hold."""
    if form.kind == PACKED and form.docs is None:
        raise UsageError("--packing without data: give --max-docs, the documents of a row, or data to count them in")
    rows = RowSource(form)
    rows.limits = form.limits(longest)
    return rows


class StreamedRows(RowSource):
    """Documents as rows of a form, without end: after the last document comes the first again.

    `documents(begun, position)` has what became of the rows of the data after a position of FileRows, whose files are
    shards here, each with the position after it, and the same each time; `begun` are seconds since 1970. `key` names
    what else it depends on, and `first` is an encoder of its first rows.

    Rows are windows, in which documents follow each other without a border, or they are packed, whole and apart as in
    Packs, a group of consecutive documents at a time; with one document to a row, they are padded. A group ends with a
    row of the data, after GROUP_TOKENS (or GROUP_ROWS rows of as many tokens) or with a pass.
    """

    def __init__(
        self,
        documents: Callable[[int, Position], Iterator[tuple[Position, TokenSpan]]],
        form: RowForm,
        name: str,
        key: str = "",
        first: Encoder | None = None,
    ) -> None:
        super().__init__(form)
        self.documents, self.name, self.key, self.first = documents, name, key, first

    @property
    def end_token_ids(self) -> set[int]:
        """Those of the first rows."""
        return set() if self.first is None else set(self.first.end_token_ids)

    def templates(self) -> list[tuple[TemplateNote, float]]:
        """The chat template that renders it, if there is one."""
        note = None if self.first is None else self.first.template_note
        return [] if note is None else [(note, 1.0)]

    def read(self, position: Position = START) -> Iterator[tuple[Place, Rows]]:
        """Row after row (1,T), each with the position after it.

        A position is the whole numbers `begun` and PLACE, and for packed rows `packs`, how many of the group at this
        place were taken. DataError for an id outside the vocabulary, or if a whole pass has no tokens.
        """
        at = dict(position) if position else {"begun": int(time.time()), **dict.fromkeys(PLACE, 0)}
        return self._windows(at) if self.form.kind == WINDOWS else self._packs(at)

    def _windows(self, at: Place) -> Iterator[tuple[Place, Rows]]:
        pieces, waiting, size = self._pieces(at), list[_Piece](), self.form.room
        while True:
            while sum(len(piece.tokens.ids) for piece in waiting) <= size:
                waiting.append(next(pieces))
            ids, trained = _joined(waiting)
            row = Rows.empty(1, self.seq_len, None)
            row.tokens[0, self.num_virtual :] = ids[:size]
            aim(row.targets[0, self.num_virtual :], ids[: size + 1], trained[1 : size + 1])
            rest = size
            while len(waiting[0].tokens.ids) <= rest:
                rest -= len(waiting.pop(0).tokens.ids)
            waiting[0] = waiting[0].after(rest)
            yield waiting[0].place, row

    def _packs(self, at: Place) -> Iterator[tuple[Place, Rows]]:
        taken, group, count = at.get("packs", 0), list[_Piece](), 0
        for piece, following in pairwise(self._pieces(at)):
            if not len(piece.tokens.ids):
                continue
            group.append(piece)
            count += len(piece.tokens.ids)
            ends_pass = following.place["epoch"] != piece.place["epoch"]
            if count < max(GROUP_TOKENS, GROUP_ROWS * self.seq_len) and not ends_pass:
                continue
            place, (ids, trained) = group[0].place, _joined(group)
            lengths = np.concatenate([np.diff(piece.tokens.stops, prepend=0) for piece in group])
            seed = mixed(self.form.seed, place["epoch"], place["overall"])
            index = pack_documents(lengths, replace(self.form, seed=seed))
            num_packs = len(index.ends) - 1
            for number in range(taken, num_packs):
                row = Rows.empty(1, self.seq_len, self.form.docs)
                lay(row, 0, ((ids[a:b], trained[a + 1 : b]) for a, b in index.spans(number)), self.num_virtual)
                after = {**following.place, "packs": 0} if number + 1 == num_packs else {**place, "packs": number + 1}
                yield after, row if self.limits else row._replace(borders=None)
            taken, group, count = 0, [], 0

    def _pieces(self, at: Place) -> Iterator[_Piece]:
        """Documents from a place on, pass after pass, with a piece without tokens after each."""
        epoch, skipped = at["epoch"], at["token"]
        start: Position = (at["shard"], at["row"], at["overall"])
        empty = False
        while True:
            for (shard, after, after_all), tokens in self.documents(at["begun"], start):
                ids = tokens.ids
                if ids.size and not 0 <= ids.min() <= ids.max() < self.form.vocab_size:
                    raise DataError(
                        f"{self.name}, shard {shard}, row {after}: an id is outside the vocabulary "
                        f"(0 to {self.form.vocab_size - 1}): tokenize the text with the model's own tokenizer"
                    )
                if np.isin(ids, self.form.placeholders).any():
                    raise DataError(f"{self.name}, shard {shard}, row {after} has an id {OF_IMAGES}")
                place = dict(zip(PLACE, (epoch, shard, after - 1, after_all - 1, 0), strict=True))
                piece = _Piece({"begun": at["begun"], **place}, tokens).after(skipped)
                skipped = 0
                if piece.tokens.ids.size:
                    empty = False
                    yield piece
            if empty:
                raise DataError(f"{self.name} has no tokens: check where it comes from")
            epoch, empty, start = epoch + 1, True, START
            # What ends with the pass is whole now: no row of the next one, which may not be there, is waited for.
            yield _Piece({"begun": at["begun"], "epoch": epoch, **dict.fromkeys(PLACE[1:], 0)}, NO_TOKENS)


NO_TOKENS = TokenSpan(np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.int64))


class _Piece(NamedTuple):
    """The tokens of a row of the data from one of them on, which is at `place`."""

    place: Place
    tokens: TokenSpan

    def after(self, count: int) -> _Piece:
        place = {**self.place, "token": self.place["token"] + count}
        return _Piece(place, self.tokens.part(count, len(self.tokens.ids)))


def _joined(pieces: Sequence[_Piece]) -> tuple[np.ndarray, np.ndarray]:
    """The ids (n,) of pieces one after the other, and which are trained (n,)."""
    masks = (np.ones(len(ids), bool) if trained is None else trained for _, (ids, trained, _) in pieces)
    return np.concatenate([piece.tokens.ids for piece in pieces]), np.concatenate(list(masks))


def open_stream(request: Request, form: RowForm, say: Say) -> StreamedRows:
    """The rows of a request as an endless stream of rows of this form.

    Where rows are too long, that is reported when the first one is, and with all else at the end of the first pass.
    Packed rows that leave it open have as many documents as fill rows with documents such as the first ones. UsageError
    for text files, mixtures and drawn rows.
    """
    rows, name = request.found.train, request.found.name
    if not isinstance(rows, FileRows) or request.found.limit is not None or request.found.eval_tokens:
        raise UsageError(
            f"--streaming reads files of rows one after the other, which {name} is not: leave it out, or name the "
            "files or the data set of the Hub itself (such as HuggingFaceFW/fineweb:sample-10BT)"
        )
    first = request.encoder()
    assert first is not None
    say(f"{name}: a stream; {request.found.rule}\n{first.describe()}")
    first.encode(request.first_rows, [])  # which tokens end its trained turns
    said: set[str] = set()

    def report(when: str, counts: Counts, num_bad: int) -> None:
        if when not in said:
            said.add(when)
            for note in notes(counts, request.encode.seq_len, request.encode.overlong, num_bad):
                say(f"{name}, {when}: {note}")

    def documents(begun: int, position: Position) -> Iterator[tuple[Position, TokenSpan]]:
        encoder = request.encoder(datetime.fromtimestamp(begun))
        assert encoder is not None
        left_out, counts = BadRows(request.skip_bad_rows), Counts()
        with closing(tokenized(RowWork(rows, encoder, ROWS_AT_ONCE), position)) as batches:
            for _, batch in batches:
                for one in batch.bad:
                    left_out.add(one)
                counts.add(batch.counts)
                if counts.overlong:
                    report("so far", counts, left_out.count)
                yield from batch.by_row()
        report("to the end of its rows", counts, left_out.count)

    form = with_docs(form, _first_documents([request]), is_sample=True)
    return StreamedRows(documents, form, name, request.key, first)


def _first_documents(requests: Sequence[Request]) -> np.ndarray:
    """Tokens (n,) int64 of the documents of the first rows; the same on every day, as a run resumes with no other."""
    encoders = [(request, request.encoder(datetime.fromtimestamp(0))) for request in requests]
    found = (one for request, encoder in encoders if encoder for one in encoder.encode(request.first_rows, []))
    return np.array([len(document.ids) for document in found], np.int64)
