"""A GPU that writes the memory of others of its machine: CUDA's IPC handles, its copy engines, and waits on memory."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WORD = 4  # bytes of what other GPUs set
ALLOCATION = 2 << 20  # that has a handle of its own: smaller ones may be parts of one
BOOT = Path("/proc/sys/kernel/random/boot_id")
RELEASE_S = 5.0  # at most, until all that waits has gone on
Move = tuple[int, int, int]  # target, source, bytes


class PeerError(Exception):
    """Why a GPU cannot reach the memory of another one."""


def machine() -> str:
    """What tells this machine, since it was started, from others."""
    try:
        return BOOT.read_text("ascii").strip()
    except OSError:
        return socket.gethostname()


class OpenedMemory:
    """An allocation of another process, until nothing refers to this."""

    def __init__(self, handle: str) -> None:
        try:
            self.address = _open(handle)
        except RuntimeError:
            gc.collect()  # what lay at the same address may still be open, for programs that are garbage
            try:
                self.address = _open(handle)
            except RuntimeError as error:
                raise PeerError(str(error)) from error
        weakref.finalize(self, _close, self.address).atexit = False


def _open(handle: str) -> int:
    from cupy.cuda import runtime

    return int(runtime.ipcOpenMemHandle(bytes.fromhex(handle)))


def _close(address: int) -> None:
    from cupy.cuda import runtime

    runtime.deviceSynchronize()  # a graph that reads it may still run
    runtime.ipcCloseMemHandle(address)


class CudaPeer:
    """The current device of this process, its GPU. Copies and meetings are in the order of the current stream, or in a
    graph."""

    def __init__(self) -> None:
        from cupy.cuda import Stream, runtime

        self._device = runtime.getDevice()
        self._beside = Stream(non_blocking=True)
        self._opened: weakref.WeakValueDictionary[str, OpenedMemory] = weakref.WeakValueDictionary()

    def exported(self, address: int) -> tuple[str, int]:
        """A handle for the allocation that an address is in, in hexadecimal digits, and the offset in it.

        PeerError if it has none.
        """
        from cuda.bindings import driver
        from cupy.cuda import runtime

        status, start, _ = driver.cuMemGetAddressRange(address)
        _check(status)
        try:
            return runtime.ipcGetMemHandle(int(start)).hex(), address - int(start)
        except runtime.CUDARuntimeError as error:
            raise PeerError(str(error)) from error

    def opened(self, handle: str) -> OpenedMemory:
        """The memory of a handle of another process: one mapping for all, since CUDA has no second one in a process.

        PeerError where this GPU cannot reach it.
        """
        found = self._opened.get(handle)
        if found is None:
            found = self._opened[handle] = OpenedMemory(handle)
        return found

    def words(self, count: int) -> int:
        """Address of words that are 0, in an allocation of their own, which has a handle."""
        from cupy.cuda import runtime

        assert count * WORD <= ALLOCATION
        address = int(runtime.malloc(ALLOCATION))
        runtime.memset(address, 0, ALLOCATION)
        runtime.deviceSynchronize()
        return address

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """A copy, by a copy engine where the target is on another GPU."""
        from cupy.cuda import get_current_stream, runtime

        runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyDeviceToDevice, get_current_stream().ptr)

    def beside(self, moves: Sequence[Move]) -> Callable[[], None]:
        """Begins copies within this GPU beside what comes next; what comes after the returned call waits for them."""
        from cupy.cuda import Event, get_current_stream

        if not moves:
            return lambda: None
        start, end, stream = Event(disable_timing=True), Event(disable_timing=True), get_current_stream()
        start.record(stream)
        self._beside.wait_event(start)
        with self._beside:
            for move in moves:
                self.copy(*move)
        end.record(self._beside)
        return lambda: get_current_stream().wait_event(end)

    def meet(self, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Sets words of other GPUs to 1, waits until each of its own is 1, and sets these to 0.

        These are commands of the stream itself, which take neither a kernel nor a copy engine.

        What was copied before has arrived when a word is set: the command has a memory barrier for the whole system.
        """
        from cuda.bindings import driver
        from cupy.cuda import get_current_stream

        commands = [*(_sets(word, 1) for word in theirs), *map(_waits, mine), *(_sets(word, 0) for word in mine)]
        _check(driver.cuStreamBatchMemOp(get_current_stream().ptr, len(commands), commands, 0)[0])

    def release(self, words: int, count: int) -> None:
        """Lets all that waits for these words go on, in whatever order it waits; in any thread.

        Sets them again and again, since what waits clears them, until the GPU has nothing more to do.
        """
        from cuda.bindings import driver
        from cupy.cuda import Stream, runtime

        runtime.setDevice(self._device)
        beside = Stream(non_blocking=True)

        def wait() -> None:
            runtime.setDevice(self._device)
            runtime.deviceSynchronize()

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        until = time.monotonic() + RELEASE_S
        while waiting.is_alive() and time.monotonic() < until:
            _check(driver.cuMemsetD32Async(words, 1, count, beside.ptr)[0])
            beside.synchronize()
            waiting.join(1e-3)


def _waits(word: int) -> Any:
    """The command that waits until a word is 1."""
    from cuda.bindings import driver

    command = driver.CUstreamBatchMemOpParams()
    command.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    command.waitValue.operation = command.operation
    command.waitValue.address, command.waitValue.value = word, 1
    command.waitValue.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    return command


def _sets(word: int, value: int) -> Any:
    """The command that sets a word."""
    from cuda.bindings import driver

    command = driver.CUstreamBatchMemOpParams()
    command.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    command.writeValue.operation = command.operation
    command.writeValue.address, command.writeValue.value = word, value
    command.writeValue.flags = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
    return command


def _check(status: Any) -> None:
    if int(status):
        raise RuntimeError(f"the driver refuses: {status.name}")
