"""What is to be tokenized: data that is asked for by path or name, the part of it that is for evaluation, and all else
that the token files depend on, with their name in the cache."""

from __future__ import annotations

import glob
import hashlib
import http.client
import os
import re
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from fractions import Fraction
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, cast

from llmq.data.chat.encode import Encoder, open_encoder
from llmq.data.chat.encoded import EncodeOptions
from llmq.data.chat.formats import find_format
from llmq.data.chat.template import chosen_templates
from llmq.data.rows.held_rows import LOOKED_AT, held
from llmq.data.rows.hub_data import NOT_DATA, HubSpec, by_split, open_hub_set
from llmq.data.rows.row_files import COMPRESSIONS, SUFFIXES, BadRow, Record, RowFile
from llmq.data.rows.row_sequences import FileRows, Mixed, RowSequence, Shuffled, count_rows, train_test_order
from llmq.data.tokens.cache import PART_TOKENS, content_hash, is_whole, key_of
from llmq.data.tokens.pipeline import RowWork, TextWork, Work
from llmq.data.tokens.text import Texts, open_documents, split
from llmq.data.tokens.tokenizer import TextTokenizer, copied_files
from llmq.disk import cache_folder, write_whole
from llmq.errors import DataError, UsageError, all_problems

EVAL_FRACTION = 0.1  # where the data has no part for evaluation
TEXT_SUFFIX = ".txt"  # what is text in a folder; a file that is named may be called anything
TINY = "tiny-shakespeare"
TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT_S = 30.0
FORMAT = 4  # of what is made; a new one leaves what is in the cache aside
ALL_TRAIN = "all of them are training data"


@dataclass(frozen=True)
class NamedSet:
    """A data set of the Hub, as `repo` with its config, and llm.q's rule for evaluation: `eval_split`, `eval_rows`
    drawn rows of train, or the first `eval_tokens`. `limit` tokens end it; `numbered` files are train-000.bin, ...
    """

    repo: str
    data_format: str
    mapping: tuple[tuple[str, str], ...] = ()  # ours, the field's
    eval_split: str | None = None
    eval_rows: int = 0
    eval_tokens: int = 0
    limit: int | None = None
    numbered: bool = True


CLIMB = "gvlassis/ClimbMix"
# Tokens in each of its clusters, in the order of their numbers, in llm.q's unit.
CLIMB_WEIGHTS = (86, 121, 145, 386, 189, 1778, 1673, 117, 81, 734, 156, 2568, 90, 28, 23, 728, 702, 227, 116, 51)
SEED = 42  # of the drawn rows, and of the mixture of clusters
FINEWEB = "HuggingFaceFW/fineweb:sample-10BT"
BILLION = 1_000_000_000
NAMED = {
    "tiny-stories": NamedSet("roneneldan/TinyStories", "text", eval_split="validation"),
    "gsm8k": NamedSet("openai/gsm8k:main", "question-answer", eval_split="test", numbered=False),
    "limo": NamedSet("GAIR/LIMO", "question-answer", (("answer", "solution"),), eval_rows=40, numbered=False),
    "fineweb-1b": NamedSet(FINEWEB, "text", eval_tokens=10_000_000, limit=BILLION),
    "fineweb-10b": NamedSet(FINEWEB, "text", eval_tokens=10_000_000),
    "climb-1b": NamedSet(CLIMB, "text", eval_tokens=10_000_000, limit=BILLION),
    "climb-10b": NamedSet(CLIMB, "text", eval_tokens=10_000_000, limit=10 * BILLION),
    "climb-20b": NamedSet(CLIMB, "text", eval_tokens=20_000_000, limit=20 * BILLION),
}
NAMES = (TINY, *NAMED)


