"""What block code calls ops by. Editors and mypy read the names and arguments of all ops in op_protocol.pyi."""


class Ops:
    """Every op; the planner's recorder and a backend make the methods when they are asked for."""
