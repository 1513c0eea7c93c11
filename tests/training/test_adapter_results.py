"""An adapter's folder is the run's model: merged by the run or by llmq-merge, written with, and trained on."""

import json
import shutil
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from adapter_cases import BASES, METHODS, VIRTUAL, merged, trained
from safetensors.numpy import load_file, save_file

import llmq
from llmq.adapters import resolve as adapters
from llmq.adapters.merge import merge
from llmq.adapters.resolve import BASE, DTYPES, AdapterBase, read_base
from llmq.cli import shell
from llmq.cli.generate import command as llmq_generate
from llmq.cli.merge import command as llmq_merge
from llmq.errors import DataError
from llmq.files.source import find_source
from llmq.generation.text import Writer
from llmq.model.held import HELD_FORMS, HeldBase
from llmq.options.commands import GenerateOptions
from llmq.options.parse import descriptions


def still(based, **more):
    """The loss of a run that changes nothing."""
    return llmq.train(
        **{**based, "learning_rate": 0.0, "steps": 1, "name": "still", "overwrite": True, **more}
    ).eval_loss


@pytest.mark.quick("pissa-nf4", "ia3-None", "prefix-None")
@pytest.mark.sample("sweep")
@pytest.mark.parametrize("base", [base for base in BASES if base != "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_every_use_of_an_adapter_has_the_loss_of_its_run(based, method, base, monkeypatch):
    done = trained(based, method, base)
    found = {"continued": still(based, adapter=str(done.model_path))}
    said = based["console"].getvalue()
    assert (f"The base is held in {base}, made of fp32, as {done.model_path}" in said) == (base is not None)
    if method in VIRTUAL:
        with pytest.raises(DataError, match="virtual tokens, which are a part of no weight"):
            merged(done.model_path, Path("apart"))
    else:
        merged(done.model_path, Path("apart"))
        found |= {"merged": still(based, model=str(done.merged_path)), "llmq-merge": still(based, model="apart")}
    writer = Writer(GenerateOptions(model="base", adapter=str(done.model_path), device="cpu"), reads_text=False)
    assert len(writer.notes) == (base is not None)
    monkeypatch.setattr(adapters, "first_values", lambda *_: writer.weights.values())
    found["llmq-generate"] = still(based, adapter=str(done.model_path), base_dtype="fp32")
    assert found == pytest.approx(dict.fromkeys(found, done.eval_loss), abs=1e-5)


def said_by(based, model, adapter, capsys):
    """The exit codes and words of llmq-merge, llmq-generate, llmq.generate and a run with a model and an adapter."""
    capsys.readouterr()
    code = shell.run(llmq_merge, [f"--model={model}", f"--adapter={adapter}", "--out-dir=said", "--overwrite"])
    yield code, capsys.readouterr().err
    Path("prompts").write_text('{"tokens": [5, 6]}\n')
    more = ["--prompts=prompts", "--device=cpu", "--max-tokens=1"]
    code = shell.run(llmq_generate, [f"--model={model}", f"--adapter={adapter}", *more])
    yield code, capsys.readouterr().err
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            llmq.generate(model, [5, 6], adapter=adapter, device="cpu", max_tokens=1)
            yield 0, "".join(str(one.message) for one in caught)
        except DataError as error:
            yield error.exit_code, str(error)
    try:
        still(based, model=model, adapter=str(adapter))
        yield 0, based["console"].getvalue()
    except DataError as error:
        yield error.exit_code, str(error)


@pytest.mark.slow
def test_another_base_is_said_and_a_second_merge_refused(based, capsys):
    """By the weights, whatever the folder is called; without their fingerprint by the name of the model."""
    done = trained(based, "lora", None)
    assert not any("was trained on" in said for _, said in said_by(based, "base", done.model_path, capsys))
    Path("base").rename("moved")
    assert not any("was trained on" in said for _, said in said_by(based, "moved", done.model_path, capsys))
    values = load_file("moved/model.safetensors")
    shutil.copytree("moved", "base")
    save_file({**values, "model.norm.weight": values["model.norm.weight"] * 2}, "base/model.safetensors")
    other = f"{done.model_path} was trained on base with other weights than those of base"
    assert [(code, other in said) for code, said in said_by(based, "base", done.model_path, capsys)] == [(0, True)] * 4
    (done.model_path / BASE).unlink()
    other = f"{done.model_path} was trained on base, and is given moved"
    assert [(code, other in said) for code, said in said_by(based, "moved", done.model_path, capsys)] == [(0, True)] * 4
    merge(find_source("moved"), {done.model_path: 1.0}, Path("apart"), dtype=None, overwrite=False)
    again = trained({**based, "model": "apart", "name": "again", "overwrite": True}, "dora", None)
    for model in (done.merged_path, Path("apart"), again.merged_path):
        twice = f"{model} has the adapter of {done.model_path} in its weights already: give the model"
        found = [(code, twice in said) for code, said in said_by(based, str(model), done.model_path, capsys)]
        assert found == [(DataError.exit_code, True)] * 4


@pytest.mark.slow
def test_adapters_of_bases_that_were_held_in_other_ways_are_merged_onto_one_that_is_named(based, capsys):
    one, other = (trained({**based, "name": str(base)}, "lora", base).model_path for base in ("nf4", "int8"))
    taken = trained({**based, "name": "taken"}, "pissa", "nf4").model_path
    arguments = ["--model=base", f"--adapter={one}", f"--adapter={other}", "--out-dir=both"]
    assert shell.run(llmq_merge, arguments) == DataError.exit_code
    assert "bases in int8, made of fp32 and nf4, made of fp32: choose one with --base-dtype" in capsys.readouterr().err
    for more in ([f"--adapter={one}", f"--adapter={taken}"], [f"--adapter={taken}", f"--adapter={one}"]):
        assert shell.run(llmq_merge, ["--model=base", *more, "--out-dir=both"]) == DataError.exit_code
        assert "out of the weights before they are held in nf4, and other adapters do not" in capsys.readouterr().err
    assert shell.run(llmq_merge, [*arguments, "--base-dtype=nf4"]) == 0
    assert "on the base in nf4, made of fp32" in capsys.readouterr().out
    assert not np.array_equal(*(weight_of(one, "both", dtype) for dtype in ("nf4", "int8")))


def weight_of(adapter, out, dtype):
    """A weight of the base of an adapter in a dtype, as --base-only writes it."""
    folder = f"{out}-{dtype}"
    more = ["--base-only", f"--base-dtype={dtype}", "--overwrite"]
    assert shell.run(llmq_merge, ["--model=base", f"--adapter={adapter}", f"--out-dir={folder}", *more]) == 0
    return load_file(f"{folder}/model.safetensors")["model.layers.0.mlp.up_proj.weight"]


def test_a_base_is_held_as_options_say_in_place_of_how_it_was(based):
    done = trained(based, "lora", "nf4").model_path
    source = load_file("base/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(weight_of(done, "own", "fp32"), source)
    assert np.array_equal(weight_of(done, "own", "bf16"), source.astype(ml_dtypes.bfloat16).astype(np.float32))
    found = {}
    for dtype in ("fp32", "bf16"):
        how = {"base_only": True, "model_dtype": dtype, "base_dtype": "nf4"}
        folder = merged(done, Path(dtype), **how).folder
        found[dtype] = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert not np.array_equal(found["fp32"], found["bf16"])
    assert np.array_equal(found["fp32"], weight_of(done, "again", "nf4"))
    still(based, adapter=str(done), base_dtype="int8")
    words = f"{done} was trained on a base in nf4, made of fp32, and this run holds it in int8, made of fp32"
    assert words in based["console"].getvalue()


def test_scales_of_an_e4m3_base_are_those_of_the_run(based):
    """One for each matrix that an fp8 site reads, one for each tile of the others."""
    based = {**based, "model_dtype": "bf16", "matmul_dtype": "e4m3", "bf16_layers": "mlp.up,mlp.down"}
    done = trained(based, "lora", "e4m3")
    about = json.loads((done.model_path / BASE).read_text())
    assert about["one_scale"] == ["layers.0.attention.o.weight", "layers.0.attention.qkv.weight"]
    assert about["base_dtype"] == "e4m3" and about["model_dtype"] == "bf16"
    merged(done.model_path, Path("apart"))
    one, other = (load_file(folder / "model.safetensors") for folder in (done.merged_path, Path("apart")))
    assert all(np.array_equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_dtype": "int2"}, "base_dtype int2"),
        ({"model_dtype": None}, "model_dtype None"),
        ({"weights": 3}, "weights 3"),
        ({"double_quantization": False}, "with double quantization alone"),
    ],
)
def test_a_record_of_another_base_than_llmq_holds_is_refused(tmp_path, changes, says):
    base = AdapterBase("some", HeldBase("nf4", "bf16"))
    (tmp_path / BASE).write_text(json.dumps(base.to_json()))
    assert read_base(tmp_path) == base
    (tmp_path / BASE).write_text(json.dumps({**base.to_json(), **changes}))
    with pytest.raises(DataError, match=says):
        read_base(tmp_path)


def test_every_command_takes_the_same_dtypes_of_a_base():
    held = (*DTYPES, *HELD_FORMS)
    assert tuple(shell.BASE_DTYPE.choices) == held == tuple(descriptions()["base_dtype"].choices)