@dataclass(frozen=True)
class Found:
    """Data: documents of text files, or rows. `rule` says in words how its parts were chosen."""

    title: str  # names the output
    asked: tuple[str, ...]
    train: Texts | RowSequence
    evaluation: Texts | RowSequence | None
    rule: str
    data_format: str | None = None  # as known for a named set
    mapping: tuple[tuple[str, str], ...] = ()
    eval_tokens: int = 0  # the first ones of `train` are for evaluation
    limit: int | None = None
    numbered: bool = False
    may_lack_evaluation: bool = False  # a part for it was not asked for, and a small set need not have one

    @property
    def name(self) -> str:
        """What was asked for, for messages."""
        return ", ".join(self.asked)

    @property
    def is_rows(self) -> bool:
        """Whether this is rows, and not text files."""
        return not isinstance(self.train, Texts)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of text files; None for rows."""
        texts = [part for part in (self.train, self.evaluation) if isinstance(part, Texts)]
        return sum(part.num_bytes for part in texts) if texts else None

    def known(self, options: EncodeOptions) -> EncodeOptions:
        """The options with what is known of a named set, where they leave it open."""
        data_format, mapping = options.data_format or self.data_format, options.mapping or self.mapping
        return replace(options, data_format=data_format, mapping=mapping)

    def identity(self) -> Any:
        """What the tokens depend on, as JSON. Files of this machine are read whole for it."""
        held = None if self.evaluation is None else self.evaluation.identity()
        return [self.train.identity(), held, self.eval_tokens, self.limit, self.numbered]


def find_anything(asked: str, eval_fraction: float | None, streaming: bool = False) -> Found:
    """What `--data` names: a path, folder or glob (see `find_files`), else a data set by name (see `find_set`)."""
    if (rows := held(asked)) is not None:
        file = RowFile.of(Path(rows.evaluation)) if rows.evaluation else None
        own = FileRows((file,)) if file else None
        return replace(_split_rows(FileRows((rows,)), own, eval_fraction, streaming), title="rows", asked=(asked,))
    path = Path(asked).expanduser()
    looks_local = asked not in NAMES and ":" not in asked and (glob.has_magic(asked) or _has_data_suffix(path))
    is_local = path.exists() or asked.startswith((".", "/", "~")) or looks_local
    return find_files([str(path)], eval_fraction, streaming) if is_local else find_set(asked, eval_fraction, streaming)


def _has_data_suffix(path: Path) -> bool:
    return path.suffix.lower() in (*SUFFIXES, *COMPRESSIONS, TEXT_SUFFIX)


def find_set(dataset: str, eval_fraction: float | None = None, streaming: bool = False) -> Found:
    """The data of a named set or of one of the Hub, and its part for evaluation.

    That part is `eval_fraction` of the training data; without one, the set's own (its validation split, or llm.q's
    rule), else EVAL_FRACTION. Raises UsageError and DataError.
    """
    if dataset == TINY:
        return replace(_texts([tiny_shakespeare()], eval_fraction), title=dataset, asked=(dataset,))
    return (_named if dataset in NAMED else _hub)(dataset, eval_fraction, streaming)


def matched(patterns: Iterable[str], problems: list[str], skip: str | None = None) -> list[Path]:
    """The files that `patterns` name; adds to `problems` what matches nothing or is named twice.

    A wildcard does not match names that end in `skip`; a pattern that is itself the name of a file is that file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        if Path(pattern).exists() or not glob.has_magic(pattern):
            names = [Path(pattern)]
        else:
            hits = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
            names = [Path(hit) for hit in hits if Path(hit).is_file() and not (skip and hit.endswith(skip))]
            if not names:
                problems.append(f"no file matches {pattern}: check the path (the shell passes quoted globs unchanged)")
        for name in names:
            if name in found:
                problems.append(f"{name} is named twice: name every file once")
            found[name] = None
    return list(found)


def find_files(inputs: Sequence[str], eval_fraction: float | None = None, streaming: bool = False) -> Found:
    """The data of files, folders and globs, and its part for evaluation, as `find_set` chooses it.

    Files of rows or text; those of one folder by the split that their names give, as on the Hub.
    """
    paths = [Path(text).expanduser() for text in inputs]
    folders = [path for path in paths if path.is_dir()]
    with all_problems() as problems:
        named = matched([str(path) for path in paths if path not in folders], problems)
    files = [*(file for folder in folders for file in _data_files(folder)), *named]
    folder = folders[0] if len(folders) == 1 and not named else None
    title = files[0].stem.split(".")[0]
    if folder or len(files) > 1:
        title = (folder or files[0].parent).resolve().name or "data"
    rows = {path: RowFile.of(path) for path in files}
    kinds = Counter(file.kind if file else "text" for file in rows.values())
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        raise DataError(f"the files are of several kinds ({counts}): give those of one kind, for example with a glob")
    if "text" in kinds:
        return replace(_texts(files, eval_fraction), title=title, asked=tuple(inputs))
    splits = {"train": files}
    if folder is not None:
        names = by_split([str(path.relative_to(folder)) for path in files])
        splits = {name: [folder / path for path in paths] for name, paths in names.items()}
        if "train" not in splits and len(splits) > 1:
            raise DataError(f"{folder} has the splits {', '.join(splits)}, but no train: name the files")
    parts = {name: FileRows(tuple(file for path in split if (file := rows[path]))) for name, split in splits.items()}
    train = next(iter(parts.values()))  # comes first
    own = parts.get("validation") if "train" in parts else None
    return replace(_split_rows(train, own, eval_fraction, streaming), title=title, asked=tuple(inputs))


