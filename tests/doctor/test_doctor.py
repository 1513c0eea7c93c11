"""What llmq-doctor finds: each check on made-up facts, and the command on a machine without a GPU."""

import json
import resource
import time
from importlib.metadata import version
from types import SimpleNamespace

import fake_cuda
import pytest
from huggingface_hub import constants

from llmq.cli import doctor as cli
from llmq.cli import shell
from llmq.disk import GIB, MIB
from llmq.doctor import checks, gpus, machine, software, speed
from llmq.doctor.finding import FAULT, OK, WARNING, Finding, bounded, worst
from llmq.engine.predict import sustained
from llmq.hardware import cards, cuda_driver, nvml
from llmq.hardware.cuda_driver import Gpu, Problem
from llmq.hardware.nvml import Health, Reading

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-0", (9, 0), 132, 81559 * MIB)
OTHER = Gpu(1, H100.name, "GPU-1", (9, 0), 132, 81559 * MIB)
WELL = Reading("580", GIB, 1980, 2619, 1980, 700, 700, 40, (), 5, 16)
HEALTHY = Health(80 * GIB, 0, 0, True, False, True, 0, False, False, 5, 16, (18, 18))
RATES = sustained(cards.find(H100.name))


def statuses(found):
    return {one.name: one.status for one in found}


def read(monkeypatch, reading=WELL, health=HEALTHY):
    monkeypatch.setattr(nvml, "read", lambda uuid: reading)
    monkeypatch.setattr(nvml, "health", lambda uuid: health)


def test_a_healthy_gpu_has_only_good_lines(monkeypatch):
    read(monkeypatch)
    found = [*gpus.examine(H100), *gpus.links(H100, [OTHER], lambda one, other: True)]
    assert worst(found) == OK and {one.name.partition(".")[2] for one in found} == {
        *("", "memory", "clocks", "ecc", "persistence", "compute_mode", "pcie", "peers")
    }


@pytest.mark.parametrize(
    ("name", "status", "reading", "health"),
    [
        ("memory", WARNING, {"used_bytes": 9 * GIB}, {}),
        ("clocks", WARNING, {"throttled": ("power cap",)}, {}),
        ("clocks", FAULT, {"throttled": ("hardware temperature",)}, {}),
        ("ecc", FAULT, {}, {"uncorrected_errors": 3}),
        ("rows", WARNING, {}, {"is_remap_pending": True}),
        ("rows", FAULT, {}, {"has_remap_failed": True}),
        ("persistence", WARNING, {}, {"is_persistent": False}),
        ("compute_mode", FAULT, {}, {"compute_mode": 2}),
        ("compute_mode", WARNING, {}, {"compute_mode": 3}),
        ("mig", WARNING, {}, {"is_mig": True}),
        ("pcie", WARNING, {"pcie_lanes": 8}, {}),
        ("peers", WARNING, {}, {"nvlinks": (17, 18)}),
        ("peers", WARNING, {}, {"nvlinks": (0, 0)}),
    ],
)
def test_each_fault_of_a_gpu_is_one_line_with_a_fix(name, status, reading, health, monkeypatch):
    read(monkeypatch, WELL.__class__(**{**vars(WELL), **reading}), Health(**{**vars(HEALTHY), **health}))
    found = [*gpus.examine(H100), *gpus.links(H100, [OTHER], lambda one, other: True)]
    (bad,) = [one for one in found if one.status != OK]
    assert (bad.name, bad.status) == (f"gpu0.{name}", status) and bad.shows and bad.fix


def test_gpus_that_are_old_unread_or_apart(monkeypatch):
    old = Gpu(0, "NVIDIA GeForce RTX 2080", "GPU-0", (7, 5), 46, 8 * GIB)
    assert gpus.kind(old).status == FAULT
    read(monkeypatch, None, None)
    assert statuses(gpus.examine(H100)) == {"gpu0": OK, "gpu0.nvml": WARNING}
    assert statuses(gpus.links(old, [OTHER], lambda one, other: False)) == {"gpu0.peers": WARNING}
    read(monkeypatch, Reading(), Health())  # a virtual machine that hides everything
    assert statuses(gpus.examine(H100)) == {"gpu0": OK}


