"""Kernels take what plans of every family ask of them: forms, widths, numbers."""

import pytest
from more_families import MORE
from tiny_engines import BF16, FP8, SCALINGS, T, plan_of

from llmq.backends.planned import PlannedBackend
from llmq.blocks.cached import Sampling
from llmq.engine.generate import plan_generation
from llmq.model.config import read_config
from llmq.ops import cuda
from llmq.ops.seam import record
from llmq.plan.decoding import Decoding

from .test_cuda_compile import OPS, noting

PRECISIONS = {"bf16": BF16, **{scaling: FP8["e4m3", scaling] for scaling in SCALINGS}}


def wide(name):
    """A family's tiny config with sizes that fp8 products take."""
    sizes = ("n_embd", "n_inner") if name == "gpt2" else ("hidden_size", "intermediate_size", "head_dim")
    return read_config({**MORE[name], **dict(zip(sizes, (256, 384, 64), strict=False))})


@pytest.mark.sample
@pytest.mark.parametrize("kind", PRECISIONS)
@pytest.mark.parametrize("name", MORE)
def test_what_steps_and_generation_call_is_launched(monkeypatch, name, kind):
    noted, scratch = noting(monkeypatch), PlannedBackend().scratch_bytes
    plan = plan_of(PRECISIONS[kind], config=wide(name), scratch_bytes=scratch)
    writing = plan_generation(Decoding(plan.spec, Sampling(), (T,)), scratch)
    programs = (*(plan.programs[name] for name in ("only", "update")), *writing.programs.values())
    calls = [call for program in programs for call in program.calls]
    own = [call for call in calls if not record(call.op).is_linear and "attention" not in call.op]  # of our kernels
    for call in own:
        written = [
            result and noted.output(result.ref.shape, result.ref.dtype, *result.forms) for result in call.outputs
        ]
        read = [ref and noted.tensor(ref.shape, ref.dtype, ref.form) for ref in call.inputs]
        getattr(OPS, call.op)(*(one or noted.output((1,), "fp32") for one in written), *read, **call.numbers)
    assert {call.op for call in own} <= cuda.KERNELS.keys() and len(noted.found) >= len(own)
