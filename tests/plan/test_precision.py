"""Which sites multiply in fp8, and what an fp8 head makes of a chunk of logits."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import BF16, FP8, FP8_HEAD, batch, engine_of, next_logits, plan_of, spec_of, tiny

from llmq.errors import UsageError
from llmq.model.parameters import layer_maps
from llmq.plan.build import site_of
from llmq.plan.memory import Memory
from llmq.plan.precision import block_sites, chosen, wide_sites
from llmq.sites.fp8 import Fp8Linear
from llmq.sites.linear import Bf16Linear
from llmq.tensor import Form

ROW, COL = Form("e4m3", "row", "delayed"), Form("e4m3", "col", "delayed")
EVERY = block_sites(tiny(num_layers=5))


def gradients(engine):
    """Gradient of every parameter, f32."""
    return {row.name: engine.gradient(row.name).astype(np.float32) for row in engine.plan.rows}


def layer(*numbers):
    """All sites of these layers."""
    return {f"layers.{n}.{site}" for n in numbers for site in layer_maps(tiny())}


@pytest.mark.parametrize(
    ("text", "sites"),
    [
        ("2,1", layer(0, 1, 4)),
        ("0,1", layer(4)),
        ("layers.3", layer(3)),
        ("layers.3, layers.0.mlp.down", layer(3) | {"layers.0.mlp.down"}),
        ("mlp.down", {f"layers.{n}.mlp.down" for n in range(5)}),
        ("attention", {name for name in EVERY if ".attention." in name}),
        ("o", {f"layers.{n}.attention.o" for n in range(5)}),
    ],
)
def test_names_of_layers_and_sites(text, sites):
    assert chosen(text, "--bf16-layers", EVERY) == sites
    assert set(wide_sites(text, None, EVERY)) == sites
    assert set(wide_sites(None, text, EVERY)) == set(EVERY) - sites


@pytest.mark.parametrize(
    "text", ["layers.5", "mlp.gate", "layers", "mlp,,", "3,3", "1,1,1", "0,0", "4", "layers.1.head"]
)
def test_what_names_nothing_is_an_error(text):
    with pytest.raises(UsageError, match=r"--fp8-layers .*(1,1|2,1)"):
        wide_sites(None, text, EVERY)


def test_a_run_without_an_fp8_site_is_an_error():
    with pytest.raises(UsageError, match="use --matmul-dtype bf16"):
        wide_sites("3,2", None, EVERY)


def test_each_place_has_its_site():
    spec = spec_of(replace(FP8_HEAD, wide=("layers.1.mlp.up",)))
    assert isinstance(site_of(spec, "layers.0.mlp.up"), Fp8Linear)
    assert isinstance(site_of(spec, "head"), Fp8Linear)
    assert isinstance(site_of(spec, "layers.1.mlp.up"), Bf16Linear)
    assert isinstance(site_of(replace(spec, precision=FP8["e4m3", "delayed"]), "head"), Bf16Linear)
    assert (FP8["e4m3", "delayed"].head, BF16.head) == ("bf16", "bf16")


def test_a_wide_site_reads_no_fp8():
    plan = plan_of(replace(FP8["e4m3", "delayed"], wide=("layers.0.mlp.down",)))
    read = {(ref.name, ref.form) for call in plan.programs["first"].calls for ref in call.inputs if ref is not None}
    assert ("layers.0.mlp.down.weight", None) in read
    assert not {form for name, form in read if name in ("layers.0.mlp.down.weight", "0/0.mlp.act")} - {None}
    assert ("layers.1.mlp.down.weight", ROW) in read


def test_an_fp8_head_stores_its_gradient_in_fp8_only_and_its_chunks_share_a_scale():
    plan = plan_of(FP8_HEAD, Memory(head_chunks=4))
    calls = plan.programs["first"].calls
    losses = [call for call in calls if call.op == "cross_entropy"]
    assert len(losses) == 4
    for call in losses:
        assert call.outputs[0] is not None
        assert call.outputs[0].forms == (ROW,)
    turned = [call for call in calls if call.op == "cast" and call.inputs[0] is not None and call.inputs[0].form == ROW]
    assert [call.outputs[0].forms for call in turned] == [(COL,)] * 4
    assert [cell for cell in plan.scales if "logits" in cell] == ["d.head.logits@e4m3"]


@pytest.mark.quick("current")
@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise"])
def test_chunks_of_an_fp8_head_only_change_the_order_of_sums(scaling):
    """Whole and in four pieces: the copies of x are the same bytes, those of the logits' gradient share a scale if it
    is delayed; then only f32 sums of the head's gradient differ, which are rounded to bf16 between chunks."""
    runs = [engine_of(plan_of(replace(FP8_HEAD, scaling=scaling), Memory(head_chunks=n))) for n in (1, 4)]
    for run in runs:
        run.micro_step(batch())
    losses = [run.update(1, 0.0).loss for run in runs]
    assert losses[0] == losses[1]
    for name, whole in gradients(runs[0]).items():
        pieces = gradients(runs[1])[name]
        assert np.linalg.norm(whole - pieces) <= (4 * 2**-8 if scaling == "delayed" else 0.1) * np.linalg.norm(whole)


@pytest.mark.parametrize("tied", [True, False])
def test_an_fp8_head_follows_a_wide_one(tied):
    config = tiny(tie_embeddings=tied)
    runs = [engine_of(plan_of(p, config=config)) for p in (FP8_HEAD, FP8["e4m3", "delayed"])]
    for run in runs:
        run.micro_step(batch())
    losses = [run.update(1, 0.0).loss for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert losses[0] != losses[1]
    a, b = (np.concatenate([g.ravel() for g in gradients(run).values()]) for run in runs)
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) >= 0.98
    logits = [next_logits(run, batch().tokens[0]) for run in runs]
    assert np.abs(logits[0] - logits[1]).max() <= 0.1 * np.abs(logits[1]).max()
