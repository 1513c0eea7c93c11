"""A plugin of mypy (pyproject.toml): `ops.name(...)` has the signature of the op's reference function, with Refs."""

from pathlib import Path

from mypy.nodes import Decorator, MypyFile
from mypy.plugin import AttributeContext, Plugin
from mypy.types import CallableType, Instance, NoneType, Type, UnionType, get_proper_type

OPS = "llmq.protocols"
REFERENCE = "llmq.ops.reference"
FILES = sorted((Path(__file__).parents[1] / REFERENCE.replace(".", "/")).glob("*.py"))
MODULES = [f"{REFERENCE}.{path.stem}" for path in FILES if path.stem != "__init__"]


class OpsPlugin(Plugin):
    def get_additional_deps(self, file: MypyFile):
        return [(10, module, -1) for module in MODULES] if file.fullname == OPS else []

    def get_attribute_hook(self, fullname: str):
        owner, _, op = fullname.rpartition(".")
        return (lambda context: self.op(op, context)) if owner == f"{OPS}.Ops" and op[:2] != "__" else None

    def op(self, name: str, context: AttributeContext) -> Type:
        """The type of `ops.name`; an error where the reference has no such op."""
        for module in MODULES:
            found = self.lookup_fully_qualified(f"{module}.{name}")
            if found is not None and isinstance(found.node, Decorator):
                function = get_proper_type(found.node.func.type)
                assert isinstance(function, CallableType), name
                ref = Instance(self.lookup_fully_qualified("llmq.tensor.Ref").node, [])
                return function.copy_modified(arg_types=[_with_handles(given, ref) for given in function.arg_types])
        context.api.fail(f"no op is called {name}", context.context)
        return context.default_attr_type


def _with_handles(given: Type, ref: Instance) -> Type:
    """A parameter's type as block code sees it: a Ref for a tensor, and None too for a result that is not wanted."""
    given = get_proper_type(given)
    if isinstance(given, UnionType):
        return UnionType.make_union([_with_handles(item, ref) for item in given.items])
    name = given.type.fullname if isinstance(given, Instance) else ""
    return {"llmq.operands.Tensor": ref, "llmq.operands.Output": UnionType([ref, NoneType()])}.get(name, given)


def plugin(version: str) -> type[Plugin]:
    return OpsPlugin
