#!/usr/bin/env python3
"""Do the tests bite? Plants the faults of tests/faults, one at a time, and lists those that no test notices.

    python tools/plant_faults.py [--jobs N] [--only NAME]... [--list]

Each fault is planted in a copy of the tree; its targeted tests run first, and if they stay green the whole default
suite does. The copy without a fault has to be green, or a red one would mean nothing. A fault whose module no longer
imports proves nothing either and is reported as broken. Exit 0: all noticed; 1: some survived; 2: no verdict.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from faults import FAULTS, Fault, planted  # noqa: E402

TIMEOUT_S = 900.0  # a fault may make a test wait for ever


def copy_tree(target: Path) -> None:
    """The files of the working tree that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run(tree: Path, command: list[str]) -> tuple[int, str]:
    """Exit status and output of a Python command in `tree`; status -1 when it ran out of time."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tree,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return -1, f"still running after {TIMEOUT_S:.0f} s"
    return done.returncode, done.stdout


def pytest(tree: Path, tests: tuple[str, ...], workers: int) -> tuple[int, str]:
    """Runs the default suite, or `tests`, up to the first failure; status 5 (nothing collected) counts as green."""
    spread = ["-n", str(workers)] if workers > 1 else ["-p", "no:xdist"]
    table = "--ignore=tests/test_faults.py"  # it compares the table with the source, and would notice everything
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", table]
    status, output = run(tree, ["-m", "pytest", *options, *spread, *tests])
    return 0 if status == 5 else status, output


def failure(output: str) -> str:
    """The first failing test named in pytest's output."""
    named = [line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not named:
        named = [line for line in output.splitlines() if line.startswith("ERROR: ")] or output.strip().splitlines()[-1:]
    return named[0] if named else "no output"


def try_fault(tree: Path, fault: Fault, workers: int = 2) -> tuple[str, str]:
    """Plants `fault` in `tree`, runs the tests, takes it out; ("noticed" | "survived" | "broken", by what).

    The default suite is spread over `workers` processes.
    """
    path = tree / fault.file
    original = path.read_text()
    path.write_text(planted(original, fault))
    try:
        module = fault.file.removesuffix(".py").replace("/", ".")
        status, output = run(tree, ["-c", f"import {module}"])
        if status:
            return "broken", output.strip().splitlines()[-1]
        for tests, processes in ((fault.tests, 1), ((), workers)):
            status, output = pytest(tree, tests, processes)
            if status in (3, 4):  # pytest itself failed, or was asked for tests that are not there
                return "broken", failure(output)
            if status:
                return "noticed", failure(output)
        return "survived", "the default suite is green"
    finally:
        path.write_text(original)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults tried at the same time")
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault alone (repeatable)")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - {fault.name for fault in FAULTS}:
        parser.error(f"no fault named {', '.join(sorted(unknown))}: see --list")
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    if options.list:
        for fault in chosen:
            print(f"{fault.name:34} {fault.file:36} {' '.join(fault.tests)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="llmq-faults-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            copy_tree(Path(folder) / str(job))
            trees.put(Path(folder) / str(job))
        targeted = tuple(sorted({test for fault in chosen for test in fault.tests})) if options.only else ()
        status, output = pytest(Path(folder) / "0", targeted, 2)
        if status:
            print(f"the tests fail without any fault: {failure(output)}", file=sys.stderr)
            return 2

        def work(fault: Fault) -> str:
            tree, start = trees.get(), time.monotonic()
            try:
                verdict, by = try_fault(tree, fault)
            finally:
                trees.put(tree)
            print(f"{verdict:9} {fault.name:34} {time.monotonic() - start:5.0f} s  {by}", flush=True)
            return verdict

        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(work, chosen))
    print(", ".join(f"{verdicts.count(v)} {v}" for v in ("noticed", "survived", "broken")))
    return 1 if "survived" in verdicts else 2 if "broken" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
