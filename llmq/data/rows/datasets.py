"""Data sets known by name: where they come from, and which rows are for evaluation. Names and rules are llm.q's."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from llmq.data.rows.file_rows import FileRows, Mixed, RowSequence, Shuffled, count_rows, train_test_order
from llmq.data.rows.hub_data import HubSpec, open_hub_set
from llmq.disk import cache_folder, write_whole
from llmq.errors import DataError

CLIMB = "gvlassis/ClimbMix"
CLIMB_SEED = 42
# Tokens in each of its clusters, in the order of their numbers, in llm.q's unit.
CLIMB_WEIGHTS = (86, 121, 145, 386, 189, 1778, 1673, 117, 81, 734, 156, 2568, 90, 28, 23, 728, 702, 227, 116, 51)
TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
OVERRIDE = "LLMQ_TINY_SHAKESPEARE"  # a file or URL to take instead
TIMEOUT_S = 30.0


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
TINY = "tiny-shakespeare"
NAMES = (TINY, *NAMED)
SPLIT_SEED = 42  # of the drawn rows


def named_rows(named: NamedSet, *, streaming: bool) -> tuple[RowSequence, RowSequence | None]:
    """The training rows, and those for evaluation where they are rows of their own; see open_hub_set for the errors."""
    if named.repo == CLIMB:
        clusters = range(1, len(CLIMB_WEIGHTS) + 1)
        specs = [HubSpec(CLIMB, "main", f"cluster_id={number}", None, None) for number in clusters]
        sets = [open_hub_set(spec, streaming=streaming) for spec in specs]
        return Mixed(tuple(FileRows(one.files("train")[1]) for one in sets), CLIMB_WEIGHTS, CLIMB_SEED), None
    opened = open_hub_set(HubSpec.parse(named.repo), streaming=streaming)
    train = FileRows(opened.files("train")[1])
    if named.eval_split:
        return train, FileRows(opened.files(named.eval_split)[1])
    if named.eval_rows:
        kept, held = train_test_order(count_rows(train.files), named.eval_rows, SPLIT_SEED)
        return Shuffled(train, kept), Shuffled(train, held)
    return train, None


def tiny_shakespeare() -> Path:
    """The text of tiny-shakespeare (1.1 MB, public domain): from the cache, else downloaded into it.

    Raises DataError if it is not cached and cannot be fetched, or is not the text that it should be.
    """
    source = os.environ.get(OVERRIDE) or TINY_SHAKESPEARE
    if "://" not in source:
        if not Path(source).is_file():
            raise DataError(f"{OVERRIDE} is {source}, which is not a file: set it to a text file or a URL, or unset it")
        return Path(source)
    official = source == TINY_SHAKESPEARE
    suffix = "" if official else "-" + hashlib.sha256(source.encode()).hexdigest()[:12]
    path = cache_folder("text") / f"tiny-shakespeare{suffix}.txt"
    if not path.is_file():
        way_out = f"save the text as {path}, or set {OVERRIDE} to a copy of it"
        content = _fetched(source, way_out)
        if official and hashlib.sha256(content).hexdigest() != TINY_SHAKESPEARE_SHA256:
            raise DataError(f"{source} gave {len(content)} bytes that are not tiny-shakespeare: {way_out}")
        write_whole(path, content)
    return path


def _fetched(url: str, way_out: str) -> bytes:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise DataError(f"{url} is not in the cache, and HF_HUB_OFFLINE forbids downloading it: unset that, {way_out}")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return response.read()
    except (http.client.HTTPException, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"{url} cannot be fetched ({reason}): try again, {way_out}") from None
