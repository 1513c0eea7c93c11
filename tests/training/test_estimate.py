"""`llmq-estimate`: the plan of a run in lines, on cards that are not here."""

import re
from dataclasses import replace

import pytest
from tiny_engines import BF16, plan_of, tiny
from tiny_runs import folder

from llmq.backends.planned import PlannedBackend
from llmq.cli import estimate as command
from llmq.disk import MIB
from llmq.engine import advice
from llmq.plan.memory import Memory
from llmq.training.estimate import fullest

SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
SIZES = ("--batch-size=2", "--seq-len=16", "--grad-accumulation=2", "--model-dtype=bf16")


def estimated(capsys, tmp_path, *arguments):
    """Exit code, and what is printed."""
    with pytest.raises(SystemExit) as ended:
        command.main([f"--model={folder(tmp_path / 'model', **SHAPE)}", *SIZES, *arguments])
    return ended.value.code, capsys.readouterr()


def test_it_prints_the_plan_that_training_runs(capsys, tmp_path):
    flags = ("--recompute-block", "--offload-residual", "--offload-optimizer", "--lmhead-chunks=1")
    code, said = estimated(capsys, tmp_path, "--gpu=RTX 4090", *flags)
    memory = Memory(("recompute_block",), offload=("residual",), host=("m", "v"))
    scratch_bytes = PlannedBackend(capability=(8, 9)).scratch_bytes
    config = tiny(num_layers=1, **SHAPE)
    plan = plan_of(replace(BF16, m="fp32", v="fp32"), memory, config, scratch_bytes=scratch_bytes)
    assert code == 0
    for name, size in plan.table().items():
        row = next(line for line in said.out.splitlines() if line.startswith(f"  {name} "))
        assert row.split()[-2:] == [f"{size / MIB:,.1f}", f"{plan.table('host')[name] / MIB:,.1f}"]
    assert re.search(r"A step of 64 tokens takes about [\d.]+ s, [\d,]+ tokens/s: a model", said.out)
    assert "On disk: a checkpoint" in said.out


def test_a_card_without_a_known_rate_has_that_of_one_like_it(capsys, tmp_path):
    code, said = estimated(capsys, tmp_path, "--gpu=24GiB")
    (tmp_path / "again").mkdir()
    named = estimated(capsys, tmp_path / "again", "--gpu=RTX 4090")[1].out.splitlines()[-1]
    told = ", with the rates of the RTX 4090, as those of 24 GiB are not known"
    assert code == 0 and said.out.splitlines()[-1] == named + told


def test_a_card_has_to_be_named(capsys):
    """With everything else that is wrong."""
    with pytest.raises(SystemExit) as ended:
        command.main(["--model=Qwen2.5-7B", "--seq-len=0"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "--gpu is needed: GPU to plan for" in said and "--seq-len 0" in said


def test_a_run_that_does_not_fit_is_refused_after_its_table(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(advice, "remedies", lambda plan, room: [])
    code, said = estimated(capsys, tmp_path, "--gpu=1.3GiB", "--batch-size=256", "--seq-len=256")
    assert code == 4 and "are missing" in said.err and "Weights" in said.out


@pytest.mark.slow
def test_the_tensors_of_a_plan_that_does_not_fit_are_listed(capsys, tmp_path):
    sizes = ("--gpu=1.3GiB", "--batch-size=256", "--seq-len=256")
    code, said = estimated(capsys, tmp_path, *sizes, f"--debug-memory={tmp_path / 'lists' / 'slots.txt'}")
    text = (tmp_path / "lists" / "slots.txt").read_text("utf-8")
    assert code == 4 and "slots.txt" in said.out and "Program evaluate" in text
    (tmp_path / "again").mkdir()
    code, said = estimated(capsys, tmp_path / "again", *sizes, "--debug-memory=-")
    assert code == 4 and text in said.out


def test_a_rank_of_many_holds_its_share(capsys, tmp_path):
    code, said = estimated(capsys, tmp_path, "--gpu=H200", "--gpus=4", "--zero-level=3")
    assert code == 0 and "each of 4 GPUs" in said.out and "A step of 256 tokens" in said.out


def test_what_is_alive_at_the_fullest_call_is_the_peak():
    for memory in (Memory(), Memory(("recompute_block",), offload=("residual",))):
        program = plan_of(memory=memory).programs["first"]
        index, alive = fullest(program)
        assert sum(size for _, size in alive.values()) <= program.live_bytes["device"]
        assert sum(size for _, size in alive.values()) >= 0.9 * program.live_bytes["device"]
        assert 0 <= index < len(program.calls) and any("*" in name for name in alive)
