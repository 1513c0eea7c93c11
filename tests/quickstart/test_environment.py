"""The environment that the scripts make: nothing is done twice, nothing foreign is touched, failures say what to do."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_cuda import RTX_2080, FakeDriver, install

from llmq.quickstart import environment


@pytest.fixture
def calls(monkeypatch):
    """Commands that would have run; each succeeds, and making an environment leaves a Python that runs."""
    ran = []
    real = subprocess.run

    def run(command, **keywords):
        if "-c" in command:
            return real(command, **keywords)
        ran.append(command)
        if "venv" in command:
            folder = environment.Path(command[-1])
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").symlink_to(sys.executable)
            (folder / "pyvenv.cfg").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(environment.subprocess, "run", run)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    return ran


def test_a_second_call_does_nothing(tmp_path, calls):
    assert environment.make(tmp_path / "venv", ["test"], [])
    made = len(calls)
    assert [command[1:3] for command in calls] == [["-m", "venv"], ["-m", "pip"], ["-m", "pip"]]
    assert not environment.make(tmp_path / "venv", ["test"], [])
    assert len(calls) == made


def test_more_packages_are_added_and_fewer_are_enough(tmp_path, calls):
    environment.make(tmp_path / "venv", ["test"], [])
    del calls[:]
    assert environment.make(tmp_path / "venv", ["test"], ["torch==2.13.0"])
    assert not any("venv" in command for command in calls)
    assert calls[-1][-1] == "torch==2.13.0"
    assert not environment.make(tmp_path / "venv", ["test"], [])


def test_a_changed_project_file_installs_again(tmp_path, calls, monkeypatch):
    environment.make(tmp_path / "venv", [], [])
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    assert environment.make(tmp_path / "venv", [], [])


def test_uv_is_used_where_it_is(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/opt/uv")
    environment.make(tmp_path / "venv", ["test"], [])
    assert [command[:2] for command in calls] == [["/opt/uv", "venv"], ["/opt/uv", "pip"]]


def test_a_folder_with_something_else_is_left_alone(tmp_path, calls):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(environment.EnvironmentProblem, match="not a virtual environment"):
        environment.make(tmp_path, [], [])
    assert not calls


def test_a_python_without_venv_names_the_package(tmp_path, calls, monkeypatch, capsys):
    """Debian and Ubuntu put ensurepip into a package of its own."""
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    assert environment.main([str(tmp_path / "venv")]) == 2
    assert "apt install python{}.{}-venv".format(*sys.version_info) in capsys.readouterr().err
    assert not (tmp_path / "venv").exists()


def test_an_install_that_fails_is_tried_again(tmp_path, calls, monkeypatch, capsys):
    environment.make(tmp_path / "venv", [], [])
    succeeding = environment.subprocess.run
    monkeypatch.setattr(
        environment.subprocess,
        "run",
        lambda command, **k: subprocess.CompletedProcess(command, 1) if "pip" in command else succeeding(command, **k),
    )
    assert environment.main([str(tmp_path / "venv"), "--extra", "plot"]) == 2
    assert "failed with exit code 1" in capsys.readouterr().err
    monkeypatch.setattr(environment.subprocess, "run", succeeding)
    assert environment.make(tmp_path / "venv", ["plot"], [])


def test_setuptools_leaves_nothing_in_the_checkout(tmp_path, calls, monkeypatch):
    """An editable install writes an egg-info folder there; one that was there before belongs to somebody else."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "other.egg-info").mkdir()
    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    installing = environment.subprocess.run

    def run(command, **keywords):
        if "-e" in command:
            (tmp_path / "llmq_train.egg-info").mkdir()
        return installing(command, **keywords)

    monkeypatch.setattr(environment.subprocess, "run", run)
    environment.make(tmp_path / "venv", [], [])
    assert [path.name for path in tmp_path.glob("*.egg-info")] == ["other.egg-info"]


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        (None, None),
        (FakeDriver(cuda=12000), "cuda12"),
        (FakeDriver(cuda=12090), "cuda12"),
        (FakeDriver(cuda=13000), "cuda13"),
        (FakeDriver(cuda=13020), "cuda13"),
        (FakeDriver(cuda=11080), None),
        (FakeDriver(failure=100), None),
        (FakeDriver(gpus=(RTX_2080,)), None),
    ],
)
def test_the_driver_chooses_the_libraries_for_the_gpu(driver, extra, tmp_path, calls, monkeypatch, capsys):
    """Drivers 525 to 579 run CUDA 12, from 580 on 13; a driver that will not do is told, no driver is no news."""
    install(monkeypatch, driver)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**11))
    assert environment.main([str(tmp_path / "venv"), "--extra", "plot", "--cuda"]) == 0
    wanted = f"[plot,{extra}]" if extra else "[plot]"
    assert calls[-1][-1] == f"{environment.CHECKOUT}{wanted}"
    said = capsys.readouterr().err
    assert ("left out" in said) == (driver is not None and extra is None)
    assert ("GB to download" in said) == (extra is not None)


