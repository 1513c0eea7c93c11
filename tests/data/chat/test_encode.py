"""Rows to tokens and masks: what is trained, what ends a document, what is too long, what is refused."""

import importlib.util
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_cases import BOS, CASES, CHATML, CHATS, EOS, ONE, PAIRS, TOOLS, VARIABLES, chat_tokenizer, source
from rich.console import Console
from small_tokenizers import save
from tokenizers import AddedToken, processors

from llmq.data.chat.encode import MOST, STYLES, Encoder, open_encoder, show
from llmq.data.chat.encoded import OVERLONG, Counts, Encoded, EncodeOptions, notes
from llmq.data.chat.formats import PREAMBLES
from llmq.data.rows.row_files import BadRow, Record
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import DataError, UsageError


def records(rows: Sequence[dict]) -> list[Record]:
    return [Record(f"rows.jsonl:{number}", row) for number, row in enumerate(rows, 1)]


def opened(rows: list[Record], tokenizer: TextTokenizer, **options) -> Encoder:
    return open_encoder(rows[:8], tokenizer, EncodeOptions(**options))


def made(tokenizer: TextTokenizer, *rows: dict, **options) -> tuple[Encoder, list[Encoded]]:
    """An encoder for rows, and the documents that it made of them."""
    encoder = opened(records(rows), tokenizer, **options)
    return encoder, encoder.encode(records(rows))


def shown(tokenizer: TextTokenizer, document: Encoded) -> str:
    """A document's text with its trained runs in square brackets."""
    text, inside = "", False
    trained = np.ones(len(document.ids), bool) if document.trained is None else document.trained
    for number, is_trained in zip(document.ids.tolist(), trained.tolist(), strict=True):
        text += "" if inside == is_trained else "[" if is_trained else "]"
        text += tokenizer.encoder.decode([number], skip_special_tokens=False)
        inside = is_trained
    return text + "]" * inside


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, "tokenizer"])
@pytest.mark.parametrize("name", ["gsm8k-test.jsonl", pytest.param("gsm8k-train.jsonl", marks=pytest.mark.sweep)])
def test_gsm8k_trains_exactly_the_answers_and_their_ends(shared, name, template):
    qwen = TextTokenizer.open(str(shared("qwen2.5-tokenizer")))
    lines = shared(name).read_text("utf-8").splitlines()[: 200 if "test" in name else None]
    rows = records([json.loads(line) for line in lines])
    encoder = opened(rows, qwen, chat_template=template)
    documents = [document for at in range(0, len(rows), 1000) for document in encoder.encode(rows[at : at + 1000])]
    answers = qwen.encoder.encode_batch_fast([row.value["answer"] for row in rows], add_special_tokens=False)
    trained = sum(int(document.trained.sum()) for document in documents)
    assert trained == sum(len(answer.ids) for answer in answers) + len(rows) == encoder.counts.trained
    assert encoder.counts.rows == encoder.counts.documents == len(rows)


@pytest.mark.judge
@pytest.mark.parametrize(
    "name",
    ["chatml_generation", "qwen3", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("chatml", "zephyr"))],
)
def test_chats_of_gsm8k_have_the_ids_of_transformers_and_its_masks_with_the_end(shared, name):
    """Chats of two questions. Of a chat that makes two documents, the second is the whole of it."""
    transformers = pytest.importorskip("transformers", reason="the judge is transformers")
    qwen = TextTokenizer.open(str(shared("qwen2.5-tokenizer")))
    judge, masked = transformers.AutoTokenizer.from_pretrained(qwen.folder), "generation" in name
    lines = [json.loads(line) for line in shared("gsm8k-test.jsonl").read_text("utf-8").splitlines()[:200]]
    turns = [[{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}] for r in lines]
    rows = records([{"messages": one + other} for one, other in zip(turns[::2], turns[1::2], strict=True)])
    encoder = opened(rows, qwen, chat_template=source(name))
    documents = {document.place: document for document in encoder.encode(rows)}
    wanted = {"chat_template": source(name), "return_dict": True, "return_assistant_tokens_mask": masked}
    for row in rows:
        judged, (_, ids, trained, _) = judge.apply_chat_template(row.value["messages"], **wanted), documents[row.place]
        assert ids.tolist() == list(judged["input_ids"])
        if masked:
            spoken = np.array(judged["assistant_masks"], bool)
            assert trained[spoken].all() and ids[trained & ~spoken].tolist() == list(encoder.end_token_ids) * 2
    assert encoder.counts.documents == len(rows) * (1 + (name == "qwen3"))


