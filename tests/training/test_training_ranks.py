"""Whole runs on several ranks: they train, save, evaluate and export as one, and go on as any other number of ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
from in_process import run_ranks, train_on_ranks
from safetensors.numpy import load_file
from tiny_runs import weights_of

from llmq.comm.environment import Place
from llmq.errors import StorageError, UsageError
from llmq.files.checkpoint import load
from llmq.files.manifest import found
from llmq.options.parse import Options
from llmq.report.read import read_log
from llmq.training.ranks import Ranks, joined

# Of weights, where sums have another order: a hundredth of the rate. Adam divides by the gradient's own size, so one
# whose terms nearly cancel moves its weight by what rounding has left; which one that is depends on the processor.
ROOM = {"rtol": 1e-3, "atol": 1e-4}
STEPS = 6


@pytest.fixture
def given(given):
    """A step of four samples, for any number of ranks up to four, saved every other step."""
    return {
        **given,
        "batch_size": 1,
        "global_batch_size": 4,
        "grad_accumulation": None,
        "steps": STEPS,
        "ckpt_interval": 2,
        "ckpt_keep_n": 0,
        "eval_every_n_steps": 3,
        "deterministic": True,
    }


def train(given, size, name=None, **more):
    return train_on_ranks(size, {**given, **more, "name": name or f"on{size}"})


def losses(name):
    """The losses in a log, of steps and evaluations."""
    lines = map(json.loads, Path("runs", name, "log.jsonl").read_text().splitlines())
    return [(line["type"], line["step"], line["loss"]) for line in lines if line["type"] in ("train", "eval")]


def exported(name):
    return load_file(f"runs/{name}/model/model.safetensors")


@pytest.mark.parametrize("level", [1, *(pytest.param(level, marks=pytest.mark.slow) for level in (0, 2, 3))])
def test_ranks_train_as_one_does(given, level):
    train(given, 1)
    results, console = train(given, 2, zero_level=level)
    assert [result.exit_code for result in results] == [0, 0] and "[T]" in console
    one, two = losses("on1"), losses("on2")
    assert [loss[:2] for loss in one] == [loss[:2] for loss in two]
    np.testing.assert_allclose([loss[2] for loss in one], [loss[2] for loss in two], rtol=1e-5)
    for key, value in exported("on1").items():
        np.testing.assert_allclose(exported("on2")[key], value, **ROOM)


@pytest.mark.slow
def test_a_checkpoint_has_whole_tensors_by_all_ranks(given):
    for level in (0, 1):
        train(given, 3, f"level{level}", zero_level=level, batch_size=1, global_batch_size=3)
    paths = [Path("runs", f"level{level}", "checkpoints", f"step-{STEPS:08d}") for level in (0, 1)]
    assert weights_of(paths[0]) == weights_of(paths[1])
    for path in paths:
        assert {file.name[:13] for file in path.glob("*.safetensors")} == {f"tensors-0000{rank}" for rank in range(3)}
        assert not list(path.glob("part-*"))


HOSTED = {"offload_gradients": True, "stream_weights": True, "offload_optimizer": True}
HOMES = {"device": ({}, {}), "from the host": (HOSTED, {}), "to the host": ({}, HOSTED)}


@pytest.mark.quick("device-2 to 1")
@pytest.mark.sample("sweep")
@pytest.mark.parametrize("ranks", [(2, 1), (2, 2), (1, 2), (3, 2), (2, 3)], ids="{0[0]} to {0[1]}".format)
@pytest.mark.parametrize("homes", HOMES)
def test_a_run_goes_on_with_another_number_of_ranks(given, ranks, homes):
    """And with its states in other homes; with the same number, it has the bits of one that was never stopped."""
    (before, after), (first, then) = ranks, HOMES[homes]
    given = {**given, "global_batch_size": 6, "lr_schedule": "constant", "warmup": 0}
    train(given, after, "whole")
    train(given, before, "parts", steps=4, zero_level=1 if before == after else 3, **first)
    _, said = train(given, after, "parts", **{"continue": "newest", "overwrite": False}, **then)
    assert (f", ranks {before} to {after}\n" in said) == (before != after)
    whole, parts = (exported(name) for name in ("whole", "parts"))
    for key, value in whole.items():
        np.testing.assert_allclose(parts[key], value, **ROOM)
        assert before != after or np.array_equal(parts[key], value)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_leaves_the_last_checkpoint_and_ends_all(given, monkeypatch, failing):
    from llmq.files import writers

    real = writers.write_part

    def write(saving, rank, *rest, **more):
        if rank == failing and saving.snapshot.step == 4:
            raise StorageError("its disk is full")
        return real(saving, rank, *rest, **more)

    monkeypatch.setattr(writers, "write_part", write)
    with pytest.raises(StorageError, match=r"its disk is full|was not completed"):
        train(given, 2)
    kept = found(Path("runs/on2/checkpoints"))
    assert sorted(kept) == [2]
    state, _ = load(kept[2])
    assert state["step"] == 2


def test_what_one_rank_is_asked_for_all_do(given, monkeypatch):
    """The second rank hears a signal in step 3: all end after it, saved, with its exit code."""
    from llmq.engine.engine import Engine

    real = Engine.update

    def update(self, step, rate, request=0):
        if self._backend.world.rank == 1 and step == 3:
            request = 75
        return real(self, step, rate, request)

    monkeypatch.setattr(Engine, "update", update)
    results, console = train(given, 2)
    assert [(result.exit_code, result.steps) for result in results] == [(75, 3)] * 2
    assert sorted(found(Path("runs/on2/checkpoints"))) == [2, 3] and "Stopped after step 3" in console


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seq_len": 8}, r"--seq-len 8 \(16\): start all"),
        ({"zero_level": 3, "reduce_dtype": "bf16"}, r"--zero-level 3 \(1\), --reduce-dtype bf16 \(not set\): st"),
    ],
)
def test_a_rank_with_other_options_is_refused_by_all(given, changes, said):
    values = {key: value for key, value in given.items() if value is not None and key != "console"}
    refused = []

    def work(world):
        more = {"verbosity": world.rank - 1, **(changes if world.rank == 1 else {})}
        with pytest.raises(UsageError, match=rf"rank 1 was started with other options than rank 0, .*: {said}"):
            Ranks(world).check_same(Options.parse({**values, **more}))
        refused.append(world.rank)

    run_ranks(3, work)
    assert sorted(refused) == [0, 1, 2]


@pytest.mark.parametrize(("kind", "restarts"), [("llmq-launch", True), ("--gpus", True), ("another", False)])
def test_a_single_rank_knows_what_started_it_and_whether_that_does_so_again(monkeypatch, kind, restarts):
    start = ("llmq-launch", "--procs=1", "--")
    place = Place(0, 1, 0, 1, "127.0.0.1", 7, "token", kind, start=start, again=True)
    for name, value in place.environ().items():
        monkeypatch.setenv(name, value)
    with joined(Options.parse({"model": "m", "train_file": "t.bin"})) as ranks:
        assert (ranks.size, ranks.start, ranks.again, ranks.can_restart) == (1, start, True, restarts)


@pytest.mark.parametrize("size", [1, 2])
def test_copy_engines_are_refused_where_there_are_none(given, size):
    more = {"memcpy_all_gather": True, "memcpy_send_recv": True, "all_to_all_reduce": True}
    with pytest.raises(UsageError, match="--memcpy-all-gather and --memcpy-send-recv: copy engines are parts of GPUs"):
        train(given, size, **more)
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "e4m3"])
def test_errors_of_fp8_copies_are_the_same_at_every_level(given, compression):
    fp8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "log_fp8_every": 1, "gradient_compression": compression}
    given |= {"steps": 3, "ckpt_interval": 0, "eval_every_n_steps": 0, "global_batch_size": 2}
    found = []
    for level in range(4):
        train(given, 2, f"level{level}", zero_level=level, **fp8)
        lines = map(json.loads, Path(f"runs/level{level}/log.jsonl").read_text().splitlines())
        found.append([line["copies"] for line in lines if line["type"] == "fp8"])
    names, errors = (
        [[[copy[key] for copy in copies] for copies in one] for one in found] for key in ("name", "snr_db")
    )
    assert len(names[0]) == 3 and names[1:] == names[:1] * 3
    for other in errors[1:]:  # the weights of level 0 are counted by both ranks
        np.testing.assert_allclose(np.float64(other), np.float64(errors[0]), rtol=1e-3)


BF16 = {"reduce_dtype": "bf16"}  # rounded once by each rank, and on the way at each of three: 3 * 2^-8 at most


@pytest.mark.slow
@pytest.mark.sample("sweep")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("how", "close"),
    [({"all_to_all_reduce": True}, 1e-5), (BF16, 2e-3), ({**BF16, "all_to_all_reduce": True}, 2e-3)],
    ids=["exchanged", "bf16", "exchanged in bf16"],
)
def test_gradients_travel_in_other_ways(given, level, how, close):
    given |= {"global_batch_size": 3}
    train(given, 1)
    train(given, 3, zero_level=level, **how)
    one, many = losses("on1"), losses("on3")
    np.testing.assert_allclose([loss[2] for loss in many], [loss[2] for loss in one], rtol=close)
    if "reduce_dtype" in how:
        train(given, 3, "wide", zero_level=level)
        assert many[1:] != losses("wide")[1:], "nothing is rounded"


@pytest.mark.slow
def test_the_log_has_the_error_of_compressed_gradients(given):
    train(given, 1)
    train(given, 2, zero_level=2, gradient_compression="e4m3")
    sent = read_log(Path("runs/on2")).train["sent_error"]
    assert len(sent) == STEPS and np.all((sent > 0.02) & (sent < 0.03))
    np.testing.assert_allclose([loss[2] for loss in losses("on1")], [loss[2] for loss in losses("on2")], rtol=1e-2)
