"""The table of faults fits the source: each text is there once, the file still parses, the tests to run exist."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
from faults import FAULTS, Fault, planted

ROOT = Path(__file__).parents[1]


def test_at_least_thirty_faults_with_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_planted(fault):
    source = (ROOT / fault.file).read_text()
    faulty = ast.dump(ast.parse(planted(source, fault)))
    assert faulty != ast.dump(ast.parse(source)), "the fault changes nothing but text"
    assert fault.tests and all((ROOT / test).is_file() for test in fault.tests), fault.tests


@pytest.mark.parametrize("source, count", [("a = 1", 0), ("x + x", 2)])
def test_absent_or_ambiguous_text_is_an_error(source, count):
    with pytest.raises(ValueError, match=f"is {count} times in f.py"):
        planted(source, Fault("name", "f.py", "x", "y", ()))


@pytest.fixture
def tool(monkeypatch):
    """tools/plant_faults.py as a module."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    spec = importlib.util.spec_from_file_location("plant_faults", ROOT / "tools" / "plant_faults.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    """A project of one function and one test of it."""
    (tmp_path / "product.py").write_text("def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n")
    (tmp_path / "test_product.py").write_text(
        "import product\n\n\ndef test_double():\n    assert product.double(3) == 6\n"
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, verdict, by",
    [
        ("2 * x", "3 * x", "noticed", "test_product.py::test_double"),
        ("x / 2", "x / 3", "survived", "the default suite is green"),
        ("return 2 * x", "return 2 *", "broken", "SyntaxError"),
    ],
)
def test_verdicts(tool, tree, old, new, verdict, by):
    before = (tree / "product.py").read_text()
    found, why = tool.try_fault(tree, Fault("name", "product.py", old, new, ("test_product.py",)), workers=1)
    assert found == verdict and by in why
    assert (tree / "product.py").read_text() == before, "the fault is taken out again"


def test_tests_that_do_not_exist_are_no_proof(tool, tree):
    found, why = tool.try_fault(tree, Fault("name", "product.py", "2 * x", "3 * x", ("test_absent.py",)), workers=1)
    assert found == "broken" and "test_absent.py" in why
