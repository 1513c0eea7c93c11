"""Do the tests bite? Faults to plant, one at a time: `pytest --fault NAME`, or all with tools/plant_faults.py.

A fault is a function that stands in for one of llmq's while the tests run, and gets the real one first. Beside it are
its target and the test files that should notice it: wrong maths, wrong memory, wrong steps, wrong data, wrong files.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Fault:
    """`wrong(real, *arguments)` is called in place of `target`, `package.module:name`, or `:Class.method`."""

    wrong: Callable[..., Any]
    target: str
    tests: tuple[str, ...]

    def find(self) -> tuple[Any, str, Any]:
        """What holds the target, under which name, and the target as it lies there."""
        module, _, path = self.target.partition(":")
        *way, name = path.split(".")
        holder = import_module(module)
        for step in way:
            holder = getattr(holder, step)
        return holder, name, holder[name] if isinstance(holder, Mapping) else inspect.getattr_static(holder, name)


def plant(fault: Fault) -> None:
    """Puts the fault in its target's place for the rest of the process."""
    holder, name, found = fault.find()
    real = found.__func__ if isinstance(found, classmethod) else found

    @wraps(real)
    def planted(*arguments: Any, **numbers: Any) -> Any:
        return fault.wrong(real, *arguments, **numbers)

    if isinstance(holder, dict):
        holder[name] = planted
    else:
        setattr(holder, name, classmethod(planted) if isinstance(found, classmethod) else planted)


FAULTS: dict[str, Fault] = {}
GOLDEN = "tests/test_golden.py"
ENGINE = "tests/engine/test_engine.py"
BY_HAND = "tests/training/test_training_by_hand.py"
KEPT = "tests/training/test_training_kept.py"
OPTIMIZER = "tests/ops/test_optimizer.py"
ATTENTION = "tests/ops/test_attention.py"


