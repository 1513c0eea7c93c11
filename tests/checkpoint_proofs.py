"""What checkpoints promise, tried many times: `python tests/checkpoint_proofs.py --kills 1000 --mutants 20000 ...`.

kills     A run that saves at every step is killed (SIGKILL) at random moments and continued, again and again. Whatever
          it said to have saved is there, all that is there is whole, and has the bits of a run that was never killed.
mutants   That many damaged manifests, safetensors headers and safetensors indexes each: a reader names the damage or
          reads the same tensors; it raises nothing else, and takes less than a second.
resumes   A run continued from a random step ends with the bits of one that was never stopped.
saves     In a run of this many steps that saves at each, memory, descriptors and threads do not change.
"""

import argparse
import io
import json
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process that forks has one thread

import numpy as np
from tiny_runs import change_manifest, tiny_options, weights_of

import llmq
from llmq.errors import LlmqError
from llmq.files.checkpoint import load
from llmq.files.manifest import found, read_manifest
from llmq.files.tensor_files import Piece, cut, stored_tensors, write_files

STEPS = 40
SAVED = Path("runs/run/checkpoints")
EACH_STEP = {"steps": STEPS, "ckpt_interval": 1, "eval_every_n_steps": 0, "eval_file": None, "overwrite": True}
FLAT_BYTES = 8 << 20  # that a run's memory may grow by between its first quarter and its end


def reference(given: dict[str, Any]) -> dict[int, str]:
    """The bits of every step of a run that was never stopped."""
    llmq.train(**{**given, **EACH_STEP, "ckpt_keep_n": 0, "name": "whole"})
    return {step: weights_of(path) for step, path in found(Path("runs/whole/checkpoints")).items()}


def kills(given: dict[str, Any], count: int, chance: random.Random) -> str:
    want, in_save, begun = reference(given), 0, 0
    for _ in range(count):
        said = killed_run(given, chance.uniform(0.02, 1.2))
        in_save += any(SAVED.glob(".step-*"))
        for path in found(SAVED).values():
            assert weights_of(path) == want[read_manifest(path).step], f"{path} has other bits"
        newest = max(found(SAVED), default=0)
        assert newest >= max(said, default=0), f"step {max(said)} was saved, and is lost"
        if newest == STEPS:
            begun += 1
            shutil.rmtree("runs/run")
    return f"{count} kills, {in_save} of them within a save; {begun} runs came to their end"


def killed_run(given: dict[str, Any], seconds: float) -> list[int]:
    """Continues the run in a process that is killed after this many seconds; the steps that it said to have saved."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(theirs, "w", buffering=1) as console, redirect_stdout(io.StringIO()):
            llmq.train(**{**given, **EACH_STEP, "console": console, "continue": "auto"})
        os._exit(0)
    os.close(theirs)
    timer = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    timer.start()
    with os.fdopen(ours) as console:
        text = console.read()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    assert os.WIFSIGNALED(status) or status == 0, f"the run cannot be continued:\n{text}"
    return [int(step) for step in re.findall(r"^Checkpoint: .*step-(\d+)$", text, re.MULTILINE)]


def mutants(folder: Path, count: int, chance: random.Random) -> str:
    refused, slowest = 0, 0.0
    for name, (file, read) in targets(folder).items():
        whole, want = file.read_bytes(), read()
        for _ in range(count):
            data = mutant(whole, name, chance)
            file.write_bytes(data)
            began = time.perf_counter()
            try:
                got = read()
            except LlmqError as error:
                str(error).encode("utf-8")  # it can be printed
                assert str(file.parent) in str(error), f"{error} does not say which file is damaged"
                refused += 1
            else:
                assert name == "index" or got == want, f"a damaged {name} is read as another: {data!r}"
            slowest = max(slowest, time.perf_counter() - began)
        file.write_bytes(whole)
    assert slowest < 1, f"a damaged file took {slowest:.1f} s"
    return f"{count} each of {', '.join(targets(folder))}: {refused} refused, the slowest in {1000 * slowest:.0f} ms"


def targets(folder: Path) -> dict[str, tuple[Path, Callable[[], object]]]:
    """The files that are damaged, and how each is read."""
    checkpoint = found(SAVED)[max(found(SAVED))]
    (tensors,) = checkpoint.glob("*.safetensors")

    def from_checkpoint() -> object:
        state, read = load(checkpoint)
        return state, [(name, read(name).tobytes()) for name in read.tensors]

    def model() -> object:
        return sorted((name, at.shape, at.dtype) for name, at in stored_tensors(folder / "sharded").items())

    return {
        "manifest": (checkpoint / "manifest.json", from_checkpoint),
        "header": (tensors, from_checkpoint),
        "index": (folder / "sharded" / "model.safetensors.index.json", model),
        "model header": (folder / "sharded" / "0.safetensors", lambda: (model(), "any that is valid")[1]),
    }


def sharded(folder: Path) -> None:
    """A model in two files with an index."""
    (folder / "sharded").mkdir()
    tensors = {f"layers.{n}.weight": np.full((4, 6), n, np.float32) for n in range(6)}
    pieces = [Piece(name, array.shape, array.dtype) for name, array in tensors.items()]
    files = [(f"{n}.safetensors", part) for n, part in enumerate(cut(pieces, 300))]
    write_files(folder / "sharded", files, iter(tensors.values()))
    index = {"weight_map": {piece.name: name for name, part in files for piece in part}}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))


ODD = ("null", "-1", "1e999", "9" * 5000, "[" * 3000, "{}", '""', '"../x.safetensors"', '"\\ud800.safetensors"', "true")


def mutant(whole: bytes, name: str, chance: random.Random) -> bytes:
    """A file with bytes changed, cut off or inserted, mostly in its header, or with a value put in another's place."""
    end = 8 + int.from_bytes(whole[:8], "little") if "header" in name else len(whole)
    data = bytearray(whole)
    kind = chance.randrange(4)
    if kind == 0:
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(end)] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[chance.randrange(end) :]
    elif kind == 2:
        at = chance.randrange(end)
        data[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9))
    else:
        first = 8 if "header" in name else 0
        values = list(re.finditer(rb'-?\d+|"[^"]*"|\[[^][]*\]', bytes(data[first:end])))
        match = chance.choice(values)
        data[first + match.start() : first + match.end()] = chance.choice(ODD).encode()
        if first:
            data[:8] = (end - 8 + len(data) - len(whole)).to_bytes(8, "little")
    return bytes(data)