def test_the_libraries_for_the_gpu_are_asked_for(tmp_path, calls, monkeypatch):
    install(monkeypatch, FakeDriver())
    assert environment.main([str(tmp_path / "venv")]) == 0
    assert calls[-1][-1] == str(environment.CHECKOUT)


def test_a_disk_without_room_is_told_before_the_download(tmp_path, calls, monkeypatch, capsys):
    install(monkeypatch, FakeDriver())
    asked = []
    monkeypatch.setattr(
        environment.shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=3_000_000_000)
    )
    assert environment.main([str(tmp_path / "not" / "there"), "--cuda"]) == 2
    said = capsys.readouterr().err
    assert "takes 3.8 GB, 3.0 GB are free" in said and said.endswith("bash tools/quickstart.sh --cpu\n")
    assert asked == [tmp_path] and not calls


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with the quickstart's script and a Python that notes how it is called."""
    python, tools = tmp_path / "python", tmp_path / "checkout" / "tools"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$@" >> "$CALLED"\n')
    python.chmod(0o755)
    tools.mkdir(parents=True)
    for name in ("quickstart.sh", "python.sh"):
        shutil.copy(environment.CHECKOUT / "tools" / name, tools)
    (tmp_path / "checkout" / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "checkout" / ".venv" / "bin" / "python").symlink_to(python)
    monkeypatch.setenv("PYTHON", str(python))
    monkeypatch.setenv("CALLED", str(tmp_path / "called"))
    return tmp_path / "checkout"


@pytest.mark.parametrize("arguments", [(), ("--show-resume",), ("--cpu",), ("--show-resume", "--cpu")])
def test_the_quickstart_asks_for_the_libraries_for_the_gpu_unless_told(checkout, arguments):
    assert subprocess.run(["bash", str(checkout / "tools" / "quickstart.sh"), *arguments], check=False).returncode == 0
    made, started = [line.split() for line in (checkout.parent / "called").read_text().splitlines()]
    gpu = [] if "--cpu" in arguments else ["--cuda"]
    assert made == ["-m", "llmq.quickstart.environment", ".venv", "--extra", "plot", *gpu]
    assert started == ["-m", "llmq.quickstart", *arguments]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "usage: bash tools/quickstart.sh"),
        (["--cpu", "-h"], 0, "--show-resume"),
        (["--cpu", "--hlep"], 2, "error: --hlep is no option: there are --cpu, --show-resume and --version"),
    ],
)
def test_the_quickstart_reads_its_options_before_it_installs(checkout, arguments, code, says):
    script = str(checkout / "tools" / "quickstart.sh")
    done = subprocess.run(["bash", script, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == code and says in done.stdout + done.stderr
    assert not (checkout.parent / "called").exists(), "nothing was installed or started"


def test_an_environment_for_the_gpu_serves_without_it(tmp_path, calls, monkeypatch):
    """So that --cpu after a run on the GPU needs no network; the other way round the libraries are installed."""
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**11))
    assert environment.make(tmp_path / "venv", ["plot", "cuda13"], ["torch"])
    assert not environment.make(tmp_path / "venv", ["plot"], [])
    assert not environment.make(tmp_path / "venv", ["plot"], ["torch"])
    assert environment.make(tmp_path / "other", ["plot"], [])
    assert environment.make(tmp_path / "other", ["plot", "cuda13"], [])
