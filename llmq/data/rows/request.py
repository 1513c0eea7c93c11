"""What is to be tokenized and how: all that the token files depend on, and their name in the cache."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import islice
from pathlib import Path

from llmq.data.chat.encode import EncodeOptions, Encoder, open_encoder
from llmq.data.chat.template import chosen_templates
from llmq.data.rows.file_rows import RowSequence
from llmq.data.rows.find_sources import Found
from llmq.data.rows.row_files import BadRow, Record
from llmq.data.tokens.cache import content_hash, is_whole, key_of
from llmq.data.tokens.pipeline import PART_TOKENS, RowWork, TextWork, Work
from llmq.data.tokens.text import Texts
from llmq.data.tokens.tokenizer import TextTokenizer, copied_files
from llmq.disk import cache_folder
from llmq.errors import DataError, UsageError

FORMAT = 4  # of what is made; a new one leaves what is in the cache aside
LOOKED_AT = 32  # rows that the format is found from


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
        if not first:
            raise DataError(f"{self.found.name} has no rows: give data with rows")
        if isinstance(first[0], BadRow) and all(isinstance(row, BadRow) for row in first):
            raise first[0]
        return [row for row in first if isinstance(row, Record)]

    def encoder(self, now: datetime | None = None) -> Encoder | None:
        """The encoder of rows, with the time `now` for templates (None: the clock's); None for text files."""
        if self.found.is_rows:
            return open_encoder(self.first_rows, self.tokenizer, self.encode, now)
        if wrong := _only_for_rows(self.encode):
            raise UsageError(f"{', '.join(wrong)}: for data in rows, but {self.found.name} is text")
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
        return self if self.is_made or self.encode.format_of(self.first_rows).name != "text" else whole


def _only_for_rows(options: EncodeOptions) -> list[str]:
    given = {
        f"--data-format {options.data_format}": options.data_format not in (None, "text"),
        "--map": bool(options.mapping),
        "--prompt-template": options.prompt_template is not None,
        "--no-preamble": not options.preamble,
        "--chat-template": options.chat_template is not None,
        f"--train-on {options.train_on}": options.train_on not in (None, "all"),
        f"--seq-len {options.seq_len} with --overlong {options.overlong}": options.seq_len is not None,
    }
    return [name for name, is_given in given.items() if is_given]


def parsed_mapping(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs (ours, theirs) of --map OURS=THEIRS; UsageError names what is of another form or given twice."""
    pairs = [(ours, theirs) for ours, _, theirs in (text.partition("=") for text in texts)]
    if wrong := [text for text, pair in zip(texts, pairs, strict=True) if not all(pair)]:
        raise UsageError(f"--map {', '.join(wrong)}: give OURS=THEIRS, for example messages=conversations")
    if twice := sorted(name for name, count in Counter(ours for ours, _ in pairs).items() if count > 1):
        raise UsageError(f"--map: {', '.join(twice)} is given twice: give each of our names once")
    return tuple(pairs)
