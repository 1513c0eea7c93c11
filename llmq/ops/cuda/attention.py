"""Causal attention on the GPU: cuDNN for bf16, our own kernels for f32, there to check the rest with, and for scores
with a soft-cap, which our graphs of cuDNN have not: they compute in f32 without tensor cores, whatever is stored.

To cuDNN q, k and v are strided views of one packed (B,T,(Hq+2Hkv)*Hd), and so are their gradients; att is (B,T,Hq*Hd),
lse (B,Hq,T) f32 is its `stats` as it is. Its left bound is our window: query i sees i - window < j <= i.

Rows of several documents are ragged to cuDNN: its batch is all documents of all rows, and where they lie is device data
(lengths in tokens, offsets in elements), so that one graph serves every packing. stats is then (B,T,Hq), the layout for
which cuDNN sizes its workspaces right. The deterministic backward takes 2 Hq `longest`^2 bytes for every document that
a row may have (cuDNN 9.19), so it matters that documents are known to be shorter than rows.

The deterministic backward repeats its bits, also in a captured graph, at the speed of the other one (676 against 648 us
at 32x1024, 14/2 heads of 64; 918 against 974 us at 16x1024, 28/4 heads of 128). Its workspace is larger.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.ops.seam import Arguments
from llmq.tensor import DTYPES

ROWS, TILE, WARPS = 16, 32, 4  # cuda/attention.cu
MAX_HEAD_DIM = 256  # of our kernels: four tiles of it fit the 99 KiB that every GPU has


@dataclass(frozen=True)
class AttentionShape:
    """What a graph depends on; `window` is None where every query sees all keys before it."""

    batch: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    softmax_scale: float
    max_docs: int | None = None  # of a row; None: each row is one document
    longest: int | None = None  # tokens at which documents are cut
    softcap: float | None = None  # of scores

    @property
    def places(self) -> int:
        """Documents of a row, and of what is cut off them, that cuDNN has to be ready for."""
        return 1 if self.max_docs is None else self.max_docs + -(-self.length // self.extent) - 1

    @property
    def extent(self) -> int:
        """Tokens of the longest document."""
        return self.longest or self.length

    @property
    def num_documents(self) -> int:
        """What cuDNN sees as its batch."""
        return self.batch * self.places

    @property
    def packed(self) -> int:
        """Width of the packed qkv."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def offsets(self) -> tuple[int, int, int]:
        """First elements of q, k and v in a row of the packed qkv."""
        return 0, self.num_heads * self.head_dim, (self.num_heads + self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class AttentionPlan:
    """A graph ready to run: `uids` by tensor name (q k v att lse d_att d_q d_k d_v), and the workspace it needs.

    Of ragged documents also `lengths` (N,) int32 and `qkv_offsets`, `att_offsets`, `lse_offsets` (N+1,) int64.
    """

    graph: Any
    uids: Mapping[str, int]
    workspace_bytes: int


class Cudnn:
    """cuDNN on the current device and CuPy's current stream; plans are built on first use, some 100 ms each."""

    def __init__(self, *, deterministic: bool = True) -> None:
        import cudnn

        self.deterministic, self._cudnn = deterministic, cudnn
        self._handle = cudnn.create_handle()
        self._plans: dict[tuple[str, AttentionShape], AttentionPlan] = {}

    def plan(self, kind: str, shape: AttentionShape) -> AttentionPlan:
        """The plan of a `kind`: evaluate (no lse), forward or backward. UsageError for what cuDNN lacks on this GPU."""
        if (kind, shape) not in self._plans:
            kinds = self._cudnn.data_type
            types = {"intermediate_data_type": kinds.FLOAT, "compute_data_type": kinds.FLOAT}
            graph = self._cudnn.pygraph(io_data_type=kinds.BFLOAT16, **types, handle=self._handle)
            try:
                tensors = self._backward(graph, shape) if kind == "backward" else self._forward(graph, shape, kind)
                uids = {name: uid for uid, (name, tensor) in enumerate(tensors.items(), 1) if tensor.set_uid(uid)}
                self._build(graph)
            except (self._cudnn.cudnnGraphNotSupportedError, ValueError, NotImplementedError) as error:
                raise UsageError(self._refusal(kind, shape, error)) from error
            self._plans[kind, shape] = AttentionPlan(graph, uids, graph.get_workspace_size())
        return self._plans[kind, shape]

    def run(self, plan: AttentionPlan, pointers: Mapping[str, int], workspace: int) -> None:
        """Puts a plan on the stream; `pointers` by tensor name, 16-byte aligned (cuDNN computes nonsense otherwise)."""
        import cupy

        assert not any(pointer % 16 for pointer in pointers.values()), f"attention on misaligned memory: {pointers}"
        self._cudnn.set_stream(self._handle, int(cupy.cuda.get_current_stream().ptr))
        tensors = {plan.uids[name]: pointer for name, pointer in pointers.items()}
        plan.graph.execute(tensors, workspace, handle=self._handle)

    def _forward(self, graph: Any, s: AttentionShape, kind: str) -> dict[str, Any]:
        tensors = self._places(graph, s)
        inputs = self._packed(graph, s, tensors)
        att, lse = graph.sdpa(**inputs, **self._options(s, tensors), generate_stats=kind == "forward")
        att.set_output(True).set_dim(self._dims(s)).set_stride(self._strides(s, s.num_heads * s.head_dim))
        outputs = {"att": att}
        if kind == "forward":
            lse.set_output(True).set_data_type(self._cudnn.data_type.FLOAT)
            lse.set_dim([s.num_documents, s.num_heads, s.extent, 1]).set_stride(self._lse_strides(s))
            outputs["lse"] = lse
        if s.max_docs is not None:
            for name, tensor in outputs.items():
                tensor.set_ragged_offset(tensors[f"{name}_offsets"])
        return {**tensors, **inputs, **outputs}

    def _backward(self, graph: Any, s: AttentionShape) -> dict[str, Any]:
        tensors = self._places(graph, s)
        inputs = self._packed(graph, s, tensors)
        dims, strides, bf16 = self._dims(s), self._strides(s, s.num_heads * s.head_dim), self._cudnn.data_type.BFLOAT16
        ragged = self._ragged(tensors, "att")
        read = {n: graph.tensor(name=n, dim=dims, stride=strides, data_type=bf16, **ragged) for n in ("att", "d_att")}
        about = {"dim": [s.num_documents, s.num_heads, s.extent, 1], "stride": self._lse_strides(s)}
        about |= {"data_type": self._cudnn.data_type.FLOAT, **self._ragged(tensors, "lse")}
        read["lse"] = graph.tensor(name="lse", **about)
        options = {**self._options(s, tensors), "use_deterministic_algorithm": self.deterministic}
        if s.max_docs is not None:
            options |= dict.fromkeys(("max_total_seq_len_q", "max_total_seq_len_kv"), s.batch * s.length)
        gradients = graph.sdpa_backward(**inputs, o=read["att"], dO=read["d_att"], stats=read["lse"], **options)
        outputs = {}
        for name, heads, gradient in zip("qkv", (s.num_heads, s.num_kv_heads, s.num_kv_heads), gradients, strict=True):
            gradient.set_output(True).set_dim(self._dims(s, heads)).set_stride(self._strides(s, s.packed))
            if s.max_docs is not None:
                gradient.set_ragged_offset(tensors["qkv_offsets"])
            outputs[f"d_{name}"] = gradient
        return {**tensors, **inputs, **read, **outputs}

    def _places(self, graph: Any, s: AttentionShape) -> dict[str, Any]:
        """What says where ragged documents lie; nothing of dense rows."""
        if s.max_docs is None:
            return {}
        kinds, count = self._cudnn.data_type, s.num_documents
        found = {"lengths": graph.tensor(name="lengths", dim=[count, 1, 1, 1], stride=[1] * 4, data_type=kinds.INT32)}
        for name in ("qkv_offsets", "att_offsets", "lse_offsets"):
            found[name] = graph.tensor(name=name, dim=[count + 1, 1, 1, 1], stride=[1] * 4, data_type=kinds.INT64)
        return found

    def _ragged(self, tensors: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {"ragged_offset": tensors[f"{name}_offsets"]} if tensors else {}

    def _packed(self, graph: Any, s: AttentionShape, tensors: Mapping[str, Any]) -> dict[str, Any]:
        about = {"stride": self._strides(s, s.packed), "data_type": self._cudnn.data_type.BFLOAT16}
        about |= self._ragged(tensors, "qkv")
        heads = zip("qkv", (s.num_heads, s.num_kv_heads, s.num_kv_heads), strict=True)
        return {name: graph.tensor(name=name, dim=self._dims(s, count), **about) for name, count in heads}

    def _dims(self, s: AttentionShape, heads: int | None = None) -> list[int]:
        return [s.num_documents, heads or s.num_heads, s.extent, s.head_dim]

    def _strides(self, s: AttentionShape, width: int) -> list[int]:
        return [s.extent * width, s.head_dim, width, 1]

    def _lse_strides(self, s: AttentionShape) -> list[int]:
        heads, length = s.num_heads, s.extent
        return [heads * length, length, 1, 1] if s.max_docs is None else [heads * length, 1, heads, 1]

    def _options(self, s: AttentionShape, tensors: Mapping[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {
            "attn_scale": s.softmax_scale,
            "diagonal_alignment": self._cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }
        if s.max_docs is not None:
            lengths = tensors["lengths"]
            options |= {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}
        return options if s.window is None else {**options, "diagonal_band_left_bound": s.window}

    def _build(self, graph: Any) -> None:
        """Takes cuDNN's own best engine: others that a system happens to have installed would change the bits."""
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK])
        refused: Exception | None = None
        for index, plan in enumerate(graph.plans):
            if plan.cpp_index is None:
                continue
            try:
                graph.select_plan(index)
                graph.build_plans()
                return
            except self._cudnn.cudnnGraphNotSupportedError as error:
                refused = error
        raise refused or self._cudnn.cudnnGraphNotSupportedError("no engine of cuDNN takes this graph")

    def _refusal(self, kind: str, shape: AttentionShape, error: Exception) -> str:
        s = shape
        heads = f"{s.num_heads} query and {s.num_kv_heads} key heads of head_dim {s.head_dim}"
        window = "" if s.window is None else f", window {s.window}"
        packed = "" if s.max_docs is None else f", up to {s.max_docs} documents of {s.extent} tokens a row"
        other = "" if s.max_docs is None else "--no-packing (packed rows need compute capability 9.0 or newer), "
        return (
            f"cuDNN {self._cudnn.backend_version_string()} has no {kind} attention for head_dim {s.head_dim} on this "
            f"GPU ({heads}, {s.batch}x{s.length} tokens{window}{packed}): use {other}--model-dtype fp32, or a model "
            f"with a head_dim that is a multiple of 8 up to 128 ({' '.join(str(error).split())[:200]})"
        )


def _attention_forward(
    cudnn: Cudnn, att: Output, lse: Output, /, *read: Any, scratch: Any = None, **numbers: Any
) -> None:
    """att (B,T,Hq*Hd), lse (B,Hq,T) <- qkv (B,T,(Hq+2Hkv)*Hd); lse = log(sum over seen keys of exp(scale * q k)).

    `borders` (B,D+1) int32: the first tokens of a row's documents, ascending from 0, then T repeated; None: each row is
    one document. What is longer than `longest` tokens is cut into as many documents. lse is (B,T,Hq) where there are
    borders.
    """
    qkv, borders = read
    assert not att.accumulate and not lse.accumulate, "attention is written, not added to"
    shape = _shape(qkv.shape, borders.shape if borders else None, **numbers)
    if _is_ours(qkv.array.dtype, shape.softcap):
        _launch("attention_forward", shape, shape.num_heads, gpu.type_of(qkv, att), att, lse, qkv, borders)
        return
    plan = cudnn.plan("forward" if lse.wanted else "evaluate", shape)
    places, own = _places_bytes(shape), 0 if att.wanted else _att_bytes(shape)
    start = gpu.room(scratch, places + own + plan.workspace_bytes)
    pointers = {**_packed(shape, qkv.array), "att": gpu.plain(att) or start + places}
    if lse.wanted:
        pointers["lse"] = gpu.plain(lse)
    cudnn.run(plan, pointers | _find_documents(shape, borders, start), start + places + own)


def _attention_backward(cudnn: Cudnn, d_qkv: Output, /, *read: Any, scratch: Any = None, **numbers: Any) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd) <- d_att (B,T,Hq*Hd), qkv like d_qkv, att like d_att, lse and borders as in forward."""
    d_att, qkv, att, lse, borders = read
    assert not d_qkv.accumulate, "gradients of activations are written, not added to"
    shape = _shape(qkv.shape, borders.shape if borders else None, **numbers)
    (target,) = d_qkv.tensors
    if _is_ours(qkv.array.dtype, shape.softcap):
        dots, kind = gpu.room(scratch, _dots_bytes(shape)), gpu.type_of(d_qkv, d_att, qkv, att)
        _launch("attention_backward_q", shape, shape.num_heads, kind, target, d_att, qkv, att, lse, borders, dots)
        _launch("attention_backward_kv", shape, shape.num_kv_heads, kind, target, d_att, qkv, lse, borders, dots)
        return
    plan, places = cudnn.plan("backward", shape), _places_bytes(shape)
    start = gpu.room(scratch, places + plan.workspace_bytes)
    pointers = {name: gpu.pointer(x) for name, x in (("d_att", d_att), ("att", att), ("lse", lse))}
    pointers |= _packed(shape, qkv.array) | _packed(shape, target.array, "d_")
    cudnn.run(plan, pointers | _find_documents(shape, borders, start), start + places)


def attention_kernels(cudnn: Cudnn | None) -> dict[str, gpu.Kernel]:
    """The two ops; None: those of our own kernels, which take no cuDNN.

    What a bf16 call needs is read off its plan, so this is also where cuDNN refuses a head_dim, before anything is
    allocated.
    """
    ops: tuple[Any, ...] = ((_attention_forward, _forward_scratch), (_attention_backward, _backward_scratch))
    kernels = (gpu.Kernel(partial(op, cudnn), partial(scratch, cudnn), _refuse) for op, scratch in ops)
    return dict(zip(("attention_forward", "attention_backward"), kernels, strict=True))


def _forward_scratch(cudnn: Cudnn, call: Arguments) -> int:
    if is_ours(call):
        return 0
    shape = _shape_of(call)
    plan = cudnn.plan("forward" if call.writes.get("lse") else "evaluate", shape)
    return _places_bytes(shape) + (0 if call.writes.get("att") else _att_bytes(shape)) + plan.workspace_bytes


def _backward_scratch(cudnn: Cudnn, call: Arguments) -> int:
    shape = _shape_of(call)
    if is_ours(call):
        return _dots_bytes(shape)
    return _places_bytes(shape) + cudnn.plan("backward", shape).workspace_bytes


def _refuse(call: Arguments, capability: int) -> None:
    """UsageError for what our kernels do not take; cuDNN refuses when its plan is made."""
    shape = _shape_of(call)
    if not is_ours(call):
        return
    gpu.cap_bits(shape.softcap)
    what, instead = "attention in fp32", "--model-dtype bf16 or --device cpu"
    if shape.softcap is not None:
        what, instead = "attention with a soft-cap", "--device cpu"
    if shape.head_dim > MAX_HEAD_DIM:
        raise UsageError(
            f"{what} on the GPU takes a head_dim up to {MAX_HEAD_DIM}, not {shape.head_dim}: use {instead}"
        )
    gpu.at_most(gpu.GRID_SIDE, shape.batch, "sequences", what)


def is_ours(call: Arguments) -> bool:
    """Whether a call runs our own kernels; UsageError for what neither they nor cuDNN take."""
    return _is_ours(DTYPES[call.reads["qkv"].dtype], call.numbers.get("softcap"))


def _shape_of(call: Arguments) -> AttentionShape:
    borders = call.reads.get("borders")
    return _shape(call.reads["qkv"].shape, borders.shape if borders else None, **call.numbers)


def _shape(
    qkv: tuple[int, ...],
    borders: tuple[int, ...] | None,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    longest: int | None,
    softmax_scale: float,
    softcap: float | None = None,
) -> AttentionShape:
    batch, length, width = qkv
    window = None if window is None or window >= (longest or length) else window
    head_dim = width // (num_heads + 2 * num_kv_heads)
    max_docs = None if borders is None else borders[1] - 1
    sizes, of_docs = (batch, length, num_heads, num_kv_heads, head_dim, window), (max_docs, longest)
    return AttentionShape(*sizes, softmax_scale, *of_docs, softcap)


def _is_ours(dtype: np.dtype, softcap: float | None) -> bool:
    if dtype not in (DTYPES["fp32"], DTYPES["bf16"]):
        raise UsageError(f"attention on the GPU reads bf16 or fp32, not {dtype}: use --device cpu")
    return softcap is not None or dtype == DTYPES["fp32"]


def _att_bytes(shape: AttentionShape) -> int:
    """Bytes of att in bf16, aligned."""
    return -(-shape.batch * shape.length * shape.num_heads * shape.head_dim * 2 // 256) * 256


def _dots_bytes(shape: AttentionShape) -> int:
    """Bytes of the f32 sums of d_att * att, one per query and head."""
    return shape.batch * shape.num_heads * shape.length * 4


def _places_parts(shape: AttentionShape) -> dict[str, int]:
    """Bytes of what `_find_documents` writes, aligned, by the name that cuDNN's graph has for it."""
    if shape.max_docs is None:
        return {}
    sizes = {"lengths": 4, "qkv_offsets": 8, "att_offsets": 8, "lse_offsets": 8}
    return {name: -(-(shape.num_documents + 1) * size // 256) * 256 for name, size in sizes.items()}


def _places_bytes(shape: AttentionShape) -> int:
    return sum(_places_parts(shape).values())


def _find_documents(shape: AttentionShape, borders: Tensor | None, start: int) -> dict[str, int]:
    """Writes where the documents lie, from the address `start` on, and returns the addresses; nothing for dense rows.

    Once per call, 2 us: the arrays of a piece of the batch count from its own start, and no slot has to hold them.
    """
    if borders is None:
        return {}
    addresses = {}
    for name, size in _places_parts(shape).items():
        addresses[name] = start
        start += size
    widths = {"QKV": shape.packed, "ATT": shape.num_heads * shape.head_dim, "LSE": shape.num_heads}
    numbers = map(np.int32, (shape.batch, borders.shape[1] - 1, shape.places, shape.length, shape.extent))
    arguments = (*addresses.values(), borders, *numbers)
    gpu.launch("documents", "document_offsets", shape.batch, 32, arguments, widths)
    return addresses


def _packed(shape: AttentionShape, array: Any, prefix: str = "") -> dict[str, int]:
    start = int(array.data.ptr)
    return {prefix + name: start + 2 * offset for name, offset in zip("qkv", shape.offsets(), strict=True)}


def _launch(entry: str, shape: AttentionShape, heads: int, kind: str, *arguments: Output | Tensor | int | None) -> None:
    """One kernel of ours on values of a type: a block per tile of rows, head and sequence."""
    group, is_packed = shape.num_heads // shape.num_kv_heads, int(shape.max_docs is not None)
    constants: Constants = {"T": kind, "HD": shape.head_dim, "GROUP": group, "KV_HEADS": shape.num_kv_heads}
    constants = {**constants, "PACKED": is_packed, "CAP": gpu.cap_bits(shape.softcap)}
    sizes = (shape.max_docs or 1, shape.extent, shape.length, shape.window or shape.length)
    numbers = (*map(np.int32, sizes), np.float32(shape.softmax_scale))
    grid = (-(-shape.length // ROWS), heads, shape.batch)
    shared = 4 * (2 * TILE * (shape.head_dim + 1) + 2 * ROWS * shape.head_dim)
    gpu.launch("attention", entry, grid, 32 * WARPS, (*arguments, *numbers), constants, shared_bytes=shared)
