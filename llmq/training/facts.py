"""Options, model, data and device made into what is to be planned, and what there is for it."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.adapters import resolve as adapters
from llmq.backends import Backend
from llmq.backends.opening import open_backend
from llmq.blocks.packed import Packing
from llmq.data.batches.batch import step_of
from llmq.engine.advice import Limits
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.model import optimizer
from llmq.model.config import ModelConfig
from llmq.model.parameters import padded_vocab
from llmq.options.parse import Options
from llmq.plan import memory, precision, sharding
from llmq.plan.precision import Precision
from llmq.plan.spec import Completions, Spec, regularization
from llmq.tensor import DTYPES


@dataclass(frozen=True)
class Facts:
    """What a plan depends on beside options: the model, the device, the borders of rows, and which of `size` ranks."""

    config: ModelConfig
    where: Device
    seed: int = 0
    packing: Packing | None = None
    completions: Completions | None = None
    rank: int = 0
    size: int = 1
    steps: int = 0  # of the run, with which the schedule of AdaLoRA ends

    @property
    def gpu_bytes(self) -> int:
        """The memory of a GPU; 0 on the CPU."""
        return device.memory_bytes(self.where)[0] if self.where.kind == "cuda" else 0

    def spec(self, options: Options, dtypes: Precision | None = None) -> Spec:
        """What is to be planned, all options resolved; with `dtypes` where timing has chosen them."""
        b, t, micro_steps = step_of(options.data, self.size)
        dtypes = dtypes or precision.resolve(options.precision, self.config)
        hyper = optimizer.resolve(options.optimizer)
        precision.refuse_unkept(options.precision, hyper.rule)
        limits = memory.resolve(
            options.memory,
            hyper.rule,
            batch_size=b,
            seq_len=t,
            logit_bytes=padded_vocab(self.config) * DTYPES[dtypes.model].itemsize,
            gpu_bytes=self.gpu_bytes,
            own_master=dtypes.has_own_master,
            micro_steps=micro_steps,
        )
        return Spec(
            self.config,
            dtypes,
            limits,
            hyper,
            b,
            t,
            self.seed,
            self.packing,
            precision.watching(options.precision).every > 0,
            sharding.resolve(options.sharding, self.rank, self.size),
            self.completions,
            adapters.resolve(options.adapters, self.config, self.steps),
            regularization(options.regularization),
        )

    def limits(self, options: Options, backend: Backend, micro_steps: int) -> Limits:
        """What there is for a run with these options, whose steps have so many micro-batches."""
        is_gpu = self.where.kind == "cuda"
        strict = is_gpu and device.backend_settings(options.system, self.where)["deterministic"]
        return Limits(
            device.memory_bytes(self.where)[1],
            backend.scratch_bytes,
            open_backend("planned", deterministic=False).scratch_bytes if strict else None,
            device.host_bytes(options.system, self.where),
            self.where.num_sharing,
            in_one=not is_gpu,
            micro_steps=micro_steps,
            has_global_batch=options.to_flat()["global_batch_size"] is not None,
            gpu_bytes=self.gpu_bytes,
            auto_chunks=memory.chooses_attention_chunks(options.memory),
            card=self.where.card,
        )
