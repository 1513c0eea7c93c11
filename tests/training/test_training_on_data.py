"""`llmq-train --data`: from rows and text to a trained model, through the cache or as a stream."""

import io
import json
import signal
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from small_tokenizers import EOS, byte_level, save
from tiny_engines import tiny
from tokenizers import decoders

import llmq
from llmq.cli.train import command
from llmq.data.tokens.token_file import TokenFile, TokenWriter
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import DataError, UsageError
from llmq.model import presets
from llmq.model.config import to_hf
from llmq.report.read import read_log

T = 32  # the longest row has 31 tokens


MARKERS = ("<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|end|>' if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_source(vocab_size, *special, **config):
    """The model's folder, with a tokenizer that has these special tokens, which is returned."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    save(tokenizer, Path("source"), {"eos_token": EOS, **config})
    Path("source/config.json").write_text(json.dumps(to_hf(tiny(num_layers=1, vocab_size=vocab_size), "fp32")))
    return tokenizer


SLOW = pytest.mark.slow
LAYOUTS = pytest.mark.parametrize(
    "packing",
    [None, pytest.param(False, marks=SLOW), pytest.param("windows", marks=SLOW)],
    ids=["packed", "padded", "windows"],
)


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a small run on rows of questions and answers, with a tokenizer in the model's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    save_source(420)
    rows = [
        {"question": f"What is {n} and {n % 7}?" + "\x1b[2J" * (n == 0), "answer": f"It is {n + n % 7}."}
        for n in range(200)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": str(tmp_path / "source"),
        "from_scratch": True,
        "data": "rows.jsonl",
        "model_dtype": "fp32",
        "batch_size": 2,
        "seq_len": T,
        "grad_accumulation": 1,
        "learning_rate": 1e-2,
        "steps": 6,
        "ckpt_interval": 3,
        "name": "run",
        "console": io.StringIO(),
    }


def token_files(tmp_path):
    return sorted((tmp_path / "cache/tokens").glob("*/*.bin"))


def test_rows_are_tokenized_once_and_trained_by_mask(given, tmp_path):
    result = llmq.train(**given)
    evaluation, train = (TokenFile.open(path) for path in token_files(tmp_path))
    assert (train.num_documents, evaluation.num_documents) == (180, 20)
    share = train.trained(0, train.num_tokens).mean()
    log = read_log(result.log_path)
    assert 0.2 < share < 0.8 and result.eval_loss < 6.1
    assert all(count < 2 * T for count in log.train["trained_tokens"])
    said = given["console"].getvalue()
    assert "rows.jsonl: tokenizing into" in said and "question-answer" in said
    trained = train.num_trained
    assert share == trained / train.num_tokens and f"trained tokens      : {trained:,}, " in said
    assert "[Sample] of train.bin" in said and f"?\\x1b[2J[[It is 0.{EOS}]]" in said
    ends = json.loads((result.model_path / "generation_config.json").read_text())["eos_token_id"]
    assert ends == json.loads((train.path.parent / "train.bin.json").read_text())["end_token_ids"][0]

    assert "\x1b" not in said

    again = io.StringIO()
    assert llmq.train(**{**given, "name": "again", "console": again}).train_loss == result.train_loss
    said = again.getvalue()
    assert said.startswith("[Options]") and said.index("[Dataset]") < said.index("  rows.jsonl: tokenized before, in")
    assert len(token_files(tmp_path)) == 2
    one = {**given, "name": "one", "train_on": "all", "console": io.StringIO()}
    assert llmq.train(**one).eval_loss != result.eval_loss and len(token_files(tmp_path)) == 4


def test_what_an_earlier_run_left_is_said_before_text_is_tokenized(given, tmp_path):
    llmq.train(**{**given, "steps": 1})
    with pytest.raises(DataError, match=r"other\.jsonl"):
        llmq.train(**{**given, "data": "other.jsonl"})
    there = token_files(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"text": "new"}\n')
    given["console"] = io.StringIO()
    with pytest.raises(UsageError, match="holds checkpoints of an earlier run"):
        llmq.train(**{**given, "data": "other.jsonl"})
    assert token_files(tmp_path) == there and "tokenizing into" not in given["console"].getvalue()


def test_a_folder_that_hides_a_data_set_is_noticed(given, tmp_path):
    Path("gsm8k").mkdir()
    Path("rows.jsonl").rename("gsm8k/rows.jsonl")
    llmq.train(**{**given, "data": "gsm8k", "dry_run": True})
    assert f"--data gsm8k is {tmp_path / 'gsm8k'}, not the data set of that name" in given["console"].getvalue()


def test_a_run_from_scratch_takes_the_tokenizer_that_is_asked_for_and_exports_it(given, tmp_path):
    """A model's folder without a tokenizer, and one that has another."""
    save(byte_level(digits=True), tmp_path / "other", {"eos_token": EOS, "model_max_length": 77})
    own = llmq.train(**given)
    for name in ("own", "none"):
        result = llmq.train(**{**given, "name": name}, tokenizer=tmp_path / "other")
        exported = {path.name: path.read_bytes() for path in result.model_path.glob("tokenizer*")}
        assert exported == {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
        assert result.train_loss != own.train_loss
        for path in Path("source").glob("tokenizer*"):
            path.unlink()
    for file in [path for path in token_files(tmp_path) if path.name == "train.bin"]:  # one of each tokenizer
        is_of_it = "other" in Path(f"{file}.json").read_text()
        asked = {**given, "data": None, "train_file": str(file), "tokenizer": tmp_path / "other", "dry_run": True}
        with nullcontext() if is_of_it else pytest.raises(DataError, match="is of another tokenizer"):
            llmq.train(**asked)
    with pytest.raises(UsageError, match="source has none: name one with --tokenizer"):
        llmq.train(**{**given, "name": "again"})
    save(byte_level(added=tuple(f"<{n}>" for n in range(300))), tmp_path / "large", {"eos_token": EOS})
    says = r"--tokenizer .*large has \d+ ids, but .*source has a vocabulary of 420.* add --vocab-size tokenizer"
    with pytest.raises(UsageError, match=says):
        llmq.train(**{**given, "name": "again"}, tokenizer=tmp_path / "large")
    result = llmq.train(**{**given, "name": "again"}, tokenizer=tmp_path / "large", vocab_size="tokenizer")
    config = json.loads((result.model_path / "config.json").read_text())
    assert config["vocab_size"] == TextTokenizer.open(str(tmp_path / "large")).vocab_size > 420


def test_a_preset_brings_a_tokenizer_of_the_hub(given, tmp_path, monkeypatch):
    monkeypatch.setitem(presets.PRESETS, "tiny_llama3_50m", tiny(num_layers=1, vocab_size=420))
    asked = []
    monkeypatch.setattr(
        "llmq.data.tokens.tokenizer.model_folder",
        lambda name, *about, kind: asked.append((name, kind)) or tmp_path / "source",
    )
    result = llmq.train(**{**given, "model": "tiny_llama3_50m", "streaming": True})
    assert asked[0] == (presets.preset_tokenizer("tiny_llama3_50m"), "tokenizer") and result.steps == 6
    assert (result.model_path / "tokenizer.json").read_bytes() == Path("source/tokenizer.json").read_bytes()


def test_a_dry_run_says_what_would_be_tokenized_and_does_not(given, tmp_path):
    llmq.train(**given, dry_run=True)
    said = given["console"].getvalue()
    assert "would be tokenized into" in said and "columns question, answer" in said
    assert not (tmp_path / "cache/tokens").exists() and "train: 0 tokens" not in said


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"packing": True, "max_docs": 3}, marks=pytest.mark.slow),
        pytest.param({"steps": 7}, marks=pytest.mark.slow),
        pytest.param({"warmup": 50}, marks=pytest.mark.slow),
    ],
)
def test_a_dry_run_plans_without_data(given, more):
    """A preset, which asks the Hub for no tokenizer; the memory is that of a run with data."""
    plain = {"seq_len": 64, "batch_size": 2, "dry_run": True, "model": "tiny_llama3_50m", "from_scratch": True}
    said = io.StringIO()
    assert llmq.train(**{**plain, **more, "console": said}).exit_code == 0
    lines = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in said.getvalue().split("\n"))
    }
    assert (lines["steps"], lines["steps per epoch"]) == (str(more.get("steps", "-")), "-")
    if not more:
        with TokenWriter("train.bin", vocab_size=128256) as file:
            file.append(np.zeros(999, np.int32))
        with_data = io.StringIO()
        llmq.train(**plain, train_file="train.bin", console=with_data)
        tables = [text.getvalue().split("[Allocator State]")[1].split("Free")[0] for text in (said, with_data)]
        assert tables[0] == tables[1]