def test_packages_are_held_against_the_metadata():
    needs = ["numpy>=1.26", 'cupy-cuda13x>=14; extra == "cuda13"', 'nvmath>=1; extra == "cuda13"']
    needs += ['nvmath>=1; extra == "cuda12"', 'wandb>=0.20; extra == "wandb"', 'old; python_version < "3"']
    there = {"numpy": "1.20", "nvmath": "1.1", "wandb": "0.30"}
    found = {one.name: one for one in software.required(needs, ["cuda12", "cuda13", "wandb"], there.get)}
    assert found["packages"].value == "numpy 1.20 is not >=1.26"
    assert (found["packages"].status, found["packages"].fix) == (FAULT, "pip install 'numpy>=1.26'")
    assert found["extra.wandb"].value == "wandb 0.30" and found["extra.cuda13"].value.startswith("not installed")
    found = {one.name: one for one in software.required(needs, ["cuda13"], {**there, "cupy-cuda13x": "13"}.get)}
    assert (found["extra.cuda13"].status, found["extra.cuda13"].value) == (WARNING, "cupy-cuda13x 13 is not >=14")


def test_libraries_are_held_against_the_extra(monkeypatch):
    monkeypatch.setattr(cuda_driver, "library_problem", lambda cuda: None)
    monkeypatch.setattr(cuda_driver, "installed", {"cupy-cuda13x": "14.2"}.get)
    monkeypatch.setattr(cuda_driver, "versions", lambda: {"cuDNN": "9.1.0", "NCCL": "2.28.3", "cupy-cuda13x": "14.2"})
    needs = ["nvidia-cudnn-cu13>=9.19,<10", "nvidia-nccl-cu13>=2.27,<3", "cupy-cuda13x>=14.2,<15"]
    monkeypatch.setattr(software, "requires", lambda name: [f'{one}; extra == "cuda13"' for one in needs])
    expected = {"library.cuDNN": FAULT, "library.NCCL": OK, "library.cupy-cuda13x": OK}
    assert statuses(software.libraries((13, 0))) == expected
    monkeypatch.setattr(cuda_driver, "library_problem", lambda cuda: Problem("cuDNN is missing", "pip install"))
    assert statuses(software.libraries((13, 0))) == {"libraries": FAULT}


def test_a_driver_that_fails_is_a_fault_and_none_is_not(monkeypatch):
    for driver, status in ((fake_cuda.FakeDriver(), OK), (fake_cuda.FakeDriver(failure=803), FAULT), (None, WARNING)):
        fake_cuda.install(monkeypatch, driver)
        found = cuda_driver.read()
        assert statuses(software.driver(found, cuda_driver.problem(found))) == {"driver": status}


def test_memory_of_the_machine(monkeypatch, tmp_path):
    def locked(limit, infiniband):
        return statuses(machine.locked_memory(limit=limit, has_infiniband=infiniband))["memory.locked"]

    assert (locked(MIB, True), locked(MIB, False), locked(resource.RLIM_INFINITY, True)) == (WARNING, OK, OK)
    monkeypatch.setattr(machine, "free_bytes", lambda folder: 64 * MIB)
    assert statuses(machine.shared_memory(2)) == {"memory.shared": WARNING}
    assert statuses(machine.shared_memory(1)) == {"memory.shared": OK}
    assert machine.disk("runs", tmp_path, {}).status == WARNING, "full"
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: (64 * GIB, GIB))
    assert statuses(machine.memory()) == {"memory": WARNING}


def test_disks(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "free_bytes", lambda folder: 64 * GIB)
    measured = {}
    found = machine.disk("runs", tmp_path / "absent", measured)
    assert found.numbers["mb_per_s"] > 0 and len(measured) == 1 and list(tmp_path.iterdir()) == []
    assert machine.disk("runs", tmp_path, {tmp_path.stat().st_dev: 1e6}).status == WARNING
    monkeypatch.setattr(machine, "takes_files", lambda folder: False)
    assert machine.disk("runs", tmp_path, {}).status == FAULT


def test_the_hub_is_asked_and_its_token_not_shown(monkeypatch, hub_answers):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for answer, status in ((None, OK), (OSError("no route"), WARNING)):
        hub_answers(answer)
        found = list(machine.hub({}))
        assert statuses(found) == {"hub.token": OK, "hub": status}
        assert "secret" not in "".join(map(str, found))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert statuses(machine.hub()) == {"hub": OK}


@pytest.fixture
def hub_answers(monkeypatch):
    """Sets what the Hub does: None is an answer."""

    def install(answer):
        def opened(request, timeout):
            assert timeout <= 5
            if answer:
                raise answer
            return SimpleNamespace(close=lambda: None)

        monkeypatch.setattr(machine.urllib.request, "urlopen", opened)

    return install


