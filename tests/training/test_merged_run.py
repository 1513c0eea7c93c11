"""`--merge`: the model with the run's adapter in it computes what base and adapter do, whatever the base is held in."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from in_process import run_ranks
from safetensors.numpy import load_file
from tiny_engines import engine_of, next_logits, plan_of, tiny

import llmq
from llmq.adapters.adalora import AdaLora, with_triplets
from llmq.adapters.ia3 import Gains, scaled
from llmq.adapters.importance import Budget
from llmq.adapters.lora import Lora
from llmq.adapters.merge import MergedExport, merge, untied
from llmq.adapters.targets import chosen, targets
from llmq.errors import StorageError, UsageError
from llmq.files.source import find_source, open_parameters
from llmq.model.parameters import parameter_rows
from llmq.options.parse import Options
from llmq.training import train
from llmq.training.ranks import Ranks

OFTEN = (("lora", None), ("lora", "nf4"), ("dora", "int8"), ("ia3", "e4m3"), ("adalora", None))


@pytest.fixture
def given(based):
    """Options of a run with adapters on a model with weights."""
    return {**based, "lora_rank": 4, "merge": True}


def still(given, **more):
    """Options of a run that changes nothing."""
    rest = {name: value for name, value in given.items() if not name.startswith("lora") and name != "merge"}
    return {**rest, "learning_rate": 0.0, "steps": 1, **more}


def adapters_of(config, method, base):
    modules = chosen("q_proj,o_proj,mlp" if method != "lora" else "all,lm_head", config)
    if method == "ia3":
        return Gains(scaled(modules), base=base)
    every = targets(modules, 3, 6.0, rslora=False)
    if method == "adalora":
        return AdaLora(3, 6.0, with_triplets(every), schedule=Budget(2, total=9), base=base)
    return Lora(3, 6.0, every, dora=method == "dora", base=base)


@pytest.mark.quick("lora-nf4", "dora-int8")
@pytest.mark.parametrize(
    ("method", "base"),
    [
        pytest.param(method, base, marks=() if (method, base) in OFTEN else pytest.mark.slow)
        for method in ("lora", "dora", "ia3", "adalora")
        for base in (None, "nf4", "int8", "e4m3")
    ],
)
def test_logits_of_the_merged_model_are_those_of_base_and_adapter(method, base, tmp_path):
    config = tiny(hidden_size=64, head_dim=16)
    adapters = adapters_of(config, method, base)
    run = engine_of(plan_of(config=config, adapters=adapters))
    merged = untied(config, [adapters])
    assert merged.tie_embeddings == (method != "lora")
    export = MergedExport(
        tmp_path / "merged", merged, parameter_rows(merged), "fp32", adapters=adapters, held=run.plan.rows
    )
    export.write(lambda row: run.parameter(row.name))
    found = engine_of(plan_of(config=merged))
    found.load(open_parameters(find_source(str(tmp_path / "merged")), 0)(found.plan.rows))
    without = engine_of(plan_of(config=config, adapters=replace(adapters, base=None)))
    without.load((row, value if row.file == "model" else 0 * value) for row, value in _values(run))
    tokens = np.arange(3, 3 + 11)
    wanted, right = next_logits(run, tokens), next_logits(found, tokens)
    assert np.linalg.norm(wanted - right) < 2e-6 * np.linalg.norm(wanted)
    assert np.linalg.norm(wanted - next_logits(without, tokens)) > 0.1 * np.linalg.norm(wanted)


def _values(engine):
    return [(row, engine.parameter(row.name)) for row in engine.plan.rows]


@pytest.mark.quick("fp8")
@pytest.mark.parametrize(
    ("more", "onto"),
    [
        ({"lora_targets": "all,lm_head", "lora_bias": "all"}, "the base"),
        ({"train_also": "lm_head,model.norm", "dora": True}, "the base"),
        ({"base_dtype": "e4m3", "matmul_dtype": "e4m3", "model_dtype": "bf16"}, "the base in e4m3"),
    ],
    ids=["head", "full", "fp8"],
)
def test_a_run_leaves_the_merged_model_beside_the_adapter(given, more, onto):
    done = llmq.train(**{**given, **more})
    assert done.merged_path == done.model_path / "merged"
    assert f"Merged into {onto}: {done.merged_path}" in given["console"].getvalue()
    assert (done.model_path / "adapter_config.json").exists() and (done.merged_path / "config.json").exists()
    again = llmq.train(**still(given, name="again", model=str(done.merged_path)))
    close = 2e-2 if "matmul_dtype" in more else 1e-6
    assert again.eval_loss == pytest.approx(done.eval_loss, rel=close)
    if onto == "the base" and "matmul_dtype" not in more:
        merge(find_source("base"), {done.model_path: 1.0}, Path("apart"), dtype=None, overwrite=False)
        one, other = (load_file(folder / "model.safetensors") for folder in (done.merged_path, Path("apart")))
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_the_merged_model_has_the_dtype_of_the_export_and_is_made_when_a_run_resumes(given):
    llmq.train(**{**given, "steps": 3, "merge": False, "out_dir": "cut"})
    done = llmq.train(**{**given, "continue": 3, "export_dtype": "bf16", "out_dir": "cut", "overwrite": False})
    assert json.loads((done.merged_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {str(value.dtype) for value in load_file(done.merged_path / "model.safetensors").values()} == {"bfloat16"}
    llmq.train(**{**given, "continue": True, "out_dir": "cut"})  # in place of its own
    assert json.loads((done.merged_path / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    "later", [{}, {"steps": 2, "continue": True}, {"lora_rank": None}], ids=["adapter", "longer", "whole model"]
)
def test_what_an_earlier_run_merged_goes_once_its_adapter_is_replaced(given, later):
    done = llmq.train(**{**given, "steps": 1})
    Path(done.merged_path, "notes.txt").write_text("")
    llmq.train(**{**given, "steps": 1, "overwrite": True, "merge": False, **later})
    assert [path.name for path in done.merged_path.iterdir()] == ["notes.txt"]
    assert f"Removed what an earlier run merged: {done.merged_path}" in given["console"].getvalue()


def test_what_cannot_be_merged_is_refused_before_training(given, monkeypatch):
    for more, says in (
        ({}, "--merge is for adapters: add --lora-rank"),
        ({"train_only": "*.bias"}, "--merge is for adapters: add --lora-rank"),
        ({"prompt_tuning": 2}, "virtual tokens, which are a part of no weight: leave it out"),
    ):
        with pytest.raises(UsageError, match=says):
            llmq.train(**{**given, "lora_rank": None, **more})
    (Path("runs/run/model/merged")).mkdir(parents=True)
    Path("runs/run/model/merged/config.json").write_text("{}")
    with pytest.raises(StorageError, match=r"runs/run/model/merged already holds a model \(config\.json\)"):
        llmq.train(**given)
    assert not Path("runs/run/log.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("level", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_the_first_of_many_ranks_writes_the_merged_model(given, level):
    options = {name: value for name, value in given.items() if name not in ("console", "grad_accumulation")}
    options |= {"batch_size": 1, "global_batch_size": 4, "deterministic": True, "lora_targets": "all,lm_head"}

    def work(world, **more):
        return train.run(Options.parse({**options, **more}), console=io.StringIO(), ranks=Ranks(world))

    two = run_ranks(2, lambda world: work(world, name="two", zero_level=level))
    (one,) = run_ranks(1, lambda world: work(world, name="one"))
    assert {done.merged_path for done in two} == {Path("runs/two/model/merged")}
    found, wanted = (load_file(done.merged_path / "model.safetensors") for done in (two[0], one))
    assert found.keys() == wanted.keys() and "lm_head.weight" in found
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    again = llmq.train(**{**still(given, name="again"), "model": "runs/two/model/merged"})
    assert again.eval_loss == pytest.approx(two[0].eval_loss, rel=1e-5)
