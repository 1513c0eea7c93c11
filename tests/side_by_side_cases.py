"""What tests/side_by_side.py trains: tiny models, and every option that moves, repeats or rounds work.

Options are spelled out whole, so that two trees with other defaults train alike. They are written in the words of the
present tree; where an older one says it in another way, a case's `old` does.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from golden import families
from safetensors.numpy import save_file

from llmq.options.parse import Options, descriptions

VOCAB, SEQ_LEN, STEPS = 300, 32, 4
# Several tiles of 128 rows, with a short last one, in gate and up; padding in the vocabulary.
WIDTHS = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 176}
MODELS = {"llama": "llama3", "qwen2": "qwen2.5_tied", "qwen3": "qwen3_tied", "window": "mistral"}
UNTIED, TIED, NORMED, WINDOW = MODELS

OURS: dict[str, Any] = {  # of every run; what else there is has the defaults of the present tree
    "train_file": "../../train.bin",
    "eval_file": "../../eval.bin",
    "batch_size": 2,
    "grad_accumulation": 2,
    "seq_len": SEQ_LEN,
    "lmhead_chunks": 1,
    "attn_bwd_chunks": 1,
    "seq_tiles": 1,
    "steps": STEPS,
    "learning_rate": 1e-2,
    "lr_schedule": "cosine",
    "warmup": 1,
    "final_lr_fraction": 0.1,
    "name": "run",
    "eval_every_n_steps": 3,
    "eval_num_steps": 2,
    "final_eval": "all",
    "checkpoint_dir": "checkpoints",
    "ckpt_interval": 0,
    "ckpt_keep_n": 0,
    "out_dir": "model",
    "export_dtype": "fp32",
    "overwrite": True,
    "seed": 5,
}


def _plain(dtype: str) -> dict[str, Any]:
    """Everything in `dtype` but the moments."""
    fp8_only = dict.fromkeys(("gradient_dtype", "fp8_scaling", "head_dtype", "log_fp8_every"))
    same = dict.fromkeys(("model_dtype", "matmul_dtype", "master_dtype", "grad_accum_dtype"), dtype)
    return {**same, **fp8_only, "opt_m_dtype": "fp32", "opt_v_dtype": "fp32"}


def _fp8(scaling: str) -> dict[str, Any]:
    """The blocks' matmuls in e4m3, everything else in bf16."""
    fp8 = {"matmul_dtype": "e4m3", "gradient_dtype": "e4m3", "fp8_scaling": scaling, "head_dtype": "bf16"}
    return {**_plain("bf16"), **fp8, "log_fp8_every": 0}


SCALINGS = ("delayed", "current", "rowwise", "blockwise")
FP32, BF16, (DELAYED, CURRENT, ROWWISE, BLOCKWISE) = _plain("fp32"), _plain("bf16"), (_fp8(s) for s in SCALINGS)
PRECISIONS = {"fp32": FP32, "bf16": BF16, **{f"fp8 {scaling}": _fp8(scaling) for scaling in SCALINGS}}
RECOMPUTE = ("swiglu", "norm", "ffn", "qkv", "att", "block")
BF16_MOMENTS = {"opt_m_dtype": "bf16", "opt_v_dtype": "bf16"}


@cache
def spelled() -> dict[str, Any]:
    """Every option of a run but those for --data."""
    flat = Options.parse({"model": "m", **OURS}).to_flat()
    return {key: OURS.get(key, value) for key, value in flat.items() if descriptions()[key].section != "source"}


