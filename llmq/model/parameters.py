"""The parameter table: one row per parameter as the engine holds it, with the Hugging Face tensors it is made of.

The engine fuses what is computed together (q, k and v; gate and up) and pads the vocabulary; `parts` says which
slices along axis 0 are which Hugging Face tensors, so loading and export need no knowledge of models.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from llmq.model.config import ModelConfig
from llmq.row import Part, Row

HEAD = "head"  # the linear map to the logits
EMBED_ROW = "embed.weight"  # which a tied head is
HEAD_ROW = f"{HEAD}.weight"
VOCAB_MULTIPLE = 128  # the vocabulary is padded to this, so that every matmul is aligned; padded rows stay zero


def padded_vocab(config: ModelConfig) -> int:
    """Vocabulary size as held: the next multiple of VOCAB_MULTIPLE."""
    return -(-config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def num_parameters(rows: Iterable[Row]) -> int:
    """Parameters of a model as published: without the padding of the vocabulary."""
    return sum((row.parts[-1].stop - row.parts[0].start) * math.prod(row.part_axes[1:]) for row in rows)


def parameter_rows(config: ModelConfig) -> tuple[Row, ...]:
    """Every parameter of a model, in the order of the forward pass."""
    c, v, vp, names = config.hidden_size, config.vocab_size, padded_vocab(config), config.family.wiring.names
    embed = Row(EMBED_ROW, (vp, c), (Part(f"{names.embed}.weight", 0, v),), "normal", decay=True)
    positions = config.family.position_rows(config)
    layers = (row for layer in range(config.num_layers) for row in config.family.rows(config, layer))
    norms = config.family.head_rows(config)
    lm_head = (Part(f"{names.head}.weight", 0, v),)
    head = Row(HEAD_ROW, (vp, c), lm_head, "normal", decay=True, site=HEAD)
    return (embed, *positions, *layers, *norms, *(() if config.tie_embeddings else (head,)))


def fitted_rows(config: ModelConfig, sites: Mapping[str, Any]) -> tuple[Row, ...]:
    """The rows of a model whose linear maps are computed by `sites`, which may bring rows of their own, or freeze the
    model's. A tied head has none in the model."""
    groups = [(site, list(rows)) for site, rows in groupby(parameter_rows(config), key=lambda row: row.site)]
    groups += [] if any(site == HEAD for site, _ in groups) else [(HEAD, [])]
    return tuple(row for site, rows in groups for row in (sites[site].rows(rows) if site else rows))


def rows_of_file(rows: Iterable[Row], file: str = "model") -> tuple[Row, ...]:
    """The rows that are loaded from and stored in a file: the model's, or those of an adapter."""
    return tuple(row for row in rows if row.file == file)


def linear_maps(config: ModelConfig) -> dict[str, int]:
    """Every linear map of a model by its name, `layers.3.mlp.up`, with its number of weights, in forward order.

    The last one is `head`, whether its weight is a row of its own or the embedding's.
    """
    found = {row.site: math.prod(row.shape) for row in parameter_rows(config) if row.site and len(row.shape) > 1}
    return {**found, HEAD: config.vocab_size * config.hidden_size}


def layer_maps(config: ModelConfig) -> tuple[str, ...]:
    """The linear maps that layers have, by their names within one: `mlp.up`."""
    names = (name.split(".", 2)[2] for name in linear_maps(config) if name != HEAD)
    return tuple(dict.fromkeys(names))
