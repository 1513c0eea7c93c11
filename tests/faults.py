"""Do the tests bite? Faults to plant, one at a time: `pytest --fault NAME`, or all with tools/plant_faults.py.

A fault is a function that stands in for one of llmq's while the tests run, and gets the real one first. Beside it are
its target and the test files that should notice it: of wrong maths, wrong memory, wrong steps, wrong data, wrong files.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from typing import Any

import numpy as np

GOLDEN = "tests/test_golden.py"
ENGINE = "tests/engine/test_engine.py"
KEPT = "tests/training/test_training_kept.py"
LOADER = "tests/data/batches/test_loader.py"
OPTIMIZER = "tests/ops/test_optimizer.py"
ATTENTION = "tests/ops/test_attention.py"
LOAD = "tests/api/test_load.py"
ARRAYS = "tests/ops/test_arrays.py"


@dataclass(frozen=True)
class Fault:
    """`wrong(real, *arguments)` is called in place of `target`, `package.module:name`, or `:Class.method`."""

    target: str
    tests: tuple[str, ...]
    wrong: Callable[..., Any]

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


def _off_by_one(real, config, head_dim, length, dtype):
    return real(config, head_dim + 2, length, dtype).reshape(length, 2, -1)[..., 1:].reshape(length, head_dim)


def _with_array(handle, change):
    """An op's operand with another array."""
    return replace(handle, array=change(handle.array))


def _not_again(real, calls, fates):
    """Replays that read what was dropped."""
    return [
        replace(call, inputs=tuple(ref and replace(ref, again=False) for ref in call.inputs))
        if call.phase == "replay"
        else call
        for call in real(calls, fates)
    ]


