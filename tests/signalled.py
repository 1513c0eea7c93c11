"""Runs of llmq-train that get a signal in one of their phases.

`python tests/signalled.py` imports llmq once. It forks a process for each line of JSON on stdin, and answers with its
exit code, and whether the phase was reached. A line has the folder of the run, its `arguments`, and the `phase`,
`number` and `delay` of the signal, which comes so many seconds after the run has entered that. No phase: no signal.
"""

import json
import os
import select
import signal
import sys
import time
import traceback

from llmq.cli import shell, train
from llmq.data.batches import named_data
from llmq.engine.engine import Engine
from llmq.files.writers import Saver
from llmq.training import loop, saving
from llmq.training import train as training

# What a phase begins with: the class or module, and the function.
PHASES = {
    "start": (training, "prepare"),
    "tokenizing": (named_data, "cached"),
    "loading": (saving, "load_weights"),
    "training": (Engine, "micro_step"),
    "update": (Engine, "update"),
    "evaluation": (loop, "evaluate"),
    "saving": (Saver, "save"),
    "export": (loop, "export_all"),
}
PATIENCE = 60  # seconds for a run


def told(owner, name, say):
    """Has a function call `say` first."""
    real = getattr(owner, name)

    def function(*args, **kwargs):
        say()
        return real(*args, **kwargs)

    setattr(owner, name, function)


def run(case, pipe):
    """The child: never returns."""
    os.chdir(case["folder"])
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    calls = iter(range(10**9))
    if case.get("phase"):
        told(*PHASES[case["phase"]], lambda: next(calls) == case.get("call", 0) and os.write(pipe, b"."))
    code = 99
    try:
        shell.main(train.command(), case["arguments"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def ended(case):
    """The exit code of a run, and whether it has entered the phase."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        run(case, writes)
    os.close(writes)
    reached = bool(select.select([reads], [], [], PATIENCE)[0] and os.read(reads, 1))
    if reached:
        time.sleep(case["delay"])
        os.kill(child, case["number"])
    until = time.monotonic() + PATIENCE
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    os.close(reads)
    return os.waitstatus_to_exitcode(found[1]), reached


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(ended(json.loads(line))), flush=True)
