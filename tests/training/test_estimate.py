"""`llmq-estimate`: the plan of a run in lines, on cards that are not here, and the longest sequence that fits."""

import re
from dataclasses import replace

import pytest
from tiny_engines import BF16, plan_of, tiny
from tiny_runs import folder

from llmq.backends.planned import PlannedBackend
from llmq.disk import MIB
from llmq.engine import advice
from llmq.hardware import cards
from llmq.plan.memory import Memory
from llmq.training import fit

SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
SIZES = ("--batch-size=2", "--seq-len=16", "--grad-accumulation=2", "--model-dtype=bf16")


@pytest.fixture
def model(tmp_path):
    return f"--model={folder(tmp_path / 'model', **SHAPE)}"


def test_it_prints_the_plan_that_training_runs(estimated, model):
    flags = ("--recompute-block", "--offload-residual", "--offload-optimizer", "--lmhead-chunks=1")
    code, said = estimated(model, *SIZES, "--gpu=RTX 4090", *flags)
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


def test_a_card_without_a_known_rate_has_that_of_one_like_it(estimated, model):
    code, said = estimated(model, *SIZES, "--gpu=24GiB")
    named = estimated(model, *SIZES, "--gpu=RTX 4090")[1].out.splitlines()[-1]
    rates = ", with the rates of the RTX 4090, as those of 24 GiB are not known"
    assert code == 0 and said.out.splitlines()[-1] == named + rates


def test_a_card_has_to_be_named(estimated):
    """With everything else that is wrong."""
    code, said = estimated("--model=Qwen2.5-7B", "--seq-len=0")
    assert code == 2 and "--gpu is needed: GPU to plan for" in said.err and "--seq-len 0" in said.err


def test_a_run_that_does_not_fit_is_refused_after_its_table(estimated, model, monkeypatch):
    monkeypatch.setattr(advice, "remedies", lambda plan, room: [])
    code, said = estimated(model, *SIZES, "--gpu=1.3GiB", "--batch-size=256", "--seq-len=256")
    assert code == 4 and "are missing" in said.err and "Weights" in said.out


@pytest.mark.slow
def test_the_tensors_of_a_plan_that_does_not_fit_are_listed(estimated, model, tmp_path, monkeypatch):
    monkeypatch.setattr(advice, "remedies", lambda plan, room: [])
    sizes = (model, *SIZES, "--gpu=1.3GiB", "--batch-size=256", "--seq-len=256")
    code, said = estimated(*sizes, f"--debug-memory={tmp_path / 'lists' / 'slots.txt'}")
    text = (tmp_path / "lists" / "slots.txt").read_text("utf-8")
    assert code == 4 and "slots.txt" in said.out and "Program evaluate" in text
    code, said = estimated(*sizes, "--debug-memory=-")
    assert code == 4 and text in said.out


def test_a_rank_of_many_holds_its_share(estimated, model):
    code, said = estimated(model, *SIZES, "--gpu=H200", "--gpus=4", "--zero-level=3")
    assert code == 0 and "each of 4 GPUs" in said.out and "A step of 256 tokens" in said.out


FLAGS = ("--gpu=H200", "--model-dtype=bf16", "--no-deterministic", "--recompute-block")
CONTEXT = cards.CONTEXT_BYTES // 2**20


@pytest.fixture
def units(model, monkeypatch):
    """The model, whose lengths are multiples of 128."""
    monkeypatch.setattr(fit, "UNIT", 128)
    monkeypatch.setattr(fit, "HEAD_UNIT", 64)
    return model


@pytest.mark.slow
def test_no_longer_one_fits(estimated, units):
    limit = f"--memory-limit={CONTEXT + 34}MiB"
    code, said = estimated(units, *FLAGS, limit, "--longest")
    found = re.search(r"in steps of 128 tokens: (--seq-len (\d+) --seq-tiles (\d+) --lmhead-chunks (\d+))", said.out)
    length, tiles, chunks = map(int, found.groups()[1:])
    assert code == 0 and length == 128 * tiles == 64 * chunks and tiles > 1
    single = (units, *FLAGS, limit, "--batch-size=1", "--grad-accumulation=1")
    code, again = estimated(*single, *found[1].split())
    assert code == 0 and again.out == said.out.partition("\n")[2]
    longer = (f"--seq-len={length + 128}", f"--seq-tiles={tiles + 1}", f"--lmhead-chunks={chunks + 2}")
    assert estimated(*single, *longer)[0] == 4


@pytest.mark.slow
def test_what_is_given_stays_and_the_host_is_a_limit(estimated, units):
    offload, limit = "--offload-residual", "--host-memory-limit=0.2MiB"
    code, said = estimated(units, *FLAGS, offload, limit, "--lmhead-chunks=2", "--longest")
    (length,) = re.findall(r"--seq-len (\d+) --seq-tiles", said.out)
    assert code == 0 and 64 * 2 * int(length) <= 0.2 * 2**20, "a stream of 64 channels in bf16"
    assert 64 * 2 * (int(length) + 128) > 0.2 * 2**20


@pytest.mark.slow
def test_what_an_attention_without_its_workspace_allows_is_said(estimated, units):
    limit = f"--memory-limit={CONTEXT + 36}MiB"
    strict = tuple(flag for flag in FLAGS if flag != "--no-deterministic")
    code, said = estimated(units, *strict, limit, "--longest")
    line = said.out.splitlines()[0]
    code_relaxed, relaxed = estimated(units, *FLAGS, limit, "--longest")
    (length,) = re.findall(r"--seq-len (\d+) --seq-tiles", relaxed.out)
    assert code == code_relaxed == 0 and line.endswith(f"; --no-deterministic allows {int(length):,} tokens")
    assert int(re.search(r"--seq-len (\d+)", line)[1]) < int(length) and "allows" not in relaxed.out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--seq-len=64",), 2, "leave out --seq-len"),
        (("--fit",), 2, "leave out --fit"),
        ((f"--memory-limit={CONTEXT + 1}MiB",), 4, "not even 128 tokens fit in 1.0 MiB"),
    ],
)
def test_refusals(estimated, units, arguments, code, says):
    found, said = estimated(units, *FLAGS, *arguments, "--longest")
    assert found == code and says in said.err
