"""Model folders: what is read is what was written, anything wrong is one clear error, and nothing is ever half done."""

import errno
import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmq.errors import DataError, StorageError, UsageError
from llmq.files import huggingface as hf
from llmq.files import tensor_files
from llmq.files.huggingface import Export, checked_tensors, export_bytes, read_rows
from llmq.files.source import find_source, fingerprint
from llmq.files.tensor_files import INDEX, WEIGHTS, stored_dtype, stored_tensors
from llmq.model.config import ModelConfig, RopeConfig, from_folder
from llmq.model.parameters import padded_vocab, parameter_rows
from llmq.tensor import DTYPES

BASE = ModelConfig("LlamaForCausalLM", 100, 16, 24, 3, 4, 2, 4, 1e-5, 64, dtype="fp32", eos_token_ids=(2,))
FAMILIES = {
    "llama": BASE,
    "llama3 tied": replace(
        BASE, vocab_size=32001, tie_embeddings=True, rope=RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32), dtype="bf16"
    ),
    "code llama": replace(BASE, vocab_size=32016, num_kv_heads=4, rope=RopeConfig(1e6, "linear", 2.0), dtype="fp16"),
    "mistral": replace(BASE, architecture="MistralForCausalLM", windows=(16, 16, 16), eos_token_ids=(2, 3)),
    "qwen2": replace(BASE, architecture="Qwen2ForCausalLM", qkv_bias=True, windows=(None, 9, 9), dtype="bf16"),
    "qwen3": replace(BASE, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=8, tie_embeddings=True),
    "gpt2": replace(BASE, architecture="GPT2LMHeadModel", num_kv_heads=4, qkv_bias=True, tie_embeddings=True),
    "large vocabulary": replace(BASE, vocab_size=262_144, hidden_size=4, num_layers=1, head_dim=2),
}
LONG_NAME = "\u00e9" * 130 + ".safetensors"  # in bytes of UTF-8


def random_values(config, seed=0, dtype=None):
    """A value for every row, in the config's dtype, padded rows zero."""
    draw = np.random.default_rng(seed)
    values = {}
    for row in parameter_rows(config):
        values[row.name] = draw.standard_normal(row.shape, dtype=np.float32).astype(DTYPES[dtype or config.dtype])
        if row.shape[0] == padded_vocab(config):
            values[row.name][config.vocab_size :] = 0
    return values


def write(folder, config, values=None, **options):
    values = values or random_values(config)
    options = {"dtype": config.dtype, **options}
    Export(folder, config, parameter_rows(config), **options).write(lambda row: values[row.name])
    return values


def load(folder, config=None):
    rows = parameter_rows(config or from_folder(folder))
    return {row.name: value for row, value in read_rows(checked_tensors(folder, rows), rows)}


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name].astype(np.float32), other[name].astype(np.float32), err_msg=name)


