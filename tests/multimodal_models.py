"""Tiny multimodal models, as config.json: what transformers makes of them is the judge."""

from typing import Any

from more_families import MORE

_TEXT = {key: value for key, value in MORE["olmo2"].items() if key not in ("architectures", "model_type", "dtype")}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOWER |= {"image_size": 8, "patch_size": 4}

MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            key: value for key, value in MORE["gemma3"].items() if key not in ("architectures", "dtype", "bos_token_id")
        },
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": 96,
        "boi_token_index": 94,
        "eoi_token_index": 95,
        "dtype": "bfloat16",
    },
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 12, "sliding_window": None, "rope_theta": 1e5},
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 96,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **_TEXT,
        "rope_theta": 1e5,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
        | {"fullatt_block_indexes": [0], "patch_size": 4},
        "image_token_id": 96,
        "video_token_id": 95,
        "vision_start_token_id": 93,
        "vision_end_token_id": 94,
        "dtype": "bfloat16",
    },
}
