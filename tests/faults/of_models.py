"""Faults in what a model computes: the maths of the ops, forms and memory, wiring."""

from faults.fault import Fault

OPS = "llmq/ops/reference/"
GOLDEN = ("tests/test_golden.py",)
ENGINE = ("tests/engine/test_engine.py",)


def op_fault(name: str, op: str, old: str, new: str) -> Fault:
    """A fault in the reference definition of an op, whose own test should notice it."""
    return Fault(name, f"{OPS}{op}.py", old, new, (f"tests/ops/test_{op}.py",))


MATHS = (
    op_fault("rmsnorm_backward_sign_flipped", "rmsnorm", "(g - n * np.mean(", "(g + n * np.mean("),
    op_fault("rmsnorm_residual_gradient_dropped", "rmsnorm", "d = d + d_res.read()", "d = d + 0 * d_res.read()"),
    op_fault("qk_norm_gradients_swapped", "qk_norm", "per_head[:num_heads].sum", "per_head[num_heads:].sum"),
    op_fault("rope_sin_sign_flipped", "rope", "np.subtract(x1 * cos, x2 * sin", "np.add(x1 * cos, x2 * sin"),
    op_fault("rope_backward_turns_forward", "rope", "cos, -sin,", "cos, sin,"),
    op_fault("mask_shifted_by_one", "attention", "seen = (j <= i) if", "seen = (j < i) | (j == 0) if"),
    op_fault("window_off_by_one", "attention", "(j > i - window)", "(j >= i - window)"),
    op_fault("window_block_starts_late", "attention", "max(0, begin - window + 1)", "max(0, begin - window + 2)"),
    op_fault(
        "wrong_gqa_group",
        "attention",
        "    return q, k, v\n",
        "    return q, k[:, :, ::-1], v\n",
    ),
    op_fault("documents_see_each_other", "attention", "in pairwise(row):", "in [(row[0], row[-1])]:"),
    op_fault(
        "documents_are_not_cut", "attention", "range(first, stop, longest or length)", "range(first, stop, length)"
    ),
    op_fault("key_gradient_of_one_block_only", "attention", "d_k[b, keys, h] +=", "d_k[b, keys, h] ="),
    op_fault("attention_row_sum_missing", "attention", "d_s -= (do *", "d_s -= 0 * (do *"),
    op_fault("up_and_gate_swapped", "swiglu", "x[..., :half], x[..., half:]", "x[..., half:], x[..., :half]"),
    op_fault("bias_not_added", "linear", "value += bias.read()", "value += 0 * bias.read()"),
    op_fault("bias_gradient_of_first_rows_only", "linear", "partial.shape[-1]).sum(axis=0)", "partial.shape[-1])[0]"),
    op_fault("z_loss_gradient_missing", "cross_entropy", "(1 + 2 * z_loss * lse)", "(1 + 0 * z_loss * lse)"),
    op_fault("ignored_target_has_gradient", "cross_entropy", "p[ids == IGNORED] = 0", "p[ids == IGNORED] *= 1"),
    op_fault(
        "ignored_tokens_counted", "cross_entropy", "np.count_nonzero(targets.read() != IGNORED)", "loss.read().size"
    ),
    op_fault(
        "loss_divided_per_micro_batch",
        "cross_entropy",
        "loss_total.write(tree)",
        "loss_total.write(tree / max(1, np.count_nonzero(targets.read() != IGNORED)))",
    ),
    op_fault("clip_on_squared_norm", "optimizer", "total = np.sqrt(np.sum(", "total = (np.sum("),
    op_fault("norm_not_per_token", "optimizer", "value = total / tokens if", "value = total if"),
    op_fault("non_finite_step_applied", "optimizer", "apply.write(finite.", "apply.write((finite | True)."),
    op_fault("bias_correction_off_by_one", "optimizer", "1 - beta_1**count,", "1 - beta_1 ** (count + 1),"),
    op_fault("decay_without_learning_rate", "optimizer", "* (1 - lr * weight_decay)", "* (1 - weight_decay)"),
    op_fault(
        "master_not_updated",
        "optimizer",
        "new_master.chunk(start, rows).write(updated)",
        "new_master.chunk(start, rows).write(master.chunk(start, rows).read())",
    ),
    op_fault("rounding_same_every_step", "random", "[[step & 0xFFFFFFFF]", "[[0 & step]"),
    op_fault("rounding_biased", "random", "(values.view(np.uint32) + bits)", "(values.view(np.uint32) + bits // 2)"),
    op_fault("scale_never_updated", "cast", "new_scale.write(updated)", "new_scale.write(scale.read())"),
    op_fault("scale_of_last_step_only", "cast", "pushed.max(axis=0)", "pushed[0]"),
)

