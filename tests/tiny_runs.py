"""A small training run for tests: its model folder, its options, and what its checkpoints hold."""

import hashlib
import io
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from small_tokenizers import EOS, byte_level, save
from tiny_engines import tiny
from tokenizers import decoders

from llmq.data.batches.named_data import StreamedRows
from llmq.data.batches.rows import RowForm
from llmq.data.tokens.pipeline import TokenSpan
from llmq.data.tokens.token_file import TokenWriter
from llmq.files.checkpoint import load
from llmq.files.huggingface import Export
from llmq.files.manifest import canonical
from llmq.files.source import open_parameters, open_source
from llmq.model.config import to_hf
from llmq.model.parameters import parameter_rows
from llmq.options.data import ModelOptions
from llmq.options.field import flag

T = 16
ROOT = Path(__file__).parents[1]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
CHAT_TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
ANYWHERE = {  # mpirun as any user, with more processes than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def with_commands(folder):
    """The environment of a shell in which our commands are those of this checkout."""
    (folder / "bin").mkdir()
    for name in re.findall(r'^([\w-]+) = "llmq.cli.start:', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE):
        module = name.removeprefix("llmq-").replace("-", "_")
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llmq.cli.{module} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    own = {"PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **own, "LLMQ_CACHE_DIR": str(folder / "cache")}


def chat_model(folder):
    """A tokenizer's folder, with a template that ends each turn with EOS."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    return save(tokenizer, folder, {"eos_token": EOS, "chat_template": CHAT_TEMPLATE})


def text_model(folder):
    """A model's folder without weights, with a tokenizer."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    save(tokenizer, folder, {"eos_token": EOS})
    (folder / "config.json").write_text(json.dumps(to_hf(tiny(num_layers=1, vocab_size=420), "fp32")))


ON_TOKENS = {"train_file": "train.bin", "model_dtype": "fp32", "device": "cpu", "batch_size": 2, "seq_len": T}


def text_options(path, monkeypatch):
    """Options of a small run on text, without data, in a folder and with a cache of its own."""
    monkeypatch.chdir(path)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(path / "cache"))
    text_model(path / "source")
    shape = {"seq_len": 32, "batch_size": 2, "grad_accumulation": 1, "steps": 2, "eval_every_n_steps": 2}
    about = {"model": "source", "from_scratch": True, "model_dtype": "fp32", "device": "cpu", "learning_rate": 1e-2}
    return {**about, **shape, "name": "run", "overwrite": True}


def folder(path, **changes):
    """A model folder without weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_hf(tiny(num_layers=1, **changes), "fp32")))
    return path


def number_stream(seq_len, vocab_size, opened=None):
    """An endless stream of 4 files of 10 rows; `opened` gets the positions that it is read from."""

    def rows(begun, position):
        shard, row, overall = position or (0, 0, 0)
        assert overall == 10 * shard + row
        if opened is not None:
            opened.append((shard, row, overall))
        for number in range(overall, 40):
            ids = np.random.default_rng(number).integers(0, 97, 5 + 13 * number % 29)
            yield (number // 10, number % 10 + 1, number + 1), TokenSpan(ids, None, np.array([len(ids)]))

    return StreamedRows(rows, RowForm(seq_len, vocab_size), "stream")


def tiny_options(path):
    """Options of a small run on windows, whose token files are written into the current folder."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 40 * T + 1), ("eval", 5 * T + 1)):
        with TokenWriter(f"{name}.bin", vocab_size=97) as file:
            file.append((rng.zipf(1.5, count) % 97).astype(np.int32))
    return {
        "model": str(folder(path / "source")),
        "from_scratch": True,
        "train_file": "train.bin",
        "eval_file": "eval.bin",
        "model_dtype": "fp32",
        "batch_size": 2,
        "seq_len": T,
        "grad_accumulation": 2,
        "learning_rate": 1e-2,
        "warmup": 2,
        "eval_every_n_steps": 4,
        "steps": 12,
        "name": "run",
        "console": io.StringIO(),
    }


def write_weights(source, to, times=1, tokenizer=None, **more):
    """Writes a model folder with `times` the initial weights of one without, and with the files of a tokenizer's."""
    found = open_source(ModelOptions(model=str(source), from_scratch=True, **more))
    rows = parameter_rows(found.config)
    values = {row.name: times * value for row, value in open_parameters(found, 7)(rows)}
    Export(to, found.config, rows, "fp32", tokenizer).write(lambda row: values[row.name])


def write_documents(name, count, rng):
    """A token file of documents of 2 to 30 tokens, of which some are not trained."""
    with TokenWriter(f"{name}.bin", vocab_size=97, has_masks=True) as file:
        for length in rng.integers(2, 31, count):
            ids = np.append(rng.zipf(1.5, length - 1) % 97, 2).astype(np.int32)
            file.append(ids, rng.random(length) < 0.8, stops=[length])


def on_weights(path, times=1):
    """Options of a small run on a model with weights, `times` the initial ones, in `base` below the current folder."""
    options = tiny_options(path)
    write_weights(options["model"], path / "base", times)
    return {**options, "model": "base", "from_scratch": False}


def launched_flags(path, **changes):
    """Flags of a run on the CPU by several processes, which has no evaluations: by default, five steps of 8 rows."""
    options = tiny_options(path) | {"steps": 5, "device": "cpu", "global_batch_size": 8} | changes
    for absent in ("console", "grad_accumulation", "eval_file", "eval_every_n_steps"):
        del options[absent]
    return [f"{flag(key)}={value}" if value is not True else flag(key) for key, value in options.items()]


def weights_of(path):
    """A hash of all that a checkpoint has in tensors."""
    _, read = load(Path(path))
    return hash_of((name, read(name)) for name in read.tensors)


def hash_of(tensors):
    """SHA-256 over names, dtypes, shapes and bytes, the same for any order."""
    digests = [(name, str(a.dtype), a.shape, hashlib.sha256(a.tobytes()).hexdigest()) for name, a in tensors]
    return hashlib.sha256(repr(sorted(digests)).encode()).hexdigest()


def change_manifest(path, change):
    """Changes what a checkpoint's manifest says, with the checksum that it then has."""
    file = Path(path) / "manifest.json"
    record = json.loads(file.read_text())
    del record["sha256"]
    change(record)
    record["sha256"] = hashlib.sha256(canonical(record)).hexdigest()
    file.write_text(json.dumps(record))


def changed_adapter(adapter, to, change):
    """Writes an adapter's folder again at `to`, its tensors and config as `change(tensors, config)` leaves them."""
    tensors, config = load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_config.json"
    about = json.loads(config.read_text())
    change(tensors, about)
    to.mkdir()
    save_file(tensors, to / "adapter_model.safetensors")
    (to / config.name).write_text(json.dumps(about))
