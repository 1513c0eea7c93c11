"""A GPU that computes on the host: an H200 to what asks for the device, the NumPy backend to what opens it."""

import sys
from types import ModuleType

import fake_cuda

from llmq.backends.host import HostBackend
from llmq.hardware import cuda_driver, device, nvml

BACKEND = "llmq.backends.cuda"
OPENED = []  # algorithms that each backend was opened with


def install(monkeypatch, driver=None):
    """Makes `driver` (an H200's) with all its libraries what llmq finds, and clears OPENED."""
    fake_cuda.install(monkeypatch, driver or fake_cuda.FakeDriver())
    monkeypatch.setattr(cuda_driver, "library_problem", lambda cuda: None)
    monkeypatch.setattr(cuda_driver, "versions", lambda: {"cuDNN": "9.28.0"})
    monkeypatch.setattr(nvml, "read", lambda uuid, traffic=False: None)
    monkeypatch.setattr(device, "measured_cuda_peak", lambda dtype: 7e14)
    module = ModuleType(BACKEND)
    module.CudaBackend = open_backend
    monkeypatch.setitem(sys.modules, BACKEND, module)
    OPENED.clear()


def open_backend(*, use_graphs=True, deterministic=True, given=None, world=None):
    """The host in the place of the GPU; what a run records and hands on as algorithms is a number of its own."""
    backend = HostBackend()
    OPENED.append(given)
    backend.algorithms = given or {"table": len(OPENED)}
    return backend
