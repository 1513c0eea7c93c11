"""The command that trains two trees side by side: a tree equals itself, and what differs is named."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import side_by_side
import side_by_side_cases
from side_by_side_cases import BF16, TIED, Case, cases

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_tree_equals_itself_also_where_a_run_resumes():
    command = [sys.executable, str(ROOT / "tests" / "side_by_side.py"), "--against", str(ROOT)]
    command += ["--cases", "^bf16, bf16 moments, resumed$"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = "PASS  bf16, bf16 moments, resumed"
    assert done.stdout.splitlines()[:2] == [passed, f"{passed} from the older tree's checkpoint"]
    assert "\n2 of 2 cases are equal to" in done.stdout


@pytest.mark.slow
def test_what_differs_is_named(monkeypatch, tmp_path, capsys):
    """In the log, in the weights alone, and where one tree refuses the run; equal cases beside them pass."""
    weights_alone = {"steps": 1, "eval_every_n_steps": 0}
    found = [
        Case("seed", {"from_scratch": True}, old={"seed": 6}),
        Case("decay", weights_alone, old={"weight_decay": 0.2}),
        Case("same", weights_alone),
        Case("refused", {}, old={"lr_schedule": "steep"}),
    ]
    found = [Case(c.name, {"model": f"../../{TIED}", **BF16, **c.options}, old=c.old) for c in found]
    monkeypatch.setattr(side_by_side_cases, "cases", lambda: found)
    arguments = Namespace(against=str(ROOT), cases="", gpu=False)
    assert side_by_side.compare(arguments, tmp_path) == 3
    seed, decay, same, refused, _ = capsys.readouterr().out.splitlines()
    assert seed.startswith("FAIL  seed: train record of step 1: loss 5.")
    assert decay.startswith("FAIL  decay: model.embed_tokens.weight: ") and " numbers, by up to " in decay
    assert same == "PASS  same"
    assert refused.startswith("FAIL  refused: the older tree: UsageError: --lr-schedule steep")


def test_the_older_tree_is_that_of_a_commit(tmp_path):
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("needs a git checkout")
    assert (side_by_side.older_tree("HEAD", tmp_path / "tree") / "llmq" / "__init__.py").is_file()


@pytest.mark.parametrize(
    ("against", "cases", "says"),
    [
        (ROOT, "nothing of the kind", "--cases nothing of the kind: no case has that"),
        ("no-such-commit", "^fp32, llama$", "--against no-such-commit: "),
    ],
)
def test_a_wrong_call_is_refused(against, cases, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        side_by_side.compare(Namespace(against=str(against), cases=cases, gpu=False), tmp_path)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(says)


def test_no_case_is_there_twice():
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
