"""A plan that does not fit: how many bytes are missing, and which option of the same run would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmq.errors import MemoryLimitError, UsageError
from llmq.plan.plan import Plan, make_plan
from llmq.plan.program import Step

Scratch = Callable[[Step], int]


def refuse_if_too_large(plan: Plan, free_bytes: int, scratch_bytes: Scratch | None = None) -> None:
    """MemoryLimitError if the plan needs more than `free_bytes`. `scratch_bytes` is what the plan was made with."""
    missing = plan.total_bytes - free_bytes
    if missing <= 0:
        return
    for change, smaller in _smaller_plans(plan, scratch_bytes):
        if smaller.total_bytes <= free_bytes:
            raise MemoryLimitError(
                f"the run needs {_gib(plan.total_bytes)}, {_gib(free_bytes)} are free, {_gib(missing)} are missing: "
                f"{change} needs {_gib(smaller.total_bytes)}"
            )
    raise MemoryLimitError(
        f"the run needs {_gib(plan.total_bytes)}, {_gib(free_bytes)} are free, {_gib(missing)} are missing, and no "
        "memory option makes it fit: train a smaller model, or use a device with more memory"
    )


def _smaller_plans(plan: Plan, scratch_bytes: Scratch | None) -> list[tuple[str, Plan]]:
    """Changes of the run's options that need less memory, the mildest first."""
    block = replace(plan.memory, flags=("recompute_block",))
    one = replace(plan.memory, attention_chunks=1)
    moments = replace(plan.precision, m="bf16", v="bf16")
    least = replace(moments, master=plan.precision.model, grad=plan.precision.model)
    narrow = "--opt-m-dtype bf16 --opt-v-dtype bf16"
    attempts = [
        ("--recompute-block", plan.precision, block, plan.batch_size),
        (narrow, moments, plan.memory, plan.batch_size),
        (f"--recompute-block {narrow}", moments, block, plan.batch_size),
        ("--batch-size 1 (with more --grad-accumulation)", plan.precision, one, 1),
        (
            f"--batch-size 1 --recompute-block {narrow}, default --master-dtype",
            least,
            replace(block, attention_chunks=1),
            1,
        ),
    ]
    found = []
    for change, precision, memory, batch_size in attempts:
        if plan.seq_len * batch_size % memory.head_chunks:
            memory = replace(memory, head_chunks=1)
        try:
            smaller = make_plan(
                plan.config,
                precision,
                memory,
                plan.hyper,
                batch_size=batch_size,
                seq_len=plan.seq_len,
                seed=plan.seed,
                scratch_bytes=scratch_bytes,
            )
        except UsageError:
            continue
        found.append((change, smaller))
    return found


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
