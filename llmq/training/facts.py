"""Options, model, data and device made into what is to be planned."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.adapters import resolve as adapters
from llmq.blocks.packed import Packing
from llmq.data.batches.batch import step_of
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
from llmq.training.ranks import Ranks
from llmq.training.run_data import RunData
from llmq.training.samples import SamplePrompts


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

    def spec(self, options: Options, dtypes: Precision) -> Spec:
        """What is to be planned, all options resolved."""
        b, t, micro_steps = step_of(options.data, self.size)
        hyper = optimizer.resolve(options.optimizer)
        precision.refuse_unkept(options.precision, hyper.rule)
        limits = memory.resolve(
            options.memory,
            hyper.rule,
            batch_size=b,
            seq_len=t,
            logit_bytes=padded_vocab(self.config) * DTYPES[dtypes.model].itemsize,
            gpu_bytes=device.memory_bytes(self.where)[0] if self.where.kind == "cuda" else 0,
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


def facts_of(
    trains: RunData, dtypes: Precision, where: Device, seed: int, samples: SamplePrompts | None, ranks: Ranks
) -> Facts:
    """What plans of a run on this data depend on beside options."""
    config, data, steps = trains.config, trains.data, trains.schedule.steps
    packs = device.packing_problem(where, dtypes.model) is None
    completions = None if samples is None else samples.completions(packed=packs)
    packing = Packing(*data.limits) if data.limits else None
    return Facts(config, where, seed, packing, completions, ranks.rank, ranks.size, steps)