def layout(given):
    """What the run said last of its layout and its rows."""
    lines = [line.partition(":") for line in given["console"].getvalue().splitlines()]
    return {key.strip(): value.strip() for key, _, value in lines if key.strip() in ("layout", "rows", "eval rows")}


KINDS_OF_DATA = {  # one document each, which stays whole unless asked otherwise, but for the last one
    "rows.jsonl": '{"question": "What is %d?", "answer": "It is a number."}',
    "prompts.jsonl": '{"prompt": "What is %d?", "completion": "It is a number."}',
    "chats.jsonl": '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "A"}]}',
    "texts.jsonl": '{"text": "It is the number %d."}',
    "texts.csv": "A line of %d.",
    "text.txt": "It is the number %d.",
}


@pytest.mark.quick("chats.jsonl", "text.txt")
@pytest.mark.parametrize("name", KINDS_OF_DATA)
def test_rows_are_packed_and_text_is_cut_by_windows(given, name):
    lines, whole = [KINDS_OF_DATA[name] % n for n in range(60)], name != "text.txt"
    Path(name).write_text("\n".join([*(["text"] if name == "texts.csv" else []), *lines, ""]))
    if name == "chats.jsonl":
        given |= {"chat_template": CHAT_TEMPLATE.replace("<|end|>", ""), "train_on": "assistant"}
    given |= {"data": name, "seq_len": 96, "steps": 1}
    for dry_run in (True, False):
        llmq.train(**given, dry_run=dry_run)
        assert layout(given)["layout"].startswith("packed rows (" if whole else "windows (")
    assert ("documents in each" in layout(given).get("rows", "")) == whole


