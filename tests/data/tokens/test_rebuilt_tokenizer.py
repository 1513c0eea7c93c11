"""The warning of a Qwen tokenizer that transformers 5 rebuilds: there exactly where its ids would be others."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_tokenizers import EOS, SAMPLE, byte_level, save
from tiny_engines import tiny
from tokenizers import Tokenizer, decoders

import llmq
from llmq.data.tokens.text import QWEN2_PATTERN
from llmq.data.tokens.tokenize import tokenize_data
from llmq.data.tokens.tokenizer import rebuilt_warning
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


TOKENIZERS = {
    "qwen": qwen,
    "digits by threes": lambda: byte_level(QWEN2_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")),
    "no NFC": without_nfc,
    "GPT-2": byte_level,
}
PREFIX = {"add_prefix_space": True}
# Model type, tokenizer_class, tokenizer, more of tokenizer_config.json, and whether transformers 5 gives other ids.
CASES: list[tuple[str, str | None, str, dict[str, Any], bool]] = [
    *(("qwen2", None, name, {}, name != "qwen") for name in TOKENIZERS),
    ("qwen2", "PreTrainedTokenizerFast", "digits by threes", {}, True),
    ("qwen2", "Qwen2Tokenizer", "qwen", PREFIX, True),
    ("qwen3", "Qwen2TokenizerFast", "digits by threes", {}, True),
    ("qwen3", None, "no NFC", {}, True),
    ("qwen3", None, "qwen", {"add_prefix_space": False}, False),
    ("qwen3", "PreTrainedTokenizerFast", "digits by threes", {}, False),
    ("llama", None, "digits by threes", {}, False),
    ("llama", "Qwen2Tokenizer", "digits by threes", {}, True),
    ("mistral", "Qwen2Tokenizer", "digits by threes", {}, False),
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
    assert (warning is not None) == differs and (not differs or "Different: " in warning)
    opened = SimpleNamespace(encoder=Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert rebuilt_warning(folder, opened=opened) == warning
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


def test_qwen_itself_and_a_folder_without_a_tokenizer_have_nothing_to_warn_of(tmp_path, shared):
    assert rebuilt_warning(None) is None and rebuilt_warning(tmp_path, "qwen2") is None
    folder = shared("qwen2.5-tokenizer")
    assert [rebuilt_warning(folder, model_type) for model_type in ("qwen2", "qwen3", "llama", None)] == [None] * 4


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
