"""Signals in each phase of a run: nothing is lost or half written, and the run that goes on has the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_runs import ROOT, text_model, weights_of

from llmq.files.checkpoint import load
from llmq.report.read import read_log
from llmq.training.interrupt import terminable

STEPS = 6
RUN = ["--model=source", "--from-scratch", "--data=rows.jsonl", "--seq-len=16", "--batch-size=2", "--device=cpu"]
RUN += ["--grad-accumulation=2", "--model-dtype=fp32", "--name=run", f"--steps={STEPS}", "--eval-every-n-steps=2"]
RUN += ["--eval-num-steps=2", "--ckpt-interval=2", "--ckpt-keep-n=0"]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}
PHASES = ("training", "saving", "start", "loading", "tokenizing", "update", "evaluation", "export")
DELAYS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # seconds after a phase has begun


class Runs:
    """Runs in processes that are forked from one."""

    def __init__(self):
        about = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, ROOT / "tests/signalled.py"],
            env={**os.environ, **about, "LLMQ_CACHE_DIR": "cache"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, folder, *more, **case):
        """The exit code of a run in a folder, and whether it has entered its phase."""
        line = json.dumps({"folder": str(folder), "arguments": [*RUN, *more], **case})
        print(line, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(10)


@pytest.fixture(scope="module")
def runs():
    made = Runs()
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, runs):
    """The folder of a run that nothing has ended, beside its model and data."""
    folder = tmp_path_factory.mktemp("whole")
    text_model(folder / "source")
    rows = [json.dumps({"text": f"{n} and {n + 1} are {2 * n + 1}. " * 4}) for n in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    code, _ = runs(folder)
    assert code == 0, (folder / "out.txt").read_text()
    return folder


def is_whole(folder):
    """Checks all that a run has left so far, and returns the names of what is not in a checkpoint."""
    place = folder / "runs/run"
    for checkpoint in place.glob("checkpoints/step-*"):
        load(checkpoint)  # all of it is read
    if (place / "model").exists():
        tensors = load_file(place / "model/model.safetensors")
        assert all(np.isfinite(value).all() for value in tensors.values()) and (place / "model/config.json").exists()
    if (place / "log.jsonl").exists():
        read_log(place / "log.jsonl")
    assert "Traceback" not in (folder / "out.txt").read_text()
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(name) for name in names if "checkpoints" not in name.parts and name.name != "out.txt"}


@pytest.mark.quick("training-*", "saving-*")
@pytest.mark.sample("sweep")
@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_leaves_nothing_half_done(whole, runs, tmp_path, phase, delay, number):
    for name in ("source", "rows.jsonl"):
        (shutil.copytree if (whole / name).is_dir() else shutil.copy)(whole / name, tmp_path / name)
    call = {"training": 5, "update": 2, "evaluation": 1, "saving": 1}.get(phase, 0)
    code, reached = runs(tmp_path, phase=phase, number=int(number), delay=delay, call=call)
    assert reached and code in (CODES[number], 0), (tmp_path / "out.txt").read_text()
    left = is_whole(tmp_path)
    if code == 0:  # the signal came when all was done
        assert (tmp_path / "runs/run/model/model.safetensors").exists()
    assert runs(tmp_path, "--continue=auto")[0] == 0, (tmp_path / "out.txt").read_text()
    # Tokens so far stay where their making resumes, and a log of no step beside the next one.
    assert {name for name in left if ".partial/" not in name} <= is_whole(whole)
    assert is_whole(tmp_path) - {"runs/run/log.jsonl.1"} == is_whole(whole)
    log = read_log(tmp_path / "runs/run/log.jsonl")
    assert log.train["step"].tolist() == [*range(1, STEPS + 1)] and log.eval["step"].tolist() == [2, 4, 6]
    saved = "runs/run/checkpoints/step-00000006"
    assert weights_of(tmp_path / saved) == weights_of(whole / saved)
    model = "runs/run/model/model.safetensors"
    assert (tmp_path / model).read_bytes() == (whole / model).read_bytes()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_an_object_is_freed_is_not_lost(number, error):
    """Python ignores what a handler raises then."""

    class Freed:
        def __del__(self):
            signal.raise_signal(number)
            time.sleep(0)  # where the handler runs

    with pytest.raises(error), terminable():
        Freed()
        time.sleep(10)
