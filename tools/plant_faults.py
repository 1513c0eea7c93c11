#!/usr/bin/env python3
"""Do the tests bite? Plants the faults of tests/faults, one at a time, and lists those that no test notices.

    python tools/plant_faults.py [--jobs N] [--only NAME]... [--list]

The tests that are named beside a fault run with it; a fault that keeps them from running proves nothing and is reported
as broken. Exit 0: all noticed; 1: some survived; 2: some broken.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from faults import FAULTS  # noqa: E402

TIMEOUT_S = 600.0  # a fault may make a test wait for ever
VERDICTS = {0: "survived", 1: "noticed"}  # by pytest's exit status


def try_fault(name: str, tests: Sequence[str] = ()) -> tuple[str, str]:
    """Runs the fault's tests, or `tests`, with it: ("noticed" | "survived" | "broken", pytest's last words)."""
    options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", f"--fault={name}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *(tests or FAULTS[name].tests)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, check=False, **streams)
    except subprocess.TimeoutExpired:
        return "noticed", f"still running after {TIMEOUT_S:.0f} s"
    lines = done.stdout.strip().splitlines() or ["no output"]
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return VERDICTS.get(done.returncode, "broken"), (named or lines[-1:])[0]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults tried at the same time")
    parser.add_argument("--only", action="append", choices=FAULTS, metavar="NAME", help="this fault alone (repeatable)")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    options = parser.parse_args()
    chosen = options.only or list(FAULTS)
    if options.list:
        for name in chosen:
            print(f"{name:40} {FAULTS[name].target:55} {' '.join(FAULTS[name].tests)}")
        return 0

    def work(name: str) -> str:
        start = time.monotonic()
        verdict, why = try_fault(name)
        print(f"{verdict:9} {name:40} {time.monotonic() - start:5.0f} s  {why}", flush=True)
        return verdict

    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(work, chosen))
    print(", ".join(f"{verdicts.count(v)} {v}" for v in ("noticed", "survived", "broken")))
    return 1 if "survived" in verdicts else 2 if "broken" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
