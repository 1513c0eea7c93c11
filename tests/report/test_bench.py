"""The bench trains for real: it reports what was measured, family by family, and refuses what it cannot run."""

import json

import numpy as np
import pytest
from tiny_engines import FP32, plan_of, tiny

from llmq.backends.host import HostBackend
from llmq.cli import bench, shell
from llmq.config import to_hf
from llmq.plan.memory import Memory
from llmq.report.bench import Clock, family, measure, random_parameters, zipf_batch


def test_every_op_of_a_step_belongs_to_a_family():
    named = {}
    for name in ("next", "update"):
        for step in plan_of(FP32, config=tiny(qk_norm=True)).programs[name].steps:
            named.setdefault(family(step.op, step.outputs[0].ref.name), set()).add(step.op)
    assert named["head"] == {"linear_forward", "linear_dgrad", "linear_wgrad"}
    assert named["linears wgrad"] == {"linear_wgrad", "bias_backward"}
    assert named["optimizer"] == {"sum_squares", "grad_scale", "adamw"}
    assert named["embedding"] == {"embedding_forward", "embedding_backward"}


SHAPE = {"batch_size": 2, "seq_len": 16, "tokens_per_step": 64, "steps": 3, "warmup": 1}


def test_measured_steps_are_training_steps():
    speed = measure(tiny(), FP32, Memory(), HostBackend(), Clock(), **SHAPE)
    assert len(speed.seconds) == 3 and speed.tokens_per_step == 64
    median, low, high = speed.tokens_per_second
    assert low <= median <= high and high == pytest.approx(64 / min(speed.seconds))
    assert speed.update_ms > 0 and all(ms > 0 for ms in speed.micro_step_ms.values())
    assert {"linears forward", "head", "attention backward", "cross-entropy"} <= speed.micro_step_ms.keys()


def test_the_parts_timed_one_by_one_are_about_the_whole():
    """A forgotten family would be missing. Steps take 10 ms: what else the machine does must not turn this red."""
    found = []
    while len(found) < 10:
        speed = measure(tiny(), FP32, Memory(), HostBackend(), Clock(), **SHAPE)
        parts = 2 * sum(speed.micro_step_ms.values()) + speed.update_ms
        found.append(1e-3 * parts / (sum(speed.seconds) / 3))
        if 0.3 < found[-1] < 3:
            return
    raise AssertionError(found)


def test_generated_tokens_repeat_like_words():
    tokens, targets = zipf_batch(1000, 4, 256, seed=0)
    assert np.array_equal(tokens[:, 1:], targets[:, :-1]) and tokens.min() >= 0 and tokens.max() < 1000
    counts = np.sort(np.bincount(tokens.ravel(), minlength=1000))[::-1]
    assert counts[0] > 10 * counts[50] > 0


def test_weights_are_random_and_their_padding_is_zero():
    values = {row.name: value for row, value in random_parameters(plan_of(FP32), 0)}
    assert values["layers.0.mlp.up.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert (values["head.norm"] == 1).all() and not values["embed.weight"][97:].any()


def test_the_command_prints_and_saves(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(to_hf(tiny(), "fp32")))
    shape = ["--batch-size=2", "--seq-len=16", "--tokens-per-step=64", "--steps=2", "--warmup=1", "--device=cpu"]
    arguments = [f"--models={tmp_path}", "--dtypes=fp32,e4m3", *shape, f"--save={tmp_path}/out.json"]
    assert shell.run(bench.command, arguments) == 0
    assert "tokens/s" in capsys.readouterr().out
    first, second = json.loads((tmp_path / "out.json").read_text())
    assert (first["dtype"], second["dtype"]) == ("fp32", "e4m3")
    assert first["tokens_per_second"]["median"] > 0 and first["sol"] > 0 and "quantize" in second["micro_step_ms"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--models=Qwen2.5-0.6B"], "Qwen2.5-0.5B"),
        (["--dtypes=int4"], "known are"),
        (["--recompute=everything"], "known are"),
        (["--batch-size=3", "--seq-len=100"], "524100"),
    ],
)
def test_bad_input_is_one_message(arguments, says, capsys):
    assert shell.run(bench.command, [*arguments, "--device=cpu"]) == 2
    assert says in capsys.readouterr().err
