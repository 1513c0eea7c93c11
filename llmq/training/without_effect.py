"""Options that are given and change nothing in this run: a table of where that is so, and a notice for each reason.

People share one command between a laptop and eight GPUs, so these are no errors. What cannot go together anywhere is
one (`contradictions` of a section of options, llmq/plan/spec.py).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llmq.options.field import written
from llmq.plan.memory import is_quant
from llmq.training.ready import Ready

NO_EVAL = "without data to evaluate on, such as --eval-file"


def _has_no_eval(run: Ready) -> bool:
    return run.data.is_there and run.data.eval is None


# Options, the runs in which they have no effect, and why, which ends the line.
TABLE: tuple[tuple[tuple[str, ...], Callable[[Ready], bool], str], ...] = (
    (
        (
            *("zero_level", "shard_gradients", "shard_weights", "reduce_dtype", "all_to_all_reduce"),
            *("gradient_compression", "memcpy_all_gather", "memcpy_send_recv"),
        ),
        lambda run: run.plan.spec.sharding.size == 1,
        "in a run of one process",
    ),
    (
        ("use_cuda_graphs", "deterministic", "write_combined", "memcpy_all_gather", "memcpy_send_recv"),
        lambda run: run.device.kind == "cpu",
        "on the CPU",
    ),
    (
        ("host_memory_limit",),
        lambda run: run.device.kind == "cpu" and not run.plan.host_bytes,
        "on the CPU: --memory-limit limits its memory",
    ),
    (
        ("host_memory_limit", "write_combined"),
        lambda run: not (run.plan.host_bytes or run.options["fit"]),
        "without something on the host, such as --offload-optimizer",
    ),
    (
        ("use_zero_copy",),
        lambda run: {"master", "m", "v", "grad"}.isdisjoint(run.plan.spec.memory.host),
        "without optimizer states or gradients on the host: --offload-optimizer",
    ),
    (
        ("offload_quants", "persistent_quants"),
        lambda run: not any(is_quant(row, run.plan.spec.precision) for row in run.plan.rows),
        "without e4m3 matmuls of weights that are trained: --matmul-dtype e4m3",
    ),
    (
        ("memcpy_all_gather",),
        lambda run: not (run.plan.spec.sharding.states or run.plan.spec.sharding.weights),
        "at --zero-level 0, which gathers no weights",
    ),
    (("memcpy_send_recv",), lambda run: not run.plan.spec.sharding.all_to_all, "without --all-to-all-reduce"),
    (("restart_failed",), lambda run: not run.ranks.can_restart, "without --gpus, llmq-launch or --launcher ray"),
    (
        ("weight_decay",),
        lambda run: not any(row.trainable and row.decay for row in run.plan.rows),
        "without a matrix or an embedding that is trained",
    ),
    (
        ("master_dtype",),
        lambda run: (
            run.plan.spec.precision.master == "none" and not any(r.stored for r in run.plan.rows if r.trainable)
        ),
        "without a block's matrix that is trained",
    ),
    (
        ("eval_every_n_steps",),
        lambda run: (
            _has_no_eval(run) and not (run.samples and run.samples.prompts) and run.options["eval_every_n_steps"]
        ),
        NO_EVAL,
    ),
    (("eval_num_steps", "final_eval"), _has_no_eval, NO_EVAL),
    (
        ("eval_num_steps", "final_eval"),
        lambda run: not run.options["eval_every_n_steps"],
        "with --eval-every-n-steps 0",
    ),
    (("sample_tokens", "sample_temperature"), lambda run: run.samples is None, "without --sample-prompts"),
)


def without_effect(run: Ready, given: Mapping[str, Any]) -> Iterator[str]:
    """A line for each reason for which some of the options `given`, by key, have no effect in this run."""
    left = {key: value for key, value in given.items() if key not in run.fitted}
    for keys, is_idle, why in TABLE:
        if (idle := [key for key in keys if key in left]) and is_idle(run):
            *others, last = (written(key, left.pop(key)) for key in idle)
            yield f"{', '.join(others)} and {last} have no effect {why}" if others else f"{last} has no effect {why}"
