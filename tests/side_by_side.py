"""Trains an older commit and the present tree side by side: a redesign changes no bit.

    python tests/side_by_side.py --against COMMIT [--cases REGEX] [--gpu]

Each case of tests/side_by_side_cases.py is a run of a tiny model with every option spelled out, made by `llmq.train` in
a process per tree. The logs of all steps (loss, norm, evaluations, errors of fp8 copies) have to be equal, and so has
every bit of the exported weights. Runs that resume also resume in the present tree from the older one's checkpoint.

BLAS gives other bits on other processors and with other numbers of threads, so both trees have one thread and the
kernels of one processor. On a GPU other matmul algorithms give other bits: the older tree runs first, and the present
one finds its table in the cache folder that they share (LLMQ_CACHE_DIR, else a new one).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from side_by_side_cases import Case

ROOT = Path(__file__).resolve().parents[1]
COMPARED = {
    "train": ("step", "loss", "norm", "lr", "tokens", "trained_tokens", "applied"),
    "eval": ("step", "loss", "train_loss", "trained_tokens"),
    "fp8": ("step", "copies"),
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
SAME_BITS = {**ONE_THREAD, "OPENBLAS_CORETYPE": "Haswell", "TOKENIZERS_PARALLELISM": "false"}

# The worker: a process of its own, which has one of the trees on its path.


def work(path: Path) -> None:
    """Does the jobs in a JSON file, each a folder and options of its runs; prints what each logged, a line a job."""
    import llmq

    given, descriptions = json.loads(path.read_text()), _descriptions()
    assert Path(llmq.__file__).parents[1] == Path(given["tree"]), f"llmq is that of {llmq.__file__}"
    with contextlib.redirect_stdout(sys.stderr), os.fdopen(os.dup(1), "w") as out:
        for job in given["jobs"]:
            if given["older"]:  # an option that it does not have yet is spelled out as what it always does
                job["runs"] = [{k: v for k, v in run.items() if k in descriptions} for run in job["runs"]]
            print(json.dumps(_done(job)), file=out, flush=True)


def _descriptions() -> dict[str, Any]:
    """Every option of the tree by its key; before modules were in folders, `llmq.options` was the module itself."""
    found = importlib.import_module("llmq.options")
    options = found if hasattr(found, "descriptions") else importlib.import_module("llmq.options.parse")
    return options.descriptions()


def _done(job: dict[str, Any]) -> dict[str, Any]:
    import llmq

    os.chdir(job["folder"])
    try:
        for options in job["runs"]:
            llmq.train(**options, console=io.StringIO())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None, "records": [_records(Path(options["log_file"])) for options in job["runs"]]}


def _records(log: Path) -> list[tuple[str, dict[str, Any]]]:
    """What is compared of a log."""
    lines = map(json.loads, log.read_text().splitlines())
    return [(r["type"], {key: r.get(key) for key in COMPARED[r["type"]]}) for r in lines if r["type"] in COMPARED]


# The command.


class Tree:
    """One of the two, `old` or `new`: its folder, and the processes that run its jobs."""

    def __init__(self, name: str, folder: Path, place: Path) -> None:
        self.name, self.folder, self.place = name, folder, place
        (place / name).mkdir()

    def job(self, number: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """A job in a new folder of this tree."""
        folder = self.place / self.name / f"{number:03}"
        folder.mkdir()
        return {"folder": str(folder), "runs": runs}

    def start(self, jobs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Begins the jobs at once; yields what each logged, with its folder, in order."""
        described = Path(f"{jobs[0]['folder']}.json")
        described.write_text(json.dumps({"tree": str(self.folder), "older": self.name == "old", "jobs": jobs}))
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **SAME_BITS, "PYTHONPATH": path, "LLMQ_CACHE_DIR": str(_cache(self.place))}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(described)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=self.place)
        return self._results(process, jobs)

    def _results(self, process: subprocess.Popen[str], jobs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        assert process.stdout is not None
        with process:
            try:
                for job in jobs:
                    line = process.stdout.readline()
                    found = json.loads(line) if line else {"error": f"its process ended with status {process.wait()}"}
                    yield {**found, "folder": job["folder"]}
            finally:
                process.stdout.close()  # where the comparison ends early, so does the process
                process.kill()


def first_difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Where two results differ first: in time by their logs, then in the exported weights."""
    for name, result in (("older", old), ("present", new)):
        if result["error"]:
            return f"the {name} tree: {result['error']}"
    records = [[record for run in result["records"] for record in run] for result in (old, new)]
    if len(records[0]) != len(records[1]):
        return f"{len(records[0])} log records and {len(records[1])}"
    for (kind, one), (other_kind, other) in zip(*records, strict=True):
        if kind != other_kind:
            return f"a record {kind} and a record {other_kind} of step {one['step']}"
        for key, value in one.items():
            if value != other[key]:
                return f"{kind} record of step {one['step']}: {key} {_unequal(value, other[key])}"
    return _first_weights(Path(old["folder"]), Path(new["folder"]))


def _unequal(one: Any, other: Any) -> str:
    """Two values, of lists of records only the first that differ."""
    if isinstance(one, list) and isinstance(other, list):
        pairs = list(zip(one, other, strict=False))
        return f"of {len(one)} and {len(other)}: " + next((_unequal(a, b) for a, b in pairs if a != b), "")
    return f"{one} and {other}"


def _first_weights(old: Path, new: Path) -> str | None:
    import numpy as np
    from safetensors.numpy import load_file

    one, other = (
        {
            f"{file.relative_to(folder / 'model').parent.as_posix()}/{name}".removeprefix("./"): value
            for file in sorted((folder / "model").rglob("*.safetensors"))
            for name, value in load_file(file).items()
        }
        for folder in (old, new)
    )
    if one.keys() != other.keys():
        return f"exported tensors: {', '.join(sorted(one.keys() ^ other.keys()))} in one of the two"
    for name, array in one.items():
        given = other[name]
        if (array.dtype, array.shape) != (given.dtype, given.shape):
            return f"{name}: {array.dtype} {array.shape} and {given.dtype} {given.shape}"
        if array.tobytes() != given.tobytes():
            apart = array.view(np.uint32) != given.view(np.uint32)
            most = np.abs(array[apart] - given[apart]).max()
            return f"{name}: {np.count_nonzero(apart)} of {array.size} numbers, by up to {most:.3g}"
    return None


def refuse(text: str) -> NoReturn:
    """Ends the command: it was called wrongly."""
    print(text, file=sys.stderr)
    sys.exit(2)


def older_tree(commit: str, folder: Path) -> Path:
    """The files of a commit, put into `folder`; a folder that is named in place of a commit is taken unchanged."""
    if Path(commit).is_dir():
        return Path(commit).resolve()
    found = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if found.returncode:
        refuse(f"--against {commit}: {found.stderr.decode().strip()}: name a commit, or a folder with a tree")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _crossing(
    new: Tree, number: int, case: Case, always: dict[str, Any], one: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The present tree's job that continues from the older one's first run, and what the older one's second logged."""
    first, second = case.runs(False, always)
    second["continue"] = str(Path(one["folder"]) / "checkpoints" / f"step-{first['steps']:08}")
    return new.job(number, [second]), {**one, "records": one.get("records", [])[1:]}


def _cache(place: Path) -> Path:
    """What both trees keep kernels and tables in."""
    return Path(os.environ.get("LLMQ_CACHE_DIR") or place / "cache").resolve()


def _tables(place: Path) -> dict[str, set[str]]:
    """Problems by file of the cache folder's tables of matmul algorithms."""
    found = (_cache(place) / "gemm").glob("*.json")
    return {path.name: set(json.loads(path.read_text())["algorithms"]) for path in found}


def compare(arguments: argparse.Namespace, place: Path) -> int:
    """Prints a line a case; returns how many differ."""
    from side_by_side_cases import cases, write_inputs

    chosen = [case for case in cases() if re.search(arguments.cases, case.name)]
    if not chosen:
        names = "; ".join(case.name for case in cases())
        refuse(f"--cases {arguments.cases}: no case has that in its name; there are: {names}")
    write_inputs(place)
    always: dict[str, Any] = {"device": "cuda" if arguments.gpu else "cpu"}
    old, new = Tree("old", older_tree(arguments.against, place / "tree"), place), Tree("new", ROOT, place)

    def start(tree: Tree, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
        return tree.start([tree.job(number, case.runs(tree is old, always)) for number, case in enumerate(chosen)])

    began, wrong, resumed = time.perf_counter(), 0, []

    def tell(name: str, one: dict[str, Any], other: dict[str, Any]) -> None:
        nonlocal wrong
        difference = first_difference(one, other)
        wrong += difference is not None
        print(f"PASS  {name}" if difference is None else f"FAIL  {name}: {difference}", flush=True)

    first = start(old, chosen)
    if arguments.gpu:  # alone on the card, and its table of algorithms is there before the present tree asks for it
        first = iter(list(first))
        table = _tables(place)
    for case, one, other in zip(chosen, first, start(new, chosen), strict=True):
        tell(case.name, one, other)
        resumed += [(case, one)] if case.then else []
    crossed = [_crossing(new, len(chosen) + i, case, always, one) for i, (case, one) in enumerate(resumed)]
    results = new.start([job for job, _ in crossed]) if crossed else iter(())
    for (case, _), (_, one), other in zip(resumed, crossed, results, strict=True):
        tell(f"{case.name} from the older tree's checkpoint", one, other)
    if arguments.gpu and _tables(place) != table:
        print("The present tree's table has algorithms that the older one's lacks: bits of those products may differ")
    total = len(chosen) + len(resumed)
    print(f"{total - wrong} of {total} cases are equal to {arguments.against}, in {time.perf_counter() - began:.0f} s")
    return wrong


def main() -> int:
    """The command; 1 if a case differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--against", metavar="COMMIT", required="--worker" not in sys.argv, help="Or a folder of files."
    )
    parser.add_argument("--cases", metavar="REGEX", default="", help="Only cases whose name has this [default: all]")
    parser.add_argument("--gpu", action="store_true", help="Train on the GPU, one tree after the other.")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
        return 0
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory(prefix="llmq-side-by-side-") as place:
        return int(compare(arguments, Path(place)) > 0)


if __name__ == "__main__":
    sys.exit(main())
