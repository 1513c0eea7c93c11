"""Files of tokens, and tokenizers that get them."""

import json

import pytest
from small_tokenizers import EOS, byte_level, save
from tiny_runs import folder
from tokenizers import AddedToken, Tokenizer

from llmq.data.tokens.added_tokens import MOST_TOKENS, grown, read_tokens, with_tokens
from llmq.data.tokens.tokenizer import TextTokenizer, same_ids
from llmq.errors import DataError, UsageError
from llmq.files.source import open_source
from llmq.options.data import ModelOptions


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))


def written(tmp_path, content, name="tokens.txt"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def contents(tokens):
    return [token["content"] for token in tokens]


def test_a_line_is_a_token_whatever_it_begins_with(tmp_path):
    text = "\ufeff# no comment\r\n\n  <|a b|>  \n[TOOL]\n\u20ac\n"
    tokens = read_tokens(written(tmp_path, text))
    assert contents(tokens) == ["# no comment", "<|a b|>", "[TOOL]", "\u20ac"]
    about = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    assert tokens[0] == {"content": "# no comment", **about}


def test_a_json_file_says_more_of_a_token(tmp_path):
    listed = [" a ", {"content": "<s>", "special": True}, {"content": "b", "normalized": False, "lstrip": True}]
    found = read_tokens(written(tmp_path, json.dumps(listed), "t.json"))
    assert contents(found) == [" a ", "<s>", "b"]
    theirs = [AddedToken(" a "), AddedToken("<s>", special=True), AddedToken("b", normalized=False, lstrip=True)]
    for one, other in zip(found, theirs, strict=True):
        flags = ("single_word", "lstrip", "rstrip", "special")
        assert all(one[flag] == getattr(other, flag) for flag in flags)
    assert [one["normalized"] for one in found] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.txt", "", "has 0 tokens"),
        ("t.txt", "\n \n", "has 0 tokens"),
        ("t.txt", "a\nb\na\n", "has a more than once"),
        ("t.bin", bytes(range(256)), "not text in UTF-8"),
        ("t.bin", b"\x01\x02\x00\x00abc\n", "is not text"),
        ("t.txt", "".join(f"t{n}\n" for n in range(MOST_TOKENS + 1)), f"1 to {MOST_TOKENS:,} can be added"),
        ("t.txt", b"a" * (1 << 25), r"33,554,432 bytes, and 16,777,216 can be read"),
        ("t.json", "[]", "has 0 tokens"),
        ("t.json", '{"a": 1}', "no list of tokens"),
        ("t.json", '["a", {"content": ""}]', "entry 1"),
        ("t.json", '["a", {"content": "b", "spezial": true}]', "entry 1"),
        ("t.json", '["", "a"]', "no list of tokens"),
        ("t.json", "a\nb\n", "no list of tokens"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, name, content, words):
    with pytest.raises(DataError, match=words):
        read_tokens(written(tmp_path, content, name))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read.*a token in each line"):
        read_tokens(tmp_path / "none")


def opened(tmp_path, **more):
    config = {"eos_token": EOS, "added_tokens_decoder": {}, "chat_template": "{{ messages }}"}
    return TextTokenizer.open(str(save(byte_level(**more), tmp_path / "m", config)))


def test_the_tokenizer_gets_the_tokens(tmp_path):
    before, said = opened(tmp_path), []
    (before.folder / "added_tokens.json").write_text("{}")
    (before.folder / "tekken.json").write_text("{}")
    listed = ["<think>", {"content": "<s>", "special": True}, EOS]
    tokens = read_tokens(written(tmp_path, json.dumps(listed), "t.json"))
    after = with_tokens(before, tokens, said.append)
    first = before.vocab_size
    assert after.vocab_size == first + 2 and after.eos_token_id == before.eos_token_id
    assert said[0] == f"--add-tokens: the tokenizer has '{EOS}' ({before.eos_token_id}) already"
    assert said[1] == f"--add-tokens: 2 new, from the id {first} on"
    assert after.encoder.encode("a<think>b", add_special_tokens=False).ids.count(first) == 1
    assert first + 1 not in after.encoder.encode("<s>").ids and first + 1 in after.reads_special().encode("<s>").ids
    theirs = Tokenizer.from_file(str(before.folder / "tokenizer.json"))
    theirs.add_tokens(["<think>"])
    theirs.add_special_tokens(["<s>"])
    assert json.loads((after.folder / "tokenizer.json").read_text()) == json.loads(theirs.to_str())
    assert json.loads((after.folder / "added_tokens.json").read_text()) == {"<think>": first, "<s>": first + 1}
    assert not (after.folder / "tekken.json").exists()
    assert same_ids(before.folder, after.folder) and not same_ids(after.folder, before.folder)
    assert with_tokens(before, tokens, said.append).folder == after.folder
    assert with_tokens(after, tokens, said.append) is after


def test_a_tokenizer_with_gaps_takes_none(tmp_path):
    before = opened(tmp_path)
    content = json.loads((path := before.folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 1000
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="takes no more tokens"):
        with_tokens(TextTokenizer.open(str(before.folder)), read_tokens(written(tmp_path, "<a>")), print)


def test_a_model_without_a_tokenizer_gets_none(tmp_path):
    source = open_source(ModelOptions(model=str(folder(tmp_path / "m")), from_scratch=True))
    assert grown(source, (), print) is source
    with pytest.raises(UsageError, match="has no tokenizer"):
        grown(source, read_tokens(written(tmp_path, "<a>")), print)


def test_templates_read_tokens_of_both_kinds_in_any_order(tmp_path):
    listed = [{"content": f"<{n}>", "special": n % 3 == 0} for n in range(300)]
    tokens = read_tokens(written(tmp_path, json.dumps(listed), "t.json"))
    before = opened(tmp_path)
    after = with_tokens(before, tokens, lambda text: None)
    reader = after.reads_special()
    assert reader.get_added_tokens_decoder() == after.encoder.get_added_tokens_decoder()
    ids = [before.vocab_size + n for n in (3, 1, 299)]
    assert (
        reader.encode("<3><1><299>").ids == ids
        and after.encoder.encode("<1>", add_special_tokens=False).ids == ids[1:2]
    )
