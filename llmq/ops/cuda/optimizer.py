"""The update on the GPU; see cuda/optimizer.cu, cuda/sgd.cu and cuda/sum_squares.cu."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.ops.seam import Arguments
from llmq.scaling import BLOCK
from llmq.tensor import NORM_ROWS, num_norm_tiles

SQUARE_THREADS, SQUARES = 512, 1 << 14  # elements that a block adds up (sum_squares.cu)
NORM_THREADS = 1024
TRANSPOSED = 64  # rows of a tile that is written transposed (optimizer.cu)


@gpu.asks(lambda call: _scratch_bytes(call.reads["grad"].shape))
def sum_squares(partials: Output, /, grad: Tensor, *, scratch: Any = None) -> None:
    """partials (P,) <- grad (any shape): sums of squares of 128 rows each."""
    constants: Constants = {"G": gpu.type_of(grad), "PIECE": SQUARES}
    tiles, size, pieces = _pieces(grad.shape)
    read = (grad, np.int64(math.prod(grad.shape)), np.int64(size), np.int32(pieces))
    if pieces == 1:
        arguments = (partials, *read, gpu.adds(partials))
        gpu.launch("sum_squares", "square", tiles, SQUARE_THREADS, arguments, constants)
        return
    sums = gpu.room(scratch, _scratch_bytes(grad.shape))
    gpu.launch("sum_squares", "square", tiles * pieces, SQUARE_THREADS, (sums, *read, np.int32(0)), constants)
    last = (partials, sums, np.int32(tiles), np.int32(pieces), gpu.adds(partials))
    gpu.launch("sum_squares", "add", -(-tiles * 32 // SQUARE_THREADS), SQUARE_THREADS, last, constants)


def _scratch_bytes(grad: tuple[int, ...]) -> int:
    """Bytes of scratch for this shape: a sum per piece of a tile, unless a piece is the whole of it."""
    tiles, _, pieces = _pieces(grad)
    return tiles * pieces * 4 if pieces > 1 else 0


def _pieces(grad: tuple[int, ...]) -> tuple[int, int, int]:
    """Tiles of a tensor, elements of each but the last, and pieces that each is added up in."""
    size = min(NORM_ROWS, math.prod(grad[:-1])) * grad[-1]
    return num_norm_tiles(grad), size, -(-size // SQUARES)


def grad_scale(
    norm: Output, scale: Output, apply: Output, /, partials: Tensor, *totals: Tensor, grad_clip: float
) -> None:
    """norm (1,), scale (1,), apply (1,) <- partials (P,) sums of squares, loss_total (1,), num_tokens (1,) int32."""
    arguments = (norm, scale, apply, partials, np.int32(math.prod(partials.shape)), *totals, np.float64(grad_clip))
    gpu.launch("sum_squares", "grad_scale", 1, NORM_THREADS, arguments, {"G": "float", "PIECE": SQUARES})


def last_norm_scale(new_last_norm: Output, scale: Output, apply: Output, /, *read: Tensor, grad_clip: float) -> None:
    """new_last_norm, scale, apply (1,) <- norm, last_norm, loss_total (1,), num_tokens (1,) int32."""
    arguments = (new_last_norm, scale, apply, *read, np.float64(grad_clip))
    gpu.launch("sum_squares", "last_norm_scale", 1, 32, arguments, {"G": "float", "PIECE": SQUARES})


def apply_if_below(new_apply: Output, /, *read: Tensor) -> None:
    """new_apply (1,) <- apply, loss_total (1,), num_tokens (1,) int32, limit (1,): 0 if the mean loss is above it."""
    gpu.launch("sum_squares", "apply_if_below", 1, 32, (new_apply, *read), {"G": "float", "PIECE": SQUARES})


def apply_if_finite(out: Output, /, partials: Tensor, apply: Tensor) -> None:
    """out (1,) <- apply (1,) if all partials (P,) are finite, else 0."""
    arguments = (out, partials, np.int32(math.prod(partials.shape)), apply)
    gpu.launch("sum_squares", "apply_if_finite", 1, NORM_THREADS, arguments, {"G": "float", "PIECE": SQUARES})


def _refuse_update(call: Arguments, capability: int) -> None:
    """UsageError for a parameter that is not read 4 numbers at a time, as random bits come."""
    states = list(call.reads.values())[: list(call.reads).index("grad")]
    shape, is_coded = states[0].shape, any(ref.form is not None for ref in states)
    has_columns = any(ref.form is not None and ref.form.layout == "col" for ref in call.writes.get("weight", ()))
    tiled = _is_tiled(shape[-1], has_columns=has_columns, is_coded=is_coded)
    width = shape[-1] if tiled else math.prod(shape)
    if width % 4:
        raise UsageError(
            f"{states[0].name} has {width} numbers{' a row' if tiled else ''}, no multiple of 4, as the GPU updates "
            "parameters: use a --lora-rank or a model whose sizes are, or --device cpu"
        )


@gpu.asks(refuse=_refuse_update)
def adamw(
    *operands: Any, beta_1: float, beta_2: float, epsilon: float, weight_decay: float, rate: float = 1.0, **address: int
) -> None:
    """new_master, new_m, new_v, weight <- master, m, v, grad (one shape); scale, apply, learning_rate, step cells (1,).

    Bit for bit what the reference computes; new_* may be the memory of master, m and v.
    """
    new_master, new_m, new_v, weight, master, m, v, grad, *cells = operands
    states = {"MASTER": (new_master, master), "M": (new_m, m), "V": (new_v, v)}
    betas = tuple(np.float32(number) for beta in (beta_1, beta_2) for number in (beta, 1 - beta))
    numbers = (np.float64(beta_1), np.float64(beta_2), *betas, np.float32(epsilon), np.float64(weight_decay))
    _update("optimizer", "adamw", states, weight, (grad, *cells), (*numbers, np.float64(rate)), {}, **address)


@gpu.asks(refuse=_refuse_update)
def sgd(
    *operands: Any, momentum: float, nesterov: bool, weight_decay: float, rate: float = 1.0, **address: int
) -> None:
    """new_master, new_m, weight <- master, m, grad (one shape); scale, apply, learning_rate, step cells (1,).

    Bit for bit what the reference computes; new_* may be the memory of master and m.
    """
    new_master, new_m, weight, master, m, grad, *cells = operands
    states = {"MASTER": (new_master, master), "M": (new_m, m)}
    numbers = (np.float32(momentum), np.float32(weight_decay), np.float64(rate))
    constants: Constants = {"MOMENTUM": int(m is not None), "NESTEROV": int(nesterov)}
    _update("sgd", "sgd", states, weight, (grad, *cells), numbers, constants, **address)


def _update(
    source: str,
    entry: str,
    states: Mapping[str, tuple[Output, Tensor | None]],
    weight: Output,
    read: tuple[Tensor, ...],
    numbers: tuple[np.generic, ...],
    more: Constants,
    *,
    seed: int,
    stream: int,
    first: int = 0,
) -> None:
    """Launches a rule's kernel on states by the names of their types, each with what it becomes; absent ones are null.

    `read`: the gradient and the cells. Random bits have the address seed, stream, first element.
    """
    _, master = states["MASTER"]
    assert master is not None
    held = [old for _, old in states.values() if old is not None]
    wanted, outputs = gpu.forms(weight, may_be_cut=True)
    types = {name: _type_of_state(old) for name, (_, old) in states.items()}
    types["G"] = gpu.type_of(read[0])
    types["T"] = gpu.type_of(weight) if weight.wanted or master.form is not None else types["MASTER"]
    bits, count, columns = int(wanted["FORMS"]), math.prod(master.shape), master.shape[-1]
    assert first % 8 == 0, f"{master.name}: a share that begins at element {first} cuts random bits in two"
    is_coded = any(state.form is not None for state in held)
    tiled = _is_tiled(columns, has_columns=bool(bits & gpu.COL), is_coded=is_coded)
    number = gpu.access(columns if tiled else count, *types.values())
    written = (*(x for new, old in states.values() for x in ((0, 0) if old is None else _held(new))), *outputs)
    given = (x for _, old in states.values() for x in ((0, 0) if old is None else (old, gpu.scale_of(old))))
    # blocks to a multiprocessor that registers leave room for
    resident = (2 if bits or is_coded else 3) if number == 8 else 3 if bits & gpu.COL or is_coded else 4
    if tiled:
        blocks = gpu.tiles(count // columns, columns, bits, number, TRANSPOSED)
    else:
        columns = gpu.TILE_LANES * number
        blocks = min(gpu.multiprocessors() * resident, -(-count // (gpu.TILE_THREADS * number)))
    constants = {**types, "C": columns, "N": number, "TILED": int(tiled), "RESIDENT": resident, **wanted, **more}
    place = (*gpu.random_key(seed, stream), *map(np.int64, (count, first, gpu.height(weight))))
    arguments = (*written, *given, *read, *numbers, *place)
    gpu.launch(source, entry, blocks, gpu.TILE_THREADS, arguments, constants)


def _is_tiled(columns: int, *, has_columns: bool, is_coded: bool) -> bool:
    """Whether blocks own tiles of a matrix, else runs of its numbers."""
    return has_columns or (is_coded and columns % BLOCK > 0)


def _type_of_state(state: Tensor | None) -> str:
    """Type name of a state; of its codes where it is held in 8 bits."""
    return "float" if state is None else state.form.dtype if state.form is not None else gpu.type_of(state)


def _held(output: Output) -> tuple[Output | Tensor, int]:
    """A state as a kernel writes it, and the address of its scales, 0 for what is not wanted or has none."""
    if not output.wanted or output.tensors[0].form is None:
        return output, 0
    return output.tensors[0], gpu.scale_of(output.tensors[0])
