"""The exported model has the chat template that it was trained with, wherever the data's tokens come from."""

import io
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from chat_cases import EOS, TEMPLATES, WEATHER, chat_tokenizer, source
from small_tokenizers import save
from tiny_engines import tiny

import llmq
from llmq.data.chat.encoded import EncodeOptions
from llmq.data.chat.template import chosen_templates
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenize import tokenize_data
from llmq.data.tokens.tokenizer import Sidecar, sidecar_name
from llmq.model.config import to_hf

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "bos_token": "<s>"}
TOOL = (
    "{{- tools | tojson if tools }}{%- for m in messages %}{{- '<|user|>TOOL ' ~ m.content ~ eos_token }}{%- endfor %}"
)
CHAT = [{"role": "user", "content": "Why is 0?"}, {"role": "assistant", "content": "It is.\nSo."}]
CHATML = str(TEMPLATES / "chatml.jinja")
# What the model's own folder has, in every place that transformers has ever read.
OWN = {
    "config": {"tokenizer_config.json": json.dumps({**CONFIG, "chat_template": source("zephyr")})},
    "list": {
        "tokenizer_config.json": json.dumps(
            {
                **CONFIG,
                "chat_template": [
                    {"name": "default", "template": source("zephyr")},
                    {"name": "tool_use", "template": TOOL},
                    {"name": "rag", "template": source("chatml")},
                ],
            }
        )
    },
    "files": {
        "tokenizer_config.json": json.dumps({**CONFIG, "chat_template": "{{ 'old' }}"}),
        "chat_template.jinja": source("zephyr"),
        "chat_template.json": json.dumps({"chat_template": source("zephyr")}),
        "additional_chat_templates/tool_use.jinja": TOOL,
        "additional_chat_templates/rag.jinja": source("chatml"),
    },
    "none": {"tokenizer_config.json": json.dumps(CONFIG)},
}


def model_folder(path, own):
    """A Llama of one layer, without weights, whose tokenizer has the templates OWN[own]."""
    save(chat_tokenizer(), path)
    (path / "config.json").write_text(json.dumps(to_hf(tiny(num_layers=1, vocab_size=420), "fp32")))
    for name, content in OWN[own].items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content)
    return path


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a small run on chats."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    chats = [[{**CHAT[0], "content": f"Why is {n}?"}, CHAT[1]] for n in range(40)]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return {
        "from_scratch": True,
        "model_dtype": "fp32",
        "batch_size": 1,
        "seq_len": 512,
        "grad_accumulation": 1,
        "steps": 2,
        "name": "run",
        "console": io.StringIO(),
    }