def listing(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shard_bytes", [10_000, 5_000_000_000])
def test_round_trip(tmp_path, name, shard_bytes):
    config = FAMILIES[name]
    values = write(tmp_path / "m", config, shard_bytes=shard_bytes)
    same(load(tmp_path / "m"), values)
    assert from_folder(tmp_path / "m") == config
    assert stored_dtype(tmp_path / "m") == config.dtype
    stored = stored_tensors(tmp_path / "m")
    assert ("lm_head.weight" in stored) == (not config.tie_embeddings)
    embedding = stored[f"{config.family.wiring.names.embed}.weight"]
    assert embedding.shape == (config.vocab_size, config.hidden_size)
    assert listing(tmp_path) == ["m", *(f"m/{entry}" for entry in listing(tmp_path / "m"))]  # nothing beside it
    if shard_bytes == 10_000:
        index = json.loads((tmp_path / "m" / INDEX).read_text())
        assert index["metadata"]["total_size"] == export_bytes(parameter_rows(config), config.dtype)
        assert len(set(index["weight_map"].values())) > 1 and not (tmp_path / "m" / WEIGHTS).exists()
    else:
        theirs = load_file(tmp_path / "m" / WEIGHTS)
        if name == "gpt2":
            qkv = [theirs["transformer.h.0.attn.c_attn.weight"].T]
        else:
            qkv = [theirs[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]
        np.testing.assert_array_equal(
            np.concatenate(qkv).astype(np.float32), values["layers.0.attention.qkv.weight"].astype(np.float32)
        )


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_export_converts_by_rounding(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 256)  # many slices per tensor
    values = write(tmp_path / "m", BASE, dtype=dtype)
    same(load(tmp_path / "m"), {name: value.astype(DTYPES[dtype]) for name, value in values.items()})
    assert from_folder(tmp_path / "m").dtype == dtype


def test_fp16_overflow_is_an_error(tmp_path):
    values = random_values(BASE)
    values["head.norm"][3] = 1e5
    with pytest.raises(UsageError, match=r"model\.norm\.weight has a value of magnitude 100000.*bf16"):
        write(tmp_path / "m", BASE, values, dtype="fp16")
    assert listing(tmp_path) == []


def model(tmp_path, config=BASE):
    """A folder as others write it: the library's writer, in one file; returns it with its tensors."""
    write(tmp_path / "m", config)
    return tmp_path / "m", load_file(tmp_path / "m" / WEIGHTS)


def test_known_buffers_are_ignored_and_a_tied_head_must_equal_the_embedding(tmp_path):
    config = FAMILIES["qwen3"]
    folder, tensors = model(tmp_path, config)
    values = load(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / WEIGHTS)
    same(load(folder), values)
    tensors["lm_head.weight"][99, 15] += 1
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(DataError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(folder)


def test_gpt2_as_it_is_published(tmp_path):
    """Without the first part of names, and with masks beside the weights."""
    folder, tensors = model(tmp_path, config := FAMILIES["gpt2"])
    values, source = load(folder), find_source(str(folder))
    print_of = fingerprint(source)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{layer}.attn.bias": np.tril(np.ones((1, 1, 64, 64), np.float32)) for layer in range(3)}
    save_file({**bare, **masks, "h.0.attn.masked_bias": np.float32([-1e4])}, folder / WEIGHTS)
    same(load(folder), values)
    assert fingerprint(find_source(str(folder))) == print_of and config.family.wiring.transposed
    for layer in range(3):
        del bare[f"h.{layer}.ln_1.bias"]
    save_file({**bare, "h.0.attn.extra": np.float32([1])}, folder / WEIGHTS)
    with pytest.raises(DataError) as caught:
        load(folder)
    for text in ("missing: transformer.h.0.ln_1.bias (and 2 more like it)", "architecture: transformer.h.0.attn.extra"):
        assert text in str(caught.value)


def test_everything_that_does_not_fit_is_said_at_once(tmp_path):
    folder, tensors = model(tmp_path)
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    del tensors["model.layers.1.mlp.gate_proj.weight"], tensors["lm_head.weight"]
    tensors["model.norm.weight"] = np.zeros((4, 4), np.float32)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.float64)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(DataError) as caught:
        checked_tensors(folder, parameter_rows(BASE))
    for text in (
        "missing: lm_head.weight",
        "missing: model.layers.1.mlp.gate_proj.weight",
        "not part of this architecture: model.layers.0.self_attn.q_proj.bias (and 2 more like it)",
        "model.norm.weight has shape [4, 4], config.json asks for [16]",
        "model.embed_tokens.weight is stored as F64",
    ):
        assert text in str(caught.value)


def test_parts_of_different_types_are_read_as_fp32(tmp_path):
    folder, tensors = model(tmp_path, FAMILIES["llama3 tied"])
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, folder / WEIGHTS)
    values = load(folder)
    assert values["layers.0.attention.qkv.weight"].dtype == np.float32
    assert values["layers.1.attention.qkv.weight"].dtype == DTYPES["bf16"]


@pytest.mark.parametrize(
    "suffix", ["qweight", "weight_scale_inv", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"]
)
def test_quantized_sources(tmp_path, suffix):
    folder, tensors = model(tmp_path)
    tensors[f"model.layers.0.mlp.up_proj.{suffix}"] = np.zeros(3, np.uint8)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(DataError, match=r"is quantized.*unquantized original"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytorch_model.bin", "pickled weights.*save_pretrained"),
        ("model.Q4_K_M.gguf", "GGUF"),
        ("adapter_model.safetensors", "--adapter"),
        ("consolidated.safetensors", "-hf variant"),
        ("model-00001-of-00002.safetensors", "index"),
        ("README.md", "--from-scratch"),
        (WEIGHTS, "git lfs pull"),
    ],
)
def test_folders_with_other_weights(tmp_path, name, text):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DataError, match=text):
        load(tmp_path, BASE)