def test_chats_that_become_several_documents_are_counted(small):
    """Qwen3's template writes earlier turns without their reasoning, so each turn is a document of its own."""
    rows = [{"messages": ONE * count} for count in (2, 1, 3)]
    encoder, documents = made(small, *rows, chat_template=source("qwen3"))
    assert (len(documents), encoder.counts.rows, encoder.counts.documents) == (6, 3, 6)
    (line,) = notes(encoder.counts, None, "turns", 0)
    assert line.startswith("2 chats became 5 documents, as the chat template writes earlier turns differently")
    assert notes(made(small, *rows)[0].counts, None, "turns", 0) == []


def trl_templates() -> list[Path]:
    """The chat templates in TRL's package, where it is installed; nothing of it is run."""
    spec = importlib.util.find_spec("trl")
    return sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja")) if spec and spec.origin else []


# Special tokens in the templates of models that are not among chat_cases.SPECIAL.
MARKED = re.compile(r"<\|[^<>|\s]{1,40}\|?>|<[^<>|\s]{1,40}\|>|<[\uff5c][^<>\s]{1,40}>|<(?:start|end)_of_[a-z]+>")
# Those that write earlier turns otherwise than the last, so that a turn is trained as it is at inference.
REWRITING = ("glm4moe", "gptoss", "nemotron", "gemma4", "diffusion_gemma", "qwen3", "lfm2_2_5", "deepseekv3", "muse")


@pytest.mark.judge
@pytest.mark.parametrize("path", trl_templates(), ids=lambda path: path.stem)
def test_templates_of_trl_have_the_ids_and_masks_of_transformers(path, tmp_path):
    """Each of its documents is the conversation up to a turn; of one document, the mask is that of the blocks."""
    transformers = pytest.importorskip("transformers", reason="the judge is transformers")
    text = path.read_text(encoding="utf-8")
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in sorted(set(MARKED.findall(text)))])
    ours = TextTokenizer.open(str(save(tokenizer, tmp_path, {**VARIABLES, "chat_template": text})))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=text, **VARIABLES)
    masked = re.search(r"{%-?\s*generation", text) is not None
    judged = 0
    for messages, tools in (CHATS[name] for name in ("one", "long", "reasoned", "tools")):
        rows = records([{"messages": messages, "tools": tools}])
        wholes = []
        for stop in range(1, len(messages) + 1):
            given = {"tools": tools, "return_dict": True, "return_assistant_tokens_mask": masked}
            try:
                wholes.append(theirs.apply_chat_template(messages[:stop], **given))
            except Exception:  # what a template raises: anything
                wholes.append(None)
        encoder, bad = opened(rows, ours), list[BadRow]()
        documents = encoder.encode(rows, bad)
        if bad:
            assert wholes[-1] is None or "does not write" in str(bad[0]), bad
            continue
        judged += 1
        added = encoder.counts.unended > 0
        assert not added or path.stem == "glm4moe"  # which ends its turns with the beginning of the next
        assert len(documents) == 1 or path.stem.startswith(REWRITING)
        for document in documents:
            same = [whole for whole in wholes if whole and list(whole["input_ids"]) + [ours.eos_token_id] * added
                    == document.ids.tolist()]  # fmt: skip
            assert same and (len(documents) > 1 or same[0] is wholes[-1])
            if masked:
                spoken = np.array(same[0]["assistant_masks"], bool)
                assert not (document.trained & ~spoken).any() and document.trained.any()
                assert len(documents) > 1 or (document.trained == spoken).all()
    assert judged or path.stem.startswith("llava_next")  # which takes no text that is not in parts


def test_a_bad_row_is_raised_or_set_aside(small):
    rows = records([{"question": "a", "answer": "b"}, {"text": "c"}, {"question": "d", "answer": "e"}])
    with pytest.raises(BadRow, match=r"^rows\.jsonl:2: the row is text, but the data is question-answer"):
        opened(rows, small).encode(rows)
    documents = opened(rows, small).encode(rows, bad := [])
    assert [row.place for row in (*documents, *bad)] == [f"rows.jsonl:{number}" for number in (1, 3, 2)]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> TextTokenizer:
    """The tokenizer of chat_cases.py, with the ChatML template."""
    return tokenizer_with(tmp_path_factory.mktemp("encode"), source("chatml"))


