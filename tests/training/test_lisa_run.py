"""`--lisa`: a few layers train at a time, the others neither change nor have states, and a run resumes to the bit."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_engines import batch, engine_of, plan_of, tiny
from tiny_runs import tiny_options, weights_of

import llmq
from llmq.comm.in_process import run_ranks
from llmq.errors import UsageError
from llmq.files.checkpoint import load
from llmq.model.config import to_hf
from llmq.model.lisa import Lisa
from llmq.options.parse import Options
from llmq.training import loop
from llmq.training.ranks import Ranks

LAYERS, INTERVAL, STEPS = 5, 3, 8
LISA = Lisa(2, INTERVAL, 0)


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a run of five layers, of which two train at a time."""
    monkeypatch.chdir(tmp_path)
    options = tiny_options(tmp_path)
    Path(options["model"], "config.json").write_text(json.dumps(to_hf(tiny(num_layers=LAYERS), "fp32")))
    about = {"steps": STEPS, "warmup": 0, "ckpt_interval": 1, "ckpt_keep_n": 0, "eval_every_n_steps": 3}
    return {**options, **about, "lisa": 2, "lisa_interval": INTERVAL}


def parameters_at(path):
    """Every parameter of a checkpoint by its row, whatever it is held as; and the rows that have moments."""
    _, read = load(path)
    values = {name.partition(":")[2]: read(name) for name in read.tensors if name.startswith(("master:", "weight:"))}
    return values, {name.partition(":")[2] for name in read.tensors if name.startswith("m:")}


def active(step):
    return LISA.active(tiny(num_layers=LAYERS), step)


def test_layers_are_drawn_evenly_and_by_the_seed():
    config, counts = tiny(num_layers=LAYERS), np.zeros(LAYERS)
    for period in range(400):
        drawn = LISA.active(config, 1 + period * INTERVAL)
        assert len(set(drawn)) == 2 and drawn == LISA.active(config, (1 + period) * INTERVAL)
        counts[list(drawn)] += 1
    assert np.all(np.abs(counts / 400 - 2 / LAYERS) < 0.1)  # four deviations
    assert any(
        LISA.active(config, step) != Lisa(2, INTERVAL, 1).active(config, step) for step in range(1, 30, INTERVAL)
    )
    assert Lisa(LAYERS, 1, 0).frozen(config, 1) == frozenset() and LISA.active(config, 0) == LISA.active(config, 1)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="fp32", marks=pytest.mark.slow),
        pytest.param({"model_dtype": "bf16", "matmul_dtype": "e4m3", "master_dtype": "fp32"}, id="fp8"),
    ],
)
def test_only_drawn_layers_change_and_have_moments(given, more):
    done = llmq.train(**{**given, **more})
    assert len({active(step) for step in range(1, STEPS + 1)}) > 1
    said = given["console"].getvalue()
    for step in range(1, STEPS + 1, INTERVAL):
        drawn = ", ".join(map(str, active(step)))
        assert f"Layers {drawn} train in steps {step} to {min(step + 2, STEPS)}" in said
    folders = [done.checkpoint_path.with_name(f"step-{step:08d}") for step in range(1, STEPS + 1)]
    before, _ = parameters_at(folders[0])
    for step, folder in enumerate(folders[1:], 2):
        values, moments = parameters_at(folder)
        layers = [f"layers.{layer}." for layer in active(step)]
        assert values.keys() == before.keys()
        for name, value in values.items():
            trains = not name.startswith("layers.") or name.startswith(tuple(layers))
            assert (name in moments) == trains, name
            frozen = before[name].astype(value.dtype)  # where it was a master, rounded
            assert np.array_equal(value, frozen) == (not trains), (step, name)
        before = values
    lines = [json.loads(line) for line in done.log_path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["type"] == "train"]
    assert losses[-1] < losses[0]
    assert [line["layers"] for line in lines if "layers" in line] == [list(active(step)) for step in (1, 4, 7)]
    exported = load_file(done.model_path / "model.safetensors")
    for layer in range(LAYERS):
        name, row = f"model.layers.{layer}.mlp.down_proj.weight", f"layers.{layer}.mlp.down.weight"
        assert np.array_equal(exported[name], before[row].astype(exported[name].dtype))