@pytest.mark.parametrize(
    "name",
    ["../m/x.safetensors", "/etc/passwd", "", 3, "x.bin", "..", "\ud800.safetensors", "\n.safetensors", LONG_NAME],
    ids=ascii,
)
def test_an_index_names_files_of_its_own_folder(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(DataError, match="weight_map"):
        load(tmp_path, BASE)


def test_absent_shards_and_double_tensors(tmp_path):
    write(tmp_path / "m", BASE, shard_bytes=10_000)
    files = tensor_files.weight_files(tmp_path / "m")
    shutil.copy(files[0], files[1])
    with pytest.raises(DataError, match=f"is in {files[0].name} too"):
        load(tmp_path / "m")
    files[0].unlink()
    with pytest.raises(DataError, match=f"lacks 1 of {len(files)} weight files: {files[0].name}"):
        load(tmp_path / "m")


def tokenizer(folder):
    """Tokenizer files with bytes that any rewriting would change."""
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model"):
        (folder / name).write_bytes(b'{"b": 1,\r\n "a":\xc3\xa9 }  ' + name.encode())
    (folder / "additional_chat_templates" / "tool.jinja").write_bytes(b"{{ x }}\r\n")
    (folder / "unrelated.py").write_text("print()")
    return folder


def test_tokenizer_files_are_copied_byte_for_byte(tmp_path):
    source = tokenizer(tmp_path / "source")
    write(tmp_path / "m", BASE, tokenizer_folder=source)
    for name in listing(source):
        if name != "unrelated.py" and (source / name).is_file():
            assert (tmp_path / "m" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "m" / "unrelated.py").exists()


def test_generation_config(tmp_path):
    config = replace(BASE, bos_token_id=1, eos_token_ids=(2, 5))
    write(tmp_path / "a", config)
    assert json.loads((tmp_path / "a/generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
    }
    source = tmp_path / "source"
    source.mkdir()
    (source / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.7}')
    write(tmp_path / "b", config, tokenizer_folder=source)
    written = json.loads((tmp_path / "b/generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": [7, 2, 5], "temperature": 0.7}  # the ends of both
    (source / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match="generation_config"):
        write(tmp_path / "c", config, tokenizer_folder=source)


def test_a_model_is_replaced_only_with_overwrite(tmp_path):
    (tmp_path / "m" / "log").mkdir(parents=True)
    (tmp_path / "m" / "log" / "notes.txt").write_text("keep")  # which is no model's
    old = write(tmp_path / "m", BASE, tokenizer_folder=tokenizer(tmp_path / "source"), shard_bytes=10_000)
    new = random_values(BASE, seed=1)
    with pytest.raises(StorageError, match=r"already holds a model.*--overwrite"):
        write(tmp_path / "m", BASE, new)
    same(load(tmp_path / "m"), old)
    write(tmp_path / "m", BASE, new, overwrite=True)
    same(load(tmp_path / "m"), new)
    expected = ["config.json", "generation_config.json", "log", "log/notes.txt", WEIGHTS]
    assert listing(tmp_path / "m") == expected
    assert sorted(os.listdir(tmp_path)) == ["m", "source"]


def test_a_replacement_that_was_killed_is_finished(tmp_path):
    values = write(tmp_path / "m", BASE)
    (tmp_path / "m" / "notes.txt").write_text("keep")
    os.rename(tmp_path / "m", tmp_path / ".m.replaced")  # killed between the two renames
    with pytest.raises(StorageError, match="already holds a model"):
        write(tmp_path / "m", BASE)
    same(load(tmp_path / "m"), values)
    assert (tmp_path / "m" / "notes.txt").exists() and os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("fail_at", ["write", "sync", "rename", ZeroDivisionError, KeyboardInterrupt])
def test_a_failed_export_leaves_what_was_there(tmp_path, monkeypatch, overwrite, fail_at):
    values, new, real_rename = random_values(BASE), random_values(BASE, seed=1), os.rename
    if overwrite:
        write(tmp_path / "m", BASE, values)
    before = listing(tmp_path)

    def no_space(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    def read(row):
        if isinstance(fail_at, type):
            raise fail_at
        return new[row.name]

    failing = {
        "write": (hf, "write_json", no_space),
        "sync": (os, "fsync", no_space),
        "rename": (os, "rename", lambda a, b: no_space() if ".tmp" in str(a) else real_rename(a, b)),
    }
    if fail_at in failing:
        monkeypatch.setattr(*failing[fail_at])
    with pytest.raises(StorageError if fail_at in failing else fail_at) as caught:
        Export(tmp_path / "m", BASE, parameter_rows(BASE), "fp32", overwrite=overwrite).write(read)
    if fail_at in failing:
        assert "No space left" in str(caught.value) and "bytes" in str(caught.value)
    monkeypatch.undo()
    assert listing(tmp_path) == before
    if overwrite:
        same(load(tmp_path / "m"), values)


def check(folder, overwrite=False, dtype="fp32"):
    return Export(folder, BASE, parameter_rows(BASE), dtype, overwrite=overwrite).check()


def test_what_would_fail_is_found_before_training(tmp_path, monkeypatch):
    needed = check(tmp_path / "new" / "m")
    assert needed >= export_bytes(parameter_rows(BASE), "fp32") and listing(tmp_path) == []
    (tmp_path / "file").write_text("")
    for folder, text in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "m", "not a folder"),
        ("/proc", "mount"),
    ):
        with pytest.raises(StorageError, match=text):
            check(folder)
    with pytest.raises(StorageError, match="cannot be written"):
        check(tmp_path / ("x" * 300))
    with pytest.raises(UsageError, match=r"e4m3.*fp32"):
        check(tmp_path / "m", dtype="e4m3")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="current folder"):
        check(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 7))
    with pytest.raises(StorageError, match=r"7 bytes are missing"):
        check(tmp_path / "m")


@pytest.mark.judge
@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "large vocabulary"])
def test_transformers_reads_ours_and_we_read_theirs(tmp_path, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = FAMILIES[name]
    ours = write(tmp_path / "ours", config, shard_bytes=100_000)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype="auto", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[config.dtype]
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert from_folder(tmp_path / "theirs") == config
    same(load(tmp_path / "theirs"), ours)
    fresh = transformers.AutoModelForCausalLM.from_config(theirs.config)
    fresh.save_pretrained(tmp_path / "fresh")
    for model_of, values in ((theirs, ours), (fresh, load(tmp_path / "fresh"))):
        state = {key: tensor.float().numpy() for key, tensor in model_of.state_dict().items()}
        for row in parameter_rows(config):
            for part in row.parts:
                read = part.take(values[row.name]).astype(np.float32)
                np.testing.assert_array_equal(state[part.name], read)
