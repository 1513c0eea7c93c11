"""`llmq-launch` and `llmq-train --gpus N`: what they start, and what they refuse."""

import os
import subprocess
import sys
from pathlib import Path

import fake_cuda
import fake_gpu
import pytest

from llmq.cli import launch, shell, train
from llmq.comm import launch as launching
from llmq.comm.launch import free_port

ROOT = Path(__file__).parents[2]
RUN = ("--model=m", "--train-file=t.bin", "--name=n")


@pytest.fixture
def groups(monkeypatch):
    """The groups that were to be started, on a machine with two GPUs; they end with code 9."""
    fake_gpu.install(monkeypatch, fake_cuda.FakeDriver(gpus=(fake_cuda.H200,) * 2))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "LLMQ_", "OMPI_", "PMI_"))]:
        monkeypatch.delenv(name)
    found = []
    monkeypatch.setattr(launching, "run_group", lambda group, restarts: found.append((group, restarts)) or 9)
    return found


def trains(*arguments):
    """`llmq-train`."""
    return shell.run(train.command(), arguments)


def launches(*arguments):
    """`llmq-launch`."""
    return shell.run(launch.command, arguments)


@pytest.mark.parametrize("asked", ["2", "0"])
def test_a_process_per_gpu(groups, asked):
    arguments = (*RUN, "--gpus", asked, "--restart-failed=4")
    assert trains(*arguments) == 9
    [(group, restarts)] = groups
    first = group.first
    assert (group.num, first.size, first.rank, first.kind, restarts) == (2, 2, 0, "--gpus", 4)
    assert group.command == ("llmq.cli.start:train", *arguments) and group.logs == Path("runs/n")
    assert first.start == ("llmq-train",)  # whose option --gpus starts as many
    assert (first.master_addr, first.master_port, len(group.cores), len(first.token)) == ("127.0.0.1", 0, 2, 32)


def test_the_ranks_of_the_second_machine(groups, monkeypatch):
    monkeypatch.setenv("LLMQ_JOB_TOKEN", "given")
    machines = ("--nnodes=3", "--node-rank=1", "--master-addr=node0", "--master-port=29400", "--join-timeout=5")
    assert launches(*machines, "--gpus=2", "--", *RUN) == 9
    [(group, _)] = groups
    first = group.first
    assert (group.num, first.size, first.rank, first.kind) == (2, 6, 2, "llmq-launch")
    assert (first.master_addr, first.master_port, first.token, first.join_s) == ("node0", 29400, "given", 5.0)
    same = ("--nnodes=3", "--node-rank=1", "--master-addr=node0", "--master-port=29400", "--gpus=2", "--join-timeout=5")
    assert first.start == ("llmq-launch", *same, "--")
    launches("--procs=3", "--", *RUN, "--device=cpu")
    assert groups[1][0].first.start == ("llmq-launch", "--procs=3", "--")


def test_machines_of_one_user_have_one_token(groups, monkeypatch, tmp_path):
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path))
    machines = ("--nnodes=2", "--master-addr=node0", "--gpus=1")
    for more in (("--master-port=1", "--node-rank=0"), ("--master-port=1", "--node-rank=1"), ("--master-port=2",)):
        launches(*machines, *more, "--", *RUN)
    tokens = [group.first.token for group, _ in groups]
    assert tokens[0] == tokens[1] != tokens[2]


def test_a_rank_and_a_dry_run_start_nothing(groups, monkeypatch):
    ran = []
    module = type(sys)("llmq.training.train")
    module.run = lambda options: ran.append(options) or type("Result", (), {"exit_code": 0})
    monkeypatch.setitem(sys.modules, "llmq.training.train", module)
    assert trains(*RUN, "--gpus=2", "--dry-run") == 0
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert trains(*RUN, "--gpus=2") == 0
    assert len(ran) == 2 and not groups


def test_gpus_that_are_not_there_are_not_started(groups, capsys):
    assert trains("--gpus=3", *RUN) == 2 and not groups
    assert "--gpus 3: CUDA sees 2 here; llmq-launch --procs N starts ranks on the CPU" in capsys.readouterr().err


@pytest.mark.parametrize("command", [trains, launches])
def test_two_launchers_are_refused(groups, monkeypatch, capsys, command):
    for name, value in {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    arguments = (*RUN, "--launcher=ray") if command is trains else ("--procs=2", "--", *RUN)
    assert command(*arguments) == 2
    said = capsys.readouterr().err
    assert "Open MPI started" in said and "OMPI_COMM_WORLD_RANK" in said and not groups


@pytest.fixture
def machines(tmp_path):
    """A function that runs `llmq-launch` on two machines with a rank each: exit codes, and what each has shown."""

    def run(stand_in, *arguments):
        script = "from llmq.cli import launch as l, shell; l.PROGRAM = 'stand_in:run'; shell.main(l.command)"
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/comm'}", "STAND_IN": stand_in}
        environ |= {"LLMQ_JOB_TOKEN": "token"}
        flags = ["--nnodes=2", "--master-addr=localhost", f"--master-port={free_port()}", "--procs=1"]
        command = [sys.executable, "-c", script, *flags, "--join-timeout=60"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ends = [[f"--node-rank={node}", "--", *RUN, *arguments] for node in (0, 1)]
        started = [subprocess.Popen([*command, *end], cwd=tmp_path, env=environ, **streams) for end in ends]
        said = [machine.communicate(timeout=120)[0] for machine in started]
        return [machine.returncode for machine in started], said

    return run


@pytest.mark.slow
def test_two_machines_meet(machines, tmp_path):
    """Only machine 0 shows what the run prints."""
    codes, said = machines("exchange")
    assert codes == [0, 0] and said[1] == "" and "the sum over 2 ranks is" in said[0], said
    assert (tmp_path / "runs/n/rank-00001.log").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_two_machines_start_again(machines, tmp_path, rank):
    codes, said = machines(f"fail-once {rank} {tmp_path}", "--restart-failed=2")
    assert codes == [0, 0] and "the sum over 2 ranks is" in said[0], said
    assert all("starting again from the last checkpoint (start 2 of 3)" in text for text in said)
    assert "rank 1 ended with exit code" in said[1]
