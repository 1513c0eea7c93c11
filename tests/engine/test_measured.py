"""The modelled time of a step beside every speed of the docs that was measured on H200s: within 10%.

`python tests/engine/test_measured.py` writes the table of docs/memory.md.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from llmq.backends.opening import open_backend
from llmq.engine.predict import step_seconds, sustained
from llmq.files.source import find_source
from llmq.hardware import device
from llmq.options.parse import Options
from llmq.plan import precision
from llmq.plan.plan import make_plan
from llmq.training.ready import Facts

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "memory.md"
TITLE = "| one H200 unless said | predicted tokens/s | measured | ratio | page |"
TABLE = re.compile(r"(<!-- predictions: [^\n]* -->\n).*?(?=<!-- end of predictions -->)", re.DOTALL)
WITHIN = 0.1

WHOLE = 524_288  # tokens of a step
NARROW = {"model_dtype": "bf16", "opt_m_dtype": "bf16", "opt_v_dtype": "bf16"}
E4M3 = {**NARROW, "matmul_dtype": "e4m3"}
HEAD = {**E4M3, "head_dtype": "e4m3"}
LORA = {"model_dtype": "bf16", "lora_rank": 16}
LORA_E4M3 = {**LORA, "matmul_dtype": "e4m3"}
FROZEN = {"lora_targets": "layers.0.self_attn.q_proj"}
IN_16_GIB = {
    **dict.fromkeys(("offload_quants", "offload_gradients", "offload_optimizer", "recompute_block"), True),
    "attn_bwd_chunks": 4,
    "seq_tiles": 4,
}
LONG = {"recompute_block": True, "offload_residual": True, "deterministic": False, "seq_tiles": 16, "lmhead_chunks": 64}
NF4 = {**LORA_E4M3, "base_dtype": "nf4"}
IN_24_GIB = {
    **dict.fromkeys(("stream_weights", "offload_gradients", "offload_optimizer", "recompute_block"), True),
    "opt_m_dtype": "int8",
    "opt_v_dtype": "e4m3",
}
BLOCK = {**NARROW, "recompute_block": True}
QLORA = {**LORA, "lora_rank": 32, "base_dtype": "nf4", **LONG}
MOMENTS, ZERO_COPY = {"offload_opt_m": True, "offload_opt_v": True}, {"use_zero_copy": True}


@dataclass(frozen=True)
class Measured:
    """A speed in tokens/s of a page, in steps of this many `tokens`, and the options of llmq-train. The name has model,
    sizes and number of GPUs."""

    name: str
    speed: int
    tokens: int
    options: dict = field(default_factory=dict)
    page: str = "results.md"

    @property
    def model(self):
        return "llama3_8b" if self.name.startswith("Llama") else self.name.partition(" ")[0]

    @property
    def sizes(self):
        """Rows and tokens of a micro-batch, and GPUs."""
        return (*map(int, re.search(r"(\d+)x(\d+)", self.name).groups()), 2 if "2 GPUs" in self.name else 1)


def tiles(number):
    """A long sequence in tiles, with chunks of half as many tokens."""
    return {"seq_tiles": number, "lmhead_chunks": 2 * number}


ROWS = [
    Measured("Qwen2.5-0.5B bf16, 32x1024", 169_381, WHOLE, NARROW),
    Measured("Qwen2.5-0.5B e4m3, 32x1024", 220_073, WHOLE, E4M3),
    Measured("Qwen2.5-0.5B e4m3, head too, 32x1024", 246_682, WHOLE, HEAD),
    Measured("Qwen2.5-0.5B bf16, 1x1024, one a step", 81_447, 1024, NARROW),
    *(
        Measured(
            f"Qwen2.5-0.5B e4m3 {scaling}, 32x1024", speed, WHOLE, {**E4M3, "fp8_scaling": scaling}, page="precision.md"
        )
        for scaling, speed in {"current": 191_475, "rowwise": 185_504, "blockwise": 175_003}.items()
    ),
    Measured("Qwen2.5-1.5B bf16, 32x1024", 61_955, WHOLE, NARROW),
    Measured("Qwen2.5-1.5B e4m3, 32x1024", 91_241, WHOLE, E4M3),
    Measured("Qwen2.5-1.5B e4m3, head too, 32x1024", 99_585, WHOLE, HEAD),
    Measured("Qwen2.5-7B bf16, 16x1024", 14_732, WHOLE, NARROW),
    Measured("Qwen2.5-7B e4m3, 16x1024", 24_155, WHOLE // 2, E4M3),
    Measured("Qwen2.5-7B e4m3, 16x1024, 131,072 a step", 24_491, 131_072, E4M3),
    Measured("Qwen2.5-7B e4m3, 16x1024, 32,768 a step", 23_733, 32_768, E4M3),
    Measured("Qwen2.5-7B e4m3, head too, 16x1024", 25_373, WHOLE // 2, HEAD),
    Measured("Llama-3-8B e4m3, 2x8192", 16_759, 131_072, {**E4M3, "recompute_swiglu": True, "attn_bwd_chunks": 2}),
    Measured("Qwen2.5-7B bf16, frozen, 16x1024", 21_766, 65_536, {**LORA, **FROZEN}),
    Measured("Qwen2.5-7B e4m3, frozen, 16x1024", 36_149, 65_536, {**LORA_E4M3, **FROZEN}),
    Measured("Qwen2.5-7B bf16, LoRA 16, 16x1024", 20_470, 65_536, LORA),
    Measured("Qwen2.5-7B bf16, LoRA 64, 16x1024", 19_930, 65_536, {**LORA, "lora_rank": 64}),
    Measured("Qwen2.5-7B e4m3, LoRA 16, 16x1024", 32_026, 65_536, LORA_E4M3),
    Measured("Qwen2.5-7B e4m3, LoRA 64, 16x1024", 30_527, 65_536, {**LORA_E4M3, "lora_rank": 64}),
    Measured("Qwen2.5-7B bf16, DoRA 16, 16x1024 *", 18_092, 65_536, {**LORA, "dora": True}),
    Measured("Qwen2.5-7B e4m3, LoRA 16 on nf4, 16x1024", 30_512, 65_536, NF4),
    Measured(
        "Qwen2.5-7B e4m3, LoRA 16 on nf4, 8x1024, `--recompute-block` *",
        21_095,
        65_536,
        {**NF4, "recompute_block": True, "lmhead_chunks": 8},
    ),
    Measured("Qwen2.5-7B bf16, LoRA 16, 2x4096", 17_898, 65_536, LORA),
    Measured("Qwen2.5-7B e4m3, LoRA 16, 2x4096", 26_356, 65_536, LORA_E4M3),
    Measured("Qwen2.5-32B e4m3, LoRA 16 on nf4, 4x1024", 6_996, 16_384, NF4),
    Measured("Qwen2.5-7B e4m3, 32x1024, in 16 GiB", 18_248, WHOLE, {**E4M3, **IN_16_GIB}),
    Measured("Llama-3-8B bf16, 1x131072", 2_550, 131_072, {**NARROW, **LONG}),
    *(
        Measured(f"{name}, {tokens:,} a step, 2 GPUs, level {level}", speed, tokens, {**options, "zero_level": level})
        for name, tokens, options, speeds in (
            ("Qwen2.5-0.5B bf16, 32x1024", WHOLE, NARROW, {1: 335_157, 3: 319_756}),
            ("Qwen2.5-0.5B e4m3, 32x1024", WHOLE, E4M3, {1: 434_295, 3: 414_995}),
            ("Qwen2.5-1.5B bf16, 32x1024", WHOLE, NARROW, {1: 122_997, 3: 120_053}),
            ("Qwen2.5-1.5B e4m3, 32x1024", WHOLE, E4M3, {1: 179_583, 3: 175_099}),
            ("Qwen2.5-7B e4m3, 16x1024", 131_072, E4M3, {1: 46_568}),
            ("Qwen2.5-7B e4m3, 16x1024", 32_768, E4M3, {1: 44_091}),
        )
        for level, speed in speeds.items()
    ),
    Measured("Qwen2.5-14B bf16, 16x1024, in 24 GiB", 5_169, 131_072, {**NARROW, **IN_24_GIB}),
    Measured("Llama-3.1-8B bf16, QLoRA 32, 1x147456", 2_447, 147_456, {**QLORA, **tiles(18)}),
    Measured("Llama-3.1-8B bf16, QLoRA 32, 1x344064", 1_184, 344_064, {**QLORA, **tiles(42)}),
    Measured("Qwen2.5-7B e4m3, 16x1024, moments on the host", 23_551, WHOLE, {**E4M3, **MOMENTS}),
    Measured(
        "Qwen2.5-7B e4m3, 16x1024, moments on the host, `--use-zero-copy`",
        23_641,
        WHOLE,
        {**E4M3, **MOMENTS, **ZERO_COPY},
    ),
    Measured("Qwen2.5-7B bf16, 16x1024, `--recompute-block`", 11_908, 65_536, BLOCK),
    Measured("Qwen2.5-0.5B bf16, 32x1024, `--recompute-block`", 139_593, 131_072, BLOCK),
]
USUAL = (6, 26)  # in every run of the tests; all with --sweeps
SLOW = (0, 3, 11, 15, 24, 25, 28)  # the last of all layers on the host


def predicted(row):
    """Tokens/s by the model."""
    batch_size, seq_len, gpus = row.sizes
    micro_steps, rest = divmod(row.tokens, batch_size * seq_len * gpus)
    assert not rest
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "grad_accumulation": micro_steps}
    about = {"model": row.model, "from_scratch": True, "dry_run": True, "train_file": "none", "gpu": "H200"}
    options = Options.parse({**about, **sizes, **row.options})
    where = device.pick_device(options.system)
    facts = Facts(find_source(row.model, from_scratch=True).config, where, size=gpus)
    spec = facts.spec(options, precision.resolve(options.precision, facts.config))
    scratch = open_backend("planned", **device.backend_settings(options.system, where)).scratch_bytes
    plan = make_plan(replace(spec, observe=False), scratch)
    return row.tokens / step_seconds(plan, sustained(where.card), micro_steps)


def line(row, rate):
    """A row of the table."""
    page = row.page.removesuffix(".md").capitalize()
    return f"| {row.name} | {rate:,.0f} | {row.speed:,} | {rate / row.speed:.2f} | [{page}]({row.page}) |"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if n in USUAL else pytest.mark.slow if n in SLOW else pytest.mark.sweep)
        for n, row in enumerate(ROWS)
    ],
)
def test_an_h200_is_predicted_as_it_was_measured(row):
    rate = predicted(row)
    assert f"{row.speed:,}" in (DOCS / row.page).read_text("utf-8"), "a number of the page"
    assert rate == pytest.approx(row.speed, rel=WITHIN)
    said = re.search(
        rf"^\| {re.escape(row.name)} \| ([\d,]+) \| {row.speed:,} \|", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert rate == pytest.approx(int(said[1].replace(",", "")), rel=0.01), "write the table again, as said above"


def test_the_table_has_every_row_and_no_other():
    found = TABLE.search(PAGE.read_text("utf-8"))
    names = [text.split(" | ")[0].removeprefix("| ") for text in found[0].splitlines()[3:] if text]
    assert names == [row.name for row in ROWS]


if __name__ == "__main__":
    made = "\n".join([TITLE, "|---|---|---|---|---|", *(line(row, predicted(row)) for row in ROWS)])
    text = TABLE.sub(lambda found: f"{found[1]}{made}\n", PAGE.read_text("utf-8"))
    PAGE.write_text(text, "utf-8")
