"""What one reads to understand a training step: the files that a dense one on the CPU enters, and their lines.

    python tests/dense_step.py

A tiny model trains without adapters, ranks or options. Counted is every file of llmq with a function that runs while
the calls of a step are recorded, and while a micro-step and an update run, and the file that calls these. The planner,
which works on the recorded calls, is taken on trust. `tests/test_budgets.py` holds the numbers.
"""

import gc
import os
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
LLMQ = str(ROOT / "llmq") + os.sep
ON_TRUST = str(ROOT / "llmq" / "plan") + os.sep


def dense_step():
    """Every file to read, with its number of lines and of functions that run."""
    from tiny_runs import tiny_options

    import llmq
    from llmq.engine.engine import Engine
    from llmq.plan.recordings import Recordings

    gc.collect()  # what earlier tests left is not finalized while this one notes what runs
    entered = defaultdict(set)

    def note(code):
        if code.co_filename.startswith(LLMQ) and not code.co_filename.startswith(ON_TRUST):
            entered[code.co_filename].add((code.co_name, code.co_firstlineno))

    def noting(method):
        """Notes what runs within a method, and which file calls it."""

        def wrapped(*args, **kwargs):
            note(sys._getframe(1).f_code)
            before = sys.getprofile()
            sys.setprofile(lambda frame, event, _: note(frame.f_code) if event == "call" else None)
            try:
                return method(*args, **kwargs)
            finally:
                sys.setprofile(before)

        return wrapped

    with ExitStack() as stack:
        stack.callback(os.chdir, Path.cwd())
        for owner, name in ((Recordings, "train"), (Recordings, "update"), (Engine, "micro_step"), (Engine, "update")):
            stack.enter_context(mock.patch.object(owner, name, noting(getattr(owner, name))))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.chdir(folder)
        given = {key: value for key, value in tiny_options(Path(folder)).items() if not key.startswith("eval")}
        llmq.train(**{**given, "model_dtype": "bf16", "steps": 2})
    return {
        str(Path(file).relative_to(ROOT)): (len(Path(file).read_text("utf-8").splitlines()), len(functions))
        for file, functions in sorted(entered.items())
    }


def main():
    """Prints the list."""
    found = dense_step()
    for file, (lines, functions) in found.items():
        print(f"{lines:6,} lines {functions:3} functions  {file}")
    print(f"{sum(lines for lines, _ in found.values()):6,} lines in {len(found)} files")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    main()
