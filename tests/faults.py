"""Faults to plant in the source, one at a time: tools/plant_faults.py checks that each turns the tests red.

A fault is an exact text of one file, found there once, and what stands there instead. `tests` are the files most
likely to notice it, run first. tests/test_faults.py keeps the table in step with the source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `file`; paths are relative to the repository's root."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def planted(source: str, fault: Fault) -> str:
    """`source` with the fault; ValueError unless the text to replace is there exactly once."""
    if (count := source.count(fault.old)) != 1:
        raise ValueError(f"fault {fault.name}: {fault.old!r} is {count} times in {fault.file}, not once")
    return source.replace(fault.old, fault.new)


GOLDEN = ("tests/test_golden.py",)
OPS = "llmq/ops/reference/"


def op_fault(name: str, op: str, old: str, new: str) -> Fault:
    """A fault in the reference definition of an op, whose own test should notice it."""
    return Fault(name, f"{OPS}{op}.py", old, new, (f"tests/ops/test_{op}.py",))


FAULTS: tuple[Fault, ...] = (
    # the maths of the ops
    op_fault("rmsnorm_backward_sign", "rmsnorm", "(g - n * np.mean(", "(g + n * np.mean("),
    op_fault("rmsnorm_residual_dropped", "rmsnorm", "d = d + d_res.read()", "d = d + 0 * d_res.read()"),
    op_fault("qk_norm_weight_gradients_swapped", "qk_norm", "per_head[:num_heads].sum", "per_head[num_heads:].sum"),
    op_fault(
        "qk_norm_value_heads_normed", "qk_norm", "heads[:, :, num_heads + num_kv_heads :]", "heads[:, :, num_heads :]"
    ),
    op_fault("rope_sin_sign", "rope", "np.subtract(x1 * cos, x2 * sin", "np.add(x1 * cos, x2 * sin"),
    op_fault("rope_backward_turns_forward", "rope", "cos, -sin,", "cos, sin,"),
    op_fault("mask_shifted_by_one", "attention", "seen = (j <= i) if", "seen = (j < i + 2) if"),
    op_fault("window_off_by_one", "attention", "(j > i - window)", "(j >= i - window)"),
    op_fault("window_off_by_one_block", "attention", "max(0, start - window + 1)", "max(0, start - window + 2)"),
    op_fault(
        "wrong_gqa_group",
        "attention",
        "q, k, v = (part.reshape(*x.shape[:2], num_kv_heads, -1) for part in cuts)",
        "q, k, v = (part.reshape(*x.shape[:2], num_kv_heads, -1) for part in cuts)\n    k = k[:, :, ::-1]",
    ),
    op_fault("attention_key_gradient_overwritten", "attention", "d_k[b, keys, h] +=", "d_k[b, keys, h] ="),
    op_fault("attention_rowsum_missing", "attention", "d_s -= (do *", "d_s -= 0 * (do *"),
    op_fault(
        "up_and_gate_swapped", "swiglu", "return x[..., :half], x[..., half:]", "return x[..., half:], x[..., :half]"
    ),
    op_fault("bias_not_added", "linear", "value += bias.read()", "value += 0 * bias.read()"),
    op_fault("bias_gradient_first_part_only", "linear", "partial.shape[-1]).sum(axis=0)", "partial.shape[-1])[0]"),
    op_fault("z_loss_gradient_missing", "cross_entropy", "(1 + 2 * z_loss * lse)", "(1 + 0 * z_loss * lse)"),
    op_fault("ignored_target_has_gradient", "cross_entropy", "p[ignored] = 0", "p[ignored] *= 1"),
    op_fault("padded_vocabulary_has_probability", "cross_entropy", "real = x[:, :vocab_size]", "real = x[:, :]"),
    op_fault(
        "ignored_tokens_counted", "cross_entropy", "np.count_nonzero(targets.read() != IGNORED)", "targets.read().size"
    ),
    op_fault("clip_on_squared_norm", "optimizer", "total = np.sqrt(np.sum(", "total = (np.sum("),
    op_fault("norm_not_per_token", "optimizer", "value = total / tokens if", "value = total if"),
    op_fault("non_finite_step_applied", "optimizer", "apply.write(finite.", "apply.write((finite | True)."),
    op_fault("bias_correction_off_by_one", "optimizer", "1 - beta_1**count,", "1 - beta_1 ** (count + 1),"),
    op_fault("decay_coupled", "optimizer", "* (1 - lr * weight_decay)", "* (1 - weight_decay)"),
    op_fault("stochastic_rounding_same_every_step", "random", "[[step & 0xFFFFFFFF]", "[[0 & step]"),
    op_fault("stochastic_rounding_biased", "random", "(bits & np.uint32(0xFFFF))", "(bits & np.uint32(0x7FFF))"),
    op_fault("scale_never_updated", "cast", "new_scale.write(updated)", "new_scale.write(scale.read())"),
    op_fault("amax_history_of_one", "cast", "pushed.max(axis=0)", "pushed[0]"),
    # tensors and forms
    Fault(
        "fp8_cast_overflows",
        "llmq/tensor.py",
        "np.clip(value * (np.float32(1) / scale), -limit, limit)",
        "value * (np.float32(1) / scale) * (limit / limit)",
        ("tests/test_tensor.py", "tests/ops/test_cast.py"),
    ),
    Fault(
        "accumulate_flag_ignored",
        "llmq/tensor.py",
        "value = target.read() + value",
        "value = 0 * target.read() + value",
        ("tests/test_tensor.py", *GOLDEN),
    ),
    Fault(
        "scale_not_dequantised",
        "llmq/tensor.py",
        "array = array * self.scale",
        "array = array * self.scale * self.scale",
        ("tests/test_tensor.py", *GOLDEN),
    ),
    # models and parameters
    Fault(
        "llama3_rope_ignored",
        "llmq/rope.py",
        'if config.kind == "default":',
        'if config.kind in ("default", "llama3"):',
        ("tests/test_rope.py", *GOLDEN),
    ),
    Fault(
        "llama3_rope_bands_swapped",
        "llmq/rope.py",
        "return kept * freq + (1 - kept) * freq / config.factor",
        "return (1 - kept) * freq + kept * freq / config.factor",
        ("tests/test_rope.py", *GOLDEN),
    ),
    Fault(
        "weight_decay_on_norms",
        "llmq/rows.py",
        "decay=len(shape) > 1, layer=layer",
        "decay=True, layer=layer",
        ("tests/test_rows.py", *GOLDEN),
    ),
    Fault(
        "gate_and_up_weights_swapped",
        "llmq/rows.py",
        '(f"{mlp}gate_proj.weight", f), (f"{mlp}up_proj.weight", f)',
        '(f"{mlp}up_proj.weight", f), (f"{mlp}gate_proj.weight", f)',
        GOLDEN,
    ),
    Fault(
        "residual_init_not_scaled",
        "llmq/rows.py",
        '"mlp.down.weight", (c, f), "residual"',
        '"mlp.down.weight", (c, f), "normal"',
        ("tests/test_source.py",),
    ),
)
