"""Losses that jump: reported, skipped on the device, or undone, with the same bits on resuming."""

import io
import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from in_process import train_on
from tiny_runs import ON_TOKENS, T, folder, weights_of

from llmq.data.tokens.token_file import TokenWriter
from llmq.errors import UsageError
from llmq.files.checkpoint import load
from llmq.options.parse import Options
from llmq.report.read import read_log
from llmq.training.faults import LEVEL, Spikes
from llmq.training.hooks import Ask, Hook

AT = 12  # the first step that is a spike
SPIKES = {"spike_window": 4, "spike_zscore": 2.0}
OPTIONS = {
    **ON_TOKENS,
    "model": "source",
    "from_scratch": True,
    "name": "run",
    "learning_rate": 3e-2,
    "warmup": 0,
    "steps": 16,
    "ckpt_interval": 2,
    "ckpt_keep_n": 0,
    "eval_every_n_steps": 0,
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model, and rows of one token, of which one has others."""
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "source")
    folder(tmp_path / "wide", hidden_size=64, head_dim=16, intermediate_size=128)  # which a GPU takes
    tokens = np.full(40 * T + 1, 5)
    tokens[21 * T : 22 * T] = np.arange(T) + 40
    with TokenWriter("train.bin", vocab_size=97) as file:
        file.append(tokens.astype(np.int32))


def train(console=None, size=1, hooks=(), **changes):
    return train_on(size, {**OPTIONS, **changes}, console, hooks)


def spikes(name="run"):
    """The steps that a run calls spikes."""
    return [event["step"] for event in read_log(f"runs/{name}").events if "spike" in event]


def masters(step, name="run"):
    _, read = load(f"runs/{name}/checkpoints/step-{step:08}")
    return {tensor: read(tensor).tobytes() for tensor in read.tensors if tensor.startswith(("master:", "m:", "v:"))}


@pytest.mark.slow
def test_a_warning_changes_no_bit(place):
    console = io.StringIO()
    warned = train(console, on_spike="warn", **SPIKES)
    loss = dict(zip(*(read_log("runs/run").train[key] for key in ("step", "loss")), strict=True))[AT]
    assert spikes()[0] == AT and f"Step {AT}: the loss of {loss:.4f} is a spike, " in console.getvalue()
    assert masters(16) == masters(16, train(name="plain") and "plain")
    assert warned.exit_code == 0


WAYS = {
    "plain": {},
    "two ranks": {"size": 2, "zero_level": 2, "grad_accumulation": 2},
    "fused": {"fused_update": True, "grad_clip": 0.0, "grad_accumulation": 1},
    "fp8": {"model_dtype": "bf16", "matmul_dtype": "e4m3"},
    "last norm": {"clip_by": "last", "offload_optimizer": True, "spike_zscore": 1.0},
}


@pytest.mark.quick("fused")
@pytest.mark.parametrize("way", WAYS)
def test_the_update_of_a_spike_is_skipped(place, way):
    result = train(on_spike="skip", ckpt_interval=1, **{**SPIKES, **WAYS[way]})
    found = spikes()
    log = read_log("runs/run").train
    assert found and log["step"][log["applied"] == 0].tolist() == found and np.isfinite(log["norm"]).all()
    assert masters(found[0]) == masters(found[0] - 1) != masters(found[0] + 1)
    assert result.exit_code == 0 and result.model_path is not None


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"fused_update": True, "grad_clip": 0.0, "grad_accumulation": 1}], ids=str)
def test_a_gpu_skips_the_update_of_a_spike(place, more):
    train(model="wide", device="cuda", on_spike="skip", ckpt_interval=1, **{**SPIKES, "spike_zscore": 1.0, **more})
    log, found = read_log("runs/run").train, spikes()
    assert found and log["step"][log["applied"] == 0].tolist() == found
    assert masters(found[0]) == masters(found[0] - 1) != masters(found[0] + 1)


class Ends(Hook):
    """Sends SIGTERM after a step."""

    def __init__(self, step):
        self.step = step

    def after_step(self, run, record):
        if record.step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["skip", "rollback"])
def test_a_resumed_run_knows_the_losses_before(place, what):
    options = {"on_spike": what, "rollback_limit": 9 if what == "rollback" else 3, **SPIKES}
    whole = train(**options, name="whole")
    for step in (AT - 1, AT + 1):
        options["name"] = f"ends-{step}"
        assert spikes("whole") and train(hooks=[Ends(step)], **options).exit_code == 75
        parts = train(**options, **{"continue": "newest"})
        assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
        assert spikes(options["name"]) == spikes("whole")


def test_a_spike_is_undone(place):
    console = io.StringIO()
    result = train(console, on_spike="rollback", rollback_limit=9, **SPIKES)
    assert "Back to the checkpoint of step 10, 1 of at most 9 times" in console.getvalue()
    assert result.steps == 16 and (result.history["loss"][6:] < 0.8).all()


class Log:
    def __init__(self):
        self.said = []

    def notice(self, text, **facts):
        self.said.append((text, facts))


def test_the_window_and_a_new_level():
    log = Log()
    hook, run = Spikes(log, window=4, zscore=3.0), None

    def step(loss):
        return hook.after_step(run, SimpleNamespace(step=1, loss=loss, norm=1.0, applied=True))

    for loss in (
        9.0,
        1.0,
        1.5,
        math.inf,
        1.0,
        1.5,
    ):  # the first leaves the window; what is not finite is no matter of it
        step(loss)
        assert not log.said
    step(1.25)
    assert math.isclose(hook.limit, 1.3125 + 3 * np.std([1.0, 1.5, 1.5, 1.25]), rel_tol=0.05)
    again = Spikes(log, window=4, zscore=3.0)
    again.resume(hook.state())
    assert again.limit == hook.limit
    for _ in range(LEVEL):
        assert step(8.0) == Ask.NOTHING
    assert len(log.said) == LEVEL + 1 and "are where the loss is now" in log.said[-1][0]
    assert log.said[0][1]["spike"]["loss"] == 8.0 and hook.limit == math.inf
    hook.resume({"losses": [2.0] * 4, "in_a_row": 0})  # of equal losses: rounding is no spike
    step(2.001)
    assert len(log.said) == LEVEL + 1


def test_what_is_for_spikes_alone_needs_them():
    with pytest.raises(UsageError, match="--spike-window 9 is for --on-spike"):
        Options.parse({"model": "m", "train_file": "t", "spike_window": 9})
