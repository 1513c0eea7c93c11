"""Tokens that --add-tokens adds to a model: a file of them, a tokenizer that has them, and a model with their rows.

The file has a token in each line, without the blanks around it. No line is a comment, and all are normal tokens, found
wherever text spells them. A .json file is a list of such texts and of objects with the keys of tokenizers' AddedToken:
`content`, and `special`, `lstrip`, `rstrip`, `single_word`, `normalized`. Text that spells a special token is ordinary
text, and templates write it.

New ids follow the largest one of the tokenizer, so that those of data tokenized before stay what they are. They may
have rows in the model already: many models have more rows than tokens. The enlarged tokenizer is a folder of the cache.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from llmq.data.tokens.cache import key_of, locked
from llmq.data.tokens.tokenizer import CONFIG, TextTokenizer, copied_files
from llmq.disk import cache_folder, small_text, storage, whole_folder
from llmq.errors import DataError, UsageError
from llmq.files.huggingface import write_json
from llmq.model.config import read_json
from llmq.model.key_types import MAX_VOCABULARY

if TYPE_CHECKING:
    from llmq.files.source import ModelSource

MOST_TOKENS, MOST_BYTES = 100_000, 1 << 24  # of a file: opening a tokenizer compiles what finds them, in seconds
TEKKEN = "tekken.json"  # a tokenizer in Mistral's form, which takes no more tokens
Entry = dict[str, Any]  # what tokenizer.json says of an added token, but for its id
Say = Callable[[str], None]


class _Token(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    content: str = Field(min_length=1)
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # as in tokenizers: not if it is special
    special: bool = False


_Tokens = TypeAdapter(list[str | _Token])


def read_tokens(path: Path) -> tuple[Entry, ...]:
    """The tokens of a file, in order. DataError for what is no list of different tokens in UTF-8, or too long."""
    fix = "give a text file with a token in each line, or a .json file with a list of tokens"
    text = small_text(path, MOST_BYTES, "--add-tokens", fix)
    try:
        lines = [line.strip() for line in text.split("\n") if line.strip()] if path.suffix != ".json" else None
        given = _Tokens.validate_json(text) if lines is None else lines
        tokens = [_Token(content=one) if isinstance(one, str) else one for one in given]
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"entry {entry}: " for entry in first["loc"][:1])
        raise DataError(f"--add-tokens {path} is no list of tokens ({where}{first['msg']}): {fix}") from None
    names = Counter(token.content for token in tokens)
    if not 0 < len(tokens) <= MOST_TOKENS:
        raise DataError(f"--add-tokens {path} has {len(tokens):,} tokens, and 1 to {MOST_TOKENS:,} can be added: {fix}")
    if binary := [name for name in names if any(c < " " and not c.isspace() for c in name)]:
        raise DataError(f"--add-tokens {path} is not text: it has {binary[0][:40]!r}: {fix}")
    if twice := [name for name, count in names.items() if count > 1]:
        raise DataError(f"--add-tokens {path} has {_listed(twice)} more than once: remove what is repeated")
    normalized = ({"normalized": not one.special if one.normalized is None else one.normalized} for one in tokens)
    return tuple({**token.model_dump(), **more} for token, more in zip(tokens, normalized, strict=True))


def with_tokens(opened: TextTokenizer, tokens: Sequence[Entry], say: Say) -> TextTokenizer:
    """A tokenizer that has `tokens`, too; `say` reports those that it had before. DataError where their ids would not
    follow its own."""
    known = {one["content"]: opened.encoder.token_to_id(one["content"]) for one in tokens}
    if old := [f"{name!r} ({number})" for name, number in known.items() if number is not None]:
        say(f"--add-tokens: the tokenizer has {_listed(old)} already")
    new = [one for one in tokens if known[one["content"]] is None]
    if not new:
        return opened
    files = [*copied_files(opened.folder), *(path for path in [opened.folder / "config.json"] if path.is_file())]
    key = key_of([opened.sha256, [[path.name, path.read_text("utf-8", "replace")] for path in files[1:]], new])
    folder = cache_folder("tokenizers") / key
    with locked(folder.with_suffix(".lock"), say):
        if not folder.is_dir():
            with storage(folder), whole_folder(folder) as fresh:
                _write(opened, files, {opened.vocab_size + place: one for place, one in enumerate(new)}, fresh)
    found = TextTokenizer.open(str(folder), eos_token=opened.eos_token)
    ids = [found.encoder.token_to_id(one["content"]) for one in new]
    if ids != [*range(opened.vocab_size, found.vocab_size)]:
        raise DataError(
            f"{opened.folder} takes no more tokens: {new[0]['content']!r} would get the id {ids[0]} and not "
            f"{opened.vocab_size}, which follows the largest one. Number its tokens without gaps"
        )
    say(f"--add-tokens: {len(ids):,} new, from the id {ids[0]} on")
    return found


def grown(source: ModelSource, tokens: Sequence[Entry], say: Say) -> ModelSource:
    """A model with a tokenizer that has `tokens`, too, and with rows for them. UsageError where it has no tokenizer, or
    the vocabulary would be too large."""
    if not tokens:
        return source
    if (name := source.tokenizer_folder or source.preset_tokenizer) is None:
        raise UsageError(f"--add-tokens: {source.name} has no tokenizer: give a model with one")
    before, config = TextTokenizer.open(str(name)), source.config
    after, stored = with_tokens(before, tokens, say), source.stored_rows or config.vocab_size
    if after is before:
        return source
    rows = range(min(before.vocab_size, stored), after.vocab_size)
    if source.new_rows not in (rows, range(0)):
        raise UsageError(
            f"--add-tokens needs rows {rows.start} to {rows.stop - 1}, and --adapter has {source.new_rows.start} to "
            f"{source.new_rows.stop - 1}: give the file of its run, or leave it out"
        )
    if after.vocab_size > MAX_VOCABULARY:
        raise UsageError(
            f"--add-tokens gives {source.name} {after.vocab_size:,} ids, and it can have {MAX_VOCABULARY:,}"
        )
    if after.vocab_size > config.vocab_size:
        say(f"The vocabulary grows from {config.vocab_size:,} to {after.vocab_size:,}")
    return replace(
        source,
        config=replace(config, vocab_size=max(config.vocab_size, after.vocab_size)),
        tokenizer_folder=after.folder,
        tokenizer_asked=True,
        new_tokens=tokens,
        new_rows=rows,
        stored_rows=stored,
    )


def _write(opened: TextTokenizer, files: Iterable[Path], new: dict[int, Entry], fresh: Path) -> None:
    """A folder with the files of a tokenizer and tokens by their ids, which all are told of that list tokens by id."""
    for path in (path for path in files if path.name != TEKKEN):
        copy = fresh / path.relative_to(opened.folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    content = read_json(fresh / "tokenizer.json")
    content["added_tokens"] = [*(content.get("added_tokens") or ()), *({"id": at, **one} for at, one in new.items())]
    (fresh / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=2), "utf-8")
    if (fresh / CONFIG).is_file() and "added_tokens_decoder" in (config := read_json(fresh / CONFIG)):
        config["added_tokens_decoder"] |= {str(at): one for at, one in new.items()}
        write_json(fresh / CONFIG, config)
    if (added := fresh / "added_tokens.json").is_file():
        write_json(added, {**read_json(added), **{one["content"]: at for at, one in new.items()}})


def _listed(names: Sequence[str]) -> str:
    """The first of them."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(islice(names, 5)) + more
