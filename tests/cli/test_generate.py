"""`llmq-generate` as the shell sees it: a prompt, a file of them, a chat, and what it refuses."""

import io
import json
import shutil
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from golden import families
from safetensors.numpy import save_file
from small_tokenizers import EOS, byte_level, save
from tiny_engines import tiny

import llmq
from llmq import errors
from llmq.cli import shell
from llmq.cli.generate import command
from llmq.data.tokens import tokenizer
from llmq.generation.prompts import questions_of
from llmq.generation.text import Sampling, Writer
from llmq.model import presets
from llmq.options.commands import GenerateOptions

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
    code, text, printed = run("--prompt=It's the king", "--stats")
    assert code == 0 and text.endswith("\n") and len(text) > 1
    assert "new; first token after" in printed and "GB/s" in printed
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
    assert all(row["finish_reason"] in ("length", "stop") and len(row["new_tokens"]) <= 8 for row in found)
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
    code, _, printed = run("--chat", "--max-length=10", said="What say'st thou, ROMEO? 10 ships\n")
    assert code == errors.UsageError.exit_code and "--max-length is 10: begin a new one" in printed


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
    assert (ended["new_tokens"], ended["finish_reason"]) == (before["new_tokens"][:count], "stop")
    assert ignored == before


def test_a_model_without_a_tokenizer_or_a_template_says_so(run, model, tmp_path):
    (bare := tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(model / name)
    assert "the model has no tokenizer: give one with --tokenizer" in run("--prompt=a", folder=bare)[2]
    save(byte_level(), tmp_path / "plain", {"eos_token": EOS})
    code, _, printed = run("--chat", f"--tokenizer={tmp_path / 'plain'}", said="a\n", folder=bare)
    assert code == errors.DataError.exit_code and "has no chat template" in printed


KING = "It's the king"
DRAWN = ("--temperature=0.9", "--seed=3")


def test_each_of_several_prompts_is_answered_below_its_number(run):
    alone = [run(f"--prompt={text}")[1] for text in (KING, "Aye")]
    assert run(f"--prompt={KING}", "--prompt=Aye") == (0, f"[prompt 1]\n{alone[0]}[prompt 2]\n{alone[1]}", "")


def test_samples_are_drawn_apart_and_are_the_same_in_any_number_of_them(run, model):
    """The first is the answer without --samples, and the same prompt again has others. All take one batch."""
    found = lines(run(f"--prompt={KING}", f"--prompt={KING}", "--samples=3", "--json", *DRAWN, "--batch-size=1")[1])
    assert [row["sample"] for row in found] == [0, 1, 2, 0, 1, 2] and len({row["text"] for row in found}) == 6
    assert run(f"--prompt={KING}", *DRAWN)[1] == found[0]["text"] + "\n"
    shown = run(f"--prompt={KING}", "--samples=2", *DRAWN)[1]
    assert shown == f"[sample 1]\n{found[0]['text']}\n[sample 2]\n{found[1]['text']}\n"
    writer = Writer(GenerateOptions(model=str(model), device="cpu", max_tokens=8, samples=3, temperature=0.9, seed=3))
    assert [one.text for one in writer.answers(questions_of(KING))] == [row["text"] for row in found[:3]]
    assert (writer.course.new_tokens, writer.course.steps) == (24, 7)


def test_json_lines_have_log_p_and_those_of_a_file_only_with_json(run, tmp_path):
    (tmp_path / "p.txt").write_text(f"{KING}\nAye\n")
    given = (f"--prompt={KING}", "--prompt=Aye", "--json", f"--out={tmp_path / 'out'}")
    assert run(*given) == (0, "", "")
    found = lines((tmp_path / "out").read_text())
    assert [list(row) for row in found] == [["prompt", "text", "new_tokens", "logprobs", "finish_reason"]] * 2
    assert all(len(row["logprobs"]) == len(row["new_tokens"]) and max(row["logprobs"]) < 0 for row in found)
    assert lines(run(f"--prompts={tmp_path / 'p.txt'}", "--json")[1]) == found
    silent = [{name: value for name, value in row.items() if name != "logprobs"} for row in found]
    assert lines(run(f"--prompts={tmp_path / 'p.txt'}")[1]) == silent


def test_a_stop_text_is_cut_from_the_answer_and_ends_it_alone(run, tmp_path):
    """Text within the answer of the first prompt, from the middle of a token to the middle of another."""
    whole = [row["text"] for row in lines(run(f"--prompt={KING}", "--prompt=Aye", "--json", *DRAWN)[1])]
    stop = whole[0][3:9]
    assert stop not in whole[1]
    found = lines(run(f"--prompt={KING}", "--prompt=Aye", "--json", *DRAWN, "--stop=absent", f"--stop={stop}")[1])
    assert [row["text"] for row in found] == [whole[0][: whole[0].index(stop)], whole[1]]
    assert [row["finish_reason"] for row in found] == ["stop", "length"]
    assert len(found[0]["new_tokens"]) == len(found[0]["logprobs"]) < 8 == len(found[1]["new_tokens"])
    assert run(f"--prompt={KING}", *DRAWN, f"--stop={stop}")[1] == found[0]["text"] + "\n"
    asked = ("--chat", "--system=Be brief", *DRAWN)
    chat = run(*asked, said="Aye\n")[1]
    assert run(*asked, f"--stop={chat[2:4]}", said="Aye\n")[1] == chat[: chat.index(chat[2:4])] + "\n"


def test_a_special_token_is_a_stop_text_too(model, tmp_path):
    """Decoded text never shows one: here one that is made of a token in the middle of an answer."""
    about = {"device": "cpu", "max_tokens": 8, "ignore_end": True}
    (whole,) = llmq.generate(model, KING, **about)
    made = byte_level()
    spelled = made.id_to_token(whole.tokens[3])
    made.add_special_tokens([spelled])
    save(made, tmp_path, {"eos_token": EOS})
    for stop in (spelled, [spelled, "absent"]):
        (cut,) = llmq.generate(model, KING, tokenizer=tmp_path, stop=stop, **about)
        assert (cut.tokens, cut.finish_reason) == (whole.tokens[: whole.tokens.index(whole.tokens[3])], "stop")


def test_the_function_answers_as_the_command(run, model):
    (answer,) = llmq.generate(model, "Aye", device="cpu", max_tokens=8)
    assert answer.text + "\n" == run("--prompt=Aye")[1] and len(answer.tokens) == len(answer.logprobs) <= 8
    assert np.issubdtype(type(answer.tokens[0]), np.integer)
    (row,) = lines(run("--prompt=Aye", "--json")[1])
    assert (row["logprobs"], row["finish_reason"]) == (list(answer.logprobs), answer.finish_reason)
    (silent,) = llmq.generate(str(model), ["Aye"], device="cpu", max_tokens=8, logprobs=False)
    assert silent == replace(answer, logprobs=())


def test_a_folder_that_hides_a_preset_is_noticed(run, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "qwen2.5-0.5b")
    with pytest.warns(UserWarning, match="qwen2.5-0.5b is the folder .*, not the preset of that name"):
        llmq.generate("qwen2.5-0.5b", "Aye", device="cpu", max_tokens=1)


def test_the_function_takes_chats_samples_and_stop_texts(run, model):
    about = {"device": "cpu", "max_tokens": 8, "temperature": 0.9, "seed": 3}
    chat = [{"role": "user", "content": "Aye"}]
    rendered = "<user>Aye</><you>"
    found = llmq.generate(model, [chat, rendered, KING], samples=2, **about)
    assert [(one.index, one.sample) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    (single,) = llmq.generate(model, chat, **about)
    assert replace(single, logprobs=()) == replace(found[0], logprobs=())
    assert single.logprobs == pytest.approx(found[0].logprobs, abs=1e-5)  # products of another size, in f32
    assert single == llmq.generate(model, rendered, sampling=Sampling(0.9, seed=3), device="cpu", max_tokens=8)[0]
    stop = found[0].text[2:5]
    (cut,) = llmq.generate(model, chat, stop=stop, **about)
    assert (cut.text, cut.finish_reason) == (single.text[: single.text.index(stop)], "stop")
    assert cut.tokens == single.tokens[: len(cut.tokens)] and cut.logprobs == single.logprobs[: len(cut.tokens)]
    assert llmq.generate(model, [], **about) == list(llmq.generate(model, [], stream=True, **about)) == []


def test_a_stream_has_the_pieces_of_the_answers(model):
    about = {"device": "cpu", "max_tokens": 8, "temperature": 0.9, "seed": 3, "samples": 2, "stop": ["e", "zz"]}
    whole = llmq.generate(model, [KING, "Aye"], **about)
    found = list(llmq.generate(model, [KING, "Aye"], stream=True, **about))
    assert len(found) > len(whole) and {one.finish_reason for one in whole} == {"stop", "length"}
    for answer in whole:
        parts = [one for one in found if (one.index, one.sample) == (answer.index, answer.sample)]
        assert [one.finish_reason for one in parts] == [None] * (len(parts) - 1) + [answer.finish_reason]
        for name in ("text", "tokens", "logprobs"):
            first, *rest = (getattr(one, name) for one in parts)
            assert sum(rest, first) if name != "text" else "".join([first, *rest]) == answer.text
    assert "e" not in "".join(one.text for one in found)


def test_all_that_the_function_cannot_do_is_one_message(model):
    says = r"-tokens 1\.5 is not a whole .*\n  --stop 5: use a .*\n  --top-p 1\.9 is above .*\n  --dtype fp16 is not"
    with pytest.raises(errors.UsageError, match=says):
        llmq.generate(model, "Aye", device="cpu", max_tokens=1.5, top_p="1.9", dtype="fp16", stop=[5])


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