def tokenizer_with(folder: Path, chat_template: str | None, without: tuple[str, ...] = (), **config) -> TextTokenizer:
    config = {**VARIABLES, "chat_template": chat_template, **config}
    return TextTokenizer.open(str(save(chat_tokenizer(without), folder, config)))


def encoded(tokenizer: TextTokenizer, row: dict, **options) -> str:
    """The only document of a row."""
    _, (document,) = made(tokenizer, row, **options)
    return shown(tokenizer, document)


HEAD = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"


MASKED: list[tuple[dict, dict, str]] = [
    ({"text": "a<|im_end|>"}, {}, "[a<|im_end|></s>]"),
    ({"text": "a"}, {"data_format": "text"}, "[a</s>]"),
    ({"prompt": "a", "completion": " b"}, {}, "a[ b</s>]"),
    ({"prompt": "", "completion": "b"}, {}, "[b</s>]"),
    ({"prompt": "a", "completion": "b"}, {"train_on": "assistant"}, "a[b</s>]"),
    ({"prompt": "a", "completion": "b"}, {"train_on": "all"}, "[ab</s>]"),
    ({"prompt": "a", "completion": "b"}, {"chat_template": "tokenizer"},
     HEAD + "a<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"),
    ({"instruction": "a", "input": "c", "output": "b"}, {"preamble": False},
     "### Instruction:\na\n\n### Input:\nc\n\n### Response:\n[b</s>]"),
    ({"instruction": "a", "output": "b"}, {},
     PREAMBLES[False] + "\n\n### Instruction:\na\n\n### Response:\n[b</s>]"),
    ({"title": "a", "response": "b"}, {"prompt_template": "Q {{ title }}: "}, "Q a: [b</s>]"),
    ({"title": "a", "response": "b"}, {"prompt_template": "Q {{ title }}", "chat_template": "tokenizer"},
     HEAD + "Q a<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"),
    ({"prompt": ONE[:1], "completion": ONE[1:]}, {},
     HEAD + "What is in the box?<|im_end|>\n<|im_start|>assistant\n[Nothing.<|im_end|>]\n"),
    ({"prompt": ONE, "completion": ONE}, {},
     HEAD + "What is in the box?<|im_end|>\n<|im_start|>assistant\nNothing.<|im_end|>\n"
     "<|im_start|>user\nWhat is in the box?<|im_end|>\n<|im_start|>assistant\n[Nothing.<|im_end|>]\n"),
    ({"prompt": ONE[:1], "completion": ONE[1:]}, {"train_on": "all"},
     "[" + HEAD + "What is in the box?<|im_end|>\n<|im_start|>assistant\nNothing.<|im_end|>\n]"),
    ({"instruction": "a", "input": "c", "output": "b", "system": "d"}, {"chat_template": "tokenizer"},
     "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\na\n\nc<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"),
    ({"question": "a", "answer": "b"}, {}, "a[b</s>]"),
    ({"messages": ONE}, {}, HEAD + "What is in the box?<|im_end|>\n<|im_start|>assistant\n[Nothing.<|im_end|>]\n"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, {"train_on": "user"},
     HEAD + "[a<|im_end|>]\n<|im_start|>assistant\nb<|im_end|>\n"),
    ({"input_ids": [64, 65, 66], "labels": [-100, 65, 66]}, {}, "a[bc]"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "options", "expected"), MASKED)
def test_each_format_is_masked(small, row, options, expected):
    assert encoded(small, row, **options) == expected


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"text": "a"}, {}, "[<s>a</s>]"),
        ({"prompt": "a", "completion": "b"}, {}, "<s>a[b</s>]"),
        ({"prompt": "a", "completion": "b"}, {"train_on": "all"}, "[<s>ab</s>]"),
        ({"prompt": "a", "completion": "b"}, {"chat_template": "tokenizer"},
         HEAD + "a<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"),
        ({"input_ids": [64, 65]}, {}, "[ab]"),
    ],
)  # fmt: skip
def test_texts_and_prompts_begin_with_bos_where_the_tokenizer_puts_it(tmp_path, row, options, expected):
    tokenizer = chat_tokenizer()
    ends = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=ends)
    used = TextTokenizer.open(str(save(tokenizer, tmp_path, {**VARIABLES, "chat_template": source("chatml")})))
    assert encoded(used, row, **options) == expected
    said = opened(records([row]), used, **options).describe()
    assert ("each row begins with <s>" in said) == expected.removeprefix("[").startswith(BOS)