def _overlapping(real, lifetimes):
    offsets, peak = real(lifetimes)
    return [offset // 2 // 256 * 256 for offset in offsets], peak


def _later(real, cls, state):
    found = real(cls, state)
    return replace(found, position=found.position + 1)


def _of_op(op: str, test: str, wrong: Callable[..., Any]) -> Fault:
    """A fault of the reference backend's op."""
    return Fault(f"llmq.ops.reference:OPS.{op}", (test,), wrong)


FAULTS = {
    # the maths of ops
    "rope_frequencies_off_by_one": Fault("llmq.model.rope:rope_table", (GOLDEN,), _off_by_one),
    "what_is_not_needed_is_made": Fault(
        "llmq.ops.arrays:_needed", (ARRAYS,), lambda real, needs, **outputs: frozenset(outputs.values())
    ),
    "heads_turn_back_forwards": Fault(
        "llmq.ops.reference.rope_heads:_turn_heads",
        (ARRAYS,),
        lambda real, out, x, cos, sin, sign: real(out, x, cos, sin, 1),
    ),
    "weights_are_scaled_as_activations": Fault(
        "llmq.ops.linear_maps:_read_by", (ARRAYS,), lambda real, role, layout, scaling: real("x", layout, scaling)
    ),
    "rope_turns_backwards": Fault(
        "llmq.ops.reference.rope:turned",
        ("tests/ops/test_rope.py",),
        lambda real, x, cos, sin, *heads: real(x, cos, -sin, *heads),
    ),
    "mask_ignored": Fault(
        "llmq.ops.reference.attention:_scores",
        (ATTENTION,),
        lambda real, q, k, mask, softmax_scale: real(q, k, 0 * np.isinf(mask), softmax_scale),
    ),
    "documents_see_each_other": Fault(
        "llmq.ops.reference.attention:_blocks",
        (ATTENTION,),
        lambda real, batch, length, borders, *about: real(batch, length, None, *about),
    ),
    "window_off_by_one": Fault(
        "llmq.ops.reference.attention:_blocks",
        (ATTENTION,),
        lambda real, batch, length, borders, window, *about: real(
            batch, length, borders, window and window + 1, *about
        ),
    ),
    "gate_and_up_swapped": _of_op(
        "swiglu_forward",
        "tests/ops/test_swiglu.py",
        lambda real, act, x: real(act, _with_array(x, lambda array: np.roll(array, array.shape[-1] // 2, axis=-1))),
    ),
    "residual_gradient_dropped": _of_op(
        "linear_dgrad",
        "tests/ops/test_linear.py",
        lambda real, d_x, d_y, weight, residual, **numbers: real(d_x, d_y, weight, None, **numbers),
    ),
    "ignored_tokens_counted": _of_op(
        "loss_sum",
        "tests/ops/test_cross_entropy.py",
        lambda real, *sums: real(*sums[:-1], _with_array(sums[-1], lambda targets: np.maximum(targets, 0))),
    ),
    "gradient_not_clipped": _of_op(
        "grad_scale", OPTIMIZER, lambda real, *handles, grad_clip: real(*handles, grad_clip=0.0)
    ),
    "bias_correction_off_by_one": _of_op(
        "adamw",
        OPTIMIZER,
        lambda real, *handles, **about: real(*handles[:-1], _with_array(handles[-1], lambda n: n + 1), **about),
    ),
    "momentum_not_ahead": _of_op(
        "sgd",
        "tests/ops/test_other_updates.py",
        lambda real, *handles, **numbers: real(*handles, **{**numbers, "nesterov": False}),
    ),
    "rounding_same_every_step": Fault(
        "llmq.ops.reference.optimizer:random_bits",
        ("tests/ops/test_random.py", OPTIMIZER),
        lambda real, seed, step, *address: real(seed, 0, *address),
    ),
    "copies_scaled_wrongly": Fault(
        "llmq.operands:to_form",
        ("tests/ops/test_quantize.py",),
        lambda real, value, form, scale: real(value, form, None if scale is None else scale * np.float32(2)),
    ),
    # what is planned
    "accumulation_dropped": Fault(
        "llmq.operands:Output._write",
        (ENGINE,),
        lambda real, output, value: real(replace(output, accumulate=False), value),
    ),
    "every_micro_step_is_planned_as_the_first": Fault(
        "llmq.plan.plan:accumulate", (ENGINE,), lambda real, calls, *, first: real(calls, first=True)
    ),
    "replay_reads_what_was_dropped": Fault(
        "llmq.plan.passes.fates:apply", ("tests/plan/passes/test_fates.py",), _not_again
    ),
    "slots_overlap": Fault("llmq.plan.passes.place:lay_out", ("tests/plan/passes/test_place.py", ENGINE), _overlapping),
    "biases_and_norms_decay": Fault(
        "llmq.model.parameters:parameter_rows",
        (GOLDEN,),
        lambda real, config: tuple(replace(row, decay=True) for row in real(config)),
    ),
    "scales_stay_as_they_are": Fault(
        "llmq.model.optimizer:_update_scales", ("tests/model/test_optimizer.py",), lambda real, *state: None
    ),
    # a run
    "second_moment_not_restored": Fault(
        "llmq.engine.engine:Engine.restore",
        (ENGINE,),
        lambda real, engine, read: real(engine, lambda name: read(name) * (not name.startswith("v:"))),
    ),
    "rate_of_the_next_step": Fault(
        "llmq.training.schedule:Schedule.learning_rate",
        ("tests/training/test_schedule.py",),
        lambda real, schedule, step: real(schedule, step + 1),
    ),
    "only_the_last_micro_step_counts": Fault(
        "llmq.engine.engine:Engine.micro_step",
        ("tests/training/test_training_by_hand.py",),
        lambda real, engine, batch, *, first=True, last=True: real(engine, batch, first=True, last=last),
    ),
    "resume_skips_a_sample": Fault("llmq.training.progress:Progress.read", (KEPT,), _later),
    "other_options_continue_a_run": Fault("llmq.training.saving:check_same", (KEPT,), lambda real, saved, now: None),
    "a_ruined_model_is_exported": Fault("llmq.training.finish:all_finite", (KEPT,), lambda real, values: True),
    # data
    "epochs_all_alike": Fault(
        "llmq.data.batches.rows:sample_order",
        (LOADER,),
        lambda real, places, num, seed: real(np.asarray(places) % num, num, seed),
    ),
    "mask_of_inputs_not_of_targets": Fault(
        "llmq.data.tokens.token_file:TokenFile.trained",
        ("tests/data/batches/test_windows.py",),
        lambda real, file, start, stop: real(file, start - 1, stop - 1),
    ),
    "evaluation_drops_its_last_batch": Fault(
        "llmq.data.batches.loader:eval_batches", (LOADER,), lambda real, *arguments: iter([*real(*arguments)][:-1])
    ),
    # callbacks
    "ranks_evaluate_all_but_the_last_batch": Fault(
        "llmq.training.requests:_from_first",
        ("tests/training/test_requests.py",),
        lambda real, *arguments: [*real(*arguments)][:-1],
    ),
    "callbacks_ask_again_at_each_step": Fault(
        "llmq.training.callbacks:Callbacks._taken",
        ("tests/training/test_callbacks.py",),
        lambda real, self: self._run.asked,
    ),
    "early_stopping_is_called_first": Fault(
        "llmq.training.train:named",
        ("tests/training/test_callbacks.py",),
        lambda real, *arguments: dict(reversed(real(*arguments).items())),
    ),
    "a_rollback_goes_to_the_beginning": Fault(
        "llmq.training.rollback:Rollbacks._last",
        ("tests/training/test_faulty_steps.py",),
        lambda real, self, run: self._ready.earlier.path,
    ),
    "a_skipped_spike_is_applied": Fault(
        "llmq.model.limited_update:LimitedUpdater.limit",
        ("tests/training/test_spikes.py",),
        lambda real, self, ops, agreed: None,
    ),
    # files
    "secrets_of_urls_are_shown": Fault("llmq.redact:note_secrets", ("tests/test_secrets.py",), lambda real, text: None),
    "export_transposed": Fault(
        "llmq.files.huggingface:_row_slices",
        ("tests/files/test_huggingface.py",),
        lambda real, row, value, dtype: real(row, value.T.reshape(value.shape), dtype),
    ),
    # reading
    "virtual_tokens_are_scored": Fault(
        "llmq.engine.reading:ModelReader._places",
        (LOAD,),
        lambda real, reader, ids: (slice(len(ids)), slice(0, ids.shape[1])),
    ),
    "any_id_is_read": Fault(
        "llmq.api.tokens:TokenRules._first_wrong", (LOAD,), lambda real, rules, ids, *, or_ignored: None
    ),
    "text_of_other_weights": Fault(
        "llmq.backends.host:HostMemory.borrow", (LOAD,), lambda real, memory, names, other: real(memory, [], other)
    ),
}