def test_where_packing_cannot_run_rows_are_padded_and_that_is_said(given):
    """In bf16 on a card below compute capability 9.0; our own kernels for f32 pack there, too."""
    given |= {"model_dtype": "bf16", "seq_len": 48, "steps": 1}
    llmq.train(**given)  # on the CPU
    assert layout(given)["layout"].startswith("packed rows")
    given |= {"name": "planned", "dry_run": True, "device": "cuda", "gpu": "RTX 4090"}
    llmq.train(**given)
    why = "packed rows in bf16 need a GPU of compute capability 9.0 or later, and RTX 4090"
    why = f"(the data is rows, which stay whole, and {why} (planned for, not used) has 8.9)"
    assert layout(given)["layout"] == f"padded rows {why}"
    assert "a document in each" in layout(given)["rows"] and "a document in each" in layout(given)["eval rows"]
    llmq.train(**{**given, "model_dtype": "fp32"})
    assert layout(given)["layout"].startswith("packed rows")
    with pytest.raises(UsageError, match=r"--packing: packed rows .* has 8\.9: use --no-packing, .*-dtype fp32"):
        llmq.train(**given, packing=True)
    with pytest.raises(UsageError, match="--max-docs 3 is for packed rows: leave it out"):
        llmq.train(**given, max_docs=3)


def test_a_mixture_has_weights_and_one_with_rows_is_packed(given):
    Path("text.txt").write_text("It's the king's 10 ships\n" * 300)
    Path("more.txt").write_text("It's the queen's 10 ships\n" * 300)
    mixture = {**given, "weight": [0.75, 0.25], "steps": 8}
    llmq.train(**{**mixture, "data": ["text.txt", "rows.jsonl"]})
    said = given["console"].getvalue()
    assert "rows.jsonl: 25.00% of the tokens" in said and "text.txt: 75.00% of the tokens" in said
    assert "rows.jsonl: trained tokens" in said and "text.txt: rows" in said
    assert layout(given)["layout"].startswith("packed rows")
    llmq.train(**{**mixture, "data": ["text.txt", "more.txt"], "dry_run": True})
    assert layout(given)["layout"].startswith("windows")


