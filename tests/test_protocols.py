"""The protocol of ops is made from the reference's signatures (`python tests/test_protocols.py` writes it)."""

import inspect
import re
from pathlib import Path

from llmq.ops.reference import OPS
from llmq.ops.seam import parse

FILE = Path(__file__).parents[1] / "llmq" / "op_protocol.pyi"
BEGIN, END = "    # ops: written by `python tests/test_protocols.py`\n", "    # end of ops\n"
HANDLES = {"Output": "Ref | None", "Tensor": "Ref", "Tensor | None": "Ref | None"}


def annotation(parameter):
    """Its text: modules differ in whether annotations are kept as text."""
    given = parameter.annotation
    return given.__name__ if isinstance(given, type) else str(given).replace("llmq.operands.", "")


def method(name):
    """An op as block code calls it: with Refs, and None for a result that is not wanted."""
    function = OPS[name]
    parameters = inspect.signature(function).parameters
    outputs, inputs, numbers = parse(function)
    given = [f"{key}: {HANDLES[annotation(parameters[key])]}" for key in (*outputs, *inputs)]
    given[len(outputs) : len(outputs)] = ["/"]
    given += ["*"] * bool(numbers)
    for key in numbers:
        default = parameters[key].default
        given.append(f"{key}: {annotation(parameters[key])}" + ("" if default is inspect._empty else f" = {default}"))
    line = inspect.getdoc(function).partition("\n")[0]
    head = f"    def {name}(self, {', '.join(given)}) -> None:\n"
    if len(head) > 121:
        head = f"    def {name}(\n        self, {', '.join(given)}\n    ) -> None:\n"
    if any(len(part) > 120 for part in head.splitlines()):
        head = f"    def {name}(\n        self,\n" + "".join(f"        {one},\n" for one in given) + "    ) -> None:\n"
    return f'{head}        """{line}"""\n\n'


def with_ops(text):
    """The file with the methods of all ops made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{''.join(map(method, sorted(OPS)))}{END}{after}"


def test_ops_are_those_of_the_reference():
    text = FILE.read_text("utf-8")
    assert with_ops(text) == text, "run: python tests/test_protocols.py"


def test_every_op_is_there_with_its_shapes():
    methods = re.findall(r"    def (\w+)\(", FILE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0])
    assert methods == sorted(OPS)


if __name__ == "__main__":
    FILE.write_text(with_ops(FILE.read_text("utf-8")), "utf-8")
