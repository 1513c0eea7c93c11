"""Training on the GPU follows transformers with f32 weights under bf16 autocast, step by step on the same batches."""

import os

import numpy as np
import pytest

from llmq.config import to_hf
from llmq.data.token_file import TokenFile
from llmq.optimizer import Hyperparameters
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.precision import Precision
from llmq.presets import preset
from llmq.report.bench import zipf_batch
from llmq.source import ModelSource, drawn

pytestmark = [pytest.mark.gpu, pytest.mark.judge]
B, T, STEPS, RATE = 8, 1024, 50, 3e-4


def batches(vocab_size):
    """STEPS batches of windows of a token file (LLMQ_TEST_TOKENS: tiny-shakespeare by Qwen's tokenizer), else words."""
    path = os.environ.get("LLMQ_TEST_TOKENS")
    if not path:
        return [zipf_batch(vocab_size, B, T, seed) for seed in range(STEPS)]
    tokens = np.asarray(TokenFile.open(path).tokens[:])
    starts = np.random.default_rng(0).permutation((tokens.size - 1) // T)
    rows = np.resize(starts, STEPS * B).reshape(STEPS, B) * T
    return [
        (np.stack([tokens[r : r + T] for r in step]), np.stack([tokens[r + 1 : r + T + 1] for r in step]))
        for step in rows
    ]


def test_fifty_steps_follow_transformers(capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from llmq.backends.cuda import CudaBackend
    from llmq.engine import Engine

    config = preset("Qwen2.5-0.5B")
    backend = CudaBackend()
    precision = Precision("bf16", "bf16", master="fp32", grad="fp32")
    hyper = Hyperparameters(weight_decay=0.1, grad_clip=1.0)
    plan = make_plan(config, precision, Memory(), hyper, batch_size=B, seq_len=T, scratch_bytes=backend.scratch_bytes)
    source = ModelSource("Qwen2.5-0.5B", config, None, None, True, False)
    values = {row.name: drawn(source, row, 0) for row in plan.rows}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**to_hf(config, "fp32")), attn_implementation="sdpa", dtype=torch.float32
    ).cuda()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for row in plan.rows:
            for part in row.parts:
                named[part.name].copy_(torch.from_numpy(values[row.name][part.start : part.stop]))
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    engine = Engine(plan, backend)
    engine.load((row, values[row.name]) for row in plan.rows)
    ours, theirs = [], []
    for step, (tokens, targets) in enumerate(batches(config.vocab_size), 1):
        engine.micro_step(tokens, targets, first=True)
        ours.append(engine.update(step, RATE).loss)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(torch.from_numpy(tokens).long().cuda()).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().view(-1, config.vocab_size), torch.from_numpy(targets).long().cuda().view(-1)
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    difference = np.abs(np.array(ours) - np.array(theirs))
    text = f"loss {ours[0]:.4f} to {ours[-1]:.4f}, transformers {theirs[-1]:.4f}, {difference.max():.4f} apart at most"
    with capsys.disabled():
        print(f"\n{text}")
    assert difference.max() <= 0.02
