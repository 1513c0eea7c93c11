"""What somebody reads to understand a training step: the files that a dense one on the CPU enters, and their lines.

    python tests/dense_step.py

A tiny model trains without adapters, ranks or options. Counted is every file of llmq with a function that runs while
the calls of a step are recorded, and while a micro-step and an update run, and the file that calls these. The planner,
which works on the recorded calls, is taken on trust. `tests/test_budgets.py` holds the numbers.
"""

import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LLMQ = str(ROOT / "llmq") + os.sep
ON_TRUST = str(ROOT / "llmq" / "plan") + os.sep


class Entered:
    """The functions of llmq that run while one of the functions that are `wrapped` does, by file."""

    def __init__(self):
        self.functions = defaultdict(set)
        self._undo = []

    def wrap(self, owner, name):
        """Notes what runs within a method, and which file calls it."""
        method = getattr(owner, name)

        def wrapped(*args, **kwargs):
            self._note(sys._getframe(1).f_code)
            before = sys.getprofile()
            sys.setprofile(lambda frame, event, _: self._note(frame.f_code) if event == "call" else None)
            try:
                return method(*args, **kwargs)
            finally:
                sys.setprofile(before)

        setattr(owner, name, wrapped)
        self._undo.append((owner, name, method))

    def _note(self, code):
        if code.co_filename.startswith(LLMQ) and not code.co_filename.startswith(ON_TRUST):
            self.functions[code.co_filename].add((code.co_name, code.co_firstlineno))

    def unwrap(self):
        """The methods as they were."""
        for owner, name, method in reversed(self._undo):
            setattr(owner, name, method)


def dense_step():
    """Every file to read, with its number of lines and of functions that run."""
    from tiny_runs import tiny_options

    import llmq
    from llmq.engine.engine import Engine
    from llmq.plan.recordings import Recordings

    entered, here = Entered(), Path.cwd()
    for owner, names in ((Recordings, ("train", "update")), (Engine, ("micro_step", "update"))):
        for name in names:
            entered.wrap(owner, name)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            given = {key: value for key, value in tiny_options(Path(folder)).items() if not key.startswith("eval")}
            llmq.train(**{**given, "model_dtype": "bf16", "steps": 2})
    finally:
        os.chdir(here)
        entered.unwrap()
    return {
        str(Path(file).relative_to(ROOT)): (len(Path(file).read_text("utf-8").splitlines()), len(functions))
        for file, functions in sorted(entered.functions.items())
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
