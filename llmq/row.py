"""A row: one parameter as the engine holds it, and the tensors of files that it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.tensor import Form


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) along axis 0 of a parameter are the tensor `name` of Hugging Face, whole."""

    name: str
    start: int
    stop: int


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