@LAYOUTS
def test_a_dry_run_knows_the_memory_before_rows_are_tokenized(given, packing):
    """By the documents of the first rows; how many steps there are is known later."""
    given |= {"seq_len": 48, "eval_fraction": 0, "epochs": 1, "steps": None, "packing": packing}
    planned = {**given, "dry_run": True, "device": "cuda", "gpu": "H200", "model_dtype": "bf16", "batch_size": 512}
    planned |= {"console": io.StringIO()}
    llmq.train(**planned)
    llmq.train(**{**given, "epochs": None, "steps": 1})
    llmq.train(**{**planned, "name": "tokenized"})
    said = planned["console"].getvalue()
    for what in ("Activations", "Workspace"):
        before, after = (float(text.split()[0]) for text in said.split(what)[1:])
        assert before == after
    unknown, known = said.split("[Dataset]")[1:]
    assert "is known when it is tokenized" in unknown and "steps per epoch : -" in unknown
    assert "steps per epoch : -" not in known


@LAYOUTS
def test_a_stream_trains_and_resumes_with_the_same_bits(given, tmp_path, packing):
    stream = {**given, "streaming": True, "steps": 12, "packing": packing}
    whole = llmq.train(**{**stream, "name": "whole"})
    assert not (tmp_path / "cache/tokens").exists()
    kind = {None: "packed rows (the data is rows", False: "padded rows (by", "windows": "windows (by"}[packing]
    assert layout(given)["layout"].startswith(kind)
    llmq.train(**{**stream, "ckpt_keep_n": 0})
    parts = llmq.train(**{**stream, "continue": 3, "overwrite": True})
    one, other = (read_log(result.log_path).train["loss"] for result in (whole, parts))
    assert list(one) == list(other)
    assert "a stream" in given["console"].getvalue()
    changed = "windows" if packing is None else True
    with pytest.raises(UsageError, match="the checkpoint was trained on"):
        llmq.train(**{**stream, "continue": 9, "overwrite": True, "packing": changed})
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text().replace("It is", "They are"))
    with pytest.raises(UsageError, match=r"data, tokenizer and template: .* in the checkpoint, .* now"):
        llmq.train(**{**stream, "continue": 9, "overwrite": True})


def test_a_stream_evaluates_on_the_validation_split(given, tmp_path):
    Path("set").mkdir()
    Path("rows.jsonl").rename("set/train.jsonl")
    Path("set/validation.jsonl").write_text('{"question": "What?", "answer": "That is it, my king."}\n' * 20)
    result = llmq.train(**{**given, "streaming": True, "data": "set"})
    assert result.eval_loss > 0 and len(token_files(tmp_path)) == 1


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"data": None, "dry_run": True, "packing": True}, UsageError, "--packing without data: give --max-docs"),
        ({"data": None}, UsageError, "--dry-run plans without data"),
        ({"train_file": "a.bin"}, UsageError, "--train-file a.bin and --data rows.jsonl both say"),
        ({"data": None, "train_file": "a.bin", "train_on": "all"}, UsageError, "--train-on all is for --data"),
        ({"data": None, "train_file": "a.bin", "streaming": True}, UsageError, "--streaming is for --data: give that"),
        ({"seq_len": 1}, UsageError, "--seq-len 1: a document of one token has no target"),
        ({"streaming": True, "eval_fraction": 0.1}, UsageError, "--eval-fraction 0.1 of a stream"),
        ({"streaming": True, "seq_len": 1}, UsageError, "--seq-len 1: a document of one token has no target"),
        ({"data": "text.txt", "max_docs": 3}, UsageError, "--max-docs 3 is for packed rows: add --packing"),
        ({"streaming": True, "data": "text.txt"}, UsageError, "--streaming reads files of rows"),
        ({"streaming": True, "data": ["a", "b"]}, UsageError, "--streaming reads one data set"),
        ({"data": "text.txt", "train_on": "last"}, UsageError, "--train-on last: for data in rows, but text.txt is"),
        ({"preamble": False}, UsageError, "--no-preamble is for prompts of alpaca rows"),
        ({"prompt_template": "gone.jinja"}, UsageError, "--prompt-template gone.jinja cannot be read: No such file"),
        ({"prompt_template": "rows.jsonl", "data": "text.txt"}, UsageError, "--prompt-template: for data in rows, but"),
        ({"data": "bad.jsonl"}, DataError, r"bad.jsonl:3: not JSON .*--skip-bad-rows N"),
        ({"data": "nothing.jsonl"}, DataError, "no token to train on"),
    ],
)
def test_what_cannot_be_done_is_refused(given, change, kind, says):
    Path("text.txt").write_text("some text\n" * 99)
    lines = Path("rows.jsonl").read_text().splitlines(keepends=True)
    Path("bad.jsonl").write_text("".join([*lines[:2], "{\n", *lines[3:]]))
    Path("nothing.jsonl").write_text('{"input_ids": [5, 6], "labels": [-100, -100]}\n' * 30)
    with pytest.raises(kind, match=says):
        llmq.train(**{**given, **change})


