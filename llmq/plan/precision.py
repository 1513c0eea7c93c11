"""Precision options made into dtypes and sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmq.errors import UsageError
from llmq.sites.bf16 import Bf16Linear
from llmq.sites.fp8 import Fp8Linear

if TYPE_CHECKING:
    from llmq.options import PrecisionOptions


@dataclass(frozen=True)
class Precision:
    """Resolved dtypes. `stat` is that of statistics and losses: fp32, or fp64 in a model of fp64."""

    model: str = "fp32"
    matmul: str = "fp32"
    gradient: str = "e4m3"
    scaling: str = "delayed"
    m: str = "fp32"
    v: str = "fp32"
    master: str = "fp32"
    grad: str = "fp32"

    @property
    def stat(self) -> str:
        """Dtype of statistics, losses and optimizer scalars."""
        return "fp64" if self.model == "fp64" else "fp32"

    @property
    def is_fp8(self) -> bool:
        """Whether the blocks' matmuls read fp8."""
        return self.matmul == "e4m3"

    @property
    def head(self) -> str:
        """Dtype of the logits' matmuls: the model's where the blocks are fp8."""
        return self.model if self.is_fp8 else self.matmul

    def block_site(self) -> Any:
        """The site of the blocks' linear maps."""
        return Fp8Linear(self.gradient, self.scaling) if self.is_fp8 else Bf16Linear(self.matmul)

    def head_site(self) -> Any:
        """The site of the logits."""
        return Bf16Linear(self.head)


def resolve(options: PrecisionOptions) -> Precision:
    """The options as dtypes; UsageError for what cannot be combined."""
    model = options.model_dtype
    if model == "fp32" and options.master_dtype == "bf16":
        raise UsageError("--master-dtype bf16 is narrower than --model-dtype fp32: use --model-dtype bf16")
    return Precision(
        model=model,
        matmul=options.matmul_dtype,
        gradient=options.gradient_dtype or "e4m3",
        scaling=options.fp8_scaling or "delayed",
        m=options.opt_m_dtype,
        v=options.opt_v_dtype,
        master=options.master_dtype,
        grad=options.grad_accum_dtype,
    )
