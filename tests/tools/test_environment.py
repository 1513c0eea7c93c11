"""The environment that the scripts make: nothing is done twice, nothing foreign is touched, failures say what to do."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_cuda import RTX_2080, FakeDriver, install

ROOT = Path(__file__).parents[2]
MAKE = ROOT / "tools" / "environment.py"


@pytest.fixture
def environment(monkeypatch):
    """tools/environment.py as a module, on a machine without uv and with a large disk."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    spec = importlib.util.spec_from_file_location("environment", MAKE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**11))
    return module


@pytest.fixture
def calls(environment, monkeypatch):
    """Commands that would have run; each succeeds, and making an environment leaves a Python that runs."""
    ran = []
    real = subprocess.run

    def run(command, **keywords):
        if "-c" in command:
            return real(command, **keywords)
        ran.append(command)
        if "venv" in command:
            folder = Path(command[-1])
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").symlink_to(sys.executable)
            (folder / "pyvenv.cfg").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(environment.subprocess, "run", run)
    return ran


def test_a_second_call_does_nothing(environment, tmp_path, calls):
    environment.make(tmp_path / "venv", ["test"], [])
    made = len(calls)
    assert [command[1:3] for command in calls] == [["-m", "venv"], ["-m", "pip"], ["-m", "pip"]]
    environment.make(tmp_path / "venv", ["test"], [])
    assert len(calls) == made


@pytest.mark.parametrize("more", [(["test"], ["torch==2.13.0"]), (["test", "cuda13"], [])])
def test_more_is_added_and_less_is_enough(environment, tmp_path, calls, more):
    """So that --cpu after a run on the GPU needs no network."""
    environment.make(tmp_path / "venv", ["test"], [])
    del calls[:]
    environment.make(tmp_path / "venv", *more)
    assert calls[-1][-1 - len(more[1]) :] == [f"{ROOT}[{','.join(more[0])}]", *more[1]]
    assert not any("venv" in command for command in calls)
    del calls[:]
    environment.make(tmp_path / "venv", ["test"], [])
    assert not calls


def test_a_changed_project_file_installs_again(environment, tmp_path, calls, monkeypatch):
    environment.make(tmp_path / "venv", [], [])
    made = len(calls)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    environment.make(tmp_path / "venv", [], [])
    assert len(calls) > made and calls[-1][-1] == str(tmp_path)


def test_an_environment_whose_python_is_gone_is_made_again(environment, tmp_path, calls, monkeypatch):
    environment.make(tmp_path / "venv", [], [])
    python = tmp_path / "venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    del calls[:]
    with pytest.raises(FileExistsError):  # the fake venv makes the folder again
        environment.make(tmp_path / "venv", [], [])
    assert calls[0][1:4] == ["-m", "venv", "--clear"]


def test_an_install_that_fails_is_tried_again(environment, tmp_path, calls, monkeypatch):
    environment.make(tmp_path / "venv", [], [])
    succeeding = environment.subprocess.run

    def failing(command, **keywords):
        done = succeeding(command, **keywords)
        return subprocess.CompletedProcess(command, 1) if "pip" in command else done

    monkeypatch.setattr(environment.subprocess, "run", failing)
    with pytest.raises(environment.EnvironmentProblem, match=r"is not complete: .* failed with exit code 1"):
        environment.make(tmp_path / "venv", ["plot"], [])
    monkeypatch.setattr(environment.subprocess, "run", succeeding)
    del calls[:]
    environment.make(tmp_path / "venv", [], [])
    assert calls, "the stamp of the earlier install no longer holds"


def test_uv_is_used_where_it_is(environment, tmp_path, calls, monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/opt/uv")
    environment.make(tmp_path / "venv", ["test"], [])
    assert [command[:2] for command in calls] == [["/opt/uv", "venv"], ["/opt/uv", "pip"]]


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    """As the scripts call it: one line, exit code 2."""
    (tmp_path / "thesis.tex").touch()
    done = subprocess.run([sys.executable, MAKE, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path} exists and is not a virtual environment: move it away\n"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_python_without_packages_is_enough(tmp_path):
    """-S leaves out site-packages; -I the PYTHONPATH."""
    done = subprocess.run([sys.executable, "-IS", MAKE, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--extra" in done.stdout, done.stderr


def test_a_python_without_venv_names_the_package(environment, tmp_path, calls, monkeypatch):
    """Debian and Ubuntu put ensurepip into a package of its own."""
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(
        environment.EnvironmentProblem, match=r"apt install python{}\.{}-venv".format(*sys.version_info)
    ):
        environment.make(tmp_path / "venv", [], [])
    assert not calls


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        (None, []),
        (FakeDriver(cuda=12000), ["cuda12"]),
        (FakeDriver(cuda=12090), ["cuda12"]),
        (FakeDriver(cuda=13000), ["cuda13"]),
        (FakeDriver(cuda=13020), ["cuda13"]),
        (FakeDriver(cuda=11080), []),
        (FakeDriver(failure=100), []),
        (FakeDriver(gpus=(RTX_2080,)), []),
    ],
)
def test_the_driver_chooses_the_libraries_for_the_gpu(environment, driver, extra, monkeypatch, capsys):
    """Drivers 525 to 579 run CUDA 12, from 580 on 13; the reason why a GPU is left out is printed."""
    install(monkeypatch, driver)
    assert environment.cuda_extra() == extra
    assert ("left out" in capsys.readouterr().err) == (driver is not None and not extra)


def test_a_disk_without_room_is_an_error_before_the_download(environment, tmp_path, calls, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        environment.shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=3_000_000_000)
    )
    with pytest.raises(environment.EnvironmentProblem, match=r"take 3\.8 GB in .* tools/quickstart\.sh --cpu"):
        environment.make(tmp_path / "not" / "there", ["cuda13"], [])
    assert "1.4 GB to download, 2.4 GB on disk (3.0 GB are free)" in capsys.readouterr().err
    assert asked == [tmp_path] and not calls
