"""Which tests run: `slow` ones with --all, `judge` ones with --judges, `sweep` ones with --sweeps, `gpu` ones on a
CUDA device.

Of a test with the marker `quick` the cases with the ids that it names run, and the others are slow. Of one with the
marker `sample` as many cases run as it takes to have each value of each parameter; the others are slow, or with
`sample("sweep")` a sweep. With `by=2` each pair of values is there.
"""

import ctypes
import gc
import importlib.util
import os
import shutil
import signal
from collections import defaultdict
from fnmatch import fnmatchcase
from itertools import combinations

import hypothesis
import pytest

CHOSEN_BY = {"slow": "--all", "judge": "--judges", "sweep": "--sweeps"}
TASTES = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "HF_HUB_OFFLINE")
TASTES += ("WANDB_MODE", "WANDB_DIR", "MPLBACKEND", "GIT_DIR", "GIT_WORK_TREE")


def pytest_addoption(parser):
    """The flags of tools/test.sh."""
    parser.addoption("--all", action="store_true", help="run the slow tests too")
    parser.addoption("--emulate", action="store_true", help="run the kernels of all tests on the CPU, without a GPU")
    parser.addoption("--fault", metavar="NAME", help="plant a fault of tests/faults, which the tests should notice")
    parser.addoption("--judges", action="store_true", help="run the comparisons with PyTorch and transformers")
    parser.addoption("--sweeps", action="store_true", help="run every case of what --all runs a sample of")


def pytest_configure(config):
    """A judge that is asked for and not there is an error, not a skip. Signals do here what they do in a terminal.

    What a user's shell says of widths, colours and caches is no part of what the tests compare with.
    """
    gc.disable()  # until the tests are collected: it took as long as rewriting their asserts
    for name in TASTES:
        os.environ.pop(name, None)
    os.fsync = lambda file: None  # what a test writes need not outlive a loss of power
    slow = [hypothesis.HealthCheck.too_slow]  # says how busy the machine is
    hypothesis.settings.register_profile(
        "ours", hypothesis.settings(), suppress_health_check=slow, deadline=None, database=None
    )
    hypothesis.settings.load_profile("ours")
    # A background job and one that outlives its session begin with signals off, and children inherit that.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, usual)
    if name := config.getoption("--fault"):
        from faults import FAULTS, plant

        plant(FAULTS[name])
    judges = ("torch", "transformers", "trl", "peft", "bitsandbytes", "uv", "mpi4py", "ray", "kubernetes")
    judges += ("lm_eval", "cuda.bindings")  # our own folder is a `cuda`, too
    missing = [name for name in judges if not importlib.util.find_spec(name)]
    if config.getoption("--judges") and missing:
        raise pytest.UsageError(f"--judges needs {' and '.join(missing)}: tools/test.sh --judges installs them")


@pytest.fixture
def few_remedies(monkeypatch):
    """Searches for what fits try two ways to recompute, where a test is about something else."""
    monkeypatch.setattr("llmq.plan.remedies.RECOMPUTE", ("", "block"))


def cuda_problem() -> str | None:
    """Why no CUDA device can be used, asked of the driver itself; None if one can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1)"
    code, count = driver.cuInit(0), ctypes.c_int(0)
    if code or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the NVIDIA driver does not start (cuInit returned {code})"
    return None if count.value else "the NVIDIA driver sees no device"


def pytest_ignore_collect(collection_path, config):
    """Only who asks for the judges waits for PyTorch, transformers and PEFT to be imported."""
    asked = config.getoption("--judges") or config.option.markexpr
    return True if collection_path.name.startswith("test_judges") and not asked else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Deselects what was not asked for or has no GPU; `-m` is an explicit choice and is left alone."""
    absent = set()
    if any(item.get_closest_marker("gpu") for item in items) and (problem := cuda_problem()):
        for item in items:
            if marker := item.get_closest_marker("gpu"):
                if shutil.which("g++") and _is_emulated(config, item, marker.kwargs.get("emulated")):
                    item.add_marker("emulated")
                else:
                    item.add_marker(pytest.mark.skip(reason=problem))
                    absent.add(item)
    _choose(items)
    _sample(items)
    if config.option.markexpr:
        return
    unwanted = [marker for marker, flag in CHOSEN_BY.items() if not config.getoption(flag)]
    dropped = absent | {item for item in items if any(item.get_closest_marker(marker) for marker in unwanted)}
    if dropped:
        config.hook.pytest_deselected(items=[*dropped])
        items[:] = [item for item in items if item not in dropped]


def pytest_terminal_summary(terminalreporter, config):
    """Says why the tests of a GPU were left out: skipping each of them would take seconds."""
    if not config.option.markexpr and (problem := cuda_problem()):
        terminalreporter.write_line(f"Without the tests that need a GPU: {problem}.")


def _choose(items):
    """Marks the cases that the marker `quick` does not name as slow."""
    for item in items:
        marker = item.get_closest_marker("quick")
        if marker and not any(fnmatchcase(item.callspec.id, name) for name in marker.args):
            item.add_marker("slow")


def _sample(items):
    """Marks the cases that the marker `sample` leaves out: slow, or what it names."""
    cases = defaultdict(dict)  # by test, what each case covers
    for item in items:
        if (marker := item.get_closest_marker("sample")) and not _is_left_out(item, marker):
            values = sorted((name, repr(value)) for name, value in item.callspec.params.items())
            cases[item.parent.nodeid, item.originalname][item] = {*combinations(values, marker.kwargs.get("by", 1))}
    for covers in cases.values():
        missing = set().union(*covers.values())
        while missing:
            best = max(covers, key=lambda item: len(covers[item] & missing))  # the first of the best
            missing -= covers.pop(best)
        for item in covers:
            item.add_marker(*item.get_closest_marker("sample").args or ["slow"])


def _is_left_out(item, marker):
    """Whether a case is one of those already that `sample` would make of it."""
    names = ("sweep",) if marker.args == ("sweep",) else ("slow", "sweep")
    return any(item.get_closest_marker(name) for name in names)


def pytest_collection_finish():
    """Collecting garbage took a sixth of the time: the tests are none, and what a test leaves can wait."""
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


def _is_emulated(config, item, emulated):
    """Whether a test runs its kernels on the CPU: with --emulate all that can; with --all what the marker names.

    `emulated` is True, or the parameters of the smallest cases.
    """
    if not emulated or config.getoption("--emulate"):
        return bool(emulated)
    return config.getoption("--all") and isinstance(emulated, str) and emulated in item.name
