"""`Trainer`: the runs of the command from Python, on data that the caller holds."""

import asyncio
import gc
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from dlpack import Shared
from safetensors.numpy import load_file
from tiny_runs import hash_of, text_options, tiny_options

import llmq
from llmq import Config, Trainer
from llmq.data.tokens.token_file import TokenWriter
from llmq.errors import DataError, UsageError

ROWS = [{"text": f"the number {i}, " * (1 + i % 5)} for i in range(60)]
HELD_OUT = [{"text": f"another {i}, " * (1 + i % 3)} for i in range(8)]


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a small run, without data, in a folder and with a cache of its own."""
    return {**text_options(tmp_path, monkeypatch), "steps": 4}


def quiet(given, *data, **more):
    return Trainer(**given).train(*data, console=io.StringIO(), **more)


def weights(result):
    return hash_of(load_file(result.model_path / "model.safetensors").items())


def write_rows(folder="rows", **splits):
    Path(folder).mkdir()
    for name, rows in splits.items():
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Loads:
    """Rows with a length and an index, as torch's data sets have them."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


def frame(rows):
    """Part of a data frame of pandas, whose index is no range."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    return pandas.DataFrame([{"text": "left out"}, *rows])[lambda found: found.text != "left out"]


def older_frame(rows):
    """A data frame as pandas had them before 2.2."""
    found = frame(rows)
    older = type("DataFrame", (type(found),), {"__arrow_c_stream__": property(lambda self: [].absent)})(found)
    assert not hasattr(older, "__arrow_c_stream__")
    return older


def data_set(rows):
    """A selection of a data set of Hugging Face."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    return datasets.Dataset.from_list([*rows, *rows]).select(range(len(rows)))


HELD = {
    "dicts": lambda rows: rows,
    "texts": lambda rows: [row["text"] for row in rows],
    "tuple": tuple,
    "table": pyarrow.Table.from_pylist,
    "frame": frame,
    "older frame": older_frame,
    "data set": data_set,
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "data set" else []) for kind in HELD]
)
def test_rows_in_memory_have_the_bits_of_the_same_rows_in_files(given, kind):
    of_files = weights(quiet({**given, "data": write_rows(train=ROWS, validation=HELD_OUT)}))
    held = quiet(given, HELD[kind](ROWS), HELD[kind](HELD_OUT))
    assert weights(held) == of_files and np.isfinite(held.history["eval_loss"]).all()
    if kind == "table":
        assert weights(quiet(given, HELD[kind](ROWS), HELD_OUT)) == of_files


def test_part_of_rows_without_others_is_held_out_as_of_a_file(given):
    of_file = weights(quiet({**given, "data": str(Path(write_rows(train=ROWS)) / "train.jsonl")}))
    assert weights(quiet(given, Loads())) == of_file


def test_tokens_are_those_of_a_token_file(given):
    ids = np.random.default_rng(0).integers(0, 97, 600)
    for name, part in (("train.bin", ids), ("eval.bin", ids[:100])):
        with TokenWriter(name, vocab_size=97) as file:
            file.append(part)
    of_files = weights(quiet({**given, "train_file": "train.bin", "eval_file": "eval.bin"}))
    assert weights(quiet(given, ids, ids[:100].astype(np.uint16))) == of_files


@pytest.mark.parametrize("has_labels", [True, False])
def test_rows_of_tokens_are_those_of_a_file(given, has_labels):
    ids = np.random.default_rng(0).integers(0, 97, (30, 20))
    labels = np.where(ids % 3 == 0, -100, ids)
    rows = [
        {"input_ids": row, **({"labels": goal} if has_labels else {})}
        for row, goal in zip(ids.tolist(), labels.tolist(), strict=True)
    ]
    of_file = weights(quiet({**given, "data": write_rows(train=rows, validation=rows[:6])}))
    held = {"input_ids": ids, "labels": labels} if has_labels else ids
    part = {key: value[:6] for key, value in held.items()} if has_labels else Shared(ids[:6])
    assert weights(quiet(given, held, part)) == of_file


