"""Language models inside multimodal folders against transformers and PEFT: gradients, folders, adapters, runs."""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("peft", reason="the judge is PEFT")
pytest.importorskip("torch", reason="the judges are torch and transformers")
pytest.importorskip("transformers", reason="the judges are torch and transformers")

import peft
import torch
import transformers
from golden import families, transformers_judge
from golden.engines import FP64, engine_of, gradients, relative_errors
from multimodal_models import MULTIMODAL
from safetensors.numpy import load_file
from test_judges import LENGTH, drawn_batch
from test_judges_families import METHODS
from tiny_engines import next_logits

import llmq
from llmq.adapters.merge import merge
from llmq.data.batches.batch import Batch
from llmq.errors import DataError
from llmq.files.carried import carried_from
from llmq.files.huggingface import Export, checked_tensors, read_rows
from llmq.files.source import find_source
from llmq.model.multimodal import INSIDE
from llmq.model.parameters import parameter_rows

pytestmark = pytest.mark.judge
EVERY = pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in MULTIMODAL.items()])
AS_MODULES = {"language_model.model.": INSIDE, "language_model.lm_head.": "lm_head.", "model.": INSIDE}
TOKENS = np.arange(600, dtype=np.int32) ** 2 % 90 + 3
RUN = {"device": "cpu", "model_dtype": "fp32", "batch_size": 2, "seq_len": 16, "steps": 4, "learning_rate": 1e-2}


def empty(config, seed=0):
    """A model of a config.json dict, in f32."""
    fields = {key: deepcopy(value) for key, value in config.items() if key not in ("architectures", "dtype")}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parsed = transformers.AutoConfig.for_model(**fields)
        return transformers.AutoModelForImageTextToText.from_config(parsed, attn_implementation="eager").eval()


def loaded(folder):
    """The model of a folder, in f32."""
    about = {"dtype": torch.float32, "attn_implementation": "eager"}
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True, **about)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def saved(config, folder, dtype=torch.float32):
    """Saves a model as transformers does, with the config.json that is given."""
    empty(config).to(dtype).save_pretrained(folder)
    config = {**config, "dtype": str(dtype).removeprefix("torch.")}
    Path(folder, "config.json").write_text(json.dumps(config))
    Path(folder, "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    return config


def is_text(name):
    return name.startswith(INSIDE) or name == "lm_head.weight"


@EVERY
def test_gradients_and_logits_in_f64(config):
    tokens, targets = drawn_batch({"vocab_size": 90}, 1)
    with transformers_judge.doubled():
        model = empty(config).double()
        named = {name: value for name, value in model.named_parameters() if is_text(name)}
        drawn = families.weights(
            MULTIMODAL["mistral3"]["text_config"], 1, {n: tuple(v.shape) for n, v in named.items()}
        )
        with torch.no_grad():
            for name, value in named.items():
                value.copy_(torch.from_numpy(np.array(drawn[name])))
        loss = transformers_judge.backward(model, tokens, targets)
        right = {name: value.grad.numpy().copy() for name, value in named.items()}
        logits = transformers_judge.logits_of(model, tokens)
    run = engine_of(config, drawn, FP64, *tokens.shape)
    errors = relative_errors(gradients(run, tokens, targets), right)
    assert max(errors.values()) < 1e-9, errors
    assert run.evaluate(Batch(tokens, targets)).mean_loss == pytest.approx(loss, rel=1e-9)
    found, wanted = next_logits(run, tokens[1, :LENGTH]), logits[1, LENGTH - 1]
    assert np.linalg.norm(found - wanted) < 1e-9 * np.linalg.norm(wanted)


@pytest.mark.parametrize("names", ["files", "modules"])
@EVERY
def test_a_folder_goes_both_ways(tmp_path, config, names):
    """Bit for bit, in either spelling of names and in several files, with its other files and keys."""
    config = saved(config, tmp_path / "theirs", torch.bfloat16)
    tensors = load_file(file := tmp_path / "theirs" / "model.safetensors")
    if names == "modules":
        tensors = dict(empty(config).to(torch.bfloat16).state_dict())
        tied = find_source(str(tmp_path / "theirs")).config.tie_embeddings
        tensors = {n: v.contiguous() for n, v in tensors.items() if not (tied and n == "lm_head.weight")}
        tensors["model.positions"] = torch.arange(5)
        from safetensors.torch import save_file as save_torch

        save_torch(tensors, file)
        tensors = load_file(file)
    source = find_source(str(tmp_path / "theirs"))
    rows = parameter_rows(source.config)
    values = {row.name: value for row, value in read_rows(checked_tensors(source.folder, rows), rows)}
    about = {"carried": carried_from(source.folder, rows), "shard_bytes": 20_000, "tokenizer_folder": source.folder}
    export = Export(tmp_path / "ours", source.config, rows, source.config.dtype, **about)
    export.write(lambda row: values[row.name])
    ours = {
        name: value for part in (tmp_path / "ours").glob("*.safetensors") for name, value in load_file(part).items()
    }
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert ours.keys() == tensors.keys()
    assert all(ours[name].tobytes() == tensors[name].tobytes() for name in tensors)
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == config
    assert (tmp_path / "ours" / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'
    if names == "files":
        one, other = loaded(tmp_path / "theirs").state_dict(), loaded(tmp_path / "ours").state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one)


@EVERY
def test_a_run_changes_the_language_model_alone(tmp_path, monkeypatch, config):
    """Its logits in transformers are those here, and greedy tokens are the same."""
    monkeypatch.chdir(tmp_path)
    saved(config, "base")
    llmq.Trainer(model="base", out_dir="out", **RUN).train(train=TOKENS)
    before, after = loaded("base"), loaded("out")
    one, other = before.state_dict(), after.state_dict()
    assert {name for name in one if not torch.equal(one[name], other[name])} == set(filter(is_text, one))
    assert any(not is_text(name) for name in one)
    ours = llmq.load("out", device="cpu", seq_len=LENGTH).logits(TOKENS[None, :LENGTH])
    theirs = transformers_judge.logits_of(after, TOKENS[None, :LENGTH])
    assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)
    prompt = [5, 9, 31, 7]
    asked = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    with torch.no_grad():
        wanted = after.generate(torch.tensor([prompt]), **asked)[0, len(prompt) :].tolist()
    (found,) = llmq.generate("out", [prompt], max_tokens=60, temperature=0.0, device="cpu", ignore_end=True)
    assert list(found.tokens) == wanted