STORAGE = (
    Fault(
        "attention_keeps_to_one_chunk",
        "llmq/plan/advice.py",
        "if plan.total_bytes <= free_bytes or scratch is None",
        "if plan.total_bytes > 0 or scratch is None",
        ("tests/plan/test_advice.py",),
    ),
    Fault(
        "fp8_cast_does_not_saturate",
        "llmq/tensor.py",
        "np.clip(value * _spread(np.float32(1) / scale, value.shape, form), -limit, limit)",
        "value * _spread(np.float32(1) / scale, value.shape, form) + 0 * limit",
        ("tests/ops/test_cast.py",),
    ),
    Fault(
        "scale_of_a_block_from_its_neighbour",
        "llmq/scaling.py",
        "return _blocks(size).T",
        "return np.roll(_blocks(size).T, 1, axis=0)",
        ("tests/ops/test_quantize.py",),
    ),
    Fault(
        "transposed_copy_without_scale",
        "llmq/tensor.py",
        "if self.scale is not None:\n            array = array *",
        "if self.scale is not None and self.shape == array.shape:\n            array = array *",
        ("tests/ops/test_cast.py", "tests/ops/test_linear.py"),
    ),
    Fault(
        "copy_made_of_unrounded_value",
        "llmq/tensor.py",
        'wide = rounded if rounded.dtype.kind in "iu" else rounded.astype(np.float32)',
        'wide = rounded if rounded.dtype.kind in "iu" else value.astype(np.float32)',
        ("tests/ops/test_reference.py",),
    ),
    Fault(
        "accumulate_flag_ignored",
        "llmq/tensor.py",
        "            value = target.read() + value\n",
        "            value = 0 * target.read() + value\n",
        ENGINE,
    ),
    Fault(
        "column_sums_of_all_rows_repeated",
        "llmq/tensor.py",
        "np.add.reduceat(value.reshape(-1, columns), starts, axis=0)",
        "np.add.reduceat(value.reshape(-1, columns), starts[:1], axis=0)",
        ("tests/ops/test_cast.py", "tests/ops/test_linear.py"),
    ),
    Fault(
        "arena_overlaps_at_the_last_call",
        "llmq/plan/arena.py",
        "(lasts >= firsts[index])",
        "(lasts > firsts[index])",
        ("tests/plan/test_arena.py",),
    ),
)

MODELS = (
    Fault(
        "llama3_rope_ignored",
        "llmq/model/rope.py",
        'if config.kind == "default":',
        'if config.kind in ("default", "llama3"):',
        ("tests/model/test_rope_tables.py",),
    ),
    Fault(
        "linear_rope_inverted",
        "llmq/model/rope.py",
        "        return freq / config.factor\n",
        "        return freq * config.factor\n",
        ("tests/model/test_rope_tables.py",),
    ),
    Fault(
        "gate_and_up_tensors_swapped",
        "llmq/model/parameters.py",
        '(f"{mlp}gate_proj.weight", f), (f"{mlp}up_proj.weight", f)',
        '(f"{mlp}up_proj.weight", f), (f"{mlp}gate_proj.weight", f)',
        GOLDEN,
    ),
    Fault(
        "weight_decay_on_norms",
        "llmq/model/parameters.py",
        "decay=len(shape) > 1, layer=layer",
        "decay=True, layer=layer",
        ENGINE,
    ),
    Fault(
        "padded_rows_exported",
        "llmq/model/parameters.py",
        'Part("model.embed_tokens.weight", 0, v)',
        'Part("model.embed_tokens.weight", 0, vp)',
        ("tests/files/test_huggingface.py",),
    ),
    Fault(
        "window_of_first_sliding_layer",
        "llmq/model/config_keys.py",
        "window and n >= first",
        "window and n > first",
        GOLDEN,
    ),
    Fault("windows_ignored", "llmq/plan/build.py", "config.window(layer)", "None", GOLDEN),
    Fault(
        "z_loss_option_dropped",
        "llmq/plan/build.py",
        "memory.head_chunks, hyper.z_loss,",
        "memory.head_chunks, 0 * hyper.z_loss,",
        GOLDEN,
    ),
    Fault(
        "noise_is_evaluated",
        "llmq/plan/recordings.py",
        "ops, model = Recorder(), without_noise(self.model)",
        "ops, model = Recorder(), self.model",
        ("tests/blocks/test_embed.py",),
    ),
    Fault(
        "every_sample_has_the_same_noise",
        "llmq/ops/reference/embedding_noise.py",
        "random_words(seed, int(place), stream",
        "random_words(seed, 0 * int(place), stream",
        ("tests/ops/test_embedding_noise.py",),
    ),
    Fault(
        "padding_has_probability",
        "llmq/blocks/head.py",
        '{"vocab_size": vocab_size,',
        '{"vocab_size": padded_vocab,',
        ENGINE,
    ),
    Fault(
        "residual_missing_behind_the_mlp",
        "llmq/blocks/mlp.py",
        "a.act, w.down, residual=a.res)",
        "a.act, w.down)",
        GOLDEN,
    ),
    Fault(
        "bias_gradient_dropped",
        "llmq/sites/linear.py",
        "ops.bias_backward(dw.bias,",
        "ops.bias_backward(None,",
        GOLDEN,
    ),
    Fault(
        "bias_gradient_dropped_in_fp8",
        "llmq/sites/linear.py",
        "ops.bias_backward(dw.bias,",
        "ops.bias_backward(None,",
        ("tests/sites/test_fp8.py",),
    ),
    Fault(
        "fp8_rowwise_wgrad_reads_scales_by_row",
        "llmq/sites/fp8.py",
        'Recipe("rowwise", "current", "rowwise")',
        'Recipe("rowwise", "rowwise", "rowwise")',
        ("tests/sites/test_fp8.py",),
    ),
    Fault(
        "fp8_gradients_in_the_wrong_format",
        "llmq/sites/fp8.py",
        'd_y=Copies(Form(gradient_dtype, "row", by.rows)',
        'd_y=Copies(Form("e4m3", "row", by.rows)',
        ("tests/sites/test_fp8.py",),
    ),
)