class Again:
    """Rows that can be read from the first on again."""

    def __iter__(self):
        return iter(ROWS)


def streamed_data_set():
    return data_set(ROWS).to_iterable_dataset()


@pytest.mark.parametrize(
    "stream",
    [Again, pytest.param(streamed_data_set, marks=pytest.mark.slow), lambda: (row for row in ROWS * 10)],
    ids=["iterable", "data set", "generator"],
)
def test_a_stream_has_the_bits_of_a_streamed_file_and_resumes(given, stream):
    rows = ROWS if stream in (Again, streamed_data_set) else ROWS * 10
    given |= {"eval_every_n_steps": 0, "ckpt_interval": 2, "ckpt_keep_n": 0, "packing": "windows"}
    file = str(Path(write_rows(train=rows)) / "train.jsonl")
    of_file = weights(quiet({**given, "data": file, "streaming": True}))
    assert weights(quiet(given, stream())) == of_file
    resumed = quiet({**given, "continue": 2, "overwrite": False, "name": "run"}, stream())
    assert weights(resumed) == of_file and resumed.history.steps("loss").tolist() == [3, 4]


def test_a_stream_is_evaluated_on_other_rows(given):
    """As a file is that is streamed from a folder with both; rows to evaluate on may be a stream, too."""
    of_files = quiet({**given, "data": write_rows(train=ROWS, validation=HELD_OUT), "streaming": True})
    for val in (HELD_OUT, iter(HELD_OUT)):
        found = quiet(given, iter(ROWS), val)
        assert weights(found) == weights(of_files)
        assert found.history["eval_loss"].tolist() == of_files.history["eval_loss"].tolist()
    assert quiet(given, ROWS, iter(HELD_OUT)).eval_loss == quiet(given, ROWS, HELD_OUT).eval_loss


def test_streams_in_two_threads_are_apart(given):
    given |= {"eval_every_n_steps": 0, "steps": 2}

    def trained(name, *callbacks):
        rows = ({"text": f"{name} {number}, " * 9} for number in range(60))
        return weights(quiet({**given, "name": name}, rows, callbacks=callbacks))

    both = threading.Barrier(2, timeout=20)
    waits = lambda run, record: record.step == 1 and both.wait()  # noqa: E731 -- each is read when both are there
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(trained, ("one", "two"), (waits, waits)))
    assert found == [trained("one"), trained("two")] and found[0] != found[1]


def test_a_stream_is_for_one_gpu(given, monkeypatch):
    for gpus, there in ((2, 2), (0, 2)):
        monkeypatch.setattr("llmq.hardware.device.gpu_addresses", lambda gpus, there=there: [""] * there)
        with pytest.raises(UsageError, match=r"a stream is read by this process alone: .*, or train on one GPU"):
            quiet({**given, "gpus": gpus}, iter(ROWS))
    monkeypatch.setattr("llmq.hardware.device.gpu_addresses", lambda gpus: [""])
    with pytest.raises(UsageError, match="--gpus 0 counts GPUs, but --device is cpu"):  # which comes after
        quiet({**given, "gpus": 0}, iter(ROWS))


def test_an_iterator_that_ends_early_says_so(given):
    given |= {"eval_every_n_steps": 0, "steps": 50}
    one_pass = quiet({**given, "data": write_rows(train=ROWS), "eval_fraction": 0, "streaming": True, "steps": 3})
    assert weights(quiet({**given, "steps": 3}, iter(ROWS))) == weights(one_pass)  # its last rows come, too
    with pytest.raises(DataError, match="train: the iterator has given 60 rows, and cannot give them again"):
        quiet(given, iter(ROWS))
    with pytest.raises(DataError, match="train has no rows: an iterator gives them once"):
        quiet(given, iter([]))
    read = (row for row in ROWS)
    next(read)
    with pytest.raises(UsageError, match="train is a generator that was read before"):
        quiet(given, read)
    twice = iter(ROWS)
    with pytest.raises(UsageError, match="train and val are one iterator, which gives its rows once: give two"):
        quiet(given, twice, twice)
    with pytest.raises(UsageError, match=r"held:train are rows that a Python program gave"):
        llmq.train(**{**given, "data": "held:train", "streaming": True}, console=io.StringIO())


