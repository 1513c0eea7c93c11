"""From rows to tokens and masks: format, template, mask and length of each row of a data set.

Prompts and answers (prompt/completion, question/answer, alpaca) are tokenized each by itself and joined as they are,
and EOS follows; the answer and EOS are trained. This is what llm.q does, and what inference does: the prompt is
tokenized before the answer exists. Where the tokenizer itself puts BOS before a text (Llama's), texts and prompts begin
with it. With a chat template asked for, such rows are chats of one question instead.
In all of these, text that spells a special token is ordinary text.

Chats are rendered by the chat template and tokenized as a whole, as transformers' apply_chat_template does it, so that
the ids are the same. This includes that content which spells a special token becomes this token: it cannot
be distinguished from the template's own. Such rows are counted (`Counts.spelled`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text as Styled

from llmq.data.chat.encoded import OVERLONG, Counts, Encoded, EncodeOptions, shortened
from llmq.data.chat.formats import KNOWN_KEYS, PAIRS, Chat, Format, Pair, find_format
from llmq.data.chat.masks import Sample, TrainOn, samples, trained_tokens, turn_ends, unwritten
from llmq.data.chat.template import MARKER, OWN, RenderError, open_template
from llmq.data.rows.row_files import BadRow, Record
from llmq.data.tokens.text import pieces_of
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenizer import TemplateNote, TextTokenizer
from llmq.errors import DataError, UsageError

ENCODED_AT_ONCE = 1 << 20  # characters
LONGEST_END = 200  # characters of an end token and the white space after it
STYLES = {True: "black on green3", False: "default on grey15"}  # by whether it is trained
MOST = 2000  # tokens shown of a document
SAMPLE_TOKENS = 512  # of the sample in the log of a run
PROBE = Chat([{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}])


def open_encoder(
    first: Sequence[Record], tokenizer: TextTokenizer, options: EncodeOptions, now: datetime | None = None
) -> Encoder:
    """An encoder for data that begins with the rows `first`; `now` is the time that templates see (None: the clock's).

    UsageError for options that are wrong or have no effect on this format; DataError if the format or the template
    cannot be found, or the template ends its turns with a marker that is not one token of the tokenizer.
    """
    form, train_on = find_format(first, options), TrainOn.parse(options.train_on)
    is_pair, is_alpaca = form.name in PAIRS and not form.is_chat, form.name == "alpaca" and not form.is_chat
    rows, given = f"--train-on {options.train_on}: {form.name} rows", options.train_on is not None
    others = ", ".join(name for name in OVERLONG if name != "turns")
    unused = {
        f"--chat-template: {form.name} rows are not chats": options.chat_template is not None and not form.is_chat,
        "--no-preamble is for prompts of alpaca rows, which these are not": not options.preamble
        and (form.template is not None or not is_alpaca),
        f"{rows} are trained as a whole": given and form.name == "text",
        f"{rows} say themselves what is trained, in labels": given and form.name == "tokens",
        f"{rows} have a prompt and an answer: give assistant or all": is_pair
        and not (train_on.everything or train_on.roles == {"assistant"}),
        f"--seq-len {options.seq_len}: text rows have no turns and stay whole: give --overlong {others}": (
            form.name == "text" and options.overlong == "turns" and options.seq_len is not None
        ),
    }
    if wrong := "; ".join(text for text, is_so in unused.items() if is_so):
        raise UsageError(wrong)
    return (ChatEncoder if form.is_chat else Encoder)(form, tokenizer, options, first, now or datetime.now())


class Encoder:
    """Turns rows into documents. `counts` says what it did so far."""

    template_note: TemplateNote | None = None  # of the chat template, for the sidecar of what is made

    def __init__(
        self, form: Format, tokenizer: TextTokenizer, options: EncodeOptions, first: Sequence[Record], now: datetime
    ) -> None:
        self.format, self.tokenizer, self.options = form, tokenizer, options
        self.train_on, self.counts = TrainOn.parse(options.train_on), Counts()
        self.again = partial(open_encoder, first, tokenizer, options, now)  # opens it in another process
        # What ends every document, whatever is in the rows.
        self.own_ends = set() if form.name == "tokens" else {tokenizer.eos_token_id}
        self._begin(first, now)

    def _begin(self, first: Sequence[Record], now: datetime) -> None:
        """What else is made of the first rows."""

    def copied(self) -> Encoder:
        """The same encoder with counts of its own, which another thread may use at the same time."""
        other = copy.copy(self)
        other.counts = Counts()
        return other

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every end token that is trained, as far as known: those of the template, and those of the rows so far."""
        return tuple(sorted({*self.counts.end_tokens, *self.own_ends}))

    def describe(self) -> str:
        """Format, mapping, template and mask in words, a line each."""
        lines = [f"format: {self.format.words}", *self._described()]
        if self.options.seq_len is not None:
            lines.append(f"rows of more than {self.options.seq_len:,} tokens {OVERLONG[self.options.overlong]}")
        return "\n".join(lines)

    def _described(self) -> list[str]:
        eos, begin = self.tokenizer.eos_token, map(self.tokenizer.encoder.id_to_token, self.tokenizer.begin_ids)
        if self.format.name == "tokens":
            return ["trained: tokens whose label is not -100; no end token is added"]
        lines = [f"each row begins with {' '.join(map(str, begin))}"] if self.tokenizer.begin_ids else []
        if self.format.name == "text" or self.train_on.everything:
            return [*lines, f"trained: every token, with {eos} at the end of each row"]
        how = f"prompt and answer are joined as they are (--chat-template {OWN} would make chats of them)"
        return [*lines, f"trained: the answer and {eos} after it; {how}"]

    def encode(self, records: Sequence[Record], bad: list[BadRow] | None = None) -> list[Encoded]:
        """The documents of `records`, in their order; a row gives one, none (dropped, untrained) or several (split).

        The first bad row is raised; with a list `bad`, bad rows are put there instead and the others are encoded.
        """
        read: list[tuple[Record, Any, list[str]]] = []  # rows, their content, their texts
        for record in records:
            try:
                read.append(self._read(record))
            except BadRow as error:
                if bad is None:
                    raise
                bad.append(error)
        documents: list[Encoded] = []
        encodings = self._encodings([text for _, _, texts in read for text in texts])
        for record, content, texts in read:
            self.counts.rows += 1
            documents += self._fitted(self._documents(record.place, content, [next(encodings) for _ in texts]))
        self.counts.documents += len(documents)
        self.counts.tokens += sum(len(one.ids) for one in documents)
        masks = (np.ones(len(one.ids), bool) if one.trained is None else one.trained for one in documents)
        self.counts.trained += sum(int(np.count_nonzero(mask)) for mask in masks)
        return documents

    def _read(self, record: Record) -> tuple[Record, Any, list[str]]:
        content, texts = self._texts(record, self.format.read(record, self.tokenizer.vocab_size))
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise BadRow(record.place, f"the text holds {half!a}, which is no character of UTF-8: fix it") from None
        return record, content, texts

    def _fitted(self, documents: list[Encoded]) -> list[Encoded]:
        """A row's documents, of at most seq_len tokens, without those that train nothing."""
        limit, overlong = self.options.seq_len, self.options.overlong
        # text, which has no turns, never is too long where turns are what is kept
        sizes = [len(one.ids) for one in documents if one.turns is not None or overlong != "turns"]
        if limit is not None and (longest := max(sizes, default=0)) > limit:
            self.counts.overlong += 1
            self.counts.longest = max(self.counts.longest, longest)
            cut = [shortened(one, limit, overlong) for one in documents]
            self.counts.turns_cut += sum(lost for _, lost in cut)
            documents = [one for made, _ in cut for one in made]
            if not documents:
                self.counts.too_long += 1
                return []
        kept = [one for one in documents if one.trained is None or one.trained.any()]
        self.counts.untrained += not kept
        return kept

    def _texts(self, record: Record, content: Any) -> tuple[Any, list[str]]:
        """A row's content as `_documents` takes it, and its texts to be tokenized; BadRow for one that cannot be."""
        match content:
            case str():
                return content, pieces_of(content) if self.tokenizer.in_pieces else [content]
            case Pair(prompt, answer):
                return content, [prompt, answer]
        return content, []

    def _encodings(self, texts: list[str]) -> Iterator[Any]:
        """The ids (n,) int32 of each text; of some at a time, as the library holds 100 bytes per character."""
        start = characters = 0
        for stop, text in enumerate(texts, 1):
            characters += len(text)
            if characters >= ENCODED_AT_ONCE or stop == len(texts):
                for code in self.tokenizer.encoder.encode_batch_fast(texts[start:stop], add_special_tokens=False):
                    yield np.fromiter(code.ids, np.int32, len(code))
                start, characters = stop, 0

    def _documents(self, place: str, content: Any, encodings: list[Any]) -> list[Encoded]:
        if isinstance(content, Encoded):
            if content.ids[-1] == self.tokenizer.eos_token_id and (content.trained is None or content.trained[-1]):
                self.counts.end_tokens.add(self.tokenizer.eos_token_id)
            return [content]
        begin, end = (np.array(ids, np.int32) for ids in (self.tokenizer.begin_ids, [self.tokenizer.eos_token_id]))
        ids = np.concatenate([begin, *encodings, end])
        if isinstance(content, str):
            return [Encoded(place, ids, None)]
        whole = [(len(ids), len(ids))]
        if self.train_on.everything:
            return [Encoded(place, ids, None, whole)]
        trained = np.ones(len(ids), bool)
        trained[: len(begin) + len(encodings[0])] = False
        return [Encoded(place, ids, trained, whole)]


class ChatEncoder(Encoder):
    """Renders chats by a template, and masks their turns (see masks.py)."""

    def _begin(self, first: Sequence[Record], now: datetime) -> None:
        """Opens the templates, and learns from a small chat, or else the first rows, how they end a turn.

        DataError if they do so with a marker that is not one token.
        """
        self.template = open_template(self.tokenizer.folder, self.options.chat_template, now)
        self.template_note = self.template.note
        self._read_keys = KNOWN_KEYS | self.template.words
        # Masks depend on offsets, off which a post-processor would trim white space.
        self.encoder = self.tokenizer.reads_special()
        added = self.encoder.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special} | {self.tokenizer.eos_token}
        self.end_tokens = tuple(sorted(special, key=len, reverse=True))
        self._spelled = re.compile("|".join(map(re.escape, self.end_tokens)))
        text, stop = next(self._probes(first), ("", 0))
        tail, self.own_ends = text[:stop].rstrip(), set()
        if tail.endswith(self.end_tokens):
            self.own_ends = {self.encoder.encode(tail, add_special_tokens=False).ids[-1]}
        elif (marker := MARKER.findall(tail)) and tail.endswith(marker[-1]):
            tokens = self.encoder.encode(marker[-1], add_special_tokens=False).tokens
            raise DataError(
                f"{self.template.origin}: the template ends a turn with {marker[-1]}, which is {len(tokens)} "
                f"tokens ({' '.join(tokens)}) of {self.tokenizer.folder}: add it there as a special token, or use "
                "another template (--chat-template)"
            )

    def _probes(self, first: Sequence[Record]) -> Iterator[tuple[str, int]]:
        """Rendered chats, and where the trained part of their last assistant turn ends."""
        for record in (None, *first):
            with suppress(BadRow, RenderError):  # which are reported when the rows are encoded
                chat: Any = self.format.read(record, self.tokenizer.vocab_size) if record else PROBE
                last = samples(self.template.pick(chat.tools), chat, TrainOn(only_last=True), self.end_tokens)[-1]
                if last.spans:
                    yield last.text, last.spans[-1][1]

    def _described(self) -> list[str]:
        template = self.template
        how = ", by its generation blocks" if template.has_generation else ", found by rendering each turn's prompt"
        how = "" if self.train_on.everything else how
        ends = [str(self.encoder.id_to_token(number)) for number in self.end_token_ids]
        end = f", with {' and '.join(ends)}" if ends else ""
        lines = [f"chat template: {template.origin}", f"trained: {self.train_on.describe()}{how}{end}"]
        if not self.own_ends:
            eos = self.tokenizer.eos_token
            lines.append(f"note: the template ends a turn with no token: {eos} follows the last one")
        if "strftime_now" in template.source:
            lines.append(f"date in the template: {template.now:%Y-%m-%d %H:%M}")
        return lines

    def _texts(self, record: Record, chat: Any) -> tuple[Any, list[str]]:
        template = self.template.pick(chat.tools)
        try:
            made = samples(template, chat, self.train_on, self.end_tokens)
            lost = unwritten(template, chat)
        except RenderError as error:
            raise BadRow(record.place, f"the chat template ({template.origin}) fails: {error}") from None
        if lost:
            raise BadRow(
                record.place,
                f"the chat has {lost}, which the chat template ({template.origin}) does not write: give one that does "
                "(--chat-template)",
            )
        if len(made) > 1:
            self.counts.divided += 1
            self.counts.divided_into += len(made)
        self.counts.spelled += any(self._spelled.search(message.get("content", "")) for message in chat.messages)
        self.counts.masked += len(chat.untrained.intersection(self.train_on.candidates(chat)))
        self.counts.unread.update({key for message in chat.messages for key in message} - self._read_keys)
        return made, [sample.text for sample in made]

    def _encodings(self, texts: list[str]) -> Iterator[Any]:
        yield from self.encoder.encode_batch(texts, add_special_tokens=False)

    def _documents(self, place: str, content: list[Sample], encodings: list[Any]) -> list[Encoded]:
        documents: list[Encoded] = []
        for sample, encoding in zip(content, encodings, strict=True):
            ids = np.array(encoding.ids, np.int32)
            trained = trained_tokens(encoding, sample.spans)
            limit = self.options.seq_len
            turns = turn_ends(encoding, sample.turns) if limit is not None and len(ids) + sample.ends > limit else []
            if sample.ends:
                ids = np.append(ids, np.int32(self.tokenizer.eos_token_id))
                trained = np.append(trained, True)
                turns[-1:] = [(len(ids), len(ids))] * bool(turns)
                self.counts.unended += 1
                self.counts.end_tokens.add(self.tokenizer.eos_token_id)
            self._note_ends(sample)
            documents.append(Encoded(place, ids, trained, turns))
        return documents

    def _note_ends(self, sample: Sample) -> None:
        """Adds the special tokens that end what is trained, but for white space after them, to the end tokens."""
        for (_, stop), (following, _) in pairwise([*sample.spans, (-1, -1)]):
            tail = sample.text[max(stop - LONGEST_END, 0) : stop].rstrip()
            token = next((token for token in self.end_tokens if tail.endswith(token)), None)
            if token is not None and following != stop and (number := self.encoder.token_to_id(token)) is not None:
                self.counts.end_tokens.add(number)


