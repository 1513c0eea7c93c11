"""What is to be tokenized and how: all that the token files depend on, and their name in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import islice

from llmq.data.chat.encode import EncodeOptions, Encoder, open_encoder
from llmq.data.chat.template import chosen_templates
from llmq.data.rows.find_sources import Found
from llmq.data.rows.records import BadRow, Record
from llmq.data.tokens.cache import content_hash, key_of
from llmq.data.tokens.produce import PART_TOKENS
from llmq.data.tokens.sidecar import copied_files
from llmq.data.tokens.tokenizer import TextTokenizer
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
        assert not isinstance(self.found.train, tuple)
        first = [row for _, row in islice(self.found.train.read(), LOOKED_AT)]
        good = [row for row in first if isinstance(row, Record)]
        if not good:
            raise (
                first[0]
                if first and isinstance(first[0], BadRow)
                else DataError(f"{', '.join(self.found.asked)} has no rows: give data with rows")
            )
        return good

    def has_turns(self) -> bool:
        """Whether the rows are not text, which has no turns: whether it matters how long they may be."""
        return self.encode.format_of(self.first_rows).name != "text"

    def records(self) -> Iterator[Record]:
        """The good rows of the training data."""
        assert not isinstance(self.found.train, tuple)
        return (row for _, row in self.found.train.read() if isinstance(row, Record))

    def encoder(self, now: datetime | None = None) -> Encoder | None:
        """The encoder of rows, with the time `now` for templates (None: the clock's); None for text files."""
        if isinstance(self.found.train, tuple):
            if wrong := _only_for_rows(self.encode):
                raise UsageError(f"{', '.join(wrong)}: for data in rows, but {', '.join(self.found.asked)} is text")
            return None
        return open_encoder(self.first_rows, self.tokenizer, self.encode, now)


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
    pairs = [text.split("=", 1) for text in texts if "=" in text]
    wrong = [text for text in texts if not all(text.partition("=")[::2])]
    names = [pair[0] for pair in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if wrong:
        raise UsageError(f"--map {', '.join(wrong)}: give OURS=THEIRS, for example messages=conversations")
    if twice:
        raise UsageError(f"--map: {', '.join(twice)} is given twice: give each of our names once")
    return tuple((ours, theirs) for ours, theirs in pairs)
