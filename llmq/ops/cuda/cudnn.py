"""Causal attention through cuDNN: one graph per shape, built once, run with plain pointers.

q, k and v are strided views of one packed (B,T,(Hq+2Hkv)*Hd), and so are their gradients; att is (B,T,Hq*Hd), lse
(B,Hq,T) f32 is cuDNN's `stats` as it is. bf16 only. cuDNN's left bound is our window: query i sees i - window < j <= i.

The deterministic backward repeats its bits, also in a captured graph, at the speed of the other one (676 against 648 us
at 32x1024, 14/2 heads of 64; 918 against 974 us at 16x1024, 28/4 heads of 128). Its workspace is larger.
"""

from __future__ import annotations

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

    @property
    def packed(self) -> int:
        """Width of the packed qkv."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def offsets(self) -> tuple[int, int, int]:
        """First elements of q, k and v in a row of the packed qkv."""
        return 0, self.num_heads * self.head_dim, (self.num_heads + self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class AttentionPlan:
    """A graph ready to run: `uids` by tensor name (q k v att lse d_att d_q d_k d_v), and the workspace it needs."""

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

    def close(self) -> None:
        """Gives plans and handle back."""
        self._plans = {}
        self._cudnn.destroy_handle(self._handle)

    def _forward(self, graph: Any, s: AttentionShape, kind: str) -> dict[str, Any]:
        tensors = self._packed(graph, s, "q", "k", "v")
        att, lse = graph.sdpa(**tensors, **self._options(s), generate_stats=kind == "forward")
        att.set_output(True).set_dim(self._dims(s)).set_stride(self._strides(s, s.num_heads * s.head_dim))
        tensors["att"] = att
        if kind == "forward":
            lse.set_output(True).set_dim([s.batch, s.num_heads, s.length, 1]).set_data_type(self._cudnn.data_type.FLOAT)
            lse.set_stride([s.num_heads * s.length, s.length, 1, 1])
            tensors["lse"] = lse
        return tensors

    def _backward(self, graph: Any, s: AttentionShape) -> dict[str, Any]:
        tensors = self._packed(graph, s, "q", "k", "v")
        dims, strides = self._dims(s), self._strides(s, s.num_heads * s.head_dim)
        for name in ("att", "d_att"):
            tensors[name] = graph.tensor(name=name, dim=dims, stride=strides, data_type=self._cudnn.data_type.BFLOAT16)
        tensors["lse"] = graph.tensor(
            name="lse",
            dim=[s.batch, s.num_heads, s.length, 1],
            stride=[s.num_heads * s.length, s.length, 1, 1],
            data_type=self._cudnn.data_type.FLOAT,
        )
        read = {"o": tensors["att"], "dO": tensors["d_att"], "stats": tensors["lse"]}
        inputs = {name: tensors[name] for name in "qkv"}
        options = {**self._options(s), "use_deterministic_algorithm": self.deterministic}
        gradients = graph.sdpa_backward(**inputs, **read, **options)
        for name, heads, gradient in zip("qkv", (s.num_heads, s.num_kv_heads, s.num_kv_heads), gradients, strict=True):
            gradient.set_output(True).set_dim(self._dims(s, heads)).set_stride(self._strides(s, s.packed))
            tensors[f"d_{name}"] = gradient
        return tensors

    def _packed(self, graph: Any, s: AttentionShape, *names: str) -> dict[str, Any]:
        heads = (s.num_heads, s.num_kv_heads, s.num_kv_heads)
        return {
            name: graph.tensor(
                name=name,
                dim=self._dims(s, count),
                stride=self._strides(s, s.packed),
                data_type=self._cudnn.data_type.BFLOAT16,
            )
            for name, count in zip(names, heads, strict=True)
        }

    def _dims(self, s: AttentionShape, heads: int | None = None) -> list[int]:
        return [s.batch, heads or s.num_heads, s.length, s.head_dim]

    def _strides(self, s: AttentionShape, width: int) -> list[int]:
        return [s.length * width, s.head_dim, width, 1]

    def _options(self, s: AttentionShape) -> dict[str, Any]:
        options: dict[str, Any] = {
            "attn_scale": s.softmax_scale,
            "diagonal_alignment": self._cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }
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
        return (
            f"cuDNN {self._cudnn.backend_version_string()} has no {kind} attention for head_dim {s.head_dim} on this "
            f"GPU ({heads}, {s.batch}x{s.length} tokens{window}): use --model-dtype fp32, or a model with a head_dim "
            f"that is a multiple of 8 up to 128 ({' '.join(str(error).split())[:200]})"
        )
