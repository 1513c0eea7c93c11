"""From data to token files: found, encoded, written in parts, published together with what they were made from.

Files are written in a folder of their own, with a manifest that names the finished parts, which outlive the process. An
interrupted run that is asked for the same (by the key of all that the files are made from) continues after the last
finished part, and the files have the bytes that they would have had.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from pathlib import Path

import numpy as np
from rich.console import Console

from llmq.data.chat.encode import Encoder, show
from llmq.data.chat.encoded import Counts, EncodeOptions, notes
from llmq.data.rows.find_sources import Request, find_files, find_set
from llmq.data.rows.row_files import BadRows, Record
from llmq.data.tokens.added_tokens import read_tokens, with_tokens
from llmq.data.tokens.cache import MANIFEST, PART_TOKENS, FinishedPart, Manifest, StreamProgress, locked
from llmq.data.tokens.pipeline import TokenSpan, Work, Workers, tokenized, workers_for
from llmq.data.tokens.text import Texts
from llmq.data.tokens.token_file import TokenFile, TokenWriter
from llmq.data.tokens.tokenizer import FOLDER, Sidecar, TextTokenizer, copy_tokenizer, rebuilt_warning, sidecar_name
from llmq.disk import remove_leftovers, replace_folder, storage, sync_folder
from llmq.errors import DataError, StorageError, UsageError
from llmq.screen import Report

WORK = ".partial"  # where files are made, in the folder that they are for
NO_EVALUATION = ", or keep none for evaluation (--eval-fraction 0)"  # advice
TOKEN_FILE = re.compile(r"(train|eval)(-\d{3,})?\.bin")

Say = Callable[[str], None]


def show_samples(request: Request, count: int) -> None:
    """Prints the first `count` documents with their tokens colored by mask, or marked where there are no colors."""
    encoder, console, rows = request.encoder(), Console(), request.found.train
    if encoder is None or isinstance(rows, Texts):
        raise UsageError(f"--show is for data in rows, but {request.found.name} is text: leave it out")
    made = (encoder.encode([row], []) for _, row in rows.read() if isinstance(row, Record))
    documents = list(islice(chain.from_iterable(made), count))
    # lines as they are: a terminal breaks long ones itself, and in a file a path stays whole
    console.print(show(documents, encoder.tokenizer, count, marks=console.color_system is None), soft_wrap=True)


def tokenize_data(
    *,
    tokenizer: str | None = None,
    dataset: str | None = None,
    inputs: Sequence[str] = (),
    revision: str | None = None,
    eval_fraction: float | None = None,
    eos_token: str | None = None,
    add_tokens: str | Path | None = None,
    out_dir: str | Path | None = None,
    encode: EncodeOptions | None = None,
    skip_bad_rows: int = 0,
    on_progress: Report = lambda done, total: None,
    say: Say = lambda text: None,
    samples: int = 0,
) -> list[TokenFile]:
    """Writes train.bin and eval.bin, or numbered parts of them, with sidecars and the tokenizer's files beside them.

    The data is that of a named or Hub `dataset`, or of the files that `inputs` (paths, folders and globs) name; see
    `find_sources` for what is kept for evaluation. `tokenizer` is a folder, a hub name or a short name. `out_dir` is
    data/DATA-TOKENIZER by default. `on_progress` gets the bytes (of text) or rows done, and the bytes in all. The first
    `samples` documents of rows are printed.

    Files appear whole, at the end; an interrupted call that is made again resumes after its last finished part. Raises
    UsageError, DataError and StorageError.
    """
    if (dataset is None) == (not inputs):
        raise UsageError("give the data either as --dataset or as --input (and not both)")
    if tokenizer is None:
        raise UsageError("whose tokenizer makes the tokens? Give --model")
    found = find_set(dataset, eval_fraction) if dataset is not None else find_files(inputs, eval_fraction)
    name = Path(tokenizer).resolve().name if Path(tokenizer).is_dir() else tokenizer.rsplit("/", 1)[-1]
    folder = Path(out_dir) if out_dir is not None else Path("data") / f"{found.title}-{name.lower()}"
    if found.evaluation is None and not found.eval_tokens:
        _refuse_stale(folder, {"eval.bin"})
    opened = TextTokenizer.open(tokenizer, revision, eos_token)
    if add_tokens is not None:
        opened = with_tokens(opened, read_tokens(Path(add_tokens)), say)
    if warning := rebuilt_warning(opened.folder, opened=opened):
        say(f"note: {warning}")
    request = Request(found, opened, found.known(encode or EncodeOptions()), skip_bad_rows)
    with locked(folder / f"{WORK}.lock", say):
        if samples:
            show_samples(request, samples)
        manifest = make(request, folder / WORK, on_progress, say)
        names = [part.name for part in manifest.parts]
        _refuse_stale(folder, {path.name for path in _token_files(folder)}.difference(names))
        remove_leftovers(folder / FOLDER)
        copy_tokenizer(folder / WORK / FOLDER, folder / FOLDER)
        with storage(folder):
            for path in (folder / WORK / name for name in names):
                os.replace(path, folder / path.name)
                os.replace(sidecar_name(path), sidecar_name(folder / path.name))
            shutil.rmtree(folder / WORK)
            sync_folder(folder)
    return [TokenFile.open(folder / name) for name in names]


def make(request: Request, work: Path, on_progress: Report, say: Say, begun: datetime | None = None) -> Manifest:
    """Makes all files in the folder `work`, after the parts that an interrupted call for the same has finished there.

    Returns what was made, and says the notes on its rows. The manifest stays in `work` with the files, so that nothing
    is made twice if they cannot be moved away. Templates see the time `begun` (None: the clock's), or that of the
    interrupted call.
    """
    tokenizer, found = request.tokenizer, request.found
    resumed = Manifest.unfinished(work, request.key)
    with storage(work):
        if resumed is None and work.exists():
            shutil.rmtree(work)
        for left in work.glob(".*"):  # what was being written when an earlier call was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    manifest = resumed or Manifest(key=request.key, begun=begun or datetime.now())
    encoder = request.encoder(manifest.begun)
    if encoder is not None:
        say(encoder.describe())
    if resumed is not None:
        say("resuming where an earlier call for the same data was interrupted")
    try:
        made = Producer(request, work, manifest, encoder, on_progress).run()
        manifest.notes = _check(request, work, made)
        copy_tokenizer(tokenizer.folder, work / FOLDER)
        of_text = f"each ends with {tokenizer.eos_token}; text that spells a special token is ordinary text"
        ends = encoder.end_token_ids if encoder else (tokenizer.eos_token_id,)
        for part in manifest.parts:
            Sidecar(
                num_tokens=part.num_tokens,
                num_documents=part.num_documents,
                document_rule=f"{found.rule}; {encoder.describe() if encoder else of_text}",
                text=found.asked,
                bad_rows=sum(stream.bad for stream in made),
                end_token_ids=tuple(sorted(set(ends).union(*(stream.rows.end_tokens for stream in made)))),
                tokenizer=tokenizer.note(),
                chat_template=encoder.template_note if encoder else None,
            ).write(work / part.name)
    except BaseException:
        if (work / MANIFEST).exists():
            say("finished parts are kept: the same command resumes after them")
        else:
            shutil.rmtree(work, ignore_errors=True)
        raise
    for note in manifest.notes:
        say(note)
    return manifest


@dataclass
class Producer:
    """Makes the files of a request in `folder`, from where `manifest` says: those of the training data, then eval.bin.

    The first `eval_tokens` of the training data are in eval.bin, the others in parts, of which none is begun after
    `limit` tokens in all. One part is train.bin, unless files are `numbered` in any case.
    """

    request: Request
    folder: Path
    manifest: Manifest
    encoder: Encoder | None
    on_progress: Report
    writer: TokenWriter | None = None  # of the part that is being written

    def run(self) -> list[StreamProgress]:
        """The finished streams."""
        found, done = self.request.found, self.manifest.streams
        streams = [found.train, *([] if found.evaluation is None else [found.evaluation])]
        done += [StreamProgress() for _ in streams[len(done) :]]
        with workers_for(self.encoder) as workers:
            for stream, self.done in zip(streams, done, strict=True):
                self.is_train = stream is found.train
                if not self.done.finished:
                    bad = BadRows(self.request.skip_bad_rows, sum(progress.bad for progress in done))
                    self._fill(self.request.work(stream, self.encoder), bad, workers)
        return done

    def _fill(self, work: Work, bad: BadRows, workers: Workers | None) -> None:
        """Tokenizes to the end of the stream or its limit."""
        found, done, streams = self.request.found, self.done, self.manifest.streams
        try:
            with closing(tokenized(work, done.position, workers)) as batches:
                for position, batch in batches:
                    for row in batch.bad:
                        bad.add(row)
                    has_room = self._append(batch.tokens)
                    done.position, done.skipped = position, max(done.skipped - len(batch.tokens.ids), 0)
                    done.rows.add(batch.counts)
                    done.num_bytes += batch.num_bytes
                    done.bad += len(batch.bad)
                    counts = (one.rows.rows if found.num_bytes is None else one.num_bytes for one in streams)
                    self.on_progress(sum(counts), found.num_bytes)
                    if not has_room:
                        break
            self._end_part()
        finally:
            if self.writer is not None:
                self.writer.discard()
                self.writer = None
        if self.is_train and not found.numbered and len(done.parts) == 1 + bool(found.eval_tokens):
            # the only part that has a number needs none
            numbered, done.parts[-1].name = done.parts[-1].name, "train.bin"
            with storage(self.folder):
                os.replace(self.folder / numbered, self.folder / "train.bin")
        done.finished = True
        self.manifest.write(self.folder)

    def _append(self, tokens: TokenSpan) -> bool:
        """Writes a batch, in several parts where one is full; returns whether there is room for more."""
        found, tokenizer, done, start = self.request.found, self.request.tokenizer, self.done, self.done.skipped
        while True:
            number = len(done.parts) - bool(found.eval_tokens)
            name, size = f"train-{number:03d}.bin", min(PART_TOKENS, found.limit or PART_TOKENS)
            if number < 0 or not self.is_train:
                name, size = "eval.bin", found.eval_tokens if self.is_train else sys.maxsize >> 1
            room = size - (self.writer.num_tokens if self.writer is not None else 0)
            index = int(np.searchsorted(tokens.stops, start + room))  # of the document with which the part is full
            is_full = index < len(tokens.stops)
            stop = int(tokens.stops[index]) if is_full else len(tokens.ids)
            if start < stop:
                has_masks = self.encoder is not None and self.encoder.format.name != "text"
                about = (tokenizer.vocab_size, has_masks, tokenizer.sha256)
                self.writer = self.writer or TokenWriter(self.folder / name, *about)
                self.writer.append(*tokens.part(start, stop))
            if not is_full:
                return True
            self._end_part()
            start = done.skipped = stop
            self.manifest.write(self.folder)
            if found.limit is not None and done.num_tokens >= found.limit:
                return False

    def _end_part(self) -> None:
        if (writer := self.writer) is not None:
            writer.finish()
            self.writer = None
            counts = {name: getattr(writer, name) for name in ("num_tokens", "num_documents", "num_trained")}
            self.done.parts.append(FinishedPart(name=writer.path.name, **counts))


def _check(request: Request, work: Path, made: Sequence[StreamProgress]) -> list[str]:
    """DataError for data that would train or evaluate nothing, of which nothing is kept; notes on the rows."""
    name = request.found.name
    try:
        require_trained(f"{name}: the training data", made[0].counts, made[0].bad)
        for held in () if request.found.may_lack_evaluation else made[1:]:
            require_trained(f"{name}: the evaluation data", held.counts, held.bad, NO_EVALUATION)
    except DataError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    counts = Counts()
    for stream in made:
        counts.add(stream.counts)
    lines = notes(counts, request.encode.seq_len, request.encode.overlong, sum(stream.bad for stream in made))
    if any(not held.counts.trained for held in made[1:]):
        lines.append("no row that is trained is left for evaluation, so nothing is evaluated: raise --eval-fraction")
    return lines


def _token_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if TOKEN_FILE.fullmatch(path.name)) if folder.is_dir() else []


def _refuse_stale(folder: Path, stale: set[str]) -> None:
    """StorageError if files of an earlier run would stay beside the new ones, where a glob would take them along."""
    if stale := {name for name in stale if (folder / name).exists()}:
        names = ", ".join(str(folder / name) for name in sorted(stale))
        raise StorageError(
            f"{names} {'is' if len(stale) == 1 else 'are'} of an earlier run and would stay beside the new files: "
            "delete that, or choose another --out-dir"
        )


def cached(request: Request, on_progress: Report, say: Say) -> list[Path]:
    """The token files of a request, from the cache, or made into it; several processes may ask for the same.

    A folder of the cache is named by the hash of everything that its files depend on, and is never changed; one that
    lost files is made again. How many bad rows are allowed is not in the name: DataError if more were left out when it
    was made.
    """
    folder, found = request.entry, request.found
    manifest = Manifest.read(folder)
    if manifest is not None and request.is_made:
        for note in manifest.notes:
            say(note)
    else:
        work = folder.with_name(folder.name + WORK)
        with locked(folder.with_name(folder.name + ".lock"), say):
            if not request.is_made:  # else it was made meanwhile
                if folder.exists():
                    say(f"{folder} has changed since it was made: making it again")
                begun = manifest.begun if manifest else None  # of one that lost files: templates write its date again
                manifest = make(request, work, on_progress, say, begun)
                made = [path for path in sorted(work.rglob("*")) if path.is_file() and path.name != MANIFEST]
                manifest.files = {str(path.relative_to(work)): path.stat().st_size for path in made}
                manifest.write(work)
                remove_leftovers(folder)
                with storage(folder):
                    replace_folder(folder, work)
    files = _token_files(folder)
    sidecar = Sidecar.read(files[0], TokenFile.open(files[0]).num_tokens)
    if sidecar is not None and sidecar.bad_rows > request.skip_bad_rows:
        raise DataError(
            f"{found.name}: {sidecar.bad_rows} bad rows were left out when it was tokenized: fix them, or allow for "
            f"them with --skip-bad-rows {sidecar.bad_rows}"
        )
    # An entry that was made without a fraction asked for may have nothing to evaluate.
    has_evaluation = any(file.name.startswith("eval") for file in files)
    if found.evaluation is not None and not found.may_lack_evaluation and not has_evaluation:
        require_trained(f"{found.name}: the evaluation data", Counts(), advice=NO_EVALUATION)
    return files


def require_trained(what: str, counts: Counts, bad: int = 0, advice: str = "") -> None:
    """DataError, with what else could be done as `advice`, unless there is a document with a trained token."""
    if counts.trained:
        return
    left = f", {bad} bad rows left out" if bad else ""
    if counts.too_long:
        left += f", {counts.too_long} of {counts.rows} rows are too long: --seq-len {counts.longest} keeps all"
    if counts.untrained or (counts.rows and not counts.too_long):
        left += f", {counts.untrained} of {counts.rows} rows have no trained token"
    raise DataError(
        f"{what} has no token to train on ({counts.documents} documents{left}): give data with "
        "text, change --train-on, or check which fields are mapped (--map)" + advice
    )