def templates_of(folder):
    """What the folder's templates are, by the places that transformers reads."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    files = [path.name for path in (folder / "chat_template.jinja", folder / "chat_template.json") if path.exists()]
    return config.get("chat_template"), files, (folder / "additional_chat_templates").exists()


def run(given, model, way, template=CHATML):
    """Trains on chats.jsonl by `template`, and returns the exported folder and the token file that was trained."""
    asked = {**given, "model": str(model), "data": "chats.jsonl", "chat_template": template, "eval_fraction": 0.0}
    if way == "token files":
        asked = {**given, "model": str(model)}
        encode = EncodeOptions(chat_template=template)
        tokenize_data(tokenizer=str(model), inputs=["chats.jsonl"], encode=encode, eval_fraction=0.0, out_dir="tokens")
        asked["train_file"] = "tokens/train.bin"
    elif way == "streaming":
        asked |= {"streaming": True, "eval_fraction": None}
    elif way == "continued":
        llmq.train(**asked)
        asked |= {"continue": "auto", "steps": 4, "overwrite": True}
    folder = llmq.train(**asked).model_path
    return folder, next(Path.cwd().glob("cache/tokens/*/train.bin"), Path("tokens/train.bin"))


GIVEN = [("data", "files", CHATML), ("data", "list", "rag"), ("data", "config", None)]  # more with --all
MORE = [
    *product(("data", "streaming", "token files", "continued"), OWN, [CHATML]),
    *product(["data"], ["list", "files"], ["rag"]),
    *product(["data"], ["config", "list", "files"], [None, "tokenizer"]),
]


@pytest.mark.parametrize(
    ("way", "own", "template"),
    [*GIVEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in GIVEN)],
)
def test_a_template_that_is_given_is_exported_alone_and_the_tokenizer_s_stay_else(given, tmp_path, way, own, template):
    """One that is given is a file's, or a named one of the tokenizer's."""
    model = model_folder(tmp_path / "model", own)
    folder, _ = run(given, model, way, template)
    said = given["console"].getvalue()
    if template in (None, "tokenizer"):
        assert all((folder / name).read_text() == content for name, content in OWN[own].items())
        assert "chat template of its training data" not in said
        return
    assert templates_of(folder) == (source("chatml"), [], False)
    kept = json.loads((model / "tokenizer_config.json").read_text())
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {**kept, "chat_template": source("chatml")}
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    notice = said.rpartition("The exported model has the chat template of its training data (")[2].partition("\n")[0]
    assert template in notice and notice.endswith(", in place of the tokenizer's own") == (own != "none")


def test_both_templates_of_another_tokenizer_are_exported(given, tmp_path):
    """Token files of a tokenizer with the same ids and other templates: base and instruct models are such pairs."""
    other, model = model_folder(tmp_path / "other", "files"), model_folder(tmp_path / "model", "config")
    tokenize_data(tokenizer=str(other), inputs=["chats.jsonl"], eval_fraction=0.0, out_dir="tokens")
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": TOOL}))
    for from_scratch in (True, False):
        found = {**given, "model": str(model), "train_file": "tokens/train.bin", "name": f"run-{from_scratch}"}
        folder = llmq.train(**{**found, "from_scratch": from_scratch}).model_path
        assert [text for text, _ in chosen_templates(folder)] == [source("zephyr"), TOOL]
        assert (folder / "chat_template.jinja").exists() == from_scratch  # then the other tokenizer is exported
        if from_scratch:
            (model / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    listed, files, has_folder = templates_of(folder)
    assert [entry["name"] for entry in listed] == ["default", "tool_use"] and not files and not has_folder


def test_of_two_templates_that_of_the_larger_share_is_exported_with_a_notice(given, tmp_path):
    model = model_folder(tmp_path / "model", "config")
    for name, template in (("a", CHATML), ("b", str(TEMPLATES / "llama3.jinja"))):
        options = {"encode": EncodeOptions(chat_template=template), "eval_fraction": 0.0, "out_dir": name}
        tokenize_data(tokenizer=str(model), inputs=["chats.jsonl"], **options)
    mixed = {**given, "model": str(model), "train_file": ["a/train.bin", "b/train.bin"]}
    folder = llmq.train(**mixed, weight=[0.3, 0.7]).model_path
    mixed["name"] = "plain"
    said = given["console"].getvalue()
    assert f"2 chat templates: {TEMPLATES / 'llama3.jinja'} (70.0% of the tokens), {CHATML} (30.0%" in said
    assert templates_of(folder)[0] == source("llama3")
    sizes = [TokenFile.open(Path(name, "train.bin")).num_tokens for name in "ab"]
    folder = llmq.train(**mixed).model_path  # no mixture: by their tokens
    assert templates_of(folder)[0] == source(("chatml", "llama3")[sizes[1] > sizes[0]])


def test_a_sidecar_without_the_field_exports_the_tokenizer_s_files(given, tmp_path):
    """As those that were written before there was one; and text has none."""
    model = model_folder(tmp_path / "model", "files")
    run(given, model, "token files")
    path = sidecar_name(Path("tokens/train.bin"))
    content = json.loads(path.read_text())
    assert content.pop("chat_template") == {"origin": CHATML, "default": source("chatml"), "tool_use": None}
    path.write_text(json.dumps(content))
    assert Sidecar.read(Path("tokens/train.bin"), content["num_tokens"]).chat_template is None
    found = {**given, "model": str(model), "train_file": "tokens/train.bin", "name": "older"}
    assert templates_of(llmq.train(**found).model_path)[1:] == (["chat_template.jinja", "chat_template.json"], True)


@pytest.mark.judge
@pytest.mark.parametrize("way", ["data", "token files"])
@pytest.mark.parametrize("template", [CHATML, None, "rag", TOOL])
@pytest.mark.parametrize("own", ["config", "list", "files"])
def test_transformers_gives_the_trained_ids_from_the_export(given, tmp_path, own, template, way):
    """With tools and without, where an untrained template for tools must not win."""
    transformers = pytest.importorskip("transformers", reason="the judge is transformers")
    if (own, template) == ("config", "rag"):
        pytest.skip("it has no template of that name")
    writes_tools = template == TOOL or (template is None and own != "config")
    rows = [{"messages": CHAT, **({"tools": [WEATHER]} if n % 2 and writes_tools else {})} for n in range(20)]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder, token_file = run(given, model_folder(tmp_path / "model", own), way, template)
    judge, file = transformers.AutoTokenizer.from_pretrained(folder), TokenFile.open(token_file)
    for n, tools in enumerate((None, [WEATHER])):
        start, stop = file.document_starts[n : n + 2]
        ids = judge.apply_chat_template(CHAT, tools=tools, return_dict=False)
        assert ids == np.asarray(file.tokens[start:stop]).tolist()
