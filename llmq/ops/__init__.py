"""Backends behind one seam: each is a table of the same functions by name (`seam` says what a signature means)."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def load(device: str) -> Mapping[str, Callable[..., None]]:
    """The ops of a device, as `llmq.device` picked it: the NumPy reference on the CPU."""
    from llmq.ops import reference

    assert device == "cpu", device
    return reference.OPS