def lies(count: int, chance: random.Random) -> str:
    """As mutants of the manifest, with a checksum that fits: what is read must be within the folder, or refused."""
    checkpoint, refused = found(SAVED)[max(found(SAVED))], 0
    whole = (checkpoint / "manifest.json").read_bytes()
    for _ in range(count):
        change_manifest(checkpoint, lambda record: change(record, chance))
        try:
            _, read = load(checkpoint)
            for name in read.tensors:
                read(name)
        except LlmqError:
            refused += 1
        (checkpoint / "manifest.json").write_bytes(whole)
    return f"{count} manifests that lie with a valid checksum: {refused} refused"


def change(record: dict[str, Any], chance: random.Random) -> None:
    """Puts an odd value somewhere into a JSON object."""
    at: Any = record
    while True:
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if isinstance(at[key], (dict, list)) and at[key] and chance.random() < 0.9:
            at = at[key]
            continue
        at[key] = chance.choice([None, -1, 2**70, 0.5, "", "../x.safetensors", [], {}, [[]], True, "F32"])
        return


def resumes(given: dict[str, Any], count: int, chance: random.Random) -> str:
    want = reference(given)
    for _ in range(count):
        start, end = sorted(chance.sample(range(1, STEPS + 1), 2))
        about = {**given, **EACH_STEP, "name": "again", "console": io.StringIO(), "steps": end, "ckpt_interval": 0}
        path = f"runs/whole/checkpoints/step-{start:08}"
        result = llmq.train(**about, **{"continue": path})
        assert weights_of(result.checkpoint_path) == want[end], f"from step {start}, step {end} has other bits"
        shutil.rmtree("runs/again")
    return f"{count} resumes from a random step to another: the bits of the run that was never stopped"


def saves(given: dict[str, Any], count: int) -> str:
    seen: list[tuple[int, int, int]] = []

    def watch(run: Any, record: Any) -> None:
        if record.step in (count // 4, count):
            status = Path("/proc/self/status").read_text("ascii")
            resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
            seen.append((int(resident.split()[1]) << 10, len(os.listdir("/proc/self/fd")), len(idle_threads())))

    console = open(os.devnull, "w")  # noqa: SIM115
    llmq.train(**{**given, **EACH_STEP, "steps": count, "name": "long", "console": console}, callbacks=[watch])
    console.close()
    (memory, files, threads), (memory_after, files_after, threads_after) = seen
    assert memory_after - memory < FLAT_BYTES, f"memory grew by {memory_after - memory:,} bytes"
    assert files_after <= files + 3 and threads_after == threads, f"{seen}: descriptors or threads are left"
    grown = (memory_after - memory) / 2**20
    return f"{count} steps with a save each: memory {grown:+.1f} MiB, descriptors and threads as they were"


def idle_threads() -> list[threading.Thread]:
    """Threads that are not a save's own, which are gone when it is complete."""
    return [thread for thread in threading.enumerate() if not thread.name.startswith("llmq-")]


@contextmanager
def workplace(folder: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        os.chdir(place)
        yield Path(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in ("kills", "mutants", "resumes", "saves"):
        parser.add_argument(f"--{part}", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="Of what is random.")
    parser.add_argument("--folder", help="Where to work [default: the system's temporary folder]")
    arguments = parser.parse_args()
    print(f"--seed {arguments.seed}", flush=True)

    def prove(part: str, proof: Callable[[dict[str, Any], Path, random.Random], str]) -> None:
        began = time.perf_counter()
        with workplace(arguments.folder) as place:
            text = proof(tiny_options(place), place, random.Random(arguments.seed))
            os.chdir("/")
        print(f"PASS  {part}: {text} ({time.perf_counter() - began:.0f} s)", flush=True)

    if number := arguments.kills:
        prove("kills", lambda given, place, chance: kills(given, number, chance))
    if number := arguments.mutants:

        def damage(given: dict[str, Any], place: Path, chance: random.Random) -> str:
            llmq.train(**{**given, **EACH_STEP, "steps": 2})
            sharded(place)
            return f"{mutants(place, number, chance)}; {lies(number, chance)}"

        prove("mutants", damage)
    if number := arguments.resumes:
        prove("resumes", lambda given, place, chance: resumes(given, number, chance))
    if number := arguments.saves:
        prove("saves", lambda given, place, chance: saves(given, number))


if __name__ == "__main__":
    main()