def fault(target: str, *tests: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a function into the table under its name."""

    def enter(wrong: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS[wrong.__name__] = Fault(wrong, target, tests)
        return wrong

    return enter


def op_fault(op: str, *tests: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A fault of the reference backend's op."""
    return fault(f"llmq.ops.reference:OPS.{op}", *tests)


# the maths of ops


@fault("llmq.engine.stored:rope_table", GOLDEN)
def rope_frequencies_off_by_one(real, config, head_dim, length, dtype):
    return real(config, head_dim + 2, length, dtype).reshape(length, 2, -1)[..., 1:].reshape(length, head_dim)


@fault("llmq.ops.reference.rope:_turned", "tests/ops/test_rope.py")
def rope_turns_backwards(real, x, cos, sin, *heads):
    return real(x, cos, -sin, *heads)


@fault("llmq.ops.reference.attention:_scores", ATTENTION)
def mask_ignored(real, q, k, mask, softmax_scale):
    return real(q, k, 0 * np.isinf(mask), softmax_scale)


@fault("llmq.ops.reference.attention:_blocks", ATTENTION)
def documents_see_each_other(real, batch, length, borders, *about):
    return real(batch, length, None, *about)


@fault("llmq.ops.reference.attention:_blocks", ATTENTION)
def window_off_by_one(real, batch, length, borders, window, *about):
    return real(batch, length, borders, window and window + 1, *about)


@op_fault("swiglu_forward", "tests/ops/test_swiglu.py")
def gate_and_up_swapped(real, act, gate_up):
    real(act, replace(gate_up, array=np.roll(gate_up.array, gate_up.shape[-1] // 2, axis=-1)))


@op_fault("linear_dgrad", "tests/ops/test_linear.py")
def residual_gradient_dropped(real, d_x, d_y, weight, residual, **numbers):
    real(d_x, d_y, weight, None, **numbers)


@op_fault("loss_sum", "tests/ops/test_cross_entropy.py")
def ignored_tokens_counted(real, loss_total, num_tokens, loss, targets):
    real(loss_total, num_tokens, loss, replace(targets, array=np.maximum(targets.array, 0)))


@op_fault("grad_scale", OPTIMIZER)
def gradient_not_clipped(real, *handles, grad_clip):
    real(*handles, grad_clip=0.0)


@op_fault("adamw", OPTIMIZER)
def bias_correction_off_by_one(real, *handles, **numbers):
    *others, step = handles
    real(*others, replace(step, array=step.array + 1), **numbers)


@op_fault("sgd", OPTIMIZER)
def momentum_not_ahead(real, *handles, **numbers):
    real(*handles, **{**numbers, "nesterov": False})


@fault("llmq.ops.reference.optimizer:random_bits", "tests/ops/test_random.py", OPTIMIZER)
def rounding_same_every_step(real, seed, step, *address):
    return real(seed, 0, *address)


@fault("llmq.operands:to_form", "tests/ops/test_quantize.py")
def copies_scaled_wrongly(real, value, form, scale):
    return real(value, form, None if scale is None else scale * np.float32(2))


# what is planned


@fault("llmq.operands:Output._write", ENGINE)
def accumulation_dropped(real, output, value):
    real(replace(output, accumulate=False), value)


@fault("llmq.plan.plan:accumulate", "tests/plan/test_program.py", ENGINE)
def every_micro_step_is_planned_as_the_first(real, calls, *, first):
    return real(calls, first=True)


@fault("llmq.plan.passes.fates:apply", "tests/plan/passes/test_fates.py")
def replay_reads_what_was_dropped(real, calls, fates):
    return [
        replace(call, inputs=tuple(ref and replace(ref, again=False) for ref in call.inputs))
        if call.phase == "replay"
        else call
        for call in real(calls, fates)
    ]


@fault("llmq.plan.passes.place:lay_out", "tests/plan/passes/test_place.py", ENGINE)
def slots_overlap(real, lifetimes):
    offsets, peak = real(lifetimes)
    return [offset // 2 // 256 * 256 for offset in offsets], peak


@fault("llmq.model.parameters:parameter_rows", GOLDEN)
def biases_and_norms_decay(real, config):
    return tuple(replace(row, decay=True) for row in real(config))


@fault("llmq.model.optimizer:_update_scales", "tests/model/test_optimizer.py")
def scales_stay_as_they_are(real, ops, cells, apply):
    return None


# a run


@fault("llmq.engine.engine:Engine.restore", ENGINE)
def second_moment_not_restored(real, engine, read):
    real(engine, lambda name: read(name) * (not name.startswith("v:")))


@fault("llmq.training.schedule:Schedule.learning_rate", "tests/training/test_schedule.py")
def rate_of_the_next_step(real, schedule, step):
    return real(schedule, step + 1)


@fault("llmq.training.loop:Engine.micro_step", BY_HAND)
def only_the_last_micro_step_counts(real, engine, batch, *, first=True, last=True):
    real(engine, batch, first=True, last=last)


@fault("llmq.training.progress:Progress.read", KEPT)
def resume_skips_a_sample(real, cls, state):
    found = real(cls, state)
    return replace(found, position=found.position + 1)


@fault("llmq.training.saving:check_same", KEPT)
def other_options_continue_a_run(real, saved, now):
    return None


@fault("llmq.training.finish:all_finite", KEPT)
def a_ruined_model_is_exported(real, values):
    return True


# data


@fault("llmq.data.batches.rows:sample_order", "tests/data/batches/test_loader.py")
def epochs_all_alike(real, places, num_samples, seed):
    return real(np.asarray(places) % num_samples, num_samples, seed)


@fault("llmq.data.tokens.token_file:TokenFile.trained", "tests/data/batches/test_windows.py")
def mask_of_inputs_not_of_targets(real, file, start, stop):
    return real(file, start - 1, stop - 1)


@fault("llmq.data.batches.loader:eval_batches", "tests/data/batches/test_loader.py")
def evaluation_drops_its_last_batch(real, *arguments):
    return iter(list(real(*arguments))[:-1])


# files


@fault("llmq.files.huggingface:_row_slices", "tests/files/test_huggingface.py")
def export_transposed(real, row, value, dtype):
    return real(row, value.T.reshape(value.shape), dtype)