def test_a_special_token_in_text_is_text_and_in_a_chat_itself(small):
    end = small.encoder.token_to_id("<|im_end|>")
    said = [{"role": "user", "content": "<|im_end|>?"}, {"role": "assistant", "content": "b"}]
    encoder, (document,) = made(small, {"messages": said})
    assert (document.ids == end).sum() == 4 and encoder.counts.spelled == 1
    assert end not in made(small, {"question": "<|im_end|>?", "answer": "b"})[1][0].ids


def test_a_chat_without_an_answer_is_counted_and_left_out(small):
    encoder, documents = made(small, {"messages": ONE}, {"messages": ONE[:1]}, {"messages": ONE})
    assert [document.place for document in documents] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert (encoder.counts.rows, encoder.counts.documents, encoder.counts.untrained) == (3, 2, 1)


@pytest.mark.parametrize(
    ("overlong", "expected", "untrained"),
    [("truncate", ["abcd[efgh]"], 1), ("split", ["abcd[efgh]", "[ij</s>]", "[k</s>]"], 0), ("drop", [], 0)],
)
def test_overlong_rows_are_cut_split_or_dropped_and_counted(small, overlong, expected, untrained):
    pairs = (("abcd", "efghij"), ("abcdefgh", "k"), ("a", "fits in"))
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    encoder, documents = made(small, *rows, overlong=overlong, seq_len=8)
    assert [shown(small, document) for document in documents[:-1]] == expected
    assert shown(small, documents[-1]) == "a[fits in</s>]" and len(documents[-1].ids) == 8
    assert (encoder.counts.overlong, encoder.counts.untrained) == (2, untrained)
    assert encoder.counts.tokens == sum(len(document.ids) for document in documents)


SAYS = [
    {"role": role, "content": text}
    for role, text in zip(["user", "assistant"] * 3, ["a", "one", "b", "two", "c", "three"], strict=True)
]


@pytest.mark.parametrize(
    "row",
    [{"messages": [{**m, "train": m["content"] != "two"} for m in SAYS]}, {"messages": SAYS, "weights": [1, 0, 1]}],
)
def test_a_turn_that_says_so_is_not_trained_and_the_text_does_not_tell(small, row):
    """The ids are those of the conversation without the keys, the mask is that of the other turns."""
    encoder, (document,) = made(small, row, chat_template=CHATML)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in SAYS)
    expected = text.replace("one<|im_end|>", "[one<|im_end|>]").replace("three<|im_end|>", "[three<|im_end|>]")
    assert shown(small, document) == expected and encoder.counts.masked == 1
    assert "1 turns are not trained, as their messages say" in notes(encoder.counts, None, "turns", 0)
    row = {"messages": [{**ONE[0], "weight": 1}, {**ONE[1], "weight": 1, "x": 2}]}
    text = encoded(small, row, chat_template="{% for m in messages %}{{ m | tojson }}{% endfor %}")
    assert "weight" not in text and '"x": 2' in text


def test_keys_of_messages_that_nothing_reads_are_named_once_with_their_rows(small):
    marked = [ONE[0], {**ONE[1], "name": "Eve", "tool_call_id": "1", "reasoning_content": "Why?", "rating": 5}]
    rows = [{"messages": marked}, {"messages": ONE}, {"messages": [{**ONE[0], "rating": 1}, *marked[1:]]}]
    encoder, _ = made(small, *rows)
    assert encoder.counts.unread == {"rating": 2, "reasoning_content": 2}
    (note,) = notes(encoder.counts, None, "turns", 0)
    assert note.endswith("nothing else does (rows): rating (2), reasoning_content (2)")
    reads = source("qwen3") + "{% if false %}{{ messages[0].get('rating') }}{% endif %}"
    assert made(small, *rows, chat_template=reads)[0].counts.unread == {}


