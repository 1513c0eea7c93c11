"""The reference backend: every op in NumPy, complete and readable. It is the CPU backend and the oracle of the tests."""

from collections.abc import Callable

from llmq.ops.reference.rmsnorm import rmsnorm_backward, rmsnorm_forward

__all__ = ["rmsnorm_backward", "rmsnorm_forward"]

OPS: dict[str, Callable[..., None]] = {name: globals()[name] for name in __all__}