def show(
    encoded: Sequence[Encoded], tokenizer: TextTokenizer, count: int, *, marks: bool = False, most: int = MOST
) -> Group:
    """The first `count` documents, up to `most` tokens of each, under its place and numbers; trained text is green.

    With `marks`, for where there are no colors, what is trained is also put in [[ ]].
    Control characters are shown as escapes, so that no text moves the cursor; line breaks also break the line.
    """
    shown: list[Styled] = []
    for document in encoded[:count]:
        ids, trained = document.ids, np.ones(len(document.ids), bool) if document.trained is None else document.trained
        shown.append(Styled(f"{document.place}: {len(ids)} tokens, {int(trained.sum())} trained", style="bold"))
        body = Styled()
        starts = [0, *(np.flatnonzero(np.diff(trained[:most])) + 1)]
        for run, is_trained in zip(np.split(ids[:most], starts[1:]), trained[starts].tolist(), strict=True):
            found = tokenizer.encoder.decode(run.tolist(), skip_special_tokens=False)
            text = "".join(c if c.isprintable() else ascii(c)[1:-1] + "\n" * (c == "\n") for c in found)
            body.append(f"[[{text}]]" if marks and is_trained else text, style=STYLES[is_trained])
        if len(ids) > most:
            body.append(f" ... and {len(ids) - most} more tokens", style="italic")
        shown.append(body)
    return Group(*shown)


def sample_text(files: Sequence[TokenFile], tokenizer_folder: Callable[[], Path | None]) -> str | None:
    """The first document of masked data as text, with what is trained in marks; None where all is trained."""
    masked = next((file for file in files if file.mask_bits is not None and file.num_documents), None)
    folder = tokenizer_folder() if masked is not None else None
    if masked is None or folder is None:
        return None
    stop = int(masked.document_starts[1])
    document = Encoded(masked.path.name, np.asarray(masked.tokens[:stop]), masked.trained(0, stop))
    _, body = show([document], TextTokenizer.open(str(folder)), 1, marks=True, most=SAMPLE_TOKENS).renderables
    return f"[Sample] of {masked.path.name}, with what is trained in [[ ]]:\n{body}"