@pytest.mark.parametrize(("train_on", "behind"), [(None, 1), ("all", 0)])
def test_a_chat_keeps_the_whole_turns_that_fit(small, train_on, behind):
    """At every length: the beginning of the same ids, through the last whole trained turn and its line break, which
    need not fit unless it is trained too."""
    rows = records([{"messages": SAYS}])
    encoder = opened(rows, small, chat_template=CHATML, train_on=train_on)
    (whole,) = encoder.encode(rows)
    end = small.encoder.token_to_id("<|im_end|>")
    ends = (np.flatnonzero(whole.ids == end) + 2).tolist()[behind :: behind + 1]  # with the line break behind
    assert len(ends) == (3 if behind else 6) and ends[-1] == len(whole.ids)
    for limit in range(1, len(whole.ids) + 2):
        encoder.options, encoder.counts = replace(encoder.options, seq_len=limit), Counts()
        found, counts = encoder.encode(rows), encoder.counts
        fitting = [end for end in ends if end - behind <= limit]
        assert [len(document.ids) for document in found] == [min(end, limit) for end in fitting[-1:]], limit
        for _, ids, trained, _ in found:
            assert (ids == whole.ids[: len(ids)]).all() and (trained == whole.trained[: len(ids)]).all()
        overlong = limit < len(whole.ids)
        assert (counts.overlong, counts.too_long, counts.untrained) == (overlong, not found, 0)
        assert (counts.longest, counts.turns_cut) == ((len(whole.ids), len(ends) - len(fitting)) * overlong or (0, 0))


