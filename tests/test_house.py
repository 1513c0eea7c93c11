"""The floors of the house, and the laws that can be read off the source: who imports what, who reads an option."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAP = (ROOT / "docs" / "architecture.md").read_text("utf-8")
ARRAYS = {"numpy", "cupy", "ml_dtypes"}
JUDGES = {"torch", "transformers", "tensorflow", "jax"}


# From the ground up: a place imports from itself and from the floors below it.
FLOORS = [floor.split(", ") for floor in re.findall(r"^ *\d+ \| ([a-z_]+(?:, [a-z_]+)*) ", MAP, re.MULTILINE)[::-1]]
# What a folder or module never imports, although it is lower: parts of llmq, and packages.
NEVER: dict[str, set[str]] = {
    "backends": {"blocks", "options"},
    "blocks": {"options", *ARRAYS},
    "data": {"blocks"},
    "engine": {"blocks", "options"},
    "files": {"blocks"},
    "model.decoder": {"options", *ARRAYS},
    "model.optimizer": ARRAYS,
    "ops": {"blocks", "options"},
    "optimizers": {"options", *ARRAYS},
    "plan.passes": {"blocks", "options", "data", *ARRAYS},
    "report": {"blocks"},
    "sites": {"options", *ARRAYS},
    "stores": {"blocks", "options"},
}
# Each section of the options is read by one module: a new reader asks the owner instead.
OWNERS = {
    "ModelOptions": "llmq.files.source",
    "ExportOptions": "llmq.files.huggingface",
    "DataOptions": "llmq.data.batches",
    "SourceOptions": "llmq.data.batches.named_data",
    "AdapterOptions": "llmq.adapters",
    "PrecisionOptions": "llmq.plan.precision",
    "MemoryOptions": "llmq.plan.memory",
    "ScheduleOptions": "llmq.training.schedule",
    "ShardingOptions": "llmq.plan.levels",
    "OptimizerOptions": "llmq.model.optimizer",
    "LossOptions": "llmq.plan.loss",
    "RegularizationOptions": "llmq.plan.spec",
    "LogOptions": "llmq.training.log",
    "StoppingOptions": "llmq.training.callbacks",
    "FaultOptions": "llmq.training.faults",
    "CheckpointOptions": "llmq.files.checkpoint",
    "SystemOptions": "llmq.hardware.device",
    "LaunchOptions": "llmq.comm.launch",
    "ProfileOptions": "llmq.training.profile",
    "RunOptions": "llmq.training.prepare",
}
BRANCHES = (ast.If, ast.IfExp, ast.While, ast.Match, ast.Try, ast.BoolOp, ast.Assert)
MAX_LINES = 450
SCREEN = 50  # lines


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"), str(path))


@cache
def modules() -> dict[str, Path]:
    """Every module of llmq by its dotted name."""
    names = {}
    for path in sorted((ROOT / "llmq").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def imported(module: str, *, at_import: bool = False) -> frozenset[str]:
    """Dotted names that a module imports, anywhere or (`at_import`) when it is imported itself.

    `from llmq.model import rope` counts as `llmq.model.rope`; a relative import is resolved; imports for types count.
    """
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in at_import_nodes(tree(path)) if at_import else ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            found.update(f"{source}.{a.name}" if f"{source}.{a.name}" in modules() else source for a in node.names)
    return frozenset(found)


def at_import_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module that run when it is imported: not the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not is_for_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_import_nodes(child)


def reached(*start: str, at_import: bool) -> dict[str, frozenset[str]]:
    """The modules that `start` imports at any depth, itself included, each with what it imports."""
    todo, found = list(start), {}
    while todo:
        module = todo.pop()
        if module in modules() and module not in found:
            found[module] = imported(module, at_import=at_import)
            todo += [*found[module], module.rpartition(".")[0]]
    return found


def place(module: str) -> str:
    """The folder or file below llmq/ that a module is in."""
    return module.split(".")[1] if "." in module else ""


def below(*folders: str) -> list[str]:
    """The modules in these folders of llmq/."""
    return [name for name in modules() if place(name) in folders]


def decides(node: ast.AST) -> bool:
    """Whether a node chooses what is computed."""
    return isinstance(node, BRANCHES) or (isinstance(node, ast.comprehension) and bool(node.ifs))


def test_every_place_is_on_a_floor():
    there = {place(name) for name in modules()} - {"", "__main__"}
    floors = [name for floor in FLOORS for name in floor]
    assert sorted(floors) == sorted(there) and len(floors) == len(set(floors))


def test_the_map_has_the_passes():
    passes = {m.rpartition(".")[2] for m in modules() if m.startswith("llmq.plan.passes.")}
    columns = re.findall(r"^    (\w.*?)  ", ast.get_docstring(tree(modules()["llmq.plan.plan"])), re.MULTILINE)
    order = [name for name in re.findall(r"\w+", " ".join(columns)) if name in passes]
    listed = re.findall(r"^\d+\. `([a-z]+)`:", MAP, re.MULTILINE)
    assert listed == list(dict.fromkeys(order)) and set(listed) == passes


def test_what_the_map_names_exists():
    paths = re.findall(r"`((?:llmq|tests|cuda)/[\w./]*)`", MAP)
    assert paths and not [path for path in paths if not (ROOT / path).exists()]
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", MAP)
    assert tests and not [test for path, test in tests if f"\ndef {test}(" not in (ROOT / path).read_text("utf-8")]


def test_imports_go_down():
    height = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    wrong = []
    for module in modules():
        for target in imported(module):
            here, there = place(module), place(target)
            if target.startswith("llmq.") and here in height and here != there and height[there] >= height[here]:
                wrong.append(f"{module} imports {target}")
    assert not wrong


def test_the_folders_of_data_import_down():
    """Reading ahead is below rows, chats and tokens, which know each other; batches are made of all of them."""
    height = {"stream": 0, "rows": 1, "chat": 1, "tokens": 1, "batches": 2}
    mine = {module: module.split(".")[2] for module in modules() if module.startswith("llmq.data.")}
    wrong = {
        f"{module} imports {target}"
        for module, here in mine.items()
        for target in imported(module) & mine.keys()
        if here != mine[target] and height[mine[target]] > height[here]
    }
    assert set(mine.values()) == set(height) and not wrong


@pytest.mark.parametrize("name", NEVER)
def test_a_place_never_imports_these(name):
    mine = [m for m in modules() if f"{m}.".startswith(f"llmq.{name}.")]
    wrong = []
    for module in mine:
        for target in imported(module):
            top = target.partition(".")[0]
            if (place(target) if top == "llmq" else top) in NEVER[name]:
                wrong.append(f"{module} imports {target}")
    assert mine and not wrong


def test_nothing_but_llmq_torch_imports_pytorch():
    places = [(m, t) for m in modules() if place(m) != "torch" for t in imported(m)]
    assert not [f"{m} imports {t}" for m, t in places if t.partition(".")[0] in JUDGES or place(t) == "torch"]


def test_a_class_name_has_one_home():
    homes: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)

    assert not {name: places for name, places in homes.items() if len(places) > 1}


def test_a_command_starts_without_numpy():
    """`--help` answers at once: nothing that a command module imports on its way, at any depth, is slow to import."""
    found = reached(*below("cli"), "llmq.options.parse", at_import=True)
    slow = ARRAYS | JUDGES | {"tokenizers", "pyarrow", "huggingface_hub", "matplotlib", "safetensors", "wandb"}
    assert not [f"{m} imports {t}" for m, targets in found.items() for t in targets if t.partition(".")[0] in slow]


def test_training_imports_no_report():
    """What `--matmul-dtype auto` times steps with is below the loop, and the bench above both."""
    found = reached("llmq.training.train", at_import=False)
    assert "llmq.engine.measure" in found and not {module for module in found if place(module) in {"report", "cli"}}


def test_a_run_imports_no_metrics_of_answers():
    """They are imported where --eval-metrics asks for them."""
    found = reached("llmq.training.train", at_import=True)
    assert "llmq.training.evaluation" in found
    assert not {m for m in found if m.endswith(".answers") or place(m) == "evaluation"}


@pytest.mark.parametrize("module", [*below("blocks", "sites", "optimizers"), "llmq.model.decoder"])
def test_block_code_is_straight_lines(module):
    """Law 1: no decision on a tensor or an option in a function that is given `ops`."""
    wrong = []
    for function in ast.walk(tree(modules()[module])):
        if isinstance(function, ast.FunctionDef) and "ops" in {argument.arg for argument in function.args.args}:
            wrong += [f"{function.name}: {ast.unparse(node)}" for node in ast.walk(function) if decides(node)]
    assert not wrong


@pytest.mark.parametrize("module", [*below("blocks", "sites"), "llmq.model.decoder"])
def test_block_code_is_typed(module):
    """mypy reads every call of an op: `ops` are `Ops`, and no parameter beside them is `Any`."""
    wrong = []
    for function in ast.walk(tree(modules()[module])):
        if isinstance(function, ast.FunctionDef):
            given = {one.arg: ast.unparse(one.annotation) for one in function.args.args if one.annotation}
            if "ops" in given and (given["ops"] != "Ops" or "Any" in given.values()):
                wrong.append(function.name)
    assert not wrong


def test_every_option_section_has_one_reader():
    sections = {
        node.name
        for name in ("adapters", "data", "maths", "run")
        for node in tree(modules()[f"llmq.options.{name}"]).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Options")
    }
    assert sections == set(OWNERS)
    readers: dict[str, set[str]] = {section: set() for section in OWNERS}
    for module, path in modules().items():
        for node in ast.walk(tree(path)) if module != "llmq.options.parse" else ():  # which parses them all
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [node.attr] if isinstance(node, ast.Attribute) else []
            for section in OWNERS.keys() & set(names):
                readers[section].add(module)
    for section, who in readers.items():
        owner = OWNERS[section]  # a module, or the folder of a wall
        assert who and all(f"{module}.".startswith(f"{owner}.") for module in who), section


def test_no_one_reaches_through_the_options():
    """`options.<section>` is handed to its owner whole: `options.<section>.<field>` is an option read elsewhere."""
    sections = {name.removesuffix("Options").lower() for name in OWNERS}
    wrong = []
    for module, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(section := node.value, ast.Attribute):
                if OWNERS.get(f"{section.attr.title()}Options") == module:
                    continue
                holder = section.value
                name = holder.id if isinstance(holder, ast.Name) else getattr(holder, "attr", "")
                if section.attr in sections and name == "options":
                    wrong.append(f"{module}, line {node.lineno}: options.{section.attr}.{node.attr}")
    assert not wrong


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("llmq.ops.reference")])
def test_a_reference_op_has_no_state(module):
    """A module level of functions and constants: nothing that a call could change."""
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
    allowed = {"_MODULES", "OPS"} if module == "llmq.ops.reference" else set()
    wrong = []
    for node in tree(modules()[module]).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if {ast.unparse(target) for target in targets} - allowed:
                wrong += [ast.unparse(node) for part in ast.walk(node.value) if isinstance(part, mutable)]
        elif isinstance(node, ast.ClassDef):
            wrong.append(f"class {node.name}")
    for node in ast.walk(tree(modules()[module])):
        if isinstance(node, ast.Global):
            wrong.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef):
            wrong += [ast.unparse(d) for d in node.decorator_list if "cache" in ast.unparse(d)]
    assert not wrong


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("llmq.ops.reference.")])
def test_an_op_has_a_test_of_its_name(module):
    assert (ROOT / "tests" / "ops" / f"test_{module.rpartition('.')[2]}.py").is_file()


@pytest.mark.parametrize("module", modules())
def test_a_file_opens_with_its_subject_and_stays_short(module):
    source = modules()[module].read_text("utf-8")
    assert not source.strip() or ast.get_docstring(tree(modules()[module]))
    assert len(source.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", ["llmq.training.prepare", "llmq.training.loop", "llmq.training.fp8"])
def test_the_way_to_a_step_is_functions_that_fit_a_screen(module):
    functions = [node for node in ast.walk(tree(modules()[module])) if isinstance(node, ast.FunctionDef)]
    assert not [f.name for f in functions if f.end_lineno - f.lineno >= SCREEN]


def test_a_method_of_adaptation_is_asked_at_five_places():
    """Where a model is built, what surrounds a step, first values, export and resume; `Spec` answers for the rest."""
    asking = {name for name, path in modules().items() if re.search(r"\bspec\.adapters\b", path.read_text("utf-8"))}
    own = {name for name in asking if name.startswith(("llmq.adapters", "llmq.options"))} | {"llmq.plan.spec"}
    training = {f"llmq.training.{name}" for name in ("prepare", "finish", "saving")}
    assert asking - own == {"llmq.plan.build", "llmq.plan.recordings", *training}


def test_the_cuda_folder_is_no_package():
    """A package named `cuda` in the checkout would shadow NVIDIA's."""
    assert not list((ROOT / "cuda").rglob("*.py"))