def test_rates_are_held_against_what_the_card_sustains():
    flops, during = RATES.flops, {"sm_mhz": 1400.0, "throttled": {"power cap": 0.5}}
    copies = {"copy": RATES.memory, "to_device": RATES.link * 0.5, "to_host": RATES.link, "locked": False}
    rates = {"bf16": flops["bf16"], "e4m3": 0.3 * flops["e4m3"]}
    found = list(speed.of_gpu(H100, speed.Measured({"flops": rates, "gpu": during, **copies})))
    names = {
        "matmul.bf16": OK,
        "matmul.e4m3": FAULT,
        "copy": OK,
        "to_device": WARNING,
        "to_host": OK,
        "locked": WARNING,
    }
    assert statuses(found) == {f"gpu0.{name}": status for name, status in names.items()}
    assert "at 1400 MHz, power cap 50% of the time" in found[0].value
    unknown = Gpu(0, "NVIDIA X", "GPU-0", (9, 0), 1, GIB)
    assert worst(list(speed.of_gpu(unknown, speed.Measured({"flops": {"bf16": 1.0}})))) == OK


def test_an_all_reduce_is_slow_wrong_or_fails():
    good = {"bus": RATES.peers, "right": True}
    for found, problem, status in (
        (good, "", OK),
        ({**good, "bus": RATES.peers / 2}, "", WARNING),
        ({**good, "right": False}, "", FAULT),
        ({}, "NcclError", FAULT),
    ):
        assert worst(list(speed.of_all_reduce(2, RATES, speed.Measured(found, problem)))) == status


def test_a_measurement_that_crashes_or_hangs_is_a_line(monkeypatch):
    began = time.monotonic()
    monkeypatch.setattr(speed.subprocess, "Popen", in_the_place_of(speed.subprocess.Popen))
    scripts = ["echo '{\"bus\": 2}'; sleep 60", "echo bad >&2; exit 3", "kill -9 $$"]
    found = speed.measure([(script,) for script in scripts], 1.0)
    assert found[0] == speed.Measured({"bus": 2}, "not over after 1 s")
    assert [one.problem for one in found[1:]] == ["bad", "ended with -9"]
    assert time.monotonic() - began < 30


def in_the_place_of(start):
    """Starts a shell's script where a module of Python is named."""
    return lambda command, **options: start(["/bin/sh", "-c", f"exec 2>&2; {command[3]}"], **options)


def test_a_check_that_fails_or_hangs_is_a_line_after_what_it_had_found():
    def fails():
        yield Finding("one", "1")
        raise RuntimeError("a\nb")

    def hangs():
        yield Finding("one", "1")
        time.sleep(60)

    assert [(one.name, one.status) for one in bounded("x", fails, 5)] == [("one", OK), ("x", FAULT)]
    assert bounded("x", fails, 5)[1].value == "RuntimeError: a b"
    assert [(one.name, one.status) for one in bounded("x", hangs, 0.2)] == [("one", OK), ("x", FAULT)]


@pytest.fixture
def on_the_cpu(monkeypatch, tmp_path):
    """A machine without a GPU and without a network."""
    fake_cuda.install(monkeypatch, None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


def test_the_command_without_a_gpu(on_the_cpu, capsys):
    """Which is no fault."""
    fine = shell.run(cli.command, ["--no-speed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert fine and lines[0].startswith("warning driver") and "0 faults" in lines[-1]
    names = [line.split()[1] for line in lines[:-1]]
    assert {"packages", "cpu", "memory", "disk.cache", "hub"} <= set(names) and len(names) == len(set(names))


def test_one_document_and_an_exit_code_for_a_fault(on_the_cpu, monkeypatch, capsys):
    assert shell.run(cli.command, ["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["kind", "schema", "version", "status", "checks"]
    assert (found["kind"], found["version"], found["status"]) == ("llmq-doctor", version("llmq-train"), WARNING)
    assert all(list(one) == ["name", "value", "status", "shows", "fix", "numbers"] for one in found["checks"])
    assert any(one["name"] == "cpu.speed" and one["numbers"]["tflops"] > 0 for one in found["checks"])
    monkeypatch.setattr(machine, "takes_files", lambda folder: False)
    assert shell.run(cli.command, ["--json", "--no-speed"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == FAULT


def test_gpus_are_checked_and_measured_where_they_can_be_used(monkeypatch):
    fake_cuda.install(monkeypatch, fake_cuda.FakeDriver(gpus=(fake_cuda.H200, fake_cuda.H200)))
    driver = cuda_driver.read()
    names = [one.name for one in checks.checks(checks.Seen(driver, None, speed=True))]
    assert {"libraries", "gpu0", "gpu1.links", "speed", "all_reduce"} <= set(names)
    names = [one.name for one in checks.checks(checks.Seen(driver, Problem("x", "y"), speed=True))]
    assert "gpu1" in names and not {"libraries", "speed", "all_reduce"} & set(names)
