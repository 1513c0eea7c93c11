"""What moves in next, as classes of the tests: an adapter site, streamed weights, states on the host.

They show that the seams carry it: nothing in llmq knows of them.
"""

from dataclasses import replace
from itertools import pairwise

from llmq.plan.build import site_of
from llmq.stores.bundles import bundle_tree
from llmq.stores.moments import ReplicatedMoments, State
from llmq.stores.weights import ReplicatedWeights
from llmq.tensor import Part, Ref, Row, Slot

RANK = 4


class LoraLinear:
    """y = x W^T + alpha (x A^T) B^T on a frozen W (Hu et al., 2021)."""

    def __init__(self, base, rank=RANK, alpha=0.5):
        self.base, self.name, self.key, self.rank, self.alpha = base, base.name, base.key, rank, alpha

    def slots(self, x):
        return (Slot(f"{self.key}.low", (*x.shape[:-1], self.rank), x.roles),)

    def rows(self, rows):
        (outs, ins), layer = rows[0].shape, rows[0].layer
        own = {"a": ((self.rank, ins), "normal"), "b": ((outs, self.rank), "zeros")}
        adapter = (
            Row(
                f"{self.name}.{key}",
                shape,
                (Part(f"{self.name}.lora_{key}", 0, shape[0]),),
                init,
                True,
                layer,
                file="lora",
            )
            for key, (shape, init) in own.items()
        )
        return (*(replace(row, trainable=False) for row in rows), *adapter)

    def forward(self, ops, a, y, x, w, residual=None):
        low = a[f"{self.key}.low"]
        ops.linear_forward(low, x, w.a, None, None)
        ops.linear_forward(y, low, w.b, None, residual, alpha=self.alpha)
        self.base.forward(ops, a, y, x, w, y)

    def backward(self, ops, a, d, d_x, dw, d_y, x, w):
        low, d_low = a[f"{self.key}.low"], d[f"{self.key}.low"]
        ops.linear_dgrad(d_low, d_y, w.b, None, alpha=self.alpha)
        ops.linear_wgrad(dw.b, d_y, low, alpha=self.alpha)
        ops.linear_wgrad(dw.a, d_low, x)
        self.base.backward(ops, a, d, d_x, dw, d_y, x, w)
        ops.linear_dgrad(d_x, d_low, w.a, d_x)


def adapted(spec, name):
    """An adapter at every linear map of the blocks."""
    site = site_of(spec, name)
    return site if name == "head" else LoraLinear(site)


class StreamedWeights(ReplicatedWeights):
    """Layers' weights live on the host, and come one layer ahead of their use."""

    def __init__(self, rows, dtype, master_dtype):
        rows = [row if row.layer is None else replace(row, home="host") for row in rows]
        super().__init__(rows, dtype, master_dtype)

    def walk(self, ops, parts, phase):
        resident = dict(super().walk(ops, parts, phase))
        parts = list(parts)
        ahead = self._fetched(ops, parts[0], phase, resident)
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            here, ahead = ahead, self._fetched(ops, following, phase, resident)
            yield part, here

    def written(self, ops):
        for ref in super().written(ops):
            slot = self._slot(ref, "update")
            yield slot if ref.home == "host" else ref
            if ref.home == "host":
                ops.copy_to_host(ref, slot)

    def _fetched(self, ops, part, phase, resident):
        if not isinstance(part, int):
            return resident.get(part)
        prefix = f"layers.{part}."
        slots = {name.removeprefix(prefix): ref for name, ref in self.refs.items() if name.startswith(prefix)}
        for name, ref in slots.items():
            slots[name] = self._slot(ref, phase)
            ops.copy_to_device(slots[name], ref)
        return bundle_tree(slots)

    def _slot(self, ref, phase):
        return Ref(f"{phase}/{ref.name}", "activation", ref.shape, ref.dtype, ref.layer, cell=ref.name)


class HostMoments(ReplicatedMoments):
    """m and v live on the host; those of the next row are fetched while a row is updated."""

    def __init__(self, rows, *dtypes):
        super().__init__(rows, *dtypes)
        for name, (master, m, v) in self.refs.items():
            self.refs[name] = State(master, replace(m, home="host"), replace(v, home="host"))

    def walk(self, ops, *, masters_only=False):
        if masters_only:
            yield from super().walk(ops)
            return
        rows = [*super().walk(ops), None]
        ahead = self._fetched(ops, rows[0])
        for (row, kept), following in pairwise(rows):
            here, ahead = ahead, self._fetched(ops, following)
            yield row, here
            for slot, ref in zip(here[1:], kept[1:], strict=True):
                ops.copy_to_host(ref, slot)

    def _fetched(self, ops, item):
        if item is None:
            return None
        master, *moments = item[1]
        slots = [Ref(f"{ref.space}/{ref.name}", "activation", ref.shape, ref.dtype, ref.layer) for ref in moments]
        for slot, ref in zip(slots, moments, strict=True):
            ops.copy_to_device(slot, ref)
        return State(master, *slots)


def streams(config):
    """The residual stream that enters each layer."""
    return tuple(f"0/{n}.attention.res" for n in range(config.num_layers))