def test_bad_rows_can_be_left_out(given):
    lines = Path("rows.jsonl").read_text().splitlines(keepends=True)
    Path("rows.jsonl").write_text("".join([*lines[:2], "{\n", "\n", *lines[4:]]))
    with pytest.raises(DataError, match=r"rows.jsonl:4: the row is empty.*; 1 before it left out"):
        llmq.train(**given, skip_bad_rows=1)
    llmq.train(**{**given, "steps": 1}, skip_bad_rows=2)
    assert "2 bad rows were left out" in given["console"].getvalue()


def test_sigterm_while_text_is_tokenized_leaves_no_lock_and_no_half_file(given, tmp_path, monkeypatch):
    Path("text.txt").write_text("It's the king's 10 ships\n" * 300)
    seen = []

    def append(*about):
        seen.extend((tmp_path / "cache/tokens").rglob(".train*"))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TokenWriter, "append", append)
    with pytest.raises(SystemExit) as end:
        command().main(["--model=source", "--from-scratch", "--data=text.txt", "--steps=1"], standalone_mode=False)
    assert end.value.code == 75 and seen and list((tmp_path / "cache/tokens").iterdir()) == []


def test_the_export_ends_texts_with_every_trained_end_token(given, tmp_path):
    """Chats end with a marker of the template, which the model's own files do not know as an end."""
    tokenizer = save_source(512, *MARKERS, chat_template=CHAT_TEMPLATE)
    Path("source/generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.7}')
    first = llmq.train(**{**given, "name": "first", "train_on": "all"})
    chats = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Nothing."}] for n in range(60)]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tuned = llmq.train(
        **{**given, "model": str(first.model_path), "from_scratch": False, "data": "chats.jsonl", "name": "tuned"}
    )
    end = tokenizer.token_to_id("<|end|>")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tuned.model_path / name).read_text())["eos_token_id"] == [0, end]
    assert json.loads((tuned.model_path / "generation_config.json").read_text())["temperature"] == 0.7


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_overlong_chats_keep_whole_turns_and_all_runs_say_so(given, tmp_path, streaming):
    """Of each ten chats one is a little too long, and one has a question that leaves no room for an answer."""
    save_source(512, *MARKERS, chat_template=CHAT_TEMPLATE)
    turn = [{"role": "user", "content": "3 ships?"}, {"role": "assistant", "content": "Aye."}]
    chats = [turn * (9 if n % 10 == 3 else 2) for n in range(80)]
    chats = [[{**turn[0], "content": "?" * 99}, turn[1]] if n % 10 == 7 else chat for n, chat in enumerate(chats)]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    options = {**given, "data": "chats.jsonl", "eval_fraction": 0, "streaming": streaming, "steps": 30}
    printed = []
    for name in ("one", "two"):
        console = io.StringIO()
        llmq.train(**{**options, "name": name, "console": console})
        printed.append([line.strip() for line in console.getvalue().splitlines() if "turns that fit," in line])
    (line, *_) = [line for line in printed[0] if " rows of more than" in line and "so far" not in line]
    assert "16 rows of more than 32 tokens keep the whole turns that fit," in line and "(8 rows and 48 " in line
    assert line in printed[1]


def test_text_is_tokenized_once_for_all_lengths(given, tmp_path):
    Path("text.txt").write_text("It's the king's 10 ships\n" * 300)
    Path("text.jsonl").write_text(
        "".join(json.dumps({"text": "It's the king's 10 ships " * 9}) + "\n" for _ in range(40))
    )
    for data in ("text.txt", "text.jsonl"):
        before = len(token_files(tmp_path))
        for seq_len in (16, 24):
            llmq.train(**{**given, "data": data, "seq_len": seq_len, "steps": 2, "name": f"{data}-{seq_len}"})
        assert len(token_files(tmp_path)) - before == 2  # one entry: train and eval
