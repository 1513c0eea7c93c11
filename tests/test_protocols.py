"""What block code calls ops by: mypy knows their signatures."""

from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")
ROOT = Path(__file__).parents[1]
CALLS = {
    "ops.cast(None, x)": "",
    "ops.dropout(x, x, x, None, rate=0.1, seed=0, stream=0, first=0, length=4)": "",
    "ops.cast(x, None)": 'Argument 2 to "cast" has incompatible type "None"; expected "Ref"',
    "ops.cast(x)": 'Missing positional argument "x"',
    "ops.cast(x, x, eps=1.0)": 'Unexpected keyword argument "eps"',
    'ops.rmsnorm_forward(x, x, x, x, eps="small")': 'Argument "eps" to "rmsnorm_forward" has incompatible type "str"',
    "ops.softmax(x, x)": "no op is called softmax",
}


@pytest.mark.slow
def test_mypy_refuses_a_call_that_the_reference_does_not_take(tmp_path):
    lines = ["from llmq.protocols import Ops", "from llmq.tensor import Ref", "def calls(ops: Ops, x: Ref) -> None:"]
    (tmp_path / "calls.py").write_text("\n".join([*lines, *(f"    {call}" for call in CALLS)]), "utf-8")
    # Of the libraries, ops need NumPy's types alone; reading the others takes most of a minute.
    skipped = "[mypy-huggingface_hub.*,matplotlib.*,rich.*,torch.*]\nfollow_imports = skip\n"
    plugin = ROOT / "tools" / "ops_for_mypy.py"
    ini = tmp_path / "mypy.ini"
    ini.write_text(f"[mypy]\nplugins = {plugin}\nfollow_imports = silent\nignore_missing_imports = True\n{skipped}")
    config = ("--config-file", str(ini), "--cache-dir", str(tmp_path / "cache"))
    found, said, _ = api.run([*config, str(tmp_path / "calls.py")])
    errors = {int(line.split(":")[1]): line for line in found.splitlines() if ": error:" in line}
    assert not said
    for number, (call, expected) in enumerate(CALLS.items(), start=len(lines) + 1):
        assert expected in errors.get(number, "") and bool(expected) == (number in errors), (call, found)
