"""How a sublayer names its parameters, and the tensors of files that they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmq.row import Part, Row


@dataclass(frozen=True)
class SublayerRows:
    """The rows of a sublayer of a layer: `layers.3.attention.norm` here, in files below `model.layers.3`."""

    name: str
    layer: int

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
            parts.append(Part(f"model.layers.{self.layer}.{file}", stop, stop + size))
            stop += size
        full = f"layers.{self.layer}.{self.name}.{name}"
        about = (full, shape, tuple(parts), init, len(shape) > 1, self.layer)
        return Row(*about, site=site)
