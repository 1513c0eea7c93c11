"""A model as lm-evaluation-harness asks one: log p of continuations, of whole texts, and text up to stop texts.

Tokens, windows and stops are those of the harness's own `hf` backend, so that both answer a request alike:

    context, continuation   white space at the end of a context goes to the continuation; both are tokenized together,
                            and what is past as many tokens as the context alone has is the continuation
    no context              the prefix token, BOS or else EOS, is the context
    BOS                     where the tokenizer puts it, unless the text begins with the prefix token
    too long                tokens of the left are dropped: at most `max_length` are read, the last one only predicted
    whole texts             windows of `max_length` tokens that do not overlap, the first after the prefix token

Requests that read the same tokens, such as choices of one token after a question, read them once. Rows of like length
are read together, the longest first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llmq.api.load import LoadedModel
from llmq.data.chat.template import ChatTemplate, RenderError, named_tokens, open_template
from llmq.data.rows.given import on_host
from llmq.data.tokens.tokenizer import GENERATION_CONFIG, TextTokenizer, json_if_there
from llmq.errors import DataError, UsageError
from llmq.screen import StartTask, counted, unshown
from llmq.tensor import IGNORED

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
NEW_TOKENS = 256  # of an answer to a request that does not say it, as of the hf backend
LEAST = 64  # lengths that a model is loaded for are multiples of this


class ReadOnce(NamedTuple):
    """Tokens that some requests read, and of each the number of its last tokens that it scores, with the last one,
    which is only predicted."""

    tokens: tuple[int, ...]
    asked: list[tuple[int, int, int]]  # index of the request, tokens of the continuation, its last token


class HarnessModel(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=...)`, with its tokenizer's folder.

    `load(seq_len)` opens the model for rows of so many tokens; it is called again where longer ones are asked.
    """

    def __init__(
        self,
        load: Callable[[int], LoadedModel],
        folder: Path,
        *,
        max_length: int,
        batch_size: int = 8,
        chat_template: str | None = None,
        name: str = "",
        task: StartTask = unshown,
    ) -> None:
        super().__init__()
        self._load, self._folder, self._task, self._template_asked = load, folder, task, chat_template
        self.max_length, self.batch_size, self._name = max_length, batch_size, name or folder.name
        self._text = TextTokenizer.open(str(folder))
        self._encoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._encoder.no_truncation()
        self._encoder.no_padding()
        bos = self._encoder.token_to_id(named_tokens(folder).get("bos_token", ""))
        begin = self._text.begin_ids[0] if self._text.begin_ids else self._text.eos_token_id
        self._prefix: int = begin if bos is None else bos
        self._model: LoadedModel | None = None
        self._template: ChatTemplate | None = None

    @property
    def tokenizer_name(self) -> str:
        """What the harness's caches of requests go by."""
        return self._name

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return self._text.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What is read before the first token of a text."""
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **about: Any) -> list[int]:
        """The tokens of a text. None: with what the tokenizer puts around it, unless it begins with the prefix."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self._decode([self._prefix], special=True))
        return list(self._encoder.encode(string, add_special_tokens=add_special_tokens).ids)

    def _decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return str(self._encoder.decode(list(ids), skip_special_tokens=not special))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **about: Any
    ) -> list[tuple[float, bool]]:
        """Of each request its continuation's log p after its context, and whether it is the most likely one."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        readings = self._readings(requests)
        model = self._for(max((len(one.tokens) for one in readings), default=1))
        alone, shared = list[ReadOnce](), list[ReadOnce]()
        for one in readings:
            (alone if len({last for _, _, last in one.asked}) == 1 else shared).append(one)
        batches = [alone[at : at + self.batch_size] for at in range(0, len(alone), self.batch_size)]
        work = [
            *(partial(_by_score, model, batch) for batch in batches),
            *(partial(_by_logits, model, one) for one in shared),
        ]
        with self._task("Scoring") as report:
            for answered in counted(work, len(work), report):
                for index, log_p, is_greedy in answered():
                    found[index] = (log_p, is_greedy)
        for (texts, _, _), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def _readings(self, requests: Sequence[tuple[Any, list[int], list[int]]]) -> list[ReadOnce]:
        """What is read for requests, the longest first."""
        same: dict[tuple[int, ...], ReadOnce] = {}
        for index, (texts, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise UsageError(
                    f"a continuation has {len(continuation)} tokens, and {self.max_length} are read at most: "
                    f"{str(texts)[:200]}"
                )
            *read, last = (context + continuation)[-(self.max_length + 1) :]
            reading = same.setdefault(tuple(read), ReadOnce(tuple(read), []))
            reading.asked.append((index, len(continuation), last))
        return sorted(same.values(), key=lambda one: -len(one.tokens))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log p of each text, window by window."""
        windows, owners = list[tuple[None, list[int], list[int]]](), list[int]()
        for number, request in enumerate(requests):
            (text,) = request.args
            for pair in get_rolling_token_windows(self.tok_encode(text), self._prefix, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(number)
        found = [0.0] * len(requests)
        for number, (log_p, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            found[number] += log_p
        for request, log_p in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, log_p)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to a stop text; requests with the same settings together."""
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True, default=str)].append(index)
        found = [""] * len(requests)
        for members in groups.values():
            contexts, settings = [requests[index].args[0] for index in members], requests[members[0]].args[1]
            for index, text in zip(members, self._written(contexts, settings), strict=True):
                found[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return found

    def _written(self, contexts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        about = dict(normalize_gen_kwargs(dict(settings), NEW_TOKENS))
        until = handle_stop_sequences(about.pop("until"), eos=self._decode([self.eot_token_id], special=True))
        max_tokens, sampled = about.pop("max_gen_toks"), about.pop("do_sample")
        room = self.max_length - max_tokens
        if room < 1:
            raise UsageError(f"max_gen_toks {max_tokens} leave no room for a prompt in {self.max_length} tokens")
        own = json_if_there(
            self._folder / GENERATION_CONFIG
        )  # as transformers: a penalty holds for greedy answers, too
        about = {"repetition_penalty": own.get("repetition_penalty") or 1.0, "temperature": 0.0, **about}
        if not sampled:
            about = {name: value for name, value in about.items() if name not in ("top_k", "top_p", "min_p")}
            about["temperature"] = 0.0
        if unknown := about.keys() - set(SAMPLING):
            raise UsageError(f"generation_kwargs {', '.join(sorted(unknown))}: known are {', '.join(SAMPLING)}")
        prompts = [(self.tok_encode(context) or [self._prefix])[-room:] for context in contexts]
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        stop = [text for text in until if text]
        model, texts = self._for(1), [""] * len(prompts)
        pieces = model.generate(
            [prompts[index] for index in order],
            stream=True,
            max_tokens=max_tokens,
            batch_size=self.batch_size,
            stop=stop,
            logprobs=False,
            **about,
        )
        with self._task("Answering") as report:
            for piece in counted(pieces, None, report):
                texts[order[piece.index]] += piece.text or ""
        return [postprocess_generated_text(text, stop, None) for text in texts]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template, or of one of its names; None: it is not applied."""
        if chat_template is False or chat_template is None:
            return None
        wanted = chat_template if isinstance(chat_template, str) else self._template_asked
        self._template = open_template(self._folder, wanted)
        return self._template.source

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as text: up to where the model answers, or to the end of its last message, which the model continues.

        A template that fails is given the chat without its system messages, as by the hf backend.
        """
        self._template = self._template or open_template(self._folder, self._template_asked)
        try:
            text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt).text
        except RenderError:
            others = [one for one in chat_history if one["role"] != "system"]
            text = self._template.render(others, add_generation_prompt=add_generation_prompt).text
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        if (at := text.rfind(last.strip())) < 0:
            raise DataError(f"{self._template.origin}: the template does not write the last message, to be continued")
        kept = last.lstrip() if text[at:].startswith(last.lstrip()) else last.strip()
        return text[: at + len(kept)]

    def _for(self, length: int) -> LoadedModel:
        """The model, for rows of at least this length."""
        if self._model is None or self._model.seq_len < min(length, self.max_length):
            self._model = None  # its memory is what the next one gets
            with self._task("Loading the model"):
                self._model = self._load(min(-(-length // LEAST) * LEAST, self.max_length))
        return self._model


def _by_score(model: LoadedModel, batch: Sequence[ReadOnce]) -> Iterator[tuple[int, float, bool]]:
    """Log p of requests that agree on their last tokens, and whether these are the most likely, by index."""
    shape = (len(batch), len(batch[0].tokens))  # the longest first
    tokens, targets = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
    for row, (ids, asked) in enumerate(batch):
        first = len(ids) - max(count for _, count, _ in asked)
        tokens[row, : len(ids)] = ids
        targets[row, first : len(ids)] = [*ids[first + 1 :], asked[0][2]]
    score, hits = map(on_host, model.score_and_hits(tokens, targets))
    for row, (ids, asked) in enumerate(batch):
        for index, count, _ in asked:
            part = slice(len(ids) - count, len(ids))
            yield index, float(score[row, part].sum(dtype=np.float64)), bool(hits[row, part].all())


def _by_logits(model: LoadedModel, reading: ReadOnce) -> Iterator[tuple[int, float, bool]]:
    """The same of requests that differ in their last token."""
    ids, counts = reading.tokens, [count for _, count, _ in reading.asked]
    size, xp = max(counts), import_module("cupy") if model.device == "cuda" else np
    logits = model.logits(ids, copy=False)[len(ids) - size :].astype(np.float32)
    log_p = logits - logits.max(axis=-1, keepdims=True)
    log_p -= xp.log(xp.exp(log_p).sum(axis=-1, keepdims=True))
    # Those of all requests at once, as each copy from a GPU waits for it.
    places = np.concatenate([np.arange(size - count, size) for count in counts])
    targets = np.array([one for _, count, last in reading.asked for one in (*ids[len(ids) - count + 1 :], last)])
    found, best = on_host(log_p[xp.asarray(places), xp.asarray(targets)]), on_host(logits.argmax(axis=-1))
    ends = np.cumsum(counts)[:-1]
    scores, hits = np.split(found, ends), np.split(best[places] == targets, ends)
    for (index, _, _), score, hit in zip(reading.asked, scores, hits, strict=True):
        yield index, float(score.sum(dtype=np.float64)), bool(hit.all())
