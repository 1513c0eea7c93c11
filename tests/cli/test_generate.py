"""`llmq-generate` as the shell sees it: a prompt, a file of them, a chat, and what it refuses."""

import io
import json

import ml_dtypes
import numpy as np
import pytest
from golden import families
from safetensors.numpy import save_file
from small_tokenizers import EOS, byte_level, save
from tiny_engines import tiny

from llmq import errors
from llmq.cli import shell
from llmq.cli.generate import command
from llmq.data.tokens import tokenizer
from llmq.model import presets

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<you>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model, its tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    save(tokenizer, folder, {"eos_token": EOS, "chat_template": TEMPLATE})
    config = {**families.FAMILIES["llama3"], "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    config |= {"eos_token_id": tokenizer.token_to_id(EOS), "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: value.astype(ml_dtypes.bfloat16) for name, value in families.weights(config).items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def run(model, capsys, monkeypatch):
    """Runs the command on that model: exit code, stdout, stderr."""

    def call(*arguments, said="", folder=model):
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        code = shell.run(command, [f"--model={folder}", "--device=cpu", "--max-tokens=8", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_prompt_is_continued_and_the_stats_close_it(run):
    code, text, told = run("--prompt=It's the king", "--stats")
    assert code == 0 and text.endswith("\n") and len(text) > 1
    assert "new; first token after" in told and "GB/s" in told
    assert run("--prompt=It's the king") == (0, text, "")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_file_gives_an_answer_to_each_line_in_order(run, tmp_path, batch_size):
    """Text lines and JSON lines alike, and the answer to a prompt alone."""
    prompts = ["It's the king", "Aye", "ROMEO: What say'st thou?", "10 ships"]
    plain, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_text("\n".join([prompts[0], "", *prompts[1:]]))
    rows.write_text("".join(json.dumps({"prompt": prompt, "id": 5}) + "\n" for prompt in prompts))
    sampled = ("--temperature=0.9", "--top-k=30", "--top-p=0.95", "--seed=3", f"--batch-size={batch_size}")
    code, text, _ = run(f"--prompts={plain}", *sampled)
    found = lines(text)
    assert code == 0 and [row["prompt"] for row in found] == prompts
    assert all(row["end"] in ("length", "stop") and len(row["new_tokens"]) <= 8 for row in found)
    assert run(f"--prompts={rows}", *sampled, f"--out={tmp_path / 'out'}")[:2] == (0, "")
    assert lines((tmp_path / "out").read_text()) == found
    assert run(f"--prompt={prompts[0]}", *sampled[:-1])[1] == found[0]["text"] + "\n"


def test_messages_and_tokens_are_prompts_too(run, tmp_path):
    file = tmp_path / "p.jsonl"
    messages = [{"role": "user", "content": "Aye"}]
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "<user>Aye</><you>"}) + "\n")
    code, text, _ = run(f"--prompts={file}")
    chat, same = lines(text)
    assert code == 0 and chat["messages"] == messages and chat["text"] == same["text"]


def test_a_chat_answers_each_line_with_all_turns_before_it(run):
    code, text, _ = run("--chat", "--system=Be brief", said="Aye\n\nROMEO\n")
    first = run("--prompt=<system>Be brief</><user>Aye</><you>")[1]
    second = run(f"--prompt=<system>Be brief</><user>Aye</><assistant>{first[:-1]}</><user>ROMEO</><you>")[1]
    assert code == 0 and text == first + second


def test_an_end_token_ends_a_text_unless_it_is_ignored(run, model, tmp_path):
    """The model's own end is made the first token that it writes."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Aye"}')
    (before,) = lines(run(f"--prompts={file}")[1])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, before["new_tokens"][2]]}))
    try:
        (ended,), (ignored,) = (lines(run(f"--prompts={file}", *more)[1]) for more in ((), ("--ignore-end",)))
    finally:
        (model / "generation_config.json").unlink()
    count = before["new_tokens"].index(before["new_tokens"][2])
    assert (ended["new_tokens"], ended["end"]) == (before["new_tokens"][:count], "stop")
    assert ignored == before


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], errors.UsageError, "give one of --prompt, --prompts and --chat, not none"),
        (["--prompt=a", "--chat"], errors.UsageError, "not --prompt and --chat"),
        (["--prompt=a", "--system=b"], errors.UsageError, "--system goes with --chat, not with --prompt"),
        (["--prompt=a", "--top-k=5"], errors.UsageError, "give a --temperature above 0"),
        (["--prompts=absent.txt"], errors.DataError, "absent.txt: cannot be read (No such file or directory)"),
        (["--prompt=" + "Aye " * 300], errors.UsageError, "has 256 positions: use a smaller --max-tokens"),
        (["--chat", "--max-length=10"], errors.UsageError, "--max-length is 10: begin a new one"),
    ],
)
def test_what_cannot_be_done_is_one_message(run, arguments, code, says):
    found, _, told = run(*arguments, said="What say'st thou, ROMEO? 10 ships\n")
    assert found == code.exit_code and says in told and told.startswith("error: ")


def test_bad_lines_and_a_model_without_a_template_are_named(run, model, tmp_path):
    file = tmp_path / "bad.jsonl"
    for line, says in (
        ("{", "bad.jsonl:2: is no JSON"),
        ('{"text": 1}', "bad.jsonl:2: has no prompt (text), messages"),
    ):
        file.write_text('{"prompt": "a"}\n' + line)
        code, _, told = run(f"--prompts={file}")
        assert code == errors.DataError.exit_code and says in told
    file.write_text("\n")
    assert "has no prompt" in run(f"--prompts={file}")[2]
    (bare := tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(model / name)
    assert "the model has no tokenizer: give one with --tokenizer" in run("--prompt=a", folder=bare)[2]
    save(byte_level(), tmp_path / "plain", {"eos_token": EOS})
    code, _, told = run("--chat", f"--tokenizer={tmp_path / 'plain'}", said="a\n", folder=bare)
    assert code == errors.DataError.exit_code and "has no chat template" in told


def test_the_function_answers_as_the_command(run, model):
    import llmq

    (answer,) = llmq.generate(str(model), ["Aye"], device="cpu", max_tokens=8)
    assert answer.text + "\n" == run("--prompt=Aye")[1] and len(answer.tokens) <= 8
    assert np.issubdtype(type(answer.tokens[0]), np.integer)


def test_a_preset_writes_with_the_tokenizer_of_its_family_and_needs_none_for_tokens(run, model, tmp_path, monkeypatch):
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    monkeypatch.setitem(presets.PRESETS, "tiny_llama3_50m", tiny(num_layers=1, vocab_size=size))
    asked = []
    monkeypatch.setattr(tokenizer, "model_folder", lambda name, *more, **about: asked.append(name) or model)
    preset = ("tiny_llama3_50m", "--from-scratch")
    code, text, _ = run("--prompt=It's the king", *preset[1:], folder=preset[0])
    assert code == 0 and text.strip() and asked == [presets.preset_tokenizer(preset[0])]
    file = tmp_path / "p.jsonl"
    file.write_text('{"tokens": [5, 6]}')
    code, text, _ = run(f"--prompts={file}", *preset[1:], folder=preset[0])
    assert code == 0 and lines(text)[0]["text"] is None and len(asked) == 1