@dataclass(frozen=True)
class Case:
    """A run with `options`, and with `then` a second one in the same folder that continues it.

    `old` replaces options in the older tree.
    """

    name: str
    options: Mapping[str, Any]
    then: Mapping[str, Any] | None = None
    old: Mapping[str, Any] = field(default_factory=dict)

    def runs(self, older: bool, always: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The options of each of its runs, which log to files of their own; `always` come before all others."""
        changes = [{}] if self.then is None else [{}, self.then]
        own = {**self.options, **(self.old if older else {})}
        return [{**spelled(), **own, **more, **always, "log_file": f"log-{n}.jsonl"} for n, more in enumerate(changes)]


def _case(name: str, precision: Mapping[str, Any], model: str = UNTIED, **options: Any) -> Case:
    return Case(name, {"model": f"../../{model}", **precision, **options})


def cases() -> Iterator[Case]:
    """All of them."""
    for model in MODELS:
        for name, precision in PRECISIONS.items():
            yield _case(f"{name}, {model}", precision, model)
    yield from _of_precision()
    yield from _of_memory()
    yield from _of_data()
    yield from _of_training()
    yield from _of_adapters()
    yield from _resumed()


def _of_precision() -> Iterator[Case]:
    for name, precision in (("delayed", DELAYED), ("current", CURRENT), ("rowwise", ROWWISE)):
        yield _case(f"fp8 {name}, e4m3 head", precision, TIED, head_dtype="e4m3")
        yield _case(f"fp8 {name}, e5m2 gradients", precision, NORMED, gradient_dtype="e5m2")
    yield _case("fp8 delayed, e4m3 head in chunks", DELAYED, head_dtype="e4m3", lmhead_chunks=2)
    yield _case("fp8 blockwise, e5m2 gradients", BLOCKWISE, NORMED, gradient_dtype="e5m2")
    yield _case("fp8 delayed, first layer in bf16", DELAYED, bf16_layers="1,0")
    yield _case("fp8 current, mlp.down alone", CURRENT, fp8_layers="mlp.down")
    for name, precision in (("bf16", BF16), ("fp8 delayed", DELAYED), ("fp8 blockwise", BLOCKWISE)):
        yield _case(f"{name}, bf16 moments", precision, TIED, **BF16_MOMENTS)
        yield _case(f"{name}, fp32 master", precision, master_dtype="fp32")
    wide = {"master_dtype": "fp32", "grad_accum_dtype": "fp32"}
    yield _case("bf16, fp32 master and gradients, bf16 m", BF16, **wide, opt_m_dtype="bf16")
    yield _case("bf16, no masters", BF16, master_dtype="none", opt_m_dtype="int8", opt_v_dtype="e4m3")
    yield _case("bf16, moments in 8 bits", BF16, TIED, opt_m_dtype="int8", opt_v_dtype="e4m3")
    for scaling in SCALINGS:
        yield _case(f"fp8 {scaling}, copies observed", _fp8(scaling), NORMED, log_fp8_every=2)
    yield _case("fp8 delayed, fallback", DELAYED, log_fp8_every=1, fp8_fallback=True)


def _of_memory() -> Iterator[Case]:
    for flag in RECOMPUTE:
        for name, precision in (("bf16", BF16), ("fp8 delayed", DELAYED)):
            yield _case(f"{name}, recompute {flag}", precision, TIED, **{f"recompute_{flag}": True})
    for flags in (("swiglu", "norm"), ("ffn", "att"), ("norm", "ffn", "qkv")):
        for name, precision in (("fp32", FP32), ("fp8 rowwise", ROWWISE), ("fp8 blockwise", BLOCKWISE)):
            named = {f"recompute_{flag}": True for flag in flags}
            yield _case(f"{name}, recompute {' and '.join(flags)}", precision, NORMED, **named)
    for flags in (("residual",), ("master", "opt_m"), ("residual", "optimizer", "gradients")):
        for name, precision in (("bf16", BF16), ("fp8 delayed", DELAYED), ("fp8 blockwise", BLOCKWISE)):
            named = {"master_dtype": "fp32", **{f"offload_{flag}": True for flag in flags}}
            yield _case(f"{name}, offload {' and '.join(flags)}", precision, NORMED, recompute_block=True, **named)
    fused = {"fused_update": True, "clip_by": "last", "grad_accumulation": 1}
    for name, precision in (("bf16", BF16), ("fp8 current", CURRENT)):
        yield _case(f"{name}, updated in backward", precision, TIED, **fused, **BF16_MOMENTS)
    yield _case("bf16, weights streamed", BF16, stream_weights=True)
    yield _case("fp8 delayed, quants offloaded", DELAYED, TIED, offload_quants=True)
    in_place = {"use_zero_copy": True, "write_combined": True, "offload_optimizer": True, "offload_gradients": True}
    for name, precision in (("bf16", BF16), ("fp8 delayed", DELAYED)):
        yield _case(f"{name}, updated in host memory", precision, NORMED, master_dtype="fp32", **in_place)
    for name, precision in (("delayed", DELAYED), ("current", CURRENT), ("blockwise", BLOCKWISE)):
        yield _case(f"fp8 {name}, quants made for each use", precision, TIED, persistent_quants=False)
    for chunks in (2, 4):
        yield _case(f"bf16, logits in {chunks} chunks", BF16, TIED, lmhead_chunks=chunks)
        yield _case(f"fp32, logits in {chunks} chunks", FP32, lmhead_chunks=chunks)
    yield _case("bf16, the MLP in 4 tiles", BF16, TIED, seq_tiles=4, recompute_block=True)
    yield _case("bf16, attention backward in 2 chunks", BF16, attn_bwd_chunks=2)
    yield _case("fp8 current, attention backward in 2 chunks", CURRENT, attn_bwd_chunks=2, recompute_att=True)


def _of_data() -> Iterator[Case]:
    for name, precision in PRECISIONS.items():
        yield _case(f"{name}, packed", precision, TIED, packing=True)
    yield _case("bf16, packed, at most 3 documents", BF16, packing=True, max_docs=3)
    yield _case("fp8 delayed, packed, recompute att", DELAYED, packing=True, recompute_att=True)
    yield _case("bf16, padded", BF16, packing=False)
    yield _case("fp8 rowwise, padded", ROWWISE, NORMED, packing=False)


def _of_training() -> Iterator[Case]:
    for count in (1, 2, 3):
        for name, precision in (("fp32", FP32), ("bf16", BF16), ("fp8 delayed", DELAYED)):
            yield _case(f"{name}, {count} micro-steps", precision, TIED, grad_accumulation=count)
    yield _case("bf16, gradients add up in fp32", BF16, grad_accumulation=3, grad_accum_dtype="fp32")
    for name, precision in (("fp32", FP32), ("bf16", BF16), ("fp8 current", CURRENT)):
        yield _case(f"{name}, NEFTune", precision, TIED, neftune_alpha=5.0)
        yield _case(f"{name}, z-loss", precision, z_loss=1e-2)
        yield _case(f"{name}, from scratch", precision, NORMED, from_scratch=True)
    yield _case("bf16, from scratch, a larger vocabulary", BF16, from_scratch=True, vocab_size=VOCAB + 7)
    yield _case("bf16, from scratch, projections zero", BF16, from_scratch=True, init_proj_to_zero=True)
    yield _case("fp32, no clip", FP32, grad_clip=0.0)
    yield _case("fp32, linear schedule", FP32, lr_schedule="linear")
    yield _case("fp32, wsd schedule", FP32, lr_schedule="wsd", cooldown=2)
    yield _case("bf16, every batch is evaluated", BF16, eval_every_n_steps=1, eval_num_steps=0)


def _of_adapters() -> Iterator[Case]:
    for name, precision in (("fp32", FP32), ("fp8 delayed", DELAYED)):
        held = {"batch_size": 3, "master_dtype": "fp32", "grad_accum_dtype": "fp32"}
        adapter = {"lora_rank": 8, "lora_targets": "all,lm_head", "lora_dropout": 0.1}
        yield _case(f"{name}, an adapter", precision, TIED, **adapter, **held)


def _resumed() -> Iterator[Case]:
    more = {
        "fp32": FP32,
        "bf16, bf16 moments": {**BF16, **BF16_MOMENTS},
        "bf16, fp32 master, packed": {**BF16, "master_dtype": "fp32", "packing": True},
        "bf16, NEFTune and z-loss": {**BF16, "neftune_alpha": 5.0, "z_loss": 1e-2},
        **{f"fp8 {scaling}": _fp8(scaling) for scaling in SCALINGS},
        "fp8 delayed, e4m3 head": {**DELAYED, "head_dtype": "e4m3"},
    }
    for name, options in more.items():
        first = _case(f"{name}, resumed", options, TIED, steps=3)
        yield Case(first.name, first.options, then={"steps": 6, "continue": 3})


def write_inputs(folder: Path) -> None:
    """Models, and token files of documents with masks, into `folder`: both trees read the same ones."""
    from llmq.data.tokens.token_file import TokenWriter  # not at the top: the older tree has another place for it

    for name, family in MODELS.items():
        config = {**families.FAMILIES[family], **WIDTHS}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(families.weights(config), folder / name / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, documents in (("train", 150), ("eval", 30)):
        with TokenWriter(folder / f"{name}.bin", vocab_size=VOCAB, has_masks=True) as file:
            for size in rng.integers(2, SEQ_LEN + 1, documents):
                tokens = (rng.zipf(1.5, size) % VOCAB).astype(np.int32)
                file.append(tokens, rng.random(size) < 0.8, stops=[size])
