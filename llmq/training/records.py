"""What is known of a step, an evaluation, the GPU and the whole run: records of the log, and lines of the console."""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llmq.plan.plan import Plan


class _Timed:
    """What took some time for this many tokens."""

    step: int
    time_ms: float
    tokens: int

    @property
    def tps(self) -> float:
        """Tokens per second, over all tokens."""
        return 1000.0 * self.tokens / self.time_ms if self.time_ms > 0 else math.nan

    @property
    def values(self) -> dict[str, Any]:
        """Its fields, and `tps`, by name."""
        return {**vars(self), "tps": self.tps}

    def _place(self, num_steps: int) -> str:
        share = f"{100 * self.step / num_steps:5.1f}%" if num_steps else "   n/a"
        return f"step {self.step:5d} [{share}] | time: {self.time_ms:5.0f} ms"


@dataclass(frozen=True)
class TrainRecord(_Timed):
    """One optimizer step. `tokens` are all tokens of the step, `trained_tokens` those that the loss is made of."""

    step: int
    epoch: float
    loss: float
    norm: float  # of the gradient of the mean loss, before clipping
    lr: float
    time_ms: float
    tokens: int
    trained_tokens: int
    wait_ms: float = 0.0  # part of time_ms spent waiting for data
    sol: float | None = None
    applied: bool = True  # False: not finite, or a spike that is skipped: the update changed nothing
    memory_mib: float | None = None  # most that was taken from the device so far, with what libraries and pools hold
    real_tokens: int | None = None  # without padding
    sent_error: float | None = None  # |sent - gradient| / |gradient| of the compressed gradients that rank 0 sends
    accuracy: float | None = None  # share of trained tokens whose target has the largest logit; None: not counted
    allocated_mib: float | None = None  # of memory_mib what the plan's tensors take

    def line(self, num_steps: int, *, details: bool = False) -> str:
        """`[T] step     7 [ 12.5%] | time:   412 ms | norm   2.718282 | loss   3.141593 | tps 19871 | sol 31.4%`.

        The share is of the run's `num_steps` (0: not known). Padded rows have their other tokens beside `tps`;
        `details` are the learning rate and the memory.
        """
        sol = "  n/a" if self.sol is None else f"{100 * self.sol:4.1f}%"
        tps = f"{self.tps:5.0f}"
        if self.real_tokens is not None and self.real_tokens < self.tokens:
            tps += f" ({self.tps * self.real_tokens / self.tokens:.0f} without padding)"
        line = f"[T] {self._place(num_steps)} | norm {self.norm:10.6f} | loss {self.loss:10.6f} | tps {tps} | sol {sol}"
        if not details:
            return line
        memory = "" if self.memory_mib is None else f" | memory {self.memory_mib:.0f} MiB"
        memory += "" if self.allocated_mib is None else f", {self.allocated_mib:.0f} allocated"
        return f"{line} | lr {self.lr:.3e}{memory}"


@dataclass(frozen=True)
class EvalRecord(_Timed):
    """One evaluation after `step` updates: `loss` on held-out data, `train_loss` of the steps since the last one."""

    step: int
    epoch: float
    loss: float
    train_loss: float | None
    time_ms: float
    tokens: int
    trained_tokens: int
    accuracy: float | None = None  # as that of a step

    def line(self, num_steps: int) -> str:
        """`[V] step     7 [ 12.5%] | time:   412 ms | eval   3.141593 | train   3.141593 | accuracy 41% | tps 1987`."""
        train = math.nan if self.train_loss is None else self.train_loss
        accuracy = "" if self.accuracy is None else f" | accuracy {100 * self.accuracy:4.1f}%"
        losses = f"eval {self.loss:10.6f} | train {train:10.6f}"
        return f"[V] {self._place(num_steps)} | {losses}{accuracy} | tps {self.tps:5.0f}"


