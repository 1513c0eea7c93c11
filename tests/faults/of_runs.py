"""Faults in what a run does: a step and its state, the loop, data, files."""

from faults.fault import Fault

GOLDEN = ("tests/test_golden.py",)
ENGINE = ("tests/test_engine.py",)
UPDATE = ("tests/test_optimizer.py",)
LOOP_BY_HAND = ("tests/test_training_by_hand.py",)
KEPT = ("tests/test_training_kept.py",)
PLAN = ("tests/plan/test_program.py", "tests/plan/test_recompute.py", "tests/test_engine.py")

STEP = (
    Fault(
        "tied_gradient_overwritten",
        "llmq/plan/program.py",
        "(not first or storage_name(ref) in written)",
        "(not first)",
        PLAN,
    ),
    Fault(
        "micro_steps_do_not_accumulate",
        "llmq/plan/program.py",
        "(not first or storage_name(ref) in written)",
        "(storage_name(ref) in written)",
        PLAN,
    ),
    Fault("amax_counted_in_replay", "llmq/plan/program.py", "statistics and not ref.again", "statistics", PLAN),
    Fault(
        "amax_counted_in_evaluation",
        "llmq/plan/plan.py",
        'compiler.program("evaluate", evaluate, statistics=False)',
        'compiler.program("evaluate", evaluate, statistics=True)',
        PLAN,
    ),
    Fault(
        "scales_of_a_copy_die_before_it",
        "llmq/plan/program.py",
        "            lasts[operand.scale] = index",
        "            lasts[operand.scale] += 0",
        PLAN,
    ),
    Fault("memory_taken_before_the_last_read", "llmq/plan/program.py", "and lasts[source.storage] == index", "", PLAN),
    Fault(
        "replay_reads_what_was_dropped",
        "llmq/ops/record.py",
        'if phase in ("replay", "backward"):',
        'if phase in ("backward",):',
        PLAN,
    ),
    Fault(
        "stale_scale",
        "llmq/optimizer.py",
        'update_scales(ops, cells, cells["apply"])',
        'update_scales(ops, {}, cells["apply"])',
        UPDATE,
    ),
    Fault("clip_off", "llmq/optimizer.py", "grad_clip=hyper.grad_clip)", "grad_clip=0.0)", ENGINE),
    Fault(
        "decay_of_every_row",
        "llmq/optimizer.py",
        "hyper.weight_decay if rows[name].decay else 0.0",
        "hyper.weight_decay",
        ENGINE,
    ),
    Fault("rounding_seed_constant", "llmq/optimizer.py", "seed=seed,", "seed=0,", UPDATE),
    Fault(
        "rounding_same_for_all_parameters",
        "llmq/optimizer.py",
        "return zlib.crc32(row.name.encode())",
        "return 0",
        UPDATE,
    ),
    Fault(
        "moment_not_restored",
        "llmq/engine.py",
        "            self._memory.write(name, read(name))\n",
        '            self._memory.write(name, read(name) * (name[:2] != "v:"))\n',
        ENGINE,
    ),
    Fault("scales_not_saved", "llmq/plan/plan.py", "for name in names + scales}", "for name in names}", ENGINE),
    Fault(
        "step_number_not_set",
        "llmq/engine.py",
        'self._memory.fill("cell:step", step)',
        'self._memory.fill("cell:step", 1)',
        GOLDEN,
    ),
)

