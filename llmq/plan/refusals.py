"""What a run may ask for and no plan can do: said before anything is recorded."""

from __future__ import annotations

from collections.abc import Iterator

from llmq.errors import UsageError
from llmq.plan.spec import Spec


def refuse(spec: Spec) -> None:
    """UsageError with everything that the update in backward, tiles, weights without masters and copies made for each
    use cannot do, and for ranks of adapters that are not known."""
    problems: list[str] = []
    if spec.memory.fused:
        problems += [f"--fused-update: {text}" for text in _fused(spec)]
    if spec.memory.seq_tiles > 1:
        problems += [f"--seq-tiles {spec.memory.seq_tiles}: {text}" for text in _tiled(spec)]
    if spec.precision.master == "none":
        problems += [f"--master-dtype none: {text}" for text in _without_master(spec)]
    if not spec.memory.persistent_quants:
        problems += [f"--no-persistent-quants: {text}" for text in _remade(spec)]
    if problems:
        raise UsageError("; ".join(problems))


def _fused(spec: Spec) -> Iterator[str]:
    clip, p = spec.hyper.grad_clip, spec.precision
    if spec.sharding.size > 1:
        yield f"it is for a run of one GPU, and this one has {spec.sharding.size}: use --zero-level 3"
    if problems := [*spec.adapters.fused_problems()]:
        yield from problems
        return
    if clip and not spec.hyper.clips_by_last:
        yield f"the norm that --grad-clip {clip:g} looks at is not known then: use --clip-by last, or --grad-clip 0"
    if p.matmul == "e4m3" and p.scaling == "delayed":
        yield (
            "copies of weights are written before the end of the step, when --fp8-scaling delayed sets their scales: "
            "use --fp8-scaling current"
        )
    if "grad" in spec.memory.host:
        yield "it leaves no gradients for --offload-gradients to keep: leave that out"


def _tiled(spec: Spec) -> Iterator[str]:
    p = spec.precision
    yield from spec.adapters.tile_problems()
    if p.matmul == "e4m3" and p.scaling == "blockwise":
        yield "cuBLASLt takes no 1x128 scales of a piece of the gradient: use --fp8-scaling rowwise"


def _without_master(spec: Spec) -> Iterator[str]:
    hosted = {"weight": "--stream-weights", "quant": "--offload-quants", "master": "--offload-master"}
    if spec.adapters.freezes:
        yield "adapters are all that is trained, and the model has no masters: hold it in --base-dtype e4m3 instead"
    for space, flag in hosted.items():
        if space in spec.memory.host and not (space == "master" and "weight" in spec.memory.host):
            yield f"weights take one byte each on the GPU, and {flag} does not move them: leave that out"
    if spec.sharding.states or spec.sharding.weights:
        yield f"weights are whole on each of {spec.sharding.size} GPUs: use --zero-level 0"


def _remade(spec: Spec) -> Iterator[str]:
    if spec.precision.master == "none":
        yield "--master-dtype none makes them for each use already: leave one of them out"
    if spec.adapters.freezes:
        yield "adapters are all that is trained, and the model has no masters: hold it in --base-dtype e4m3 instead"
    if spec.sharding.states or spec.sharding.weights:
        yield f"each of {spec.sharding.size} GPUs has masters of its share alone: use --zero-level 0"
