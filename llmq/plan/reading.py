"""The plan of reading: frozen weights, and programs that give logits, log p of targets, and hidden states of rows."""

from dataclasses import replace
from typing import Any

from llmq.adapters.method import Tracked
from llmq.blocks.head import Head, LogitsReader
from llmq.blocks.reading import HiddenHead, TargetScores, WholeLogits
from llmq.model.decoder import Model
from llmq.model.parameters import padded_vocab
from llmq.model.rope import table_refs
from llmq.ops.record import Call, Recorder
from llmq.plan.build import build_model, rows_of
from llmq.plan.passes.fates import Fates
from llmq.plan.passes.forms import forms, prune
from llmq.plan.plan import Plan, Scratch, finished, persistent_storages
from llmq.plan.spec import Spec
from llmq.stores.activations import Frame, Frames
from llmq.stores.fetched_weights import FetchedWeights
from llmq.tensor import Ref

CHUNK = 2048  # tokens whose logits exist at a time


def plan_reading(spec: Spec, scratch_bytes: Scratch | None = None) -> Plan:
    """Decides everything, for `spec.batch_size` rows of `spec.seq_len` tokens, each a document. `scratch_bytes` is the
    backend's. Logits, which are large, are those of one row at a time."""
    spec, config, p = spec.evaluated(), spec.config, spec.precision
    b, t, act = spec.batch_size, spec.seq_len, p.model
    ropes = table_refs(config, t, p.stat, "read.")
    outputs = {
        "score": Ref("score.score", "batch", (b, t), p.stat),
        "logits": Ref("logits.logits", "batch", (1, t, padded_vocab(config)), act),
        "hidden": Ref("hidden.hidden", "batch", (b, t, config.hidden_size), act),
    }
    models = {
        "score": _model(spec, TargetScores(config.vocab_size)),
        "logits": _model(replace(spec, batch_size=1), WholeLogits()),
        "hidden": _hidden(_model(spec, WholeLogits())),
    }
    rows = tuple(replace(row, trainable=False) for row in rows_of(spec, models["score"]))
    weights = FetchedWeights(rows, act, act)
    programs: dict[str, Any] = {}
    cells: dict[str, Any] = {"read_ropes": ropes}
    for name, model in models.items():
        size = 1 if name == "logits" else b
        shapes = dict.fromkeys(("tokens", "targets", "positions"), (size, t))
        refs = {key: Ref(f"{name}.{key}", "batch", shape, "int32") for key, shape in shapes.items()}
        more = {"hits": Ref("score.hits", "batch", (b, t), "int32")} if name == "score" else {}
        cells[name] = batch = Frame({**refs, **more, name: outputs[name]})
        shared = {"batch": batch, "const": Frame(ropes)}
        frames = Frames(model, shared, size, t, config.hidden_size, act, p.stat)
        programs[name] = finished(name, forms(prune(_inferred(model, frames, weights)), {}))
    persistent = persistent_storages(programs.values(), weights.refs.values(), scratch_bytes)
    return Plan(spec, rows, programs, persistent, (), Fates(), {}, {}, Frame(cells), weights.refs, {}, {}, Tracked())


def _inferred(model: Model, frames: Frames, weights: FetchedWeights) -> list[Call]:
    ops = Recorder()
    model.infer(ops, frames.a, frames.d, weights)
    return ops.calls


def _model(spec: Spec, reader: LogitsReader) -> Model:
    """The model of a spec with another reader of its logits, which exist for at most CHUNK tokens at a time."""
    tokens = spec.batch_size * spec.seq_len
    chunks = next(count for count in range(-(-tokens // CHUNK), tokens + 1) if tokens % count == 0)
    model = build_model(replace(spec, memory=replace(spec.memory, head_chunks=chunks)))
    head = model.head
    sizes = (head.c, head.vp, head.norm, head.num_chunks)
    return replace(model, head=Head(*sizes, head.site, spec.config.family.reader(spec.config, reader)))


def _hidden(model: Model) -> Model:
    """The model with what its head reads in place of logits."""
    head = model.head
    return replace(model, head=HiddenHead(head.c, head.vp, head.norm, head.num_chunks, head.site, head.reader))
