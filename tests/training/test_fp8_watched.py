"""Sites in fp8: what timing chooses; readings of their copies, whom they warn of, how a run goes on without a site."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_engines import BF16, FP8, FP8_HEAD, batch, bits, engine_of, plan_of, tiny, train_steps

from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import layer_maps
from llmq.plan.memory import Memory
from llmq.plan.precision import block_sites
from llmq.plan.spec import Spec
from llmq.training import fp8
from llmq.training.fp8 import PATIENCE, CopyError, carried, judge, summary, timed_sites

DELAYED = FP8["e4m3", "delayed"]


def readings(engine, seed=1):
    """A reading of every copy of an engine, by name."""
    found = zip(engine.plan.observed.items(), engine.observe(batch(seed)), strict=True)
    return {name: CopyError.of(name, sites, row) for (name, sites), row in found}


READ = {"delayed": DELAYED, "current": FP8["e5m2", "current"], "head": FP8_HEAD}
READ |= {name: FP8["e4m3", name] for name in ("rowwise", "blockwise")}


@pytest.mark.parametrize("precision", READ.values(), ids=READ)
def test_every_copy_of_every_site_is_read(precision):
    found = readings(engine_of(plan_of(precision, observe=True)))
    sites = {site for error in found.values() for site in error.sites}
    head = {"head"} if precision is FP8_HEAD else set()
    assert (
        sites
        == {f"layers.{n}.{s}" for n in (0, 1) for s in ("attention.qkv", "attention.o", "mlp.up", "mlp.down")} | head
    )
    assert len(found) == 3 * len(sites)  # input, weight and gradient
    for error in found.values():
        low, high = (29, 34) if error.name.endswith("e4m3") else (23, 28)
        high += 10 * ("logits" in error.name)  # most of its energy is near -1, which the scale maps to 448
        assert low <= error.snr_db <= high and error.amax > 0 and not error.is_low


def test_a_reading_changes_nothing():
    engine, other = (engine_of(plan_of(DELAYED, observe=on)) for on in (True, False))
    losses = []
    for step in range(1, 4):
        readings(engine, seed=50 + step)
        for run in (engine, other):
            run.micro_step(batch(step))
            losses.append(run.update(step, 1e-2).loss)
    assert losses[::2] == losses[1::2]
    assert bits(engine) == bits(other)


@pytest.mark.parametrize("flag", ["recompute_norm", "recompute_block"])
def test_readings_do_not_depend_on_what_is_recomputed(flag):
    a, b = (readings(engine_of(plan_of(DELAYED, memory, observe=True))) for memory in (Memory(), Memory((flag,))))
    assert a == b


def test_a_wide_run_has_nothing_to_read():
    plan = plan_of(BF16, observe=True)
    assert not plan.observed and "observe" not in plan.programs


def test_a_scale_that_is_wrong_shows():
    """A scale a million times too large flushes all to zero; one a million times too small clips all."""
    engine = engine_of(plan_of(DELAYED, observe=True))
    state = dict(engine.state())
    for factor, share in ((1e6, "flushed"), (1e-6, "clipped")):
        engine.restore({**state, "scale:scales": state["scale:scales"] * np.float32(factor)}.__getitem__)
        error = readings(engine)["0.attention.x@e4m3"]
        assert error.is_low and getattr(error, share) > 0.9


def test_readings_in_words_and_numbers():
    fields = [448.0, 1000.0, 10.0, 5, 20, 1000]
    error = CopyError.of("3.mlp.act@e4m3", ["layers.3.mlp.down"], fields)
    assert (error.snr_db, error.clipped, error.flushed) == (20.0, 0.005, 0.02) and error.is_low
    exact = CopyError.of("x@e4m3", ["head"], [1, 1, 0, 0, 0, 9])
    assert exact.snr_db is None and not exact.is_low
    assert summary([error, exact]) == "fp8: 2 copies, worst 3.mlp.act@e4m3 20.0 dB (0.5% clipped, 2% flushed)"
    assert summary([exact]) == "fp8: 1 copies, all exact"


def test_a_site_is_named_once_when_it_stays_low():
    low, fine = (CopyError("x@e4m3", ("a", "b"), 1, snr, 0, 0) for snr in (10.0, 30.0))
    worse = replace(low, name="y@e4m3", sites=("b",), snr_db=9.0)
    counts, named = {}, []
    for errors in ([low], [fine], *[[low, worse]] * (PATIENCE + 2)):
        counts, found = judge(errors, counts)
        named.append(found)
    assert [set(found) for found in named] == [set(), set(), *[set()] * (PATIENCE - 1), {"a", "b"}, set(), set()]
    assert named[PATIENCE + 1]["b"] is worse
    assert judge([low], {"a": PATIENCE - 1}) == ({"a": PATIENCE, "b": 1}, {"a": low})


def test_the_state_of_a_run_goes_on_with_fewer_scales():
    """Masters and moments as they were, and every scale that is left, with its history, where the new plan has it."""
    engine = engine_of(plan_of(DELAYED))
    train_steps(engine)
    state = dict(engine.state())
    plan = plan_of(DELAYED.without(["layers.0.mlp.down"]))
    other = engine_of(plan, seed=1)
    other.restore(carried(state.__getitem__, engine.plan, plan))
    after = dict(other.state())
    assert set(engine.plan.scales) - set(plan.scales) == {
        f"{name}@e4m3" for name in ("0.mlp.act", "layers.0.mlp.down.weight", "1.d.attention.res")
    }
    for cell in plan.scales:
        old, new = (4 * p.scales.index(cell) for p in (engine.plan, plan))
        for name in ("scale:scales", "scale:history", "scale:limits"):
            assert np.array_equal(state[name][..., old], after[name][..., new]), (cell, name)
    assert all(np.array_equal(state[name], after[name]) for name in state if not name.startswith("scale:"))
    assert np.isfinite(train_steps(other)).all()


def test_readings_of_deep_models_are_one_cell_each():
    plan = plan_of(FP8_HEAD, Memory(head_chunks=4), tiny(num_layers=3), observe=True)
    assert len(plan.observed) == 3 * (3 * 4 + 1)


SITES = layer_maps(tiny())
SPEC = Spec(tiny(), FP8["e4m3", "delayed"], Memory(), Hyperparameters(), 2, 16)


@pytest.mark.parametrize(
    ("alone", "together", "chosen", "says"),
    [
        ({"mlp.up": 8.0, "mlp.down": 9.0}, 7.0, ("mlp.up", "mlp.down"), "3.500 ms a layer, 1.43 times as fast"),
        ({"mlp.up": 8.0}, 8.0, ("mlp.up",), "4.000 ms a layer, 1.25 times as fast"),
        ({"mlp.up": 8.0, "mlp.down": 9.0}, 11.0, (), "5.500 ms a layer, no faster than bf16: every site stays bf16"),
        ({}, 0.0, (), "no site was faster in e4m3: every site stays bf16"),
    ],
)
def test_the_lines_say_why(alone, together, chosen, says, monkeypatch):
    """Milliseconds of two layers: 10 in bf16, and with a site in fp8 unless `alone` has another time."""

    def measure(spec, *_, **__):
        fp8 = [site for site in SITES if not any(name.endswith(site) for name in spec.precision.wide)]
        ms = 10.0 if not fp8 else alone.get(fp8[0], 12.0) if len(fp8) == 1 else together
        return SimpleNamespace(micro_batch_ms=ms)

    monkeypatch.setattr(fp8, "measure", measure)
    found, timing = timed_sites(SPEC, 1, None)
    rows = timing.rows("bf16")
    assert timing.chosen == chosen and rows["together"] == says
    assert {site for site in SITES if rows[site].endswith(": e4m3")} == set(chosen)
    wide = {name for name in block_sites(tiny()) if not name.endswith(chosen)} if chosen else set()
    assert set(found.wide) == wide and found.matmul == ("e4m3" if chosen else "bf16")


def test_every_run_is_reported(monkeypatch):
    """That in the model's dtype, one for each site, and the one with all that were faster."""
    monkeypatch.setattr(fp8, "measure", lambda *_, **__: SimpleNamespace(micro_batch_ms=1.0))
    calls = []
    timed_sites(SPEC, 1, None, lambda *about: calls.append(about))
    assert calls == [(n, len(SITES) + 2) for n in range(1, len(SITES) + 2)]