def _data_files(folder: Path) -> list[Path]:
    """Files of rows and text below a folder, without hidden ones; DataError if there are none."""
    below = (path for path in sorted(folder.rglob("*")) if "/." not in f"/{path.relative_to(folder).as_posix()}")
    found = [path for path in below if path.is_file() and path.name not in NOT_DATA and _has_data_suffix(path)]
    if not found:
        suffixes = ", ".join((*SUFFIXES, TEXT_SUFFIX))
        raise DataError(f"{folder} has no data: no file in it ends with {suffixes}, or these with .gz or .zst")
    return found


def _texts(paths: Sequence[Path], eval_fraction: float | None) -> Found:
    if packed := [str(path) for path in paths if path.suffix.lower() in COMPRESSIONS]:
        fix = f"decompress it, or make it .jsonl{packed[0][-3:]}"
        raise DataError(f"{packed[0]}: text files are read as they are: {fix}")
    train, kept, rule = split(open_documents(paths), EVAL_FRACTION if eval_fraction is None else eval_fraction)
    rule = f"one file is one document (UTF-8, as it is; empty files are left out); {rule}"
    return Found("text", (), Texts(tuple(train)), Texts(tuple(kept)) if kept else None, rule)


def _split_rows(train: FileRows, own: FileRows | None, eval_fraction: float | None, streaming: bool) -> Found:
    """The rows' part for evaluation: their own split, unless a fraction is asked for."""
    if own is not None and eval_fraction is None:
        return Found("rows", (), train, own, "rows are documents; those of the validation split are for evaluation")
    # Of a stream it is not known ahead which rows will come, so none of them are kept.
    default = 0.0 if streaming else EVAL_FRACTION
    fraction = Fraction(str(default if eval_fraction is None else eval_fraction))
    if not fraction:
        return Found("rows", (), train, None, f"rows are documents; {ALL_TRAIN}")
    rule = f"rows are documents; {float(fraction):g} of them, spread evenly, are for evaluation"
    ours, theirs = (replace(train, share=(fraction, is_held)) for is_held in (False, True))
    return Found("rows", (), ours, theirs, rule, may_lack_evaluation=eval_fraction is None)


def _named(name: str, eval_fraction: float | None, streaming: bool) -> Found:
    if eval_fraction:
        fix = f"{name} has its own part for evaluation: leave it out, or 0 for none"
        raise UsageError(f"--eval-fraction {eval_fraction:g}: {fix}")
    named = NAMED[name]
    train: RowSequence
    held: RowSequence | None = None
    rule, eval_tokens = f"the first {named.eval_tokens} tokens are for evaluation", named.eval_tokens
    if named.repo == CLIMB:
        clusters = (HubSpec(CLIMB, config=f"cluster_id={number}") for number in range(1, len(CLIMB_WEIGHTS) + 1))
        parts = tuple(open_hub_set(spec, streaming=streaming).rows("train") for spec in clusters)
        train = Mixed(parts, CLIMB_WEIGHTS, SEED)
    else:
        opened = open_hub_set(HubSpec.parse(named.repo), streaming=streaming)
        train = rows = opened.rows("train")
        if named.eval_split:
            held, rule = opened.rows(named.eval_split), f"those of the split {named.eval_split} are for evaluation"
        elif named.eval_rows:
            kept, drawn = train_test_order(count_rows(rows.files), named.eval_rows, SEED)
            train, held = Shuffled(rows, kept), Shuffled(rows, drawn)
            rule = f"{named.eval_rows} drawn rows are for evaluation"
    if eval_fraction is not None:
        held, rule, eval_tokens = None, ALL_TRAIN, 0
    known = (named.data_format, named.mapping, eval_tokens, named.limit, named.numbered)
    return Found(name, (name,), train, held, f"rows of {named.repo} are documents; {rule}", *known)


def _hub(text: str, eval_fraction: float | None, streaming: bool) -> Found:
    spec = HubSpec.parse(text)
    opened = open_hub_set(spec, streaming=streaming)
    name = opened.chosen(spec.split)
    own = opened.rows("validation") if name == "train" and "validation" in opened.splits else None
    found = _split_rows(opened.rows(name, spec.borders), own, eval_fraction, streaming)
    config = "" if opened.config == "default" else f"-{opened.config}"
    title = opened.repo.rsplit("/", 1)[-1] + config.replace(os.sep, "-")
    rule = f"{opened.repo} at {opened.commit[:12]}, config {opened.config}, split {name}: {found.rule}"
    return replace(found, title=title, asked=(text,), rule=rule)


def tiny_shakespeare() -> Path:
    """The text of tiny-shakespeare (1.1 MB, public domain): from the cache, else downloaded into it.

    Raises DataError if it is not cached and cannot be fetched, or is not the text that it should be.
    """
    from huggingface_hub import constants

    path = cache_folder("text") / f"{TINY}.txt"
    if path.is_file():
        return path
    if constants.HF_HUB_OFFLINE:
        raise DataError(f"{TINY} is not in the cache, and HF_HUB_OFFLINE forbids downloading it: save it as {path}")
    try:
        with urllib.request.urlopen(TINY_URL, timeout=TIMEOUT_S) as response:
            content = response.read()
    except (http.client.HTTPException, OSError) as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"{TINY_URL} cannot be fetched ({reason}): try again, or save it as {path}") from None
    if hashlib.sha256(content).hexdigest() != TINY_SHA256:
        raise DataError(f"{TINY_URL} gave {len(content)} bytes that are not {TINY}: save the text as {path}")
    write_whole(path, content)
    return path


