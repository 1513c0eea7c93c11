"""NVML: every reading, every reading that may be missing, and no NVML at all."""

import dataclasses
import sys
import threading
from types import SimpleNamespace

import pytest

from llmq.hardware import nvml

UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


class FakeNvml:
    """The package `pynvml` for one GPU; a function in `missing` is refused, as WSL2 does, one in `absent` not there."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def __init__(self, missing=(), absent=(), starts=True):
        self.missing, self.absent, self.starts, self.num_starts = missing, absent, starts, 0
        self.answers = {
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=400),
            "nvmlDeviceGetClockInfo": lambda gpu, clock: {1: 1500, 2: 3201}[clock],
            "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: {1: 1980}[clock],
            "nvmlDeviceGetPowerUsage": lambda gpu: 689_500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: {0: 61}[sensor],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 0x1 | 0x2 | 0x4 | 0x40,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x4,
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: 5,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 16,
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=97, memory=41),
            "nvmlDeviceGetPcieThroughput": lambda gpu, way: {0: 1200, 1: 3400}[way],  # nvmlPcieUtilCounter_t: tx, rx
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: ["one", "another"],
        }

    def nvmlInit(self):
        self.num_starts += 1
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != UUID:
            raise self.NVMLError("Not Found")
        return "the GPU"

    def __getattr__(self, name):
        if name in self.absent or name not in self.answers:
            raise AttributeError(name)

        def call(*arguments):
            if name in self.missing:
                raise self.NVMLError("Not Supported")
            assert not arguments or arguments[0] == "the GPU"
            return self.answers[name](*arguments)

        return call


@pytest.fixture
def pretend(monkeypatch):
    """Puts a fake package in the place of `pynvml`."""

    def install(fake):
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        nvml._started.cache_clear()
        return fake

    yield install
    nvml._started.cache_clear()


def test_everything_that_it_says(pretend):
    fake = pretend(FakeNvml())
    assert nvml.read(UUID) == nvml.Reading(
        driver="580.65.06",
        used_bytes=400,
        sm_mhz=1500,
        memory_mhz=3201,
        max_sm_mhz=1980,
        watts=689.5,
        max_watts=700,
        celsius=61,
        throttled=("power cap", "hardware temperature"),
        pcie_generation=5,
        pcie_lanes=16,
        gpu_percent=97,
        memory_percent=41,
    )
    nvml.read(UUID)
    assert fake.num_starts == 1


def test_traffic_over_pcie_is_counted_where_it_is_asked_for(pretend):
    """It takes the driver 20 ms in each direction."""
    pretend(FakeNvml())
    plain, found = nvml.read(UUID), nvml.read(UUID, traffic=True)
    assert found == dataclasses.replace(plain, pcie_rx_kb_s=3400, pcie_tx_kb_s=1200)
    pretend(FakeNvml(missing=("nvmlDeviceGetPcieThroughput",)))
    assert nvml.read(UUID, traffic=True) == plain


def test_a_gpu_is_read_in_the_background_until_it_is_stopped(monkeypatch):
    clocks, threads, enough = iter(range(1000, 10000)), set(), threading.Event()

    def read(uuid, *, traffic):
        assert (uuid, traffic) == (UUID, True)
        threads.add(threading.get_ident())
        clock = next(clocks)
        if clock == 1004:
            enough.set()
        return nvml.Reading(sm_mhz=clock)

    monkeypatch.setattr(nvml, "read", read)
    watch = nvml.Background(UUID, every_s=1e-3, traffic=True)
    assert enough.wait(60)
    found = watch.stop()
    assert [r.sm_mhz for r in found] == list(range(1000, 1000 + len(found))) and len(found) >= 5
    assert threads and threading.get_ident() not in threads
    assert next(clocks) == 1000 + len(found), "not read on"
    once = nvml.Background(UUID, traffic=True)
    assert len(once.stop()) == 1


FIELDS = {
    "nvmlSystemGetDriverVersion": {"driver"},
    "nvmlDeviceGetMemoryInfo": {"used_bytes"},
    "nvmlDeviceGetClockInfo": {"sm_mhz", "memory_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"max_sm_mhz"},
    "nvmlDeviceGetPowerUsage": {"watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"max_watts"},
    "nvmlDeviceGetTemperature": {"celsius"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_lanes"},
    "nvmlDeviceGetUtilizationRates": {"gpu_percent", "memory_percent"},
    "nvmlDeviceGetPcieThroughput": {"pcie_rx_kb_s", "pcie_tx_kb_s"},
}


@pytest.mark.parametrize("how", ["missing", "absent"])
@pytest.mark.parametrize("function", FIELDS)
def test_a_reading_that_is_missing_is_none_and_the_others_stay(function, how, pretend):
    pretend(FakeNvml(**{how: (function,)}))
    found = nvml.read(UUID, traffic=True)
    assert {name for name, value in vars(found).items() if value is None} == FIELDS[function]


def test_reasons_have_an_older_name(pretend):
    newer, older = (f"nvmlDeviceGetCurrentClocks{name}Reasons" for name in ("Event", "Throttle"))
    pretend(FakeNvml(absent=(newer,)))
    assert nvml.read(UUID).throttled == ("power cap",)
    pretend(FakeNvml(missing=(newer, older)))
    assert nvml.read(UUID).throttled is None


def test_nothing_is_known_without_nvml(pretend):
    """Where it cannot be imported or does not start, and of the GPU of another machine."""
    for fake, uuid in ((None, UUID), (FakeNvml(starts=False), UUID), (FakeNvml(), "GPU-of-another-machine")):
        pretend(fake)
        assert nvml.read(uuid) is None and nvml.num_others(uuid) is None
        assert nvml.Background(uuid, every_s=3600).stop() == ()
    (reading,) = nvml.Background(UUID, every_s=3600).stop()
    assert reading.watts == 689.5 and nvml.num_others(UUID) == 1, "this process is one of two"
    pretend(FakeNvml(missing=("nvmlDeviceGetComputeRunningProcesses",)))
    assert nvml.num_others(UUID) is None


def test_health_is_what_is_known(pretend):
    """MIG and ECC are asked for as they are now, not as they will be; a GPU without NVLink has no links."""
    fake = pretend(FakeNvml())
    fake.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, fake.NVML_VOLATILE_ECC = 1, 0
    assert nvml.health(UUID) == nvml.Health(num_processes=2)
    fake.answers |= {
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=800, used=400),
        "nvmlDeviceGetPersistenceMode": lambda gpu: 1,
        "nvmlDeviceGetComputeMode": lambda gpu: 3,
        "nvmlDeviceGetMigMode": lambda gpu: [0, 1],
        "nvmlDeviceGetEccMode": lambda gpu: [1, 0],
        "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, since: {(1, 0): 7}[kind, since],
        "nvmlDeviceGetRemappedRows": lambda gpu: (0, 1, 1, 0),
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
        "nvmlDeviceGetNvLinkState": lambda gpu, link: int(link < 17),
    }
    assert nvml.health(UUID) == nvml.Health(800, 2, 3, True, False, True, 7, True, False, 5, 16, (17, 18))
    assert nvml.health("GPU-of-another-machine") is None
