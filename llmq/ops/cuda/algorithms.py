"""Which algorithm runs each matrix product: a table, kept on disk between runs and stored with every run.

An algorithm is the 64 opaque bytes of a `cublasLtMatmulAlgo_t`, valid for one version of cuBLASLt; the same bytes give
the same bits. So the table belongs to a device (GPU name, multiprocessors, library version, what the library was asked
for), a run folder or checkpoint carries the part that the run used, and what is given from there comes before what the
disk says.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmq.disk import cache_folder, replace_file

ALGORITHM_BYTES = 64


@dataclass(frozen=True)
class Choice:
    """The answer for one problem, and what it was chosen from: time of the best and of the library's first proposal."""

    algorithm: str  # hexadecimal
    microseconds: float
    first_microseconds: float
    candidates: int

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.algorithm)) != ALGORITHM_BYTES:
            raise ValueError(f"an algorithm has {ALGORITHM_BYTES} bytes, not {len(self.algorithm) // 2}")


class Algorithms:
    """The table of one device. `given` is the `facts` of an earlier run, `folder` replaces the cache on disk."""

    def __init__(self, device: str, given: Mapping[str, Any] | None = None, folder: Path | None = None) -> None:
        self.device = device
        self.path = (folder or cache_folder("gemm")) / f"{re.sub(r'[^A-Za-z0-9.]+', '-', device)}.json"
        self.given_fits = True
        """Whether the earlier run's algorithms are for this device and all in use: if not, its bits are gone."""
        self._known = _read(self.path, device)
        self._given: dict[str, Choice] = {}
        if given is not None:
            self.take(given)
        self._used: dict[str, Choice] = {}
        self._new: dict[str, Choice] = {}

    def take(self, given: Mapping[str, Any]) -> None:
        """Computes as what has these `facts` did, or does: an earlier run, another rank."""
        self.given_fits = given.get("device") == self.device
        self._given = _choices(given) if self.given_fits else {}
        self._known |= self._given

    def find(self, problem: str) -> bytes | None:
        """The algorithm for a problem, None if it has yet to be chosen."""
        if problem not in self._known:
            return None
        self._used[problem] = self._known[problem]
        return bytes.fromhex(self._known[problem].algorithm)

    def add(self, problem: str, choice: Choice) -> None:
        """Notes what was chosen: for a problem of the earlier run, because the library refuses what that one had."""
        self.given_fits = self.given_fits and problem not in self._given
        self._known[problem] = self._used[problem] = self._new[problem] = choice

    def facts(self) -> dict[str, Any]:
        """The device and all that was used so far, as plain data for a run folder or checkpoint."""
        used = {problem: asdict(choice) for problem, choice in sorted(self._used.items())}
        return {"device": self.device, "algorithms": used}

    def save(self) -> str | None:
        """Adds what is new to the file on disk, whatever other processes wrote there meanwhile.

        Returns why that failed, if it did: a run does not need the cache, only its next start does.
        """
        if not self._new:
            return None
        merged = {p: asdict(c) for p, c in sorted((_read(self.path, self.device) | self._new).items())}
        content = {"device": self.device, "algorithms": merged, "digest": _digest(merged)}
        try:
            replace_file(self.path, json.dumps(content, indent=1).encode())
        except OSError as error:
            return f"GEMM algorithms are not kept for the next run: {self.path}: {error.strerror or error}"
        self._new = {}
        return None


def _choices(table: Mapping[str, Any]) -> dict[str, Choice]:
    return {str(problem): Choice(**choice) for problem, choice in table["algorithms"].items()}


def _read(path: Path, device: str) -> dict[str, Choice]:
    """The table in a file; empty if there is none, or if it is damaged: then it is made again."""
    try:
        content = json.loads(path.read_bytes())
        whole = content["device"] == device and content["digest"] == _digest(content["algorithms"])
        return _choices(content) if whole else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _digest(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]