@dataclass(frozen=True, eq=False)
class Request:
    """Data that is to be tokenized, and how."""

    found: Found
    tokenizer: TextTokenizer
    encode: EncodeOptions = field(default_factory=EncodeOptions)
    skip_bad_rows: int = 0

    @cached_property
    def key(self) -> str:
        """A name for what is made: that of the same data, tokenizer, template and options.

        Without the date that a template may write: what is tokenized keeps the one of its first day, so that a run is
        continued on the same tokens on the next.
        """
        options, folder = asdict(self.encode), self.tokenizer.folder
        if self.encode.chat_template is not None:
            options["chat_template"] = [source for source, _ in chosen_templates(folder, self.encode.chat_template)]
        files = copied_files(folder)  # all that is used of the folder, and what lies beside the tokens
        of_tokenizer = [self.tokenizer.eos_token_id, *([path.name, content_hash(path)] for path in files)]
        # How many bad rows are allowed changes nothing in what is made without an error.
        return key_of([FORMAT, PART_TOKENS, self.found.identity(), of_tokenizer, options])

    @cached_property
    def first_rows(self) -> list[Record]:
        """The first good rows of the training data; DataError if the data begins with LOOKED_AT bad ones."""
        assert not isinstance(self.found.train, Texts)
        first = [row for _, row in islice(self.found.train.read(), LOOKED_AT)]
        good = [row for row in first if isinstance(row, Record)]
        if not good:
            raise cast(BadRow, first[0]) if first else DataError(f"{self.found.name} has no rows: give data with rows")
        return good

    def encoder(self, now: datetime | None = None) -> Encoder | None:
        """The encoder of rows, with the time `now` for templates (None: the clock's); None for text files."""
        if self.found.is_rows:
            return open_encoder(self.first_rows, self.tokenizer, self.encode, now)
        options = self.encode
        for_rows = {
            f"--data-format {options.data_format}": options.data_format not in (None, "text"),
            "--map": bool(options.mapping),
            "--prompt-template": options.prompt_template is not None,
            "--no-preamble": not options.preamble,
            "--chat-template": options.chat_template is not None,
            f"--train-on {options.train_on}": options.train_on not in (None, "all"),
            f"--seq-len {options.seq_len} with --overlong {options.overlong}": options.seq_len is not None,
        }
        if wrong := ", ".join(name for name, is_given in for_rows.items() if is_given):
            raise UsageError(f"{wrong}: for data in rows, but {self.found.name} is text")
        return None

    def work(self, part: Texts | RowSequence, encoder: Encoder | None) -> Work:
        """How the training data or the part for evaluation becomes tokens."""
        if isinstance(part, Texts):
            return TextWork(part.documents, self.tokenizer)
        assert encoder is not None
        return RowWork(part, encoder)

    @property
    def entry(self) -> Path:
        """Where its token files are in the cache, or will be."""
        title = re.sub(r"[^\w.-]+", "-", self.found.title)[:60]
        return cache_folder("tokens") / f"{title}-{self.key}"

    @property
    def is_made(self) -> bool:
        """Whether the cache has all the files that were made for it."""
        return is_whole(self.entry)

    def settled(self) -> Request:
        """The request with a limit on the tokens of a row only where that changes them, so that text has one entry for
        all. An entry of the cache that is there decides it without a look at the rows."""
        if self.encode.overlong != "turns" or self.encode.seq_len is None:
            return self
        whole = replace(self, encode=replace(self.encode, seq_len=None))
        if not self.found.is_rows or whole.is_made:
            return whole
        # text has no turns, of which too many could be in a row
        return self if self.is_made or find_format(self.first_rows, self.encode).name != "text" else whole


def parsed_mapping(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs (ours, theirs) of --map OURS=THEIRS; UsageError names what is of another form or given twice."""
    pairs = [(ours, theirs) for ours, _, theirs in (text.partition("=") for text in texts)]
    if wrong := [text for text, pair in zip(texts, pairs, strict=True) if not all(pair)]:
        raise UsageError(f"--map {', '.join(wrong)}: give OURS=THEIRS, for example messages=conversations")
    if twice := sorted(name for name, count in Counter(ours for ours, _ in pairs).items() if count > 1):
        raise UsageError(f"--map: {', '.join(twice)} is given twice: give each of our names once")
    return tuple(pairs)
