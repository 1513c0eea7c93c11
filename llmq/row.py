"""A row: one parameter as the engine holds it, and the tensors of files that it is made of."""

from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True)
class SublayerRows:
    """The rows of a sublayer of a layer: `layers.3.attention.norm` here, in files below `model.layers.3`."""

    name: str
    layer: int
    files: str = "model.layers"

    def vector(self, name: str, size: int, file: str) -> Row:
        """The weight (size,) of a norm, which is `file`."""
        return self._row(name, (size,), "ones", {f"{file}.weight": size})

    def linear(
        self, name: str, inputs: int, files: Mapping[str, int], *, init: str = "normal", bias: bool = False
    ) -> Iterator[Row]:
        """The weight (N,inputs), and perhaps the bias (N,), of maps that are computed as one: `files` has the outputs
        of each, in order."""
        outputs, site = sum(files.values()), f"layers.{self.layer}.{self.name}.{name}"
        weights, biases = ({f"{file}.{kind}": size for file, size in files.items()} for kind in ("weight", "bias"))
        yield self._row(f"{name}.weight", (outputs, inputs), init, weights, site)
        if bias:
            yield self._row(f"{name}.bias", (outputs,), "zeros", biases, site)

    def _row(
        self, name: str, shape: tuple[int, ...], init: str, files: Mapping[str, int], site: str | None = None
    ) -> Row:
        parts, stop = [], 0
        for file, size in files.items():
            parts.append(Part(f"{self.files}.{self.layer}.{file}", stop, stop + size))
            stop += size
        full = f"layers.{self.layer}.{self.name}.{name}"
        about = (full, shape, tuple(parts), init, len(shape) > 1, self.layer)
        return Row(*about, site=site)