@pytest.mark.sample
@pytest.mark.parametrize("train_on", [None, pytest.param("user,tool", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "chat"), PAIRS)
def test_no_part_of_a_turn_is_kept_in_any_template(tmp_path, name, chat, train_on):
    """Trained runs of what is kept are whole runs of the documents without a limit; and the length said keeps all."""
    messages, tools = CHATS[chat]
    tokenizer, rows = tokenizer_with(tmp_path, source(name)), records([{"messages": messages, "tools": tools}])
    encoder = opened(rows, tokenizer, train_on=train_on)
    wholes = encoder.encode(rows)
    longest = max((len(whole.ids) for whole in wholes), default=1)
    for limit in {1, 3, longest - 1, longest, *range(8, longest, max(7, longest // 6))} - {0}:
        encoder.options, encoder.counts = replace(encoder.options, seq_len=limit), Counts()
        found = encoder.encode(rows)
        assert len(found) <= len(wholes) and all(len(document.ids) <= limit for document in found)
        for _, ids, trained, _ in found:
            whole = next(one for one in wholes if one.ids[: len(ids)].tolist() == ids.tolist())
            assert (trained == whole.trained[: len(ids)]).all()
            assert not (trained[-1] and whole.trained[len(ids) :][:1].any()), "a turn is cut"
        if limit >= longest:
            assert [document.ids.tolist() for document in found] == [whole.ids.tolist() for whole in wholes]
        elif wholes:
            assert encoder.counts.overlong == 1 and encoder.counts.longest == longest


def test_a_turn_without_end_token_is_whole_with_the_one_that_is_added(small):
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    _, (whole,) = made(small, {"messages": ONE}, chat_template=plain)
    assert whole.ids[-1] == small.eos_token_id
    for limit, kept in ((len(whole.ids), 1), (len(whole.ids) - 1, 0)):
        assert len(made(small, {"messages": ONE}, chat_template=plain, seq_len=limit)[1]) == kept


LETTERS = {"input_ids": list(range(64, 72))}


@pytest.mark.parametrize(
    ("row", "limit", "kept"),
    [
        ({"prompt": "abcd", "completion": "efg"}, 8, "abcd[efg</s>]"),
        ({"prompt": "abcd", "completion": "efg"}, 7, None),
        ({"question": "abcd", "answer": "efg"}, 5, None),
        ({"instruction": "a", "output": "b"}, 9, None),
        *(({**LETTERS, "labels": [-100, 65, 66, -100, -100, 69, 70, -100]}, limit, kept)
          for limit, kept in ((7, "a[bc]de[fg]"), (6, "a[bc]"), (2, None))),
        ({**LETTERS, "labels": LETTERS["input_ids"]}, 4, "[abcdefgh]"),  # text
        (LETTERS, 4, "[abcdefgh]"),
    ],
)  # fmt: skip
def test_no_half_answer_is_kept_of_other_rows_and_text_stays_whole(small, row, limit, kept):
    encoder, documents = made(small, row, seq_len=limit)
    assert [shown(small, document) for document in documents] == [kept] * (kept is not None)
    assert encoder.counts.too_long == (kept is None)


def test_what_is_too_long_is_reported_with_the_length_that_keeps_all(small):
    rows = [{"messages": SAYS}, {"messages": SAYS[:2]}, {"messages": [{**SAYS[0], "content": "a" * 50}, SAYS[1]]}]
    size = max(len(document.ids) for document in made(small, *rows, chat_template=CHATML)[1])
    encoder, _ = made(small, *rows, chat_template=CHATML, seq_len=40)
    kept = "rows of more than 40 tokens keep the whole turns that fit, and are left out if no trained one does"
    assert kept in encoder.describe().splitlines()
    (note,) = notes(encoder.counts, 40, "turns", 0)
    assert note == f"2 {kept} (1 rows and 3 trained turns are left out): --seq-len {size} keeps all"
    encoder, _ = made(small, {"prompt": "abcd", "completion": "efg"}, seq_len=7, overlong="truncate")
    (note,) = notes(encoder.counts, 7, "truncate", 0)
    assert note == "1 rows of more than 7 tokens are cut off: --seq-len 8 keeps all"


@pytest.mark.parametrize(
    ("template", "rows", "ends"),
    [
        ("chatml", [ONE], {"<|im_end|>"}),
        ("llama3", [TOOLS], {"<|eot_id|>", "<|eom_id|>"}),
        ("mistral", [ONE], {"</s>"}),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", [ONE], {"</s>"}),
    ],
)
def test_every_token_that_ends_a_trained_turn_is_an_end_token(tmp_path, template, rows, ends):
    tokenizer = tokenizer_with(tmp_path, source(template) if template.isalnum() else template)
    encoder, _ = made(tokenizer, *({"messages": row} for row in rows))
    assert {tokenizer.encoder.id_to_token(number) for number in encoder.end_token_ids} == ends


def test_end_tokens_are_known_before_the_first_row(small):
    ids = {"input_ids": [3, small.eos_token_id]}
    for row, known in (({"messages": ONE}, {"<|im_end|>"}), ({"text": "a"}, {EOS}), (ids, set())):
        ends = opened(records([row]), small).end_token_ids
        assert {small.encoder.id_to_token(number) for number in ends} == known
    assert made(small, ids)[0].end_token_ids == (small.eos_token_id,)


def test_counts_of_several_encoders_add_up(small):
    rows = [{"messages": ONE}, {"messages": ONE[:1]}]
    whole, one, other = (made(small, *some)[0] for some in (rows, rows[:1], rows[1:]))
    one.counts.add(other.counts)
    assert one.counts == whole.counts


def test_pad_may_be_eos(tmp_path):
    """The mask is that of the spans: with pad and eos the same, eos stays trained."""
    tokenizer = tokenizer_with(tmp_path, source("zephyr"), pad_token=EOS)
    assert encoded(tokenizer, {"messages": ONE}).endswith("<|assistant|>\n[Nothing.</s>]\n")
    assert encoded(tokenizer, {"question": "a", "answer": "b"}) == "a[b</s>]"


def test_an_end_marker_that_is_not_one_token_is_an_error(tmp_path):
    tokenizer = tokenizer_with(tmp_path, source("chatml"), without=("<|im_end|>",))
    says = r"ends a turn with <\|im_end\|>, which is 10 tokens \(< \| i m _ e n d \| >\) of"
    with pytest.raises(DataError, match=says):
        opened(records([{"messages": ONE}]), tokenizer)


def test_an_encoder_says_what_it_does(small, tmp_path):
    assert opened(records([{"messages": ONE}]), small, seq_len=8, overlong="drop").describe().splitlines() == [
        "format: messages (as in rows.jsonl:1), columns messages",
        f"chat template: the chat_template of {small.folder / 'tokenizer_config.json'}",
        "trained: turns of assistant, found by rendering each turn's prompt, with <|im_end|>",
        "rows of more than 8 tokens are left out",
    ]
    text = opened(records([{"q": "a", "answer": "b"}]), small, mapping=(("question", "q"),)).describe()
    assert text.splitlines() == [
        "format: question-answer (as in rows.jsonl:1), columns question = q, answer",
        "trained: the answer and </s> after it; prompt and answer are joined as they are (--chat-template tokenizer "
        "would make chats of them)",
    ]
    endless = tokenizer_with(tmp_path, "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}\n{% endfor %}")
    text = opened(records([{"messages": ONE}]), endless).describe()
    assert "note: the template ends a turn with no token: </s> follows the last one" in text
    assert "date in the template: 20" in text


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"text": "a"}, {"chat_template": "tokenizer"}, "--chat-template: text rows are not chats"),
        ({"text": "a"}, {"train_on": "all"}, "--train-on all: text rows are trained as a whole"),
        ({"input_ids": [1]}, {"train_on": "last"}, "--train-on last: tokens rows say themselves what is trained"),
        ({"question": "a", "answer": "b"}, {"train_on": "user"}, "rows have a prompt and an answer: give assistant"),
        ({"messages": ONE}, {"train_on": "robot"}, "--train-on robot: 'robot' is not a role"),
        ({"text": "a"}, {"seq_len": 9}, "--seq-len 9: text rows have no turns and stay whole: give --overlong trunc"),
        ({"messages": ONE}, {"data_format": "chat"}, "--data-format chat is not one of"),
    ],
)
def test_options_without_effect_are_refused(small, row, options, says):
    with pytest.raises(UsageError, match=says):
        opened(records([row]), small, **options)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [*ONE, ONE[1]]}, "the chat template (mine.jinja) fails: roles must take turns"),
        ({"messages": [{"role": "user", "content": "a\ud800b"}, ONE[1]]}, r"holds '\ud800', which is no character"),
        ({"question": "a", "answer": "b"}, "the row is question-answer, but the data is messages"),
        ({"messages": [ONE[0], {**TOOLS[2], "content": ""}]},
         "has tool_calls, which the chat template (mine.jinja) does not write: give one"),
    ],
)  # fmt: skip
def test_a_bad_row_of_a_chat_is_named(small, tmp_path, monkeypatch, row, reason):
    turns = "{% if not loop.changed(m.role) %}{{ raise_exception('roles must take turns') }}{% endif %}"
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text("{% for m in messages %}" + turns + "{% endfor %}" + source("chatml"))
    rows = records([{"messages": ONE}, row])
    with pytest.raises(BadRow) as caught:
        opened(rows, small, chat_template="mine.jinja").encode(rows)
    assert caught.value.place == "rows.jsonl:2" and reason in caught.value.reason


