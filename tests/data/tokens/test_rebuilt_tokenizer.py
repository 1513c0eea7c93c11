"""The warning of a tokenizer that transformers 5 rebuilds: there exactly where its ids would be others."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import EOS, SAMPLE, byte_level, save
from tiny_engines import tiny
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import llmq
from llmq.data.tokens.rebuilt_tokenizer import rebuilt_warning
from llmq.data.tokens.text import QWEN2_PATTERN
from llmq.data.tokens.tokenize import tokenize_data
from llmq.model.config import to_hf

TEXT = SAMPLE + f" It's 1234 e\u0301t\u00e9s{EOS}and  more, e\u0301,\n\n 12{EOS} x<s> y"
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM",
                 "mistral": "MistralForCausalLM"}  # fmt: skip


def qwen() -> Tokenizer:
    tokenizer = byte_level(QWEN2_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def without_nfc() -> Tokenizer:
    tokenizer = qwen()
    tokenizer.normalizer = None  # type: ignore[assignment]
    return tokenizer


def gpt2(digits: bool = False) -> Tokenizer:
    tokenizer = byte_level(digits=digits)
    tokenizer.normalizer = None  # type: ignore[assignment]
    return tokenizer


def spm(prepend_scheme: str | None) -> Tokenizer:
    """As of Llama 2: byte fallback, and spaces as a letter; None: by normalizers, as its own tokenizer.json says it."""
    letters = [
        *("<unk>", "<s>", EOS),
        *(f"<0x{n:02X}>" for n in range(256)),
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyz,1234",
    ]
    merges = [("\u2581", "y"), ("\u2581", "x"), ("t", "h"), ("\u2581", "m"), ("i", "n")]
    vocabulary = {token: n for n, token in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", EOS])
    if prepend_scheme is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=prepend_scheme, split=False)
    return tokenizer


TOKENIZERS = {
    "qwen": qwen,
    "digits by threes": lambda: byte_level(QWEN2_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")),
    "digits first": lambda: byte_level(QWEN2_PATTERN, digits=True),
    "no NFC": without_nfc,
    "GPT-2": gpt2,
    "GPT-2 with digits": lambda: gpt2(digits=True),
    "Llama 2": lambda: spm(None),
    "first": lambda: spm("first"),
    "always": lambda: spm("always"),
}
QWENS = ("qwen", "digits by threes", "no NFC", "GPT-2")
LLAMAS = ("Llama 2", "first", "always")
PREFIX = {"add_prefix_space": True}
# Model type, tokenizer_class, tokenizer, more of tokenizer_config.json, and whether transformers 5 gives other ids.
CASES: list[tuple[str, str | None, str, dict[str, Any], bool]] = [
    *(("qwen2", None, name, {}, name != "qwen") for name in QWENS),
    *(("qwen2", "Qwen2Tokenizer", name, {}, name != "qwen") for name in QWENS),
    ("qwen2", "PreTrainedTokenizerFast", "digits by threes", {}, True),
    ("qwen2", "LlamaTokenizerFast", "qwen", {}, False),
    ("qwen2", "LlamaTokenizerFast", "digits by threes", {}, True),
    ("qwen2", "Qwen2Tokenizer", "qwen", PREFIX, True),
    ("qwen3", "Qwen2TokenizerFast", "digits by threes", {}, True),
    ("qwen3", None, "no NFC", {}, True),
    ("qwen3", None, "qwen", {"add_prefix_space": False}, False),
    ("qwen3", "PreTrainedTokenizerFast", "digits by threes", {}, False),
    ("llama", None, "digits by threes", {}, False),
    ("llama", "Qwen2Tokenizer", "digits by threes", {}, True),
    ("llama", "LlamaTokenizerFast", "digits by threes", {}, False),
    ("llama", "GPT2Tokenizer", "GPT-2", {}, False),
    ("llama", "GPT2TokenizerFast", "GPT-2 with digits", {}, True),
    ("llama", "PreTrainedTokenizerFast", "GPT-2 with digits", {}, False),
    *(("llama", "LlamaTokenizer", name, {"legacy": True}, name != "always") for name in LLAMAS),
    *(("llama", "LlamaTokenizer", name, {}, name != "first") for name in LLAMAS),
    ("llama", "LlamaTokenizer", "first", {"add_prefix_space": False}, True),
    *(("mistral", name, "digits by threes", {}, False) for name in (None, "LlamaTokenizer", "Qwen2Tokenizer")),
]


def folder_of(path: Path, model_type: str, tokenizer_class: str | None, name: str, more: dict[str, Any]) -> Path:
    settings = {"eos_token": EOS, **({} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}), **more}
    save(TOKENIZERS[name](), path, settings)
    config = to_hf(tiny(num_layers=1, vocab_size=420), "fp32")
    config |= {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]]}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("model_type", "tokenizer_class", "name", "more", "differs"), CASES)
def test_it_warns_of_what_is_rebuilt_otherwise(tmp_path, model_type, tokenizer_class, name, more, differs):
    folder = folder_of(tmp_path, model_type, tokenizer_class, name, more)
    warning = rebuilt_warning(folder)
    assert (warning is not None) == differs
    (folder / "config.json").unlink()
    assert rebuilt_warning(folder, model_type) == warning


@pytest.mark.judge
@pytest.mark.parametrize(("model_type", "tokenizer_class", "name", "more", "differs"), CASES)
def test_transformers_has_other_ids_there_and_the_advice_helps(
    tmp_path, model_type, tokenizer_class, name, more, differs
):
    transformers = pytest.importorskip("transformers", minversion="5", reason="the judge is transformers 5")
    folder = folder_of(tmp_path, model_type, tokenizer_class, name, more)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids

    def judged(opened: Any = transformers.AutoTokenizer) -> list[int]:
        return opened.from_pretrained(folder).encode(TEXT, add_special_tokens=False)

    assert (judged() != ids) == differs
    warning = rebuilt_warning(folder)
    if warning and "PreTrainedTokenizerFast.from_pretrained" in warning:
        assert judged(transformers.PreTrainedTokenizerFast) == ids
    elif warning:
        assert '"tokenizer_class": "PreTrainedTokenizerFast"' in warning
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
        assert judged() == ids and rebuilt_warning(folder) is None


def test_it_says_what_differs(tmp_path):
    folder = folder_of(tmp_path, "qwen2", "Qwen2Tokenizer", "digits by threes", {})
    warning = rebuilt_warning(folder)
    assert warning is not None and "Different: pre_tokenizer." in warning
    warning = rebuilt_warning(folder_of(tmp_path / "other", "qwen2", None, "no NFC", {}))
    assert warning is not None and "Different: normalizer." in warning


def test_qwen_itself_is_rebuilt_as_it_is(shared):
    folder = shared("qwen2.5-tokenizer")
    assert [rebuilt_warning(folder, model_type) for model_type in ("qwen2", "qwen3", "llama", None)] == [None] * 4


def test_a_folder_without_a_tokenizer_has_nothing_to_warn_of(tmp_path):
    assert rebuilt_warning(None) is None and rebuilt_warning(tmp_path, "qwen2") is None


def test_runs_and_tokenize_data_say_it_at_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = folder_of(tmp_path / "source", "llama", "Qwen2Tokenizer", "digits by threes", {})
    Path("text.txt").write_text(SAMPLE * 40)
    said: list[str] = []
    tokenize_data(tokenizer=str(folder), inputs=["text.txt"], eval_fraction=0.0, out_dir="tokens", say=said.append)
    assert any("note: transformers 5 gives other tokens" in text for text in said)
    console = io.StringIO()
    options = {"model": str(folder), "from_scratch": True, "train_file": "tokens/train.bin", "model_dtype": "fp32"}
    options |= {"batch_size": 1, "seq_len": 16, "grad_accumulation": 1, "steps": 1, "name": "run", "console": console}
    result = llmq.train(**options)
    start, end = console.getvalue().split("Exported: ")
    assert str(tmp_path / "tokens/tokenizer") in start or "tokens/tokenizer/tokenizer.json" in start
    assert "and in models trained with it" in start
    assert end.count("transformers 5 gives other tokens") == 1  # in the list of all warnings
    assert result.log_path.read_text().count("transformers 5 gives other tokens") == 2
