"""`llmq-estimate --longest`: the longest sequence whose plan fits, and no longer one."""

import re

import pytest
from tiny_runs import folder

from llmq.cli import estimate as command
from llmq.hardware import cards
from llmq.training import longest
from llmq.training.longest import _most

SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
CONTEXT = cards.CONTEXT_BYTES // 2**20
FLAGS = ("--gpu=H200", "--model-dtype=bf16", "--no-deterministic", "--recompute-block")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(longest, "UNIT", 128)
    monkeypatch.setattr(longest, "HEAD_UNIT", 64)
    return f"--model={folder(tmp_path / 'model', **SHAPE)}"


def run(capsys, *arguments):
    """Exit code, and what is printed."""
    with pytest.raises(SystemExit) as ended:
        command.main([*arguments])
    return ended.value.code, capsys.readouterr()


@pytest.mark.slow
def test_no_longer_one_fits(capsys, model):
    limit = f"--memory-limit={CONTEXT + 38}MiB"
    code, said = run(capsys, model, *FLAGS, limit, "--longest")
    found = re.search(r"in steps of 128 tokens: (--seq-len (\d+) --seq-tiles (\d+) --lmhead-chunks (\d+))", said.out)
    length, tiles, chunks = map(int, found.groups()[1:])
    assert code == 0 and length == 128 * tiles == 64 * chunks and tiles > 1
    single = (model, *FLAGS, limit, "--batch-size=1", "--grad-accumulation=1")
    code, again = run(capsys, *single, *found[1].split())
    assert code == 0 and again.out == said.out.partition("\n")[2]
    longer = (f"--seq-len={length + 128}", f"--seq-tiles={tiles + 1}", f"--lmhead-chunks={chunks + 2}")
    assert run(capsys, *single, *longer)[0] == 4


def test_what_is_given_stays_and_the_host_is_a_limit(capsys, model):
    offload, limit = "--offload-residual", "--host-memory-limit=0.2MiB"
    code, said = run(capsys, model, *FLAGS, offload, limit, "--lmhead-chunks=2", "--longest")
    (length,) = re.findall(r"--seq-len (\d+) --seq-tiles", said.out)
    assert code == 0 and 64 * 2 * int(length) <= 0.2 * 2**20, "a stream of 64 channels in bf16"
    assert 64 * 2 * (int(length) + 128) > 0.2 * 2**20


@pytest.mark.slow
def test_what_an_attention_without_its_workspace_allows_is_said(capsys, model):
    limit = f"--memory-limit={CONTEXT + 38}MiB"
    strict = tuple(flag for flag in FLAGS if flag != "--no-deterministic")
    code, said = run(capsys, model, *strict, limit, "--longest")
    line = said.out.splitlines()[0]
    code_relaxed, relaxed = run(capsys, model, *FLAGS, limit, "--longest")
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
def test_refusals(capsys, model, arguments, code, says):
    found, said = run(capsys, model, *FLAGS, *arguments, "--longest")
    assert found == code and says in said.err


@pytest.mark.parametrize("most", [0, 1, 2, 7, 8, 63, 64, 100])
def test_the_largest_is_found_up_to_the_limit(most):
    assert _most(lambda count: count <= most, 64) == min(most, 64)