@dataclass(frozen=True)
class GpuRecord:
    """The GPU while the update `step` was computed, as NVML says; None where it does not."""

    step: int
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    watts: float | None = None
    celsius: int | None = None
    throttled: tuple[str, ...] | None = None  # what holds the clocks down: empty if nothing
    used_mib: float | None = None  # of its memory, by all processes
    pcie_rx_kb_s: int | None = None  # to the GPU
    pcie_tx_kb_s: int | None = None  # from the GPU
    gpu_percent: int | None = None  # of the time in which a kernel ran
    memory_percent: int | None = None  # of the time in which its memory was read or written

    def line(self) -> str:
        """`[G] step     7 | SM 1755 MHz | 655 W | 61 C | 36100 MiB | PCIe 12/3 MB/s | busy 99% | power cap`."""
        received, sent = self.pcie_rx_kb_s, self.pcie_tx_kb_s
        parts = (
            None if self.sm_mhz is None else f"SM {self.sm_mhz} MHz",
            None if self.watts is None else f"{self.watts:.0f} W",
            None if self.celsius is None else f"{self.celsius} C",
            None if self.used_mib is None else f"{self.used_mib:.0f} MiB",
            None if received is None or sent is None else f"PCIe {received / 1000:.0f}/{sent / 1000:.0f} MB/s",
            None if self.gpu_percent is None else f"busy {self.gpu_percent}%",
            ", ".join(self.throttled or ()),
        )
        return " | ".join([f"[G] step {self.step:5d}", *(part for part in parts if part)])


class History(Mapping[str, np.ndarray]):
    """Metrics of a run by name: the values of each, in the order in which they came, with NaN where one is not known.

    `history["eval_loss"]` are the losses of evaluations, `history.steps("eval_loss")` their steps.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[array[int], array[float]]] = {}  # steps and values: 16 bytes for each

    def add(self, step: int, found: Mapping[str, Any]) -> None:
        """Adds a value after `step` updates for each name."""
        for name, value in found.items():
            steps, values = self._found.setdefault(name, (array("q"), array("d")))
            steps.append(step)
            values.append(math.nan if value is None else float(value))

    def drop_after(self, step: int) -> None:
        """Drops the values of later steps; names stay."""
        for steps, values in self._found.values():
            kept = bisect_right(steps, step)
            del steps[kept:], values[kept:]

    def steps(self, name: str) -> np.ndarray:
        """The steps (n,) int64 of the values of a metric."""
        return np.array(self._found[name][0], np.int64)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array(self._found[name][1], np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


@dataclass(frozen=True)
class TrainResult:
    """What a run made. Losses are nats per trained token; paths are None for what was not written.

    A dry run gives its `plan` alone: `total_bytes`, and `table()` with the bytes of each part.
    The exit code is that of NonFiniteError where the model was not exported because it is ruined; `warnings` say why,
    and what else may have spoiled the run.
    """

    exit_code: int = 0
    steps: int = 0
    train_loss: float = math.nan  # of the last step
    eval_loss: float = math.nan  # of the last evaluation
    tokens_per_second: float = math.nan  # median over the steps of this run
    sol: float | None = None  # median share of the device's speed of light
    first_step_s: float = math.nan  # from the call to the end of the first step
    model_path: Path | None = None
    merged_path: Path | None = None  # of --merge
    log_path: Path | None = None
    checkpoint_path: Path | None = None
    warnings: tuple[str, ...] = ()
    plan: Plan | None = None
    history: History = field(default_factory=History)  # of this process, without the steps before a resume
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes of the device: `planned`, and `peak`
    stopped_by: str | None = None  # why it ended before its last step, if it did

    @property
    def best_step(self) -> int | None:
        """The step of the lowest evaluation loss in `history`; None without evaluations."""
        losses = self.history.get("eval_loss", np.array([]))
        return int(self.history.steps("eval_loss")[np.nanargmin(losses)]) if np.isfinite(losses).any() else None


OWN_METRICS = frozenset(  # names that every run logs itself
    (
        *("tps", "eval_tps", *(one.name for one in fields(TrainRecord))),
        *(f"eval_{one.name}" for one in fields(EvalRecord)),
    )
)


def sample_line(step: int, sample: Mapping[str, Any]) -> str:
    """`[S] step     7 | "Once upon a" -> " time there was a cat.\\n"`, each side on one line as JSON writes it.

    Of a chat the last message is shown.
    """
    asked = asked_of(sample)
    said = asked[-1].get("content") if "messages" in sample else asked
    shown, answer = (json.dumps(value, ensure_ascii=False) for value in (said, answer_of(sample)))
    return f"[S] step {step:5d} | {shown} -> {answer}"


def asked_of(sample: Mapping[str, Any]) -> Any:
    """What a sample of a log completes: text, messages or tokens."""
    return next(sample[name] for name in ("prompt", "messages", "tokens") if name in sample)


def answer_of(sample: Mapping[str, Any]) -> Any:
    """Its completion: text, or tokens without a tokenizer."""
    return sample["new_tokens"] if sample["text"] is None else sample["text"]


def to_json(value: Any) -> Any:
    """`value` with everything that JSON lacks made a string, list or null; a number that is not finite is its name."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
