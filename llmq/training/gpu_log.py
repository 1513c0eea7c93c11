"""The GPU as the log has it every N steps (`--log-gpu-util`): clocks, power, heat, memory, PCIe, utilisation.

NVML is read in a thread of its own while the step runs: what it says between two steps is that of an idle GPU, and
counting PCIe traffic takes it 40 ms. Nothing waits for the reading but the end of its step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from llmq.disk import MIB
from llmq.errors import UsageError
from llmq.hardware import nvml
from llmq.hardware.device import Device
from llmq.training.hooks import Hook, RunView
from llmq.training.records import GpuRecord, TrainRecord


class GpuWatch(Hook):
    """Readings of the GPU of a run every `every` steps, one at a time; `write` gets their records."""

    def __init__(self, where: Device, every: int, write: Callable[[GpuRecord], None]) -> None:
        """UsageError if there is no GPU to read, or nothing that reads it; 0 steps ask for nothing."""
        self._every, self._write = every, write
        self._uuid = where.gpu.uuid if where.gpu else None
        self._reading: nvml.Background | None = None
        if not every or where.planned:
            return
        if self._uuid is None:
            raise UsageError(f"--log-gpu-util {every} needs a GPU, and this run is on the CPU: leave it out")
        if nvml.read(self._uuid) is None:
            raise UsageError(
                f"--log-gpu-util {every} needs NVML, which does not answer for this GPU: pip install nvidia-ml-py, or "
                "leave it out"
            )

    def during_step(self, run: RunView) -> None:
        """Starts a reading if the step gets one: the GPU works on the step from here on."""
        if self._every and (run.progress.step + 1) % self._every == 0:
            self.begin()

    def after_step(self, run: RunView, record: TrainRecord) -> None:
        """Writes the reading of this step."""
        if (reading := self.record(record.step)) is not None:
            self._write(reading)

    def begin(self) -> None:
        """Starts a reading."""
        assert self._uuid is not None and self._reading is None
        self._reading = nvml.Background(self._uuid, traffic=True)

    def record(self, step: int) -> GpuRecord | None:
        """The reading that was begun, once it is there, as that of `step`; None if none was."""
        if self._reading is None:
            return None
        found, self._reading = self._reading.stop(), None
        reading = found[0] if found else nvml.Reading()
        used = None if reading.used_bytes is None else reading.used_bytes / MIB
        same = {one.name: getattr(reading, one.name) for one in fields(GpuRecord) if hasattr(reading, one.name)}
        return GpuRecord(step, used_mib=used, **same)
