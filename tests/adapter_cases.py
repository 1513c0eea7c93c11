"""Options of a small run for every method of adapters and every dtype of its base, and the run of the two."""

import json

from safetensors.numpy import load_file

import llmq
from llmq.adapters.merge import merge
from llmq.files.source import find_source

METHODS = {
    "lora": {"lora_rank": 4, "lora_bias": "all"},
    "head": {"lora_rank": 4, "lora_targets": "q_proj,lm_head", "rslora": True},
    "dora": {"lora_rank": 4, "dora": True},
    "pissa": {"lora_rank": 4, "lora_init": "pissa"},
    "olora": {"lora_rank": 4, "lora_init": "olora", "rslora": True},
    "adalora": {"lora_rank": 4, "adalora": True, "adalora_interval": 1},
    "full": {"lora_rank": 4, "lora_targets": "q_proj,v_proj", "train_also": "o_proj,norm"},
    "ia3": {"ia3": "k_proj,v_proj,down_proj"},
    "prompt": {"prompt_tuning": 3},
    "prefix": {"prefix_tuning": 3},
}
VIRTUAL = ("prompt", "prefix")
BASES = (None, "bf16", "e4m3", "int8", "nf4", "mxfp4")


def trained(given, method, base):
    """What a run of a method on a base leaves, with the merged model if there is one; `given` are its other options."""
    merges = {} if method in VIRTUAL else {"merge": True}
    return llmq.train(**given, **METHODS[method], **merges, **({} if base is None else {"base_dtype": base}))


def export_of(adapters, engine, folder, base, model=None):
    """The export of what an engine has trained, in PEFT's format."""
    plan = engine.plan
    found = adapters.file(plan.rows, plan.spec.config, model)
    return found.export(str(base), None)(folder, plan.spec.config, found.rows, "fp32")


def merged(adapter, out, **about):
    """The folder that llmq-merge writes of the model in `base` and an adapter."""
    return merge(find_source("base"), {adapter: 1.0}, out, dtype=None, overwrite=False, **about)


def adapter_of(folder):
    """The tensors of an adapter, by name."""
    return load_file(folder / "adapter_model.safetensors")


def config_of(folder):
    """What PEFT reads of an adapter beside these."""
    return json.loads((folder / "adapter_config.json").read_text())
