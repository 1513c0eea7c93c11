"""What moves in next, as classes of the tests: adapters, on a quantized base too, experts, gradients that are fetched.

They show that the seams carry it: nothing in llmq knows of them.
"""

from dataclasses import replace
from types import SimpleNamespace

from llmq.model.parameters import HEAD, padded_vocab
from llmq.plan.build import site_of
from llmq.row import Part, Row
from llmq.stores.replicated import ReplicatedGrads
from llmq.tensor import Form, Ref, Slot

RANK = 4


class LoraLinear:
    """y = x W^T + alpha (x A^T) B^T on a frozen W (Hu et al., 2021), which is held in a form (QLoRA) or as it is.

    A tied head has no rows: it is given its shape.
    """

    def __init__(self, base, shape, stored=None, rank=RANK, alpha=0.5):
        self.base, self.name, self.key, self.rank, self.alpha = base, base.name, base.key, rank, alpha
        self.shape, self.stored = shape, stored

    def slots(self, x):
        return (Slot(f"{self.key}.low", (*x.shape[:-1], self.rank), x.roles),)

    def rows(self, rows):
        (outs, ins), layer = (rows[0].shape, rows[0].layer) if rows else (self.shape, None)
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
        stored = {1: None, 2: self.stored}
        return (*(replace(row, trainable=False, stored=stored[len(row.shape)]) for row in rows), *adapter)

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


def adapted(spec, name, stored=None):
    """An adapter at every linear map."""
    shape = (padded_vocab(spec.config), spec.config.hidden_size)
    return LoraLinear(site_of(spec, name), shape, None if name == HEAD else stored)


TENSORWISE, TILEWISE = (Form("e4m3", "row", scaling) for scaling in ("current", "tilewise"))


class ChosenExperts:
    """y = x (W_2 + W_0)^T + b: a fixed choice of entries of a stack, or of as many rows of their own."""

    count, chosen = 3, (2, 0)

    def __init__(self, base, about, stacked):
        self.base, self.name, self.key, self.about, self.stacked = base, base.name, base.key, about, stacked

    def slots(self, x):
        return ()

    def rows(self, rows):
        weight, *rest = rows
        weight = replace(weight, **self.about)
        if self.stacked:
            size = weight.shape[0]
            parts = tuple(Part(f"{weight.name}.{i}", i * size, (i + 1) * size) for i in range(self.count))
            return (replace(weight, shape=(self.count, *weight.shape), parts=parts, stacked=True), *rest)
        names = [f"{weight.name}.{index}" for index in range(self.count)]
        return (*(replace(weight, name=name, parts=(Part(name, 0, weight.shape[0]),)) for name in names), *rest)

    def entry(self, w, index):
        return w.weight.entry(index) if self.stacked else getattr(w.weight, str(index))

    def forward(self, ops, a, y, x, w, residual=None):
        first, second = (SimpleNamespace(weight=self.entry(w, index), bias=None) for index in self.chosen)
        self.base.forward(ops, a, y, x, SimpleNamespace(weight=first.weight, bias=w.bias), residual)
        self.base.forward(ops, a, y, x, second, y)

    def backward(self, ops, a, d, d_x, dw, d_y, x, w):
        for index, before in zip(self.chosen, (None, d_x), strict=True):
            weight = self.entry(w, index).as_form(self.base.weight.col)
            ops.linear_dgrad(d_x, d_y.as_form(self.base.d_y.row), weight, before)
        for index, bias in zip(self.chosen, (dw.bias, None), strict=True):
            weight = self.entry(dw, index) if dw.weight else None
            self.base.wgrad(ops, SimpleNamespace(weight=weight, bias=bias), d_y, x)


def experts(*, stacked, **about):
    """Experts in place of the MLP's maps, whose rows are changed by `about`."""

    def sites(spec, name):
        site = site_of(spec, name)
        return ChosenExperts(site, about, stacked) if ".mlp." in name else site

    return sites


class FetchedGrads(ReplicatedGrads):
    """The optimizer reads gradients from slots that they are copied to."""

    def sums(self, ops):
        for ref in super().sums(ops):
            slot = Ref(f"sum/{ref.name}", "activation", ref.shape, ref.dtype, ref.layer)
            ops.copy_to_device(slot, ref)
            yield slot


def streams(config):
    """The residual stream that enters each layer."""
    return tuple(f"0/{n}.attention.res" for n in range(config.num_layers))
