"""Optimizer state that every rank holds whole: master parameters and the two moments of AdamW."""

from __future__ import annotations

from collections.abc import Sequence

from llmq.rows import Row
from llmq.tensor import Ref


class ReplicatedMoments:
    """Refs of master, m and v per row. A master of the weights' dtype is the weight itself (see `plan`)."""

    def __init__(self, rows: Sequence[Row], master_dtype: str, m_dtype: str, v_dtype: str) -> None:
        dtypes = {"master": master_dtype, "m": m_dtype, "v": v_dtype}
        self.refs = {
            row.name: {space: Ref(row.name, space, row.shape, dtype, row.layer) for space, dtype in dtypes.items()}
            for row in rows
        }
