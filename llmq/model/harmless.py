"""Keys of config.json that say nothing of the function that a model computes.

A key that is neither here nor read by the family is refused: it may be one that changes the function.
"""

_ABOUT = """
architectures auto_map bos_token_id decoder_start_token_id dtype eos_token_id id2label is_decoder is_encoder_decoder
label2id license model_max_length model_type name_or_path pad_token_id problem_type sep_token_id task_specific_params
tokenizer_class torch_dtype transformers_version unk_token_id unsloth_fixed unsloth_version
transformers.js_config description finetuning_task prefix
"""
_RUNNING = """
attn_implementation cache_implementation chunk_size_feed_forward flash_attn gradient_checkpointing initializer_factor
initializer_range max_window_layers output_attentions output_hidden_states output_past pretraining_tp pruned_heads
return_dict sliding_window_size tie_encoder_decoder tie_weights torchscript tf_legacy_loss use_bfloat16 use_cache
use_flash_attention use_flash_attention_2 use_flash_attn use_sliding_window keys_to_ignore_at_inference
fused_ops fused_cross_entropy fused_norm fused_swiglu fused_mlp
cross_attention_hidden_size full_attn_mod interpolate_factor
"""
_GENERATING = """
assistant_confidence_threshold bad_words_ids begin_suppress_tokens compile_config constraints disable_compile
diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff
eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale
is_assistant length_penalty low_memory max_length max_new_tokens max_time min_length min_new_tokens min_p
no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
num_return_sequences output_logits output_scores penalty_alpha prefill_chunk_size prompt_lookup_num_tokens
remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate sequence_bias stop_strings
suppress_tokens temperature token_healing top_k top_p typical_p watermarking_config
"""
HARMLESS = frozenset(f"{_ABOUT} {_RUNNING} {_GENERATING}".split())