@pytest.mark.parametrize(
    ("train", "val", "match"),
    [
        ([], None, "train has no rows"),
        (ROWS, [], "val has no rows"),
        ([{"text": "a"}, "b"], None, "train: row 2 is a str, and those before are dict"),
        ([{"text": "a"}, 5], None, "train: row 2 is an int"),
        ([[1, 2], [3]], None, "train: row 1 is a list: give a dict with fields, such as input_ids, or a text"),
        ({"a", "b"}, None, "train is a set, whose order differs from process to process: give a sorted list"),
        (ROWS, frozenset("ab"), "val is a frozenset, whose order"),
        ([{"text": {1, 2}}], None, "train: row 1 is nothing that JSON has: a set"),
        ([{"text": float("nan")}], None, "train: row 1 is nothing that JSON has"),
        ([{"text": "\ud800"}], None, "train: row 1 is nothing that JSON has: 'utf-8' codec"),
        (ROWS, (Path("no file").read_text() for _ in range(1)), "val: a row cannot be read: .* No such file"),
        (5, None, "train is an int: give a list"),
        (np.zeros(5), None, r"train is an array \(5,\) of float64"),
        (np.zeros((2, 3, 4), int), None, r"train is an array \(2, 3, 4\)"),
        ({"input_ids": np.zeros((2, 3), int), "labels": np.zeros((2, 4), int)}, None, r"train has input_ids \(2, 3\)"),
        ({"labels": np.zeros((2, 3), int)}, None, "train has labels: give input_ids"),
        ({"input_ids": [[1, 2], [3]]}, None, "train has no arrays .*: give input_ids .*; or a list of dicts"),
        (
            {"input_ids": np.zeros((2, 3))},
            None,
            r"train has input_ids \(2, 3\) of float64: .* Tokens are whole numbers",
        ),
        (np.array([[1, 2], [3]], object), None, r"train is an array \(2,\) of object"),
        (pyarrow.table({"text": pyarrow.array([], "string")}), None, "train has no rows"),
        (ROWS, pyarrow.table({"text": pyarrow.array([], "string")}), "val has no rows"),
        ([{"input_ids": [1, 2]}, {"input_ids": [1, 500]}], None, "train:2: token 1 has the id 500, but"),
        (pyarrow.table({"input_ids": [[1, 2], [1, 500]]}), None, "train:2: token 1 has the id 500, but"),
        (np.array([[1, 2], [3, 4]]), np.array([[1, 2], [-3, 4]]), "val:2: token 0 has the id -3, but"),
        (np.full(99, 2**40), None, "train: token 0 has the id 1099511627776"),
        (np.array([1, -2, 3]), None, "train: token 1 has the id -2"),
        (np.zeros(0, int), None, "train has no tokens"),
        (ROWS, np.arange(5), "train is rows and val is tokens"),
        (np.arange(5), iter(ROWS), "train is tokens and val is a stream"),
        (iter(["a" * 40, ROWS[0]]), None, "train:2: an object, and the rows before are texts"),
        (iter([ROWS[0], "b" * 40]), None, "train:2: text, where a row is an object"),
        (None, ROWS, "val is given without train"),
        (np.full(99, 500), None, "500, but the vocabulary has"),
    ],
)
def test_data_that_cannot_be_used_is_refused(given, train, val, match):
    with pytest.raises((UsageError, DataError), match=match):
        quiet(given, train, val)


