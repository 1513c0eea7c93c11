"""Copies to the host of what waits there for backward, and back.

A slot leaves as soon as it is written. It comes back a block ahead: its copy is recorded where backward begins with the
layer before the one that reads it, so that it runs beside that layer's work and two layers' slots are on the device.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import groupby

from llmq.ops.record import Call, Result
from llmq.ops.seam import record
from llmq.plan.passes.fates import Item
from llmq.tensor import Ref, changed


def transfers(calls: Sequence[Call], offloaded: Collection[Item]) -> list[Call]:
    """The calls with those that move every slot and form of `offloaded`."""
    if not offloaded:
        return list(calls)
    written: dict[Item, tuple[int, Ref]] = {}
    read: dict[Item, int] = {}
    for index, call in enumerate(calls):
        for ref in call.written:
            if not ref.again and (ref.name, ref.form) in offloaded:
                written[ref.name, ref.form] = index, ref  # the last write, as a slot may be made in pieces
        for source in call.inputs:
            if source is not None and source.again and (source.name, source.form) in offloaded:
                read.setdefault((source.name, source.form), index)
    starts = starts_of_blocks(calls)
    before: dict[int, list[Call]] = defaultdict(list)  # index of a call, what is recorded in front of it
    for item, first_read in read.items():
        index, ref = written[item]
        kept = ref.entire
        hosted = changed(kept, home="host")
        # As soon as it is written: the earlier it leaves, the earlier its bytes serve others.
        before[index + 1].append(moved("copy_to_host", hosted, kept))
        before[starts[first_read]].append(moved("copy_to_device", changed(kept, again=True), hosted))
    return [one for index in range(len(calls) + 1) for one in (*before[index], *calls[index : index + 1])]


def moved(op: str, out: Ref, x: Ref) -> Call:
    """A copy between homes, in the form of both."""
    return Call(op, (Result(changed(out, form=None), (out.form,)),), (x,), {}, "transfer", lane=record(op).lane)


def starts_of_blocks(calls: Sequence[Call]) -> list[int]:
    """For each call the index at which the run of calls of the layer before its own begins."""
    runs = [list(run) for _, run in groupby(range(len(calls)), key=lambda index: layer_of(calls[index]))]
    starts = [0, *(run[0] for run in runs)]
    return [starts[number] for number, run in enumerate(runs) for _ in run]


def layer_of(call: Call) -> int | None:
    """The layer that a call works on."""
    refs = [result.ref for result in call.outputs if result is not None]
    return next((ref.layer for ref in refs if ref.layer is not None), None)
