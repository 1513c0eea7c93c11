"""A run with rows of another file: the model's are loaded and exported, its own drawn, trained and saved."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from rooms import TILEWISE, adapted, experts
from tiny_engines import plan_of
from tiny_runs import on_weights, weights_of

import llmq
from llmq.files.checkpoint import load
from llmq.files.huggingface import Export, checked_tensors, read_rows
from llmq.files.source import INIT_STD, open_parameters, open_source
from llmq.model.config import from_folder
from llmq.model.parameters import parameter_rows
from llmq.options.data import ModelOptions
from llmq.plan.plan import make_plan
from llmq.training import prepare


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a run on a model with weights, whose maps have adapters."""
    monkeypatch.chdir(tmp_path)
    return on_weights(tmp_path)


def with_sites(monkeypatch, sites):
    monkeypatch.setattr(prepare, "make_plan", partial(make_plan, sites=sites))


def tensors(path):
    rows = parameter_rows(from_folder(path))
    return {row.name: value for row, value in read_rows(checked_tensors(path, rows), rows)}


@pytest.mark.parametrize("stored", [pytest.param(None, marks=pytest.mark.slow), TILEWISE], ids=["as it is", "tilewise"])
def test_a_run_trains_an_adapter_and_exports_the_model(given, monkeypatch, stored):
    with_sites(monkeypatch, partial(adapted, stored=stored))
    done = llmq.train(**given)
    base, exported = tensors("base"), tensors(done.model_path)
    _, read = load(done.checkpoint_path)
    frozen = {name for name in base if name.endswith(("weight", "bias")) and name.startswith("layers")}
    assert frozen and not [name for name in read.tensors if any(f":{row}" in name for row in frozen)]
    for name, value in base.items():
        if name not in frozen:
            assert not np.array_equal(exported[name], value), name
        elif stored is None or name.endswith("bias"):
            assert np.array_equal(exported[name], value), name
        else:  # what the quantized base stands for
            assert 0 < np.abs(exported[name] - value).max() <= 2.0**-4 * np.abs(value).max(), name
    assert read("master:layers.0.mlp.up.b").any() and read("master:head.b").any()
    whole = weights_of(done.checkpoint_path)
    llmq.train(**{**given, "name": "parts", "steps": 5, "out_dir": "cut", "checkpoint_dir": "parts"})
    parts = llmq.train(**{**given, "name": "parts", "continue": 5, "out_dir": "parts-model", "checkpoint_dir": "parts"})
    assert weights_of(parts.checkpoint_path) == whole
    assert all(np.array_equal(value, exported[name]) for name, value in tensors(parts.model_path).items())


def test_rows_of_another_file_are_drawn(given):
    source = open_source(ModelOptions(model="base"))
    rows = parameter_rows(source.config)
    values = open_parameters(source, 3)
    found = {row.name: value for row, value in values(rows)}
    assert list(found) == [row.name for row in rows]
    assert all(np.array_equal(found[name], value) for name, value in tensors("base").items())
    some = [replace(rows[0], name="embed.low", file="adapter"), rows[3]]
    read, drawn = values(some)
    assert read[0] == rows[3] and np.array_equal(read[1], found[rows[3].name]), "some rows of a whole model"
    assert drawn[0] == some[0] and drawn[1][:97].std() == pytest.approx(INIT_STD, rel=0.05)


def test_experts_are_stored_as_tensors_of_their_own(tmp_path, given):
    """Parts of a stack are cut from its entries laid end to end."""
    config = from_folder("base")
    stack, rows = (plan_of(config=config, sites=experts(stacked=stacked)).rows for stacked in (True, False))
    values = {row.name: np.random.default_rng(1).standard_normal(row.shape).astype(np.float32) for row in stack}
    Export(tmp_path / "stack", config, stack, "fp32").write(lambda row: values[row.name])
    stored = checked_tensors(tmp_path / "stack", rows)
    assert stored == checked_tensors(tmp_path / "stack", stack)
    found = {row.name: value for row, value in read_rows(stored, rows)}
    again = {row.name: value for row, value in read_rows(stored, stack)}
    for row in stack:
        assert np.array_equal(again[row.name][: row.parts[-1].stop], values[row.name][: row.parts[-1].stop])
        for index, entry in enumerate(row.entries if row.stacked else ()):
            assert np.array_equal(found[entry.name], values[row.name][index])