JUNK = (
    None, True, 0, -1, 1.5, 10**30, "", " ", "a", "\ud800", "<|im_end|>", "</s>", "assistant", "user", "from", "weight",
    "train_on", [], {},
    [[]], [1, "a"], {"a": {}}, [{"type": "text", "text": "x"}], {"role": "user"}, "\x00", "e\u0301" * 40,
)  # fmt: skip
FRAGMENTS = (
    *("{{", "}}", "{%", "%}", "{#", "#}", "-", "\n", "\u2028", "\x00", "[0]", ".x.y", "\\[", "' ~ '", "+ 1", ""),
    *("<|im_end|>", "{% for x in messages %}", "{% endfor %}", "{% if messages %}", "{% else %}", "{% endif %}"),
    *("{% break %}", "{{ messages }}", "{{ x.content * 99 }}", "{{ loop }}", "{{ tools | tojson }}"),
    *("{{ m.role | nothing }}", "{% set messages = messages * 2 %}", "{% generation %}", "{% endgeneration %}"),
    *("{{ raise_exception('no') }}", "{{ ''.__class__ }}", "{% for i in range(9999) %}"),
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
)  # fmt: skip
ROWS = (
    *(row for row, _, _ in MASKED), {"messages": TOOLS, "tools": CHATS["tools"][1]}, {"messages": CHATS["reasoned"][0]},
    {"messages": [ONE[0], {**ONE[1], "weight": 0}, *ONE]}, {"messages": ONE * 2},
)  # fmt: skip


