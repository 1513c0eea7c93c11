"""Weights that live on the host, and come to the device a part of the model ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from llmq.row import Row
from llmq.stores.weights import ReplicatedWeights
from llmq.tensor import Ref


class HostedWeights(ReplicatedWeights):
    """Weights of which the rows that are `hosted` live on the host, in the forms that are read of them.

    Each walk brings them into slots, so that those of two parts are on the device. `host_master` is the dtype of
    masters on the host (None: they are on the device): a weight of that dtype is its own master there.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        dtype: str,
        master_dtype: str | None,
        *,
        hosted: Callable[[Row], bool],
        host_master: str | None,
    ) -> None:
        self._host_master = host_master
        super().__init__(on_host(rows, hosted), dtype, master_dtype)

    def written(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref | None]:
        """Yields what the copies of each trained row are written to; those of the host are sent there when the next
        row's is asked for."""
        return written_here(ops, super().written(ops, only))

    def _ref(self, row: Row, dtype: str, master_dtype: str | None) -> Ref:
        ref = super()._ref(row, dtype, master_dtype)
        return replace(ref, value_in="master") if row.home == "host" and ref.dtype == self._host_master else ref

    def _fetch(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        """Slots by row name with what lives on the host of a part."""
        rows = [row for row in self.rows if row.layer == part and row.home == "host"]
        return {row.name: fetched(ops, self.refs[row.name], phase) for row in rows}


def on_host(rows: Sequence[Row], hosted: Callable[[Row], bool]) -> list[Row]:
    """The rows, with the weights of those that are `hosted` on the host."""
    return [replace(row, home="host") if hosted(row) else row for row in rows]


def weight_slot(ref: Ref, phase: str) -> Ref:
    """A slot for what is read of a weight, or written, in a phase."""
    return Ref(f"{phase}/{ref.name}", "activation", ref.shape, ref.dtype, ref.layer, cell=ref.name)


def fetched(ops: Any, ref: Ref, phase: str) -> Ref:
    """A weight on the device: itself, or a slot with what the host has."""
    if ref.home == "device":
        return ref
    ops.copy_to_device(slot := weight_slot(ref, phase), ref)
    return slot


def written_here(ops: Any, refs: Iterable[Ref | None]) -> Iterator[Ref | None]:
    """Each weight that is written, or a slot for one of the host, which is sent there when the next is asked for."""
    for ref in refs:
        if ref is None or ref.home == "device":
            yield ref
            continue
        yield (slot := weight_slot(ref, "update"))
        ops.copy_to_host(ref, slot)
