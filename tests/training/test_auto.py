"""What timing chooses, and that its lines say why."""

from types import SimpleNamespace

import pytest
from tiny_engines import FP8, tiny

from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import layer_maps
from llmq.plan.memory import Memory
from llmq.plan.precision import block_sites
from llmq.plan.spec import Spec
from llmq.training import auto

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

    monkeypatch.setattr(auto, "measure", measure)
    found, timing = auto.choose(SPEC, 1, None)
    rows = timing.rows("bf16")
    assert timing.chosen == chosen and rows["together"] == says
    assert {site for site in SITES if rows[site].endswith(": e4m3")} == set(chosen)
    wide = {name for name in block_sites(tiny()) if not name.endswith(chosen)} if chosen else set()
    assert set(found.wide) == wide and found.matmul == ("e4m3" if chosen else "bf16")


def test_every_run_is_reported(monkeypatch):
    """That in the model's dtype, one for each site, and the one with all that were faster."""
    monkeypatch.setattr(auto, "measure", lambda *_, **__: SimpleNamespace(micro_batch_ms=1.0))
    told = []
    auto.choose(SPEC, 1, None, lambda *about: told.append(about))
    assert told == [(n, len(SITES) + 2) for n in range(1, len(SITES) + 2)]
