"""Memory that a call needs only while it runs: one buffer per device, used by all calls in turn.

How much a call needs is a function of its shapes (`scratch_bytes` of the backend). Whoever owns the memory gives a
buffer to `use` before the first call; calls on one stream run one after the other, so one buffer of the largest need is
enough.
"""

from __future__ import annotations

from typing import Any

_buffers: dict[int, Any] = {}


def use(buffer: Any) -> None:
    """From now on ops on the current device take their scratch from `buffer`, a CuPy array aligned to 256 bytes."""
    import cupy

    _buffers[cupy.cuda.runtime.getDevice()] = buffer


def take(num_bytes: int) -> int:
    """Address of scratch for one call."""
    import cupy

    buffer = _buffers[cupy.cuda.runtime.getDevice()]
    assert num_bytes <= buffer.nbytes, f"{num_bytes} bytes of scratch are needed and {buffer.nbytes} were given"
    return int(buffer.data.ptr)
