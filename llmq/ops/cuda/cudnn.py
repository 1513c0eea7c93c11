"""Causal attention through cuDNN: one graph per shape, built once, run with plain pointers.

q, k and v are strided views of one packed (B,T,(Hq+2Hkv)*Hd), and so are their gradients; att is (B,T,Hq*Hd), lse
(B,Hq,T) f32 is cuDNN's `stats` as it is. bf16 only. cuDNN's left bound is our window: query i sees i - window < j <= i.

Rows of several documents are ragged to cuDNN: its batch is all documents of all rows, and where they lie is device data
(lengths in tokens, offsets in elements), so that one graph serves every packing. stats is then (B,T,Hq), the layout for
which cuDNN sizes its workspaces right. The deterministic backward takes 2 Hq `longest`^2 bytes for every document that
a row may have (cuDNN 9.19), so it matters that documents are known to be shorter than rows.

The deterministic backward repeats its bits, also in a captured graph, at the speed of the other one (676 against 648 us
at 32x1024, 14/2 heads of 64; 918 against 974 us at 16x1024, 28/4 heads of 128). Its workspace is larger.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.errors import UsageError


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
            graph = self._cudnn.pygraph(
                io_data_type=self._cudnn.data_type.BFLOAT16,
                intermediate_data_type=self._cudnn.data_type.FLOAT,
                compute_data_type=self._cudnn.data_type.FLOAT,
                handle=self._handle,
            )
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
        read["lse"] = graph.tensor(
            name="lse",
            dim=[s.num_documents, s.num_heads, s.extent, 1],
            stride=self._lse_strides(s),
            data_type=self._cudnn.data_type.FLOAT,
            **self._ragged(tensors, "lse"),
        )
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
        heads = (s.num_heads, s.num_kv_heads, s.num_kv_heads)
        return {
            name: graph.tensor(
                name=name,
                dim=self._dims(s, count),
                stride=self._strides(s, s.packed),
                data_type=self._cudnn.data_type.BFLOAT16,
                **self._ragged(tensors, "qkv"),
            )
            for name, count in zip("qkv", heads, strict=True)
        }

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