LORA = {targets: {"lora_rank": 2, "lora_targets": targets} for targets in ("all", "q_proj,lm_head")}


@pytest.mark.parametrize(
    ("config", "method"),
    [
        pytest.param(config, method, id=f"{name}-{what}")
        for name, config in MULTIMODAL.items()
        for what, method in (LORA | METHODS if name == "gemma3" else LORA).items()
    ],
)
def test_an_adapter_is_that_of_peft(tmp_path, monkeypatch, config, method):
    """PEFT puts it on the language model alone, and merged into the model it is the same."""
    monkeypatch.chdir(tmp_path)
    saved(config, "base")
    merges = not any(name.endswith("_tuning") for name in method)
    llmq.Trainer(model="base", merge=merges, out_dir="out", **RUN, **method).train(train=TOKENS)
    row = TOKENS[None, :LENGTH]
    ours = llmq.load("base", adapter="out", device="cpu", seq_len=LENGTH).logits(row)
    base = loaded("base")
    plain = transformers_judge.logits_of(base, row)
    adapted = peft.PeftModel.from_pretrained(base, "out")
    names = [name.removeprefix("base_model.model.") for name, _ in adapted.named_parameters() if ".lora_A." in name]
    assert all(name.startswith((INSIDE, "lm_head.")) for name in names)
    theirs = transformers_judge.logits_of(adapted, row)[:, -LENGTH:]
    assert np.linalg.norm(theirs - plain) > 1e-3 * np.linalg.norm(plain), "the adapter does something"
    assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)
    if merges:
        merge(find_source("base"), {Path("out"): 1.0}, Path("merged"), dtype="fp32", overwrite=False)
    one = loaded("base").state_dict()
    for folder in ("merged", "out/merged") if merges else ():
        model = loaded(folder)
        assert np.linalg.norm(transformers_judge.logits_of(model, row) - theirs) < 1e-5 * np.linalg.norm(theirs)
        other = model.state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one if not is_text(name))


def test_a_folder_that_goes_away_while_a_run_trains(tmp_path, monkeypatch):
    """The run ends with an error, and exports once the folder is back and it continues."""
    monkeypatch.chdir(tmp_path)
    saved(MULTIMODAL["gemma3"], "base")

    class Takes(llmq.Callback):
        def on_begin(self, run):
            Path("base").rename("away")

    about = {"model": "base", "out_dir": "out", "checkpoint_dir": "checkpoints", **RUN}
    with pytest.raises(DataError, match="Put the folder back as it was when the run began, and use --continue"):
        llmq.Trainer(**about).train(train=TOKENS, callbacks=[Takes()])
    assert not Path("out").exists()
    Path("away").rename("base")
    llmq.Trainer(**about, **{"continue": "newest"}).train(train=TOKENS)
    assert loaded("out")