def test_data_in_two_places_is_refused(given):
    with pytest.raises(UsageError, match="train and val, and the options data, eval_file, both name data"):
        quiet({**given, "eval_file": "eval.bin", "data": "rows"}, ROWS, HELD_OUT)
    with pytest.raises(UsageError, match="train and val, and the options eval_fraction, both name data"):
        quiet({**given, "eval_fraction": 0.5}, ROWS, HELD_OUT)
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    with pytest.raises(DataError, match="train is a Series that is no table"):
        quiet(given, pandas.Series(["a", "b"]))
    with pytest.raises(DataError, match="train is a DataFrame that is no table"):
        quiet(given, pandas.DataFrame({"text": ["a", 5]}))


@pytest.mark.slow
def test_a_trainer_has_the_weights_of_the_command(given):
    write_rows(train=ROWS, validation=HELD_OUT)
    mine = weights(quiet({**given, "data": "rows"}))
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if not isinstance(value, bool)]
    command = [sys.executable, "-m", "llmq.cli.train", *flags, "--from-scratch", "--data=rows", "--name=other"]
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(Path(llmq.__file__).parents[1])}
    )
    assert hash_of(load_file("runs/other/model/model.safetensors").items()) == mine


def test_a_result_has_its_history(given):
    result = quiet(given, ROWS, HELD_OUT)
    history = result.history
    assert history["step"].tolist() == history.steps("loss").tolist() == [1, 2, 3, 4]
    assert history.steps("eval_loss").tolist() == [2, 4] and history["eval_loss"][-1] == result.eval_loss
    assert result.best_step == history.steps("eval_loss")[history["eval_loss"].argmin()]
    assert result.stopped_by is None and result.memory["planned"] == Trainer(**given).plan(ROWS, HELD_OUT).total_bytes


def test_a_plan_needs_no_data(given):
    assert Trainer(**given).plan(console=io.StringIO()).total_bytes > 0 and not Path("runs").exists()


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]


@pytest.mark.slow
def test_a_hundred_runs_leave_a_process_as_it_was(given):
    """Descriptors, threads, signal handlers, and memory: Python's objects, and what the process holds."""

    def left():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), handlers(), [thread.name for thread in threading.enumerate()]

    def held():
        return len(gc.get_objects()), int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    given |= {"steps": 1, "eval_every_n_steps": 0}
    for _ in range(10):  # caches fill up
        quiet(given, ROWS)
    before, (objects, resident) = left(), held()
    for _ in range(100):
        quiet(given, ROWS)
    assert left() == before
    more_objects, more_resident = held()
    assert more_objects - objects < 50 and more_resident - resident < 32 << 20


@pytest.mark.parametrize("where", ["thread", "loop", "after an error"])
def test_a_run_is_the_same_wherever_it_is_called(given, where):
    """In a thread, where no signals can be heard; in a running event loop, as in a notebook's cell; after a failure."""
    given |= {"steps": 2, "eval_every_n_steps": 0}
    first, before, found = weights(quiet(given, ROWS)), handlers(), []

    def work():
        found.append(weights(quiet(given, ROWS)))

    async def cell():
        work()
        await asyncio.sleep(0)

    if where == "thread":
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    elif where == "loop":
        asyncio.run(cell())
    else:
        with pytest.raises(ZeroDivisionError):
            quiet(given, ROWS, callbacks=[lambda run, record: 1 / 0])
        work()
    assert found == [first] and handlers() == before


def test_a_config_and_options_are_one(given):
    config = Config(**given)
    assert Trainer(config, steps=5).config == Trainer(**{**given, "steps": 5}).config
    with pytest.raises(UsageError, match="config is 5: give a Config"):
        Trainer(5)
    with pytest.raises(UsageError, match="unknown option --stepz: did you mean --steps"):
        Trainer(stepz=4)


def test_importing_llmq_imports_no_arrays():
    code = "import sys, llmq; sys.exit(bool({'numpy', 'torch', 'cupy'} & {*sys.modules}))"
    root = str(Path(llmq.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}).returncode == 0


def test_other_runs_than_those_of_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = llmq.train(**tiny_options(tmp_path))
    assert result.steps == 12 and result.stopped_by is None