LOOP = (
    Fault(
        "learning_rate_off_by_one_step",
        "llmq/schedule.py",
        "x = min(step - 1, self.steps)",
        "x = min(step, self.steps)",
        ("tests/test_schedule.py",),
    ),
    Fault(
        "learning_rate_of_the_step_before",
        "llmq/training.py",
        "job.schedule.learning_rate(self.step + 1)",
        "job.schedule.learning_rate(self.step)",
        LOOP_BY_HAND,
    ),
    Fault(
        "step_number_starts_at_zero",
        "llmq/training.py",
        "self.engine.update(self.step + 1, rate)",
        "self.engine.update(max(self.step, 1), rate)",
        LOOP_BY_HAND,
    ),
    Fault(
        "data_position_not_restored",
        "llmq/training.py",
        'self.position, self.stream = state["position"],',
        'self.position, self.stream = 0 * state["position"],',
        ("tests/test_training.py",),
    ),
    Fault(
        "every_micro_step_is_the_first",
        "llmq/training.py",
        "first=micro_step == 0,",
        "first=micro_step >= 0,",
        LOOP_BY_HAND,
    ),
    Fault(
        "other_options_continue_a_checkpoint",
        "llmq/training.py",
        'check_same(state["must_match"], job.must_match)',
        "check_same(job.must_match, job.must_match)",
        ("tests/test_training.py",),
    ),
    Fault(
        "evaluation_is_a_mean_of_means",
        "llmq/training.py",
        "total, trained, tokens = total + loss, trained + count, tokens + batch.tokens.size",
        "total, trained, tokens = total + loss / max(count, 1), trained + 1, tokens + batch.tokens.size",
        LOOP_BY_HAND,
    ),
    Fault(
        "seed_not_in_the_plan",
        "llmq/job.py",
        "            seed=seed,\n",
        "",
        LOOP_BY_HAND,
    ),
    Fault(
        "betas_swapped",
        "llmq/optimizer.py",
        "        options.beta_1,\n        options.beta_2,\n",
        "        options.beta_2,\n        options.beta_1,\n",
        UPDATE,
    ),
    Fault(
        "residual_init_not_scaled",
        "llmq/source.py",
        "INIT_STD / math.sqrt(2 * source.config.num_layers) if residual else INIT_STD",
        "INIT_STD",
        ("tests/test_source.py",),
    ),
    Fault(
        "residual_init_of_one_projection",
        "llmq/rows.py",
        '"mlp.down.weight", (c, f), "residual"',
        '"mlp.down.weight", (c, f), "normal"',
        ("tests/test_source.py",),
    ),
    Fault(
        "initial_values_alike_in_all_rows",
        "llmq/source.py",
        "{seed}\\0{name}",
        "{seed}\\0{name[:0]}",
        ("tests/test_source.py",),
    ),
    Fault(
        "an_error_loses_the_steps_since_the_last_checkpoint",
        "llmq/training.py",
        "                    self._rescue()\n",
        "                    pass\n",
        KEPT,
    ),
    Fault(
        "a_diverged_run_is_saved",
        "llmq/training.py",
        "if not isinstance(error, NonFiniteError):",
        "if not isinstance(error, KeyError):",
        KEPT,
    ),
    Fault(
        "a_fallback_saves_counts_that_have_its_reading",
        "llmq/training.py",
        "self._fall_back(list(low), before)",
        "self._fall_back(list(low), self.fp8.low)",
        KEPT,
    ),
    Fault(
        "an_evaluation_cut_off_is_never_made",
        "llmq/training.py",
        "self._evaluate_if_due()  # where an interrupt",
        "pass  # where an interrupt",
        KEPT,
    ),
    Fault(
        "held_out_loss_has_the_z_loss",
        "llmq/blocks/head.py",
        '**{**self.numbers, "z_loss": 0.0}',
        "**self.numbers",
        KEPT,
    ),
    Fault(
        "other_data_of_the_same_size_continues_a_run",
        "llmq/data/loader.py",
        "[file.fingerprint for file",
        "[file.num_tokens for file",
        KEPT,
    ),
    Fault(
        "a_false_flag_is_no_flag",
        "llmq/commands.py",
        'flag(key if value else f"no_{key}")',
        "flag(key)",
        ("tests/test_commands.py",),
    ),
)

