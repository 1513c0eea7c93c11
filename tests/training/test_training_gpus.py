"""Whole runs on two GPUs: as one trains, and on from the checkpoints of one, at every level; and when one is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_runs import folder, tiny_options

from llmq.files.manifest import found
from llmq.options.field import flag
from llmq.report.read import read_log

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 384}
LARGE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 1024}  # a layer of it is copied
CPU = ["-m", "llmq.cli.launch", "--procs=2", "--"]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Starts a run of `gpus` with options; the process."""
    on_cpu = os.environ.get("LLMQ_TEST_RANKS") == "cpu"
    if not on_cpu:
        cupy = pytest.importorskip("cupy")
        if cupy.cuda.runtime.getDeviceCount() < 2:
            pytest.skip("needs two GPUs")
    monkeypatch.chdir(tmp_path)
    given = tiny_options(tmp_path) | {"model": str(folder(tmp_path / "wide", **SHAPE)), "model_dtype": "bf16"}
    given |= {"global_batch_size": 8, "steps": 8, "ckpt_interval": 2, "ckpt_keep_n": 0, "learning_rate": 1e-3}
    del given["console"], given["grad_accumulation"]

    def start(gpus, name, **more):
        options = {**given, "name": name, **more}
        flags = [spelled(flag(key), value) for key, value in options.items()]
        many = gpus > 1
        device = ["--device=cpu"] if on_cpu else [f"--gpus={gpus}"]
        program = CPU if on_cpu and many else ["-m", "llmq"]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, *program, *device, *flags], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    return start


def spelled(option, value):
    """An option as a command has it."""
    if isinstance(value, bool):
        return option if value else f"--no-{option[2:]}"
    return f"{option}={value}"


def end(process, code=0):
    """Its output, when it has ended with `code`."""
    text = process.communicate(timeout=150)[0].decode()
    assert process.returncode == code, text
    return text


def weights(name):
    return load_file(f"runs/{name}/model/model.safetensors")


def losses(name):
    return read_log(Path("runs") / name).train["loss"]


@pytest.mark.parametrize("precision", [{}, {"matmul_dtype": "e4m3"}], ids=["bf16", "e4m3"])
def test_two_train_as_one_at_every_level(train, precision):
    end(train(1, "one", **precision))
    for level in range(4):
        end(train(2, f"level{level}", zero_level=level, **precision))
        np.testing.assert_allclose(losses(f"level{level}"), losses("one"), rtol=2e-2)
    for one, other in ((0, 1), (2, 3)):
        pair = [weights(f"level{level}") for level in (one, other)]
        assert all(value.tobytes() == pair[1][key].tobytes() for key, value in pair[0].items())


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_a_run_goes_on_with_another_number_of_gpus(train, before, after):
    end(train(after, "whole", zero_level=3))
    end(train(before, "parts", steps=4, zero_level=3))
    end(train(after, "parts", zero_level=3, **{"continue": "newest"}))
    np.testing.assert_allclose(losses("parts")[-4:], losses("whole")[-4:], rtol=2e-2)
    pair = [weights(name) for name in ("whole", "parts")]
    assert before != after or all(value.tobytes() == pair[1][key].tobytes() for key, value in pair[0].items())


@pytest.mark.parametrize("level", [1, 3])
def test_a_run_whose_weights_are_copied_has_the_bits_of_nccls(train, tmp_path, level):
    given = {"model": str(folder(tmp_path / "large", **LARGE)), "zero_level": level, "all_to_all_reduce": True}
    for name, is_copied in (("nccl", False), ("copied", True)):
        text = end(train(2, name, **given, memcpy_all_gather=is_copied, memcpy_send_recv=is_copied))
        assert ("weights and gradients by copy engines" in " ".join(text.split())) == is_copied
    assert losses("nccl").tolist() == losses("copied").tolist()
    pair = [weights(name) for name in ("nccl", "copied")]
    assert all(value.tobytes() == pair[1][key].tobytes() for key, value in pair[0].items())


@pytest.mark.parametrize("copied", [{}, {"memcpy_all_gather": True, "zero_level": 3}], ids=["timed", "copied"])
def test_a_killed_rank_ends_all_and_the_run_goes_on(train, tmp_path, copied):
    if copied:
        copied = {**copied, "model": str(folder(tmp_path / "large", **LARGE))}
    run = train(2, "killed", steps=100_000, ckpt_interval=50, **copied)
    until = time.monotonic() + 120
    while not found(Path("runs/killed/checkpoints")):
        assert time.monotonic() < until and run.poll() is None
        time.sleep(0.1)
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(run.pid)], capture_output=True, text=True, check=True)
    ranks = [int(pid) for pid in listed.stdout.split()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    text = end(run, 6)
    assert "rank 1" in text and time.monotonic() - began < 90
    newest = max(found(Path("runs/killed/checkpoints")))
    end(train(2, "killed", steps=newest + 2, ckpt_interval=50, **copied, **{"continue": "newest"}))
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
