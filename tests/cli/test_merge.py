"""`llmq-merge` and `llmq-generate --adapter`: what adapters change, in the weights and beside them."""

import json
import re

import numpy as np
import pytest
from golden import families
from safetensors.numpy import load_file, save_file
from tiny_runs import changed_adapter

from llmq import errors
from llmq.adapters.targets import chosen
from llmq.cli import shell
from llmq.cli.generate import command as generate
from llmq.cli.merge import command
from llmq.model.config import from_folder
from llmq.model.held import HeldBase
from llmq.model.parameters import parameter_rows

RANK, ALPHA = 3, 6
PREFIX = "base_model.model."
Q, HEAD = "model.layers.1.self_attn.q_proj", "lm_head"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tied and an untied model in f32, and two adapters of each."""
    folder = tmp_path_factory.mktemp("merge")
    for family in ("qwen2", "qwen2.5_tied"):
        config = families.FAMILIES[family]
        (folder / family).mkdir()
        (folder / family / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
        save_file(families.weights(config), folder / family / "model.safetensors")
        for number, text in enumerate(("q_proj,mlp", "q_proj,lm_head")):
            adapter(folder / f"{family}-{number}", from_folder(folder / family), text, number)
    return folder


def adapter(path, config, text, seed):
    """A folder of PEFT's format with random matrices, and a trained bias."""
    rng, tensors = np.random.default_rng(seed), {}
    for module in chosen(text, config):
        shapes = {"A": (RANK, module.inputs), "B": (module.outputs, RANK)}
        for key, shape in shapes.items():
            value = rng.standard_normal(shape).astype(np.float32) * np.float32(0.3)
            tensors[f"{PREFIX}{module.name}.lora_{key}.weight"] = value
    tensors[f"{PREFIX}{Q}.base_layer.bias"] = rng.standard_normal(32).astype(np.float32)
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "all", "lora_dropout": 0.5}
    about["base_model_name_or_path"] = "org/base"
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(about))


def run(folder, family, out, *arguments):
    """The exit code, and the tensors of the model that was written."""
    code = shell.run(command, [f"--model={folder / family}", f"--out-dir={out}", *arguments])
    return code, load_file(out / "model.safetensors") if code == 0 else {}


@pytest.mark.parametrize("base", ["nf4", "int8", "mxfp4", "e4m3"])
def test_adapters_are_added_to_a_quantized_base(folder, base, tmp_path, capsys):
    """To its values, which differ from the model's in the weights of layers alone."""
    given = f"--adapter={folder / 'qwen2-0'}"
    _, plain = run(folder, "qwen2", tmp_path / "plain", given)
    code, found = run(folder, "qwen2", tmp_path / "out", given, f"--base-dtype={base}")
    assert code == 0 and f"on the base in {base}, made of bf16: " in capsys.readouterr().out
    changed = {name for name, value in plain.items() if not np.array_equal(value, found[name])}
    assert changed == {name for name in plain if name.endswith("proj.weight")}
    config = from_folder(folder / "qwen2")
    row = next(row for row in parameter_rows(config) if row.name == "layers.1.attention.qkv.weight")
    source = load_file(folder / "qwen2" / "model.safetensors")
    whole = np.concatenate([source[part.name] for part in row.parts])
    held, part = HeldBase(base, "bf16").value(row, whole).astype(np.float32), row.parts[0]
    change = plain[part.name] - source[part.name]
    np.testing.assert_allclose(found[part.name], held[: part.stop] + change, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "qwen2.5_tied"])
def test_the_changes_of_adapters_are_added_up(folder, family, tmp_path, capsys):
    names = [folder / f"{family}-{number}" for number in (0, 1)]
    given = [f"--adapter={name}" for name in names]
    code, found = run(folder, family, tmp_path / "out", *given, "--weight=0.5", "--weight=2")
    text, printed = capsys.readouterr()
    assert code == 0 and "linear maps changed" in text
    base = load_file(folder / family / "model.safetensors")
    base.setdefault("lm_head.weight", base["model.embed_tokens.weight"])
    stored = [load_file(name / "adapter_model.safetensors") for name in names]
    changes = [{name.removeprefix(PREFIX): value for name, value in each.items()} for each in stored]
    for name, value in base.items():
        wanted = value.astype(np.float64)
        for weight, change in zip((0.5, 2), changes, strict=True):
            module = name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in change:
                wanted = wanted + weight * 2 * change[f"{module}.lora_B.weight"] @ change[f"{module}.lora_A.weight"]
            if name == f"{Q}.bias":
                wanted = wanted + weight * (change[f"{Q}.base_layer.bias"] - value)
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-5, err_msg=name)
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert ("no longer tied" in printed) == (family == "qwen2.5_tied")


def test_a_tied_head_without_an_adapter_stays_tied(folder, tmp_path):
    family = "qwen2.5_tied"
    code, found = run(folder, family, tmp_path / "out", f"--adapter={folder / family}-0")
    assert code == 0 and "lm_head.weight" not in found
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


def test_what_is_written_with_an_adapter_is_what_the_merged_model_writes(folder, tmp_path, capsys):
    family = "qwen2.5_tied"
    assert run(folder, family, tmp_path / "out", f"--adapter={folder / family}-1")[0] == 0
    (tmp_path / "prompts").write_text('{"tokens": [5, 6, 7, 8]}\n{"tokens": [9, 3]}\n')
    asked = [f"--prompts={tmp_path / 'prompts'}", "--device=cpu", "--max-tokens=12", "--ignore-end"]
    said = []
    base, adapter = folder / family, [f"--adapter={folder / family}-1"]
    for model, more in ((tmp_path / "out", []), (base, adapter), (base, [])):
        capsys.readouterr()
        assert shell.run(generate, [f"--model={model}", *more, *asked]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize("command_of", ["llmq-merge", "llmq-generate"])
def test_an_adapter_that_does_not_fit_is_one_message(folder, tmp_path, capsys, command_of):
    changed_adapter(folder / "qwen2-0", tmp_path / "other", lambda tensors, about: about.update(r=5))
    model, given = folder / "qwen2", f"--adapter={tmp_path / 'other'}"
    if command_of == "llmq-merge":
        code, _ = run(folder, "qwen2", tmp_path / "out", given)
    else:
        code = shell.run(generate, [f"--model={model}", given, "--device=cpu", "--prompt=x"])
    said = capsys.readouterr().err
    assert code == errors.DataError.exit_code and not (tmp_path / "out").exists()
    assert said.count(str(tmp_path / "other")) == 1 and "Traceback" not in said and said.count("\n") == 1
    assert re.search(r"lora_A\.weight has shape \[3, \d+\], .* ask for \[5, \d+\] \(and \d+ more like it\)", said)
    assert said.endswith("Check that --model is its base, org/base\n")


def test_what_cannot_be_merged_is_refused(folder, tmp_path, capsys):
    family, out = "qwen2", tmp_path / "out"
    one, two = (f"--adapter={folder / family}-{n}" for n in (0, 1))
    assert run(folder, family, out, one, two, "--weight=1")[0] == errors.UsageError.exit_code
    assert "1 --weight for 2 --adapter" in capsys.readouterr().err and not out.exists()
    assert run(folder, family, out, one)[0] == 0
    assert run(folder, family, out, one)[0] == errors.StorageError.exit_code
    assert run(folder, family, out, one, "--overwrite")[0] == 0
