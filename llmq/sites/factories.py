"""Which site computes a linear map: the one table from which a model is fitted out."""

from __future__ import annotations

from collections.abc import Callable

from llmq.sites.fp8 import Fp8Linear
from llmq.sites.linear import Bf16Linear, Linear

Factory = Callable[[str, str, str], Linear]  # of a name, and for fp8 the dtype of gradients and the scaling


def _plain(dtype: str) -> Factory:
    return lambda name, gradient, scaling: Bf16Linear(name, dtype)


# by the dtype that a map multiplies in
FACTORIES: dict[str, Factory] = {"e4m3": Fp8Linear, **{dtype: _plain(dtype) for dtype in ("bf16", "fp32", "fp64")}}
