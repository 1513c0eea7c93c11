"""A row: one parameter as the engine holds it, and the tensors of files that it is made of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from llmq.tensor import Form


@dataclass(frozen=True)
class HeadOrder:
    """How channels of heads lie in files, where that is not how they are held.

    Rotary embedding turns channel i of a head's first half with channel i of its second. In files the first
    `rotary_dim` of a head's channels are turned, those of two halves or, `interleaved`, neighbours; the others pass. So
    it is in the first `turned` heads (None: in all), along `axis` of the tensor. What attention computes does not
    depend on the order, if queries and keys have the same.
    """

    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    turned: int | None = None
    axis: int = 0

    def places(self, size: int) -> np.ndarray:
        """(size,): where each channel of a file is held."""
        return _places(replace(self, axis=0), size)


@lru_cache(maxsize=64)
def _places(order: HeadOrder, size: int) -> np.ndarray:
    d, r = order.head_dim, order.rotary_dim
    turned = np.arange(r).reshape(-1, 2).T if order.interleaved else np.arange(r).reshape(2, -1)
    held = np.concatenate([turned, np.arange(r, d).reshape(2, -1)], axis=1).reshape(-1)  # by places, those of the file
    places = np.arange(size).reshape(-1, d)
    places[: order.turned] = places[: order.turned, :1] + np.argsort(held)
    return places.reshape(-1)


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) along axis 0 of a parameter are the tensor `name` of Hugging Face, whole: in another `order`
    there, or `transposed`, (K,N) in place of (N,K)."""

    name: str
    start: int
    stop: int
    order: HeadOrder | None = None
    transposed: bool = False

    def shape(self, axes: Sequence[int]) -> tuple[int, ...]:
        """That of the tensor, of a parameter of these axes."""
        found = (self.stop - self.start, *axes[1:])
        return found[::-1] if self.transposed else found

    def take(self, whole: np.ndarray, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Entries [start, stop) along axis 0 of the tensor, of the whole parameter's value: a view if it can be one."""
        own = whole[self.start : self.stop]
        own = own.T if self.transposed else own
        if self.order is None:
            return own[start:stop]
        places = self.order.places(own.shape[self.order.axis])
        return own[start:stop, places] if self.order.axis else own[places[start:stop]]

    def put(self, whole: np.ndarray, values: np.ndarray, start: int = 0) -> None:
        """Sets entries of the tensor from `start` on in the whole parameter's value. There may be fewer than it has
        along each axis."""
        own = whole[self.start : self.stop]
        own = own.T if self.transposed else own
        at: list[slice | np.ndarray] = [slice(start, start + len(values)), *map(slice, values.shape[1:])]
        if self.order is not None:
            axis = self.order.axis
            at[axis] = self.order.places(own.shape[axis])[at[axis]]
        own[tuple(at)] = values


@dataclass(frozen=True)
class Row:
    """One parameter. `name` is dotted: `layers.3.mlp.up.weight`; `init` is normal, residual, ones or
    zeros, or one of adapters.

    A frozen row (not `trainable`) has no gradient, master or moments, and is held once: in `dtype` (None: the model's),
    or in the form `stored`, of which other forms are made a layer at a time. `home` is where its weight lives: device
    or host. `file` names the file that it is loaded from and stored in: the `model`, or that of an adapter. `rate`
    multiplies the run's learning rate. A vector that `is_column` is (N, 1) in files.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    init: str
    decay: bool  # weight decay: matrices and embeddings only
    layer: int | None = None
    trainable: bool = True
    dtype: str | None = None
    home: str = "device"
    file: str = "model"
    site: str | None = None  # the linear map that it is the weight or bias of: `layers.3.mlp.up`, `head`
    stored: Form | None = None
    rate: float = 1.0
    is_column: bool = False

    @property
    def part_axes(self) -> tuple[int, ...]:
        """The shape whose axis 0 parts count along, and whose other axes are those of the tensors in files."""
        return (*self.shape, 1) if self.is_column else self.shape


@dataclass(frozen=True)
class SublayerRows:
    """The rows of a sublayer, `layers.3.attention`, or of the head, whose names in files begin with `files`,
    `model.layers.3.`, where some have `orders` and matrices may be `transposed`."""

    name: str
    files: str = ""
    layer: int | None = None
    orders: Mapping[str, HeadOrder] = field(default_factory=dict)  # by names in files, without `.weight`
    transposed: bool = False

    def vector(self, name: str, size: int, file: str) -> Row:
        """The weight (size,) of a norm, which is `file`."""
        return self._row(name, (size,), "ones", {f"{file}.weight": size})

    def bias(self, name: str, size: int, file: str) -> Row:
        """The bias (size,) of a norm, which is `file`."""
        return self._row(name, (size,), "zeros", {f"{file}.bias": size})

    def linear(
        self, name: str, inputs: int, files: Mapping[str, int], *, init: str = "normal", bias: bool = False
    ) -> Iterator[Row]:
        """The weight (N,inputs), and perhaps the bias (N,), of maps that are computed as one: `files` has the outputs
        of each, in order."""
        outputs, site = sum(files.values()), f"{self.name}.{name}"
        weights, biases = ({f"{file}.{kind}": size for file, size in files.items()} for kind in ("weight", "bias"))
        yield self._row(f"{name}.weight", (outputs, inputs), init, weights, site)
        if bias:
            yield self._row(f"{name}.bias", (outputs,), "zeros", biases, site)

    def _row(
        self, name: str, shape: tuple[int, ...], init: str, files: Mapping[str, int], site: str | None = None
    ) -> Row:
        parts, stop = [], 0
        for file, size in files.items():
            order = self.orders.get(file.rpartition(".")[0])
            parts.append(Part(f"{self.files}{file}", stop, stop + size, order, self.transposed and len(shape) > 1))
            stop += size
        about = (f"{self.name}.{name}", shape, tuple(parts), init, len(shape) > 1, self.layer)
        return Row(*about, site=site)
