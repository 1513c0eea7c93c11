"""A driver library as ctypes would call it, answering for made-up GPUs; where it is used, no real one is asked."""

from dataclasses import dataclass, field

from llmq.hardware import cuda_driver

H200 = ("NVIDIA H200", (9, 0), 132, 150_119_841_792)
RTX_4090 = ("NVIDIA GeForce RTX 4090", (8, 9), 128, 25_249_775_616)
RTX_4085 = ("NVIDIA GeForce RTX 4085", (8, 9), 80, 16_857_620_480)
RTX_2080 = ("NVIDIA GeForce RTX 2080", (7, 5), 46, 8_361_017_344)
MIG = ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 16, 10_468_982_784)
ERRORS = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 100: b"CUDA_ERROR_NO_DEVICE", 803: b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}


@dataclass
class FakeDriver:
    """`cuda` as cuDriverGetVersion writes it; `failure` is what cuInit returns; `used` bytes are taken on each GPU."""

    cuda: int = 13000
    gpus: tuple = (H200,)
    failure: int = 0
    used: int = 0
    context_failure: int = 0
    no_address: int = 0
    contexts: list = field(default_factory=list)

    def cuDriverGetVersion(self, pointer):
        pointer._obj.value = self.cuda
        return 0

    def cuInit(self, flags):
        return self.failure

    def cuGetErrorName(self, code, pointer):
        pointer._obj.value = ERRORS.get(code)
        return 0 if code in ERRORS else 1

    def cuDeviceGetCount(self, pointer):
        pointer._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, pointer, index):
        pointer._obj.value = index
        return 0

    def cuDeviceGetName(self, buffer, size, device):
        buffer.value = self.gpus[device.value][0].encode()
        return 0

    def cuDeviceGetUuid_v2(self, pointer, device):
        pointer._obj[:] = range(16 * device.value, 16 * device.value + 16)
        return 0

    def cuDeviceGetPCIBusId(self, buffer, size, device):
        buffer.value = f"0000:{24 + device.value:02X}:00.0".encode()
        return self.no_address

    def cuDeviceTotalMem_v2(self, pointer, device):
        pointer._obj.value = self.gpus[device.value][3]
        return 0

    def cuDeviceGetAttribute(self, pointer, attribute, device):
        _, capability, num_sms, _ = self.gpus[device.value]
        pointer._obj.value = {16: num_sms, 75: capability[0], 76: capability[1]}[attribute]
        return 0

    def cuDevicePrimaryCtxRetain(self, pointer, device):
        pointer._obj.value = 1 + device.value
        return self.context_failure

    def cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context.value - 1)
        return 0

    def cuCtxPopCurrent_v2(self, pointer):
        self.contexts.pop()
        return 0

    def cuMemGetInfo_v2(self, free, total):
        size = self.gpus[self.contexts[-1]][3]
        free._obj.value, total._obj.value = size - self.used, size
        return 0


def install(monkeypatch, driver):
    """Makes `driver` (None: there is none) what llmq finds."""
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver
