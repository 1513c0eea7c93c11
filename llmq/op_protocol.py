"""What block code calls ops by."""

from collections.abc import Callable


class Ops:
    """Every op by its name; the planner's recorder and a backend make the methods when they are asked for.

    An op takes what its function in `llmq/ops/reference/` takes, with Refs in place of tensors and None for a result
    that is not wanted. mypy checks calls by that function's signature (`tools/ops_for_mypy.py`).
    """

    def __getattr__(self, op: str) -> Callable[..., None]:
        raise AttributeError(op)
