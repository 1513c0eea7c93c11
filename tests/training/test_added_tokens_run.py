"""Runs with --add-tokens: rows that begin as the mean, the exported folder, data of both tokenizers, resuming."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from in_process import run_ranks
from safetensors.numpy import load_file
from small_tokenizers import EOS, byte_level, save
from tiny_engines import tiny
from tiny_runs import write_weights
from tokenizers import Tokenizer, decoders

import llmq
from llmq.data.tokens.tokenize import tokenize_data
from llmq.errors import DataError, UsageError
from llmq.model.config import to_hf
from llmq.options.parse import Options
from llmq.training import train
from llmq.training.ranks import Ranks

TOKENS = ["<think>", "</think>", "<|tool|>"]
TEXT = "It's <think>the king</think> of 10 ships.\n"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes a model whose embedding has some `rows`, its tokenizer, rows of text and a file of tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))

    def make(rows=None, **about):
        tokenizer = byte_level()
        tokenizer.decoder = decoders.ByteLevel()
        save(tokenizer, Path("source"), {"eos_token": EOS, "added_tokens_decoder": {}})
        count = tokenizer.get_vocab_size()
        config = tiny(num_layers=1, vocab_size=rows or count, **about)
        Path("source/config.json").write_text(json.dumps(to_hf(config, "fp32")))
        write_weights("source", Path("base"), tokenizer=Path("source"))
        Path("rows.jsonl").write_text("".join(json.dumps({"text": f"{n} {TEXT * 3}"}) + "\n" for n in range(60)))
        Path("tokens.txt").write_text("\n".join(TOKENS) + "\n")
        return count

    return make


def run(console=None, **more):
    about = {"model": "base", "data": "rows.jsonl", "model_dtype": "fp32", "batch_size": 2, "seq_len": 24, "steps": 4}
    about |= {"name": "run", "device": "cpu", "learning_rate": 1e-2, "eval_every_n_steps": 0, "eval_fraction": 0}
    about |= {"add_tokens": "tokens.txt", "grad_accumulation": 1, "console": console or io.StringIO()}
    return llmq.train(**{key: value for key, value in (about | more).items() if value is not None})


def tensors(folder):
    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("free", [None, 0, 1, 50])
def test_new_rows_begin_as_the_mean_of_the_others(made, tied, free):
    count = made(rows=None if free is None else byte_level().get_vocab_size() + free, tie_embeddings=tied)
    console = io.StringIO()
    found = run(console, learning_rate=0.0)
    before, after = tensors("base"), tensors(found.model_path)
    size = max(count + len(TOKENS), count + (free or 0))
    assert json.loads((found.model_path / "config.json").read_text())["vocab_size"] == size
    for name in [EMBED] if tied else [EMBED, HEAD]:
        old, new = before[name], after[name]
        assert new.shape == (size, old.shape[1])
        np.testing.assert_array_equal(new[:count], old[:count])
        mean = old[:count].mean(axis=0, dtype=np.float64).astype(np.float32)
        np.testing.assert_array_equal(new[count : count + len(TOKENS)], np.tile(mean, (len(TOKENS), 1)))
        np.testing.assert_array_equal(new[count + len(TOKENS) :], old[count + len(TOKENS) :])
    assert (f"The vocabulary grows from {count + (free or 0)} to {size}" in console.getvalue()) == ((free or 0) < 3)
    tokenizer = Tokenizer.from_file(str(found.model_path / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in TOKENS] == [*range(count, count + 3)]
    assert tokenizer.encode(TEXT).ids[3:5].count(count) == 1
    listed = json.loads((found.model_path / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert [*listed] == [str(count + n) for n in range(3)] and listed[str(count)]["content"] == TOKENS[0]


@pytest.mark.slow
def test_new_tokens_are_trained_and_the_model_writes_them(made):
    count = made()
    found = run(steps=150)
    new = tensors(found.model_path)[EMBED][count:]
    assert not np.allclose(new[0], new[1])
    (answer,) = llmq.load(str(found.model_path), seq_len=24).generate(["12 It's "], max_tokens=8, temperature=0.0)
    assert "<think>" in answer.text


def test_a_run_resumes_with_and_without_the_option(made):
    made()
    whole = run(steps=6, name="whole")
    for again in ("tokens.txt", None):
        run(steps=3, name=f"part {again}", ckpt_interval=3, epochs=None)
        other = run(steps=6, name=f"part {again}", add_tokens=again, **{"continue": "newest", "overwrite": False})
        for name in ("model.safetensors", "tokenizer.json", "config.json"):
            assert (other.model_path / name).read_bytes() == (whole.model_path / name).read_bytes()


def test_a_run_resumes_with_the_same_tokens_alone(made):
    made(rows=500)
    tokenize_data(tokenizer="base", inputs=["rows.jsonl"], out_dir="old", eval_fraction=0)
    about = {"data": None, "eval_fraction": None, "train_file": "old/train.bin"}
    run(steps=3, ckpt_interval=3, **about)
    Path("tokens.txt").write_text("<other>\n")
    with pytest.raises(UsageError, match=r"added tokens: 3 from '<think>' on, \w+ in the checkpoint, 1 from '<other>'"):
        run(steps=6, **about, **{"continue": "newest"})
    run(steps=3, name="none", ckpt_interval=3, add_tokens=None, **about)
    with pytest.raises(UsageError, match="added tokens: not set in the checkpoint, 1 from"):
        run(steps=6, name="none", **about, **{"continue": "newest"})


@pytest.mark.slow
def test_data_of_the_old_tokenizer_stays_valid(made):
    made()
    for tokens, folder in ((None, "old"), ("tokens.txt", "new")):
        tokenize_data(tokenizer="base", inputs=["rows.jsonl"], out_dir=folder, add_tokens=tokens, eval_fraction=0)
    about = {"data": None, "eval_fraction": None}
    new, old = (run(**about, train_file=f"{it}/train.bin", name=it) for it in ("new", "old"))
    named = run(packing="windows", name="named")
    assert list(named.history["loss"]) == list(new.history["loss"]) != list(old.history["loss"])
    write_weights("source", Path("wide"), tokenizer=Path("source"), vocab_size=500)
    tokens = [Path(f"{it}/train.bin").read_bytes() for it in ("new", "old")]
    assert len(tokens[0]) < len(tokens[1])
    with pytest.raises(DataError, match="another tokenizer"):
        run(**about, train_file="new/train.bin", model="wide", add_tokens=None, name="not")


@pytest.mark.parametrize(
    "more",
    [
        {"lora_rank": 2, "adalora": True},
        {"ia3": "k_proj"},
        {"prompt_tuning": 2, "packing": False},
        {"train_only": "*.bias"},
    ],
)
def test_a_frozen_embedding_is_refused(made, more):
    made()
    with pytest.raises(UsageError, match=r"--add-tokens: the embedding is frozen, .* add --train-also embed_tokens to"):
        run(**more)


@pytest.mark.slow
def test_adapters_train_the_embedding_beside_them(made):
    count = made(tie_embeddings=False)
    found = run(lora_rank=2, train_also="embed_tokens,lm_head", merge=True)
    stored = load_file(found.model_path / "adapter_model.safetensors")
    assert stored[f"base_model.model.{EMBED}"].shape[0] == stored[f"base_model.model.{HEAD}"].shape[0] == count + 3
    assert tensors(found.merged_path)[EMBED].shape[0] == count + 3
    tokenizer = Tokenizer.from_file(str(found.merged_path / "tokenizer.json"))
    assert tokenizer.token_to_id(TOKENS[2]) == count + 2


@pytest.mark.slow
def test_a_model_from_scratch_draws_rows_for_the_tokens(made):
    count = made()
    found = run(model="source", from_scratch=True, learning_rate=0.0)
    new = tensors(found.model_path)[EMBED][count:]
    assert new.shape[0] == 3 and 0.01 < new.std() < 0.03
    tokenizer = Tokenizer.from_file(str(found.model_path / "tokenizer.json"))
    assert tokenizer.token_to_id(TOKENS[2]) == count + 2


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
def test_ranks_train_the_same_rows(made, level):
    made()
    about = {"model": "base", "data": "rows.jsonl", "model_dtype": "fp32", "seq_len": 24, "steps": 3, "device": "cpu"}
    about |= {"learning_rate": 1e-2, "eval_every_n_steps": 0, "eval_fraction": 0, "add_tokens": "tokens.txt"}
    alone = llmq.train(**about, name="alone", batch_size=4, grad_accumulation=1, console=io.StringIO())
    two = {**about, "name": "two", "batch_size": 2, "grad_accumulation": 1, "zero_level": level}
    run_ranks(2, lambda world: train.run(Options.parse(two), console=io.StringIO(), ranks=Ranks(world)))
    ours, theirs = tensors(alone.model_path), tensors("runs/two/model")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=1e-3, atol=1e-5)


DELTA = "base_model.model.{}.token_adapter.trainable_tokens_delta"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dora": True, "base_dtype": "nf4"},
        {"lora_init": "pissa", "model_dtype": "bf16"},
        {"offload_opt_m": True, "offload_residual": True, "grad_accumulation": 2, "lmhead_chunks": 2, "packing": True},
        {"model_dtype": "bf16", "matmul_dtype": "e4m3", "head_dtype": "e4m3", "fp8_scaling": "rowwise"},
        {"lora_dropout": 0.1, "neftune_alpha": 5.0, "recompute_block": True, "lora_bias": "all"},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_lora_trains_rows_of_the_tokens_alone(made, tied, more):
    count = made(tie_embeddings=tied)
    found = run(lora_rank=2, merge=True, **more)
    names = [EMBED] if tied else [EMBED, HEAD]
    stored = load_file(found.model_path / "adapter_model.safetensors")
    rows = {name: stored[DELTA.format(name.removesuffix(".weight"))] for name in names}
    about = json.loads((found.model_path / "adapter_config.json").read_text())
    ids = [count, count + 1, count + 2]
    assert about["trainable_token_indices"] == {name.split(".")[-2]: ids for name in names}
    old, merged = tensors("base"), tensors(found.merged_path)
    for name, new in rows.items():
        mean = old[name].mean(axis=0, dtype=np.float64)
        assert (
            new.shape == (3, mean.size) and (np.abs(new - mean).max(axis=1) > 1e-4)[:2].all()
        )  # the text has no third
        bound = 1e-2 if "model_dtype" in more else 0
        np.testing.assert_allclose(merged[name][:count], old[name], atol=bound)
        np.testing.assert_allclose(merged[name][count:], new, atol=bound)
    prompts, about = ["12 It's <think>"], {"max_tokens": 6, "temperature": 0.0}
    (one,) = llmq.load(str(found.merged_path), seq_len=24).generate(prompts, **about)
    (other,) = llmq.load("base", adapter=str(found.model_path), seq_len=24).generate(prompts, **about)
    if "base_dtype" not in more and "model_dtype" not in more:
        assert one.tokens == other.tokens


@pytest.mark.slow
def test_rows_beside_adapters_resume_and_go_on(made):
    count = made()
    whole = run(steps=6, name="whole", lora_rank=2)
    for again in ("tokens.txt", None):
        run(steps=3, name=f"part {again}", ckpt_interval=3, lora_rank=2)
        other = run(steps=6, name=f"part {again}", add_tokens=again, lora_rank=2, **{"continue": "newest"})
        for name in ("adapter_model.safetensors", "tokenizer.json", "adapter_config.json"):
            assert (other.model_path / name).read_bytes() == (whole.model_path / name).read_bytes()
    key = DELTA.format("model.embed_tokens")
    first = load_file(whole.model_path / "adapter_model.safetensors")[key]
    for n, again in enumerate(("tokens.txt", None)):
        more = run(name=f"more {n}", adapter=str(whole.model_path), add_tokens=again, learning_rate=0.0)
        np.testing.assert_array_equal(load_file(more.model_path / "adapter_model.safetensors")[key], first)
        assert Tokenizer.from_file(str(more.model_path / "tokenizer.json")).token_to_id(TOKENS[0]) == count
    Path("tokens.txt").write_text("<a>\n")
    with pytest.raises(UsageError, match=r"needs rows 322 to 325, and --adapter has 322 to 324: give the file"):
        run(name="bad", adapter=str(whole.model_path))
    plain = run(name="plain", lora_rank=2, add_tokens=None)
    found = run(name="gets", adapter=str(plain.model_path))
    assert load_file(found.model_path / "adapter_model.safetensors")[key].shape[0] == 1
    with pytest.raises(UsageError, match="leave lm_head out"):
        run(name="head", lora_rank=2, lora_targets="q_proj,lm_head")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("more", [{"zero_level": level} for level in range(4)] + [{"fused_update": True}], ids=str)
def test_ranks_train_rows_beside_adapters(made, more, tied):
    made(tie_embeddings=tied)
    about = {"model": "base", "data": "rows.jsonl", "model_dtype": "fp32", "seq_len": 24, "steps": 3, "device": "cpu"}
    about |= {"learning_rate": 1e-2, "eval_every_n_steps": 0, "eval_fraction": 0, "add_tokens": "tokens.txt"}
    about |= {"lora_rank": 2, "grad_accumulation": 1, "grad_clip": 0.0}
    alone = llmq.train(**about, name="alone", batch_size=4, console=io.StringIO())
    size = 1 if "fused_update" in more else 2
    two = {**about, "name": "two", "batch_size": 4 // size, **more}
    run_ranks(size, lambda world: train.run(Options.parse(two), console=io.StringIO(), ranks=Ranks(world)))
    ours, theirs = (load_file(Path(it) / "adapter_model.safetensors") for it in (alone.model_path, "runs/two/model"))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=1e-3, atol=1e-5)
