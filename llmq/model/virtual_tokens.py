"""Virtual tokens: trained vectors at N positions before every document, by which a frozen model is told what to do.

Prompt tuning (Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning", 2021) trains their embeddings.
Prefix tuning (Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation", 2021; without its
reparametrization P-tuning v2, Liu et al., 2022) trains their keys and values in every layer: as in PEFT those that
attention reads, after norms and the rotary embedding. Real tokens are at positions from N on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmq.model.adapters import FILE, Adapters
from llmq.model.config import ModelConfig
from llmq.row import Part, Row

PROMPT, PREFIX = "prompt", "prefix"  # methods of adapters
PROMPT_ROW = "embed.prompt"
VIRTUAL = -1  # stands for a virtual token among those of a prompt


def prefix_width(config: ModelConfig) -> int:
    """Channels of a virtual token's keys and values in a layer."""
    return 2 * config.num_kv_heads * config.head_dim


def with_virtual(rows: Sequence[Row], adapters: Adapters | None, config: ModelConfig) -> tuple[Row, ...]:
    """The rows of a model and of virtual tokens: embeddings (N,C), or keys and values (N,2*Hkv*Hd) of each layer."""
    return tuple(_with_virtual(rows, adapters, config))


def _with_virtual(rows: Sequence[Row], adapters: Adapters | None, config: ModelConfig) -> Iterator[Row]:
    method, count = ("", 0) if adapters is None else (adapters.method, adapters.num_virtual)
    if method == PROMPT:
        part = Part("prompt_embeddings", 0, count)
        yield Row(PROMPT_ROW, (count, config.hidden_size), (part,), "unit", decay=True, file=FILE)
    done = set[int | None]([None])
    for row in rows:
        if method == PREFIX and row.layer not in done:
            done.add(row.layer)
            name, shape = f"layers.{row.layer}.attention.prefix", (count, prefix_width(config))
            part = Part(f"model.{name}", 0, count)
            yield Row(name, shape, (part,), "unit", decay=True, layer=row.layer, file=FILE)
        yield row