@pytest.mark.parametrize("at", [3, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 4, 6))])
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"model_dtype": "bf16", "matmul_dtype": "e4m3"}, id="fp8", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(given, at, more):
    """Within a period, and where one ends."""
    options = {**given, **more, "ckpt_interval": 0}
    whole = llmq.train(**options)
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**options, **folders, "steps": at})
    parts = llmq.train(**{**options, **folders, "out_dir": "parts-model", "continue": at})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    one, other = (load_file(run.model_path / "model.safetensors") for run in (whole, parts))
    assert all(np.array_equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
def test_each_period_is_a_run_of_adamw_of_its_own(given):
    """All layers at a time is training with moments that begin at zero every period."""
    lisa = llmq.train(**{**given, "lisa": LAYERS, "steps": 6})
    rest = {name: value for name, value in given.items() if not name.startswith("lisa")}
    llmq.train(**{**rest, "name": "plain", "steps": 3})
    plain = llmq.train(**{**rest, "name": "plain", "steps": 6, "continue": 3, "reset": "optimizer", "overwrite": True})
    assert weights_of(lisa.checkpoint_path) == weights_of(plain.checkpoint_path)


def test_frozen_layers_take_no_weight_gradients_and_no_states():
    config = tiny(num_layers=LAYERS)
    plan, full = plan_of(config=config, frozen=LISA.frozen(config, 1), lisa=LISA), plan_of(config=config)
    drawn = {f"layers.{layer}." for layer in active(1)}
    assert {name[:9] for name in plan.grads if name.startswith("layers")} == drawn
    products = [
        sum(call.op == "linear_wgrad" for call in one.programs["only"].calls if call.written[0].layer is not None)
        for one in (plan, full)
    ]
    assert products == [4 * 2, 4 * LAYERS]
    assert plan.table()["Adam M"] < full.table()["Adam M"] and plan.table()["Gradients"] < full.table()["Gradients"]
    one, other = engine_of(plan), engine_of(full)
    for engine in (one, other):
        engine.micro_step(batch())
    for name in plan.grads:
        assert np.array_equal(one.gradient(name), other.gradient(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 3])
def test_many_ranks_train_the_same_layers(given, level):
    rest = {name: value for name, value in given.items() if name not in ("console", "grad_accumulation")}
    options = {**rest, "batch_size": 1, "global_batch_size": 4, "deterministic": True, "zero_level": level}
    options |= {"steps": 5, "ckpt_interval": 0}

    def train(size, **more):
        values = {**options, "name": f"on{size}", **more}

        def work(world):
            return loop.run(Options.parse(values), console=io.StringIO(), ranks=Ranks(world))

        return run_ranks(size, work)[0]

    one, whole = train(1), train(2)
    assert whole.train_loss == pytest.approx(one.train_loss, rel=1e-4)
    assert whole.eval_loss == pytest.approx(one.eval_loss, rel=1e-4)
    train(2, name="parts", steps=4)
    parts = train(2, name="parts", **{"continue": 4}, overwrite=True)
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)


def test_what_does_not_go_together_is_refused(given):
    for change, says in (
        ({"lisa": 6}, "--lisa 6: the model has 5 layers: use so many at most"),
        ({"lisa": None}, "--lisa-interval 3 is for --lisa: add that, or leave it out"),
        ({"lora_rank": 4}, "--lisa 2 trains layers of the model in turn, and --lora-rank says otherwise"),
        ({"train_only": "*.bias"}, "--lisa 2 trains layers of the model in turn, and --train-only says otherwise"),
        ({"model_dtype": "bf16", "master_dtype": "none"}, "layers that --lisa freezes have no other room"),
    ):
        with pytest.raises(UsageError) as error:
            llmq.train(**{**given, **change})
        assert says in str(error.value)
    llmq.train(**{**given, "steps": 4})
    for change in ({"lisa": 3}, {"lisa_interval": 2}, {"lisa": None, "lisa_interval": None}):
        with pytest.raises(UsageError, match="lisa"):
            llmq.train(**{**given, "continue": 4, "overwrite": True, **change})
