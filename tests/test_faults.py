"""Faults can be planted and are noticed: some of them here, all with tools/plant_faults.py."""

import importlib.util
import sys
from pathlib import Path

import pytest
from faults import FAULTS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def try_fault(monkeypatch):
    """What tools/plant_faults.py finds of one fault."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    spec = importlib.util.spec_from_file_location("plant_faults", ROOT / "tools" / "plant_faults.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.try_fault


def test_every_fault_has_a_target_and_tests():
    assert len(FAULTS) >= 25
    for name, fault in FAULTS.items():
        _, _, found = fault.find()
        assert callable(found) or isinstance(found, classmethod), name
        assert fault.tests and all((ROOT / test).is_file() for test in fault.tests), name


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAULTS)[::6])
def test_a_fault_is_noticed(try_fault, name):
    assert try_fault(name)[0] == "noticed"


@pytest.mark.parametrize(
    ("name", "test", "verdict"),
    [
        pytest.param("rope_turns_backwards", "tests/ops/test_rope.py", "noticed", marks=pytest.mark.slow),
        pytest.param("rope_turns_backwards", "tests/ops/test_swiglu.py", "survived", marks=pytest.mark.slow),
        pytest.param("rope_turns_backwards", "tests/ops/test_absent.py", "broken", marks=pytest.mark.slow),
    ],
)
def test_verdicts(try_fault, name, test, verdict):
    assert try_fault(name, [test])[0] == verdict