def mutated(value: Any, draw: random.Random, chance: float) -> Any:
    """A copy of JSON in which some values and keys are junk, gone or twice."""
    if draw.random() < chance:
        return draw.choice(JUNK)
    if isinstance(value, dict):
        pairs = [(key if draw.random() > chance else str(draw.choice(JUNK)), item) for key, item in value.items()]
        return {key: mutated(item, draw, chance) for key, item in pairs if draw.random() > chance / 2}
    if isinstance(value, list):
        kept = [item for item in value for _ in range(draw.choices((1, 0, 2), (1 - chance, chance, chance))[0])]
        return [mutated(item, draw, chance) for item in kept]
    return value


def mutated_text(text: str, draw: random.Random) -> str:
    """A text with some pieces cut out, and some fragments put in."""
    for _ in range(draw.randint(0, 4)):
        at, length = draw.randrange(len(text) + 1), draw.choice((0, 0, 1, 2, 8, 40))
        text = text[:at] + draw.choice(FRAGMENTS) + text[at + length :]
    return text


@pytest.mark.parametrize("tries", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_whatever_rows_and_templates_hold_what_is_wrong_is_named(small, monkeypatch, tries):
    """No other exception than our own, which names the row or the template; and what is encoded is well-formed."""
    monkeypatch.setattr("llmq.data.chat.template.MAX_SECONDS", 0.1)
    outcomes = Counter()
    for number in range(tries):
        draw = random.Random(number)
        base = draw.choice(ROWS)
        template = mutated_text(source(draw.choice(sorted(CASES))), draw)
        template = None if base.keys() & {"text", "input_ids"} else template if "{" in template else "{{ '' }}"
        values = [base, *(mutated(base, draw, 0.08) for _ in range(3))]
        rows = records([value if isinstance(value, dict) else {} for value in values])
        limits = {"seq_len": draw.choice((None, 64)), "overlong": draw.choice(sorted(OVERLONG))}
        try:
            documents = opened(rows, small, chat_template=template, **limits).encode(rows, bad := [])
        except (DataError, UsageError) as error:
            assert str(error).startswith(("--chat-template", "--seq-len", "the template", "rows.jsonl:")), error
            outcomes["template refused"] += 1
            continue
        places = {row.place for row in rows}
        for place, ids, trained, _ in documents:
            assert place in places and ids.dtype == np.int32 and 0 <= ids.min() <= ids.max() < small.vocab_size
            assert trained is None or trained.shape == ids.shape
        assert all(error.place in places and str(error) == f"{error.place}: {error.reason}" for error in bad)
        outcomes["rows encoded"] += bool(documents)
        outcomes["rows refused"] += bool(bad)
    assert len(outcomes) == 3 and min(outcomes.values()) > tries // 20, outcomes


def as_document(text: str, trained: list[int] | None = None) -> Encoded:
    """The tokens of a text, of which those at the places `trained` are trained."""
    ids = np.array(chat_tokenizer().encode(text, add_special_tokens=False).ids, np.int32)
    return Encoded("rows.jsonl:7", ids, None if trained is None else np.isin(np.arange(len(ids)), trained))


def test_trained_text_is_coloured_and_put_in_marks_without_colors(small):
    shown = [as_document("the ok</s>", trained) for trained in ([3, 4], [0, 5], [], None)]
    title, body = show(shown, small, 1).renderables
    assert title.plain == "rows.jsonl:7: 6 tokens, 2 trained"
    drawn = [(body.plain[span.start : span.end], str(span.style)) for span in body.spans]
    assert drawn == [("the ", STYLES[False]), ("ok", STYLES[True]), ("</s>", STYLES[False])]
    bodies = show(shown, small, 4, marks=True).renderables[1::2]
    assert [body.plain for body in bodies] == ["the [[ok]]</s>", "[[t]]he ok[[</s>]]", "the ok</s>", "[[the ok</s>]]"]


def test_no_text_moves_the_cursor_and_long_ones_are_cut(small):
    console = Console(force_terminal=False, width=200)
    with console.capture() as captured:
        console.print(show([as_document("a\x1b[2J\x07\r\u202eb\nc")], small, 1))
    assert captured.get().splitlines()[1:] == ["a\\x1b[2J\\x07\\r\\u202eb\\n", "c"]
    title, body, *others = show([as_document("a" * (MOST + 5))] * 3, small, 2).renderables
    assert title.plain.endswith(f"{MOST + 5} tokens, {MOST + 5} trained") and len(others) == 2
    assert body.plain.endswith(" ... and 5 more tokens")