DATA = (
    Fault(
        "positions_run_on_across_documents",
        "llmq/rope.py",
        "- np.maximum.accumulate(starts",
        "- 0 * np.maximum.accumulate(starts",
        ("tests/test_packed_engine.py",),
    ),
    Fault(
        "masks_of_packs_shifted_by_one",
        "llmq/data/packing.py",
        "file.trained(begin + 1, begin + length)",
        "file.trained(begin, begin + length - 1)",
        ("tests/data/test_packing.py",),
    ),
    Fault(
        "pieces_of_long_documents_share_a_start",
        "llmq/data/packing.py",
        "starts = np.cumsum(pieces, dtype=np.int64) - pieces",
        "starts = np.cumsum(pieces, dtype=np.int64) - pieces.max(initial=0)",
        ("tests/data/test_packing.py",),
    ),
    Fault(
        "packs_hold_a_document_too_many",
        "llmq/data/first_fit.py",
        "count = min(left[length], room // length, places)",
        "count = min(left[length], room // length)",
        ("tests/data/test_first_fit.py",),
    ),
    Fault(
        "documents_do_not_end",
        "llmq/data/pipeline.py",
        "np.array([len(code) for code in encodings]) + np.array(batch.ends)",
        "np.array([len(code) for code in encodings])",
        ("tests/data/test_tokenize.py",),
    ),
    Fault(
        "position_is_of_the_batch_before",
        "llmq/data/produce.py",
        """                    self.position = tokens.position
                    self.producer""",
        "                    self.producer",
        ("tests/data/test_produce.py",),
    ),
    Fault(
        "parts_are_renamed_before_the_state_knows_them",
        "llmq/data/produce.py",
        """        self.producer.save(self.number, state)
        for writer in self.sealed:
            writer.publish()
""",
        """        for writer in self.sealed:
            writer.publish()
        self.producer.save(self.number, state)
""",
        ("tests/data/test_produce.py",),
    ),
    Fault(
        "bad_rows_are_not_counted",
        "llmq/data/produce.py",
        "self.done.bad += len(tokens.bad)",
        "self.done.bad += 0",
        ("tests/data/test_produce.py",),
    ),
    Fault(
        "a_share_begins_at_the_file",
        "llmq/data/rows.py",
        "share.has(before + row - start)",
        "share.has(row)",
        ("tests/data/test_rows.py",),
    ),
    Fault(
        "two_hold_a_lock",
        "llmq/data/cache.py",
        "            if not _is_at(fd, path):  # the one before removed it while we waited\n                continue\n",
        "",
        ("tests/data/test_cache.py",),
    ),
    Fault(
        "foreign_ids_accepted",
        "llmq/data/token_file.py",
        'self.tokens[at:end].view(f"<u{size}")',
        "self.tokens[at:end]",
        ("tests/data/test_token_file.py",),
    ),
    Fault(
        "mask_bits_most_significant_first",
        "llmq/data/token_file.py",
        'np.unpackbits(self.mask_bits[first:last], bitorder="little")',
        'np.unpackbits(self.mask_bits[first:last], bitorder="big")',
        ("tests/data/test_token_file.py",),
    ),
    Fault(
        "mask_of_inputs_not_targets",
        "llmq/data/windows.py",
        "~file.trained(start + 1, stop + 1)",
        "~file.trained(start, stop)",
        ("tests/data/test_windows.py",),
    ),
    Fault(
        "last_window_dropped",
        "llmq/data/windows.py",
        "max(file.num_tokens - 1, 0) // seq_len",
        "max(file.num_tokens - 2, 0) // seq_len",
        ("tests/data/test_windows.py",),
    ),
    Fault(
        "evaluation_out_of_order",
        "llmq/data/loader.py",
        "windows.read(samples)",
        "windows.read(samples[::-1])",
        ("tests/data/test_loader.py",),
    ),
    Fault(
        "epochs_all_alike",
        "llmq/data/permutation.py",
        "^ epochs.astype(np.uint64)",
        "^ (0 * epochs).astype(np.uint64)",
        ("tests/data/test_permutation.py",),
    ),
    Fault(
        "data_position_one_batch_behind",
        "llmq/data/loader.py",
        "yield Batch(*rows, position, places, epoch",
        "yield Batch(*rows, position - batch_size * world, places, epoch",
        ("tests/data/test_loader.py",),
    ),
    Fault(
        "a_source_starts_again_with_each_period",
        "llmq/data/mixture.py",
        "draws = periods[mine] * self.parts[n] + counts[mine]",
        "draws = 0 * periods[mine] * self.parts[n] + counts[mine]",
        ("tests/data/test_mixture.py",),
    ),
    Fault(
        "shuffled_inputs_show_their_targets",
        "llmq/data/augment.py",
        "targets[row, source[row, to] - 1] = IGNORED",
        "targets[row, source[row, to]] = IGNORED",
        ("tests/data/test_augment.py",),
    ),
    Fault(
        "a_stream_goes_on_at_the_start_of_its_document",
        "llmq/data/stream.py",
        'at["epoch"], at["token"]',
        'at["epoch"], 0',
        ("tests/data/test_stream.py",),
    ),
    Fault(
        "damaged_blocks_are_read",
        "llmq/data/token_file.py",
        "!= self._table[block]:",
        "< 0 * self._table[block]:",
        ("tests/data/test_token_file.py",),
    ),
)

FILES = (
    Fault(
        "numbers_that_json_lacks_are_logged",
        "llmq/log.py",
        "        if math.isfinite(value):\n            return value\n",
        "        if value < math.inf:\n            return value\n",
        ("tests/test_log.py",),
    ),
    Fault(
        "one_checkpoint_too_few_kept",
        "llmq/checkpoint.py",
        "others[: len(others) - keep + 1 if",
        "others[: len(others) - keep + 2 if",
        ("tests/test_checkpoint.py",),
    ),
    Fault(
        "newest_by_step_not_by_save",
        "llmq/checkpoint.py",
        "newest = max(there, key=lambda step: numbers[step] or 0)",
        "newest = max(there)",
        ("tests/test_checkpoint.py",),
    ),
    Fault(
        "corrupt_shard_accepted",
        "llmq/shards.py",
        "if zlib.crc32(block, crc) != shard.crc32:",
        "if zlib.crc32(block, crc) == -1:",
        ("tests/test_shards.py",),
    ),
    Fault(
        "model_overwritten",
        "llmq/hf.py",
        "if there and not overwrite:",
        "if there and not there:",
        ("tests/test_hf.py",),
    ),
    Fault(
        "contradicting_head_accepted",
        "llmq/hf.py",
        "if tied and not unfit and not _equal(named, HEAD, EMBEDDING):",
        "if tied and unfit and not _equal(named, HEAD, EMBEDDING):",
        ("tests/test_hf.py",),
    ),
)
