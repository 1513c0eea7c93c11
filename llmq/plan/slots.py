"""Every tensor of a plan in lines that people read: `--debug-memory`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmq.disk import storage
from llmq.plan.arena import aligned
from llmq.plan.passes.place import Program
from llmq.plan.plan import Plan
from llmq.tensor import stored_bytes


def listed(plan: Plan, path: str | None) -> Iterator[str]:
    """Lines of --debug-memory, those that are for the console: the first rank's plan goes to a file, or here with `-`.

    StorageError if the file cannot be written.
    """
    if path is None or plan.spec.sharding.rank:
        return
    lines: Iterable[str] = slot_lines(plan)
    if path == "-":
        yield from lines
        return
    with storage(Path(path), "the list of --debug-memory cannot be written"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    yield f"The tensors of the plan are listed in {path}"


def slot_lines(plan: Plan) -> Iterator[str]:
    """What outlasts programs, then the slots of each program.

    A slot lies at an offset in the arena of its home from its birth to its death, which are calls, counted from 0.
    """
    yield "Tensors that outlast programs"
    yield f"  {'home':<8}{'bytes':>16}  name"
    for name, ref in sorted(plan.persistent.items()):
        yield f"  {ref.home:<8}{aligned(stored_bytes(ref)):>16,}  {name}"
    names: dict[int, list[str]] = defaultdict(list)
    for name, program in plan.programs.items():
        names[id(program)].append(name)
    for program in {id(program): program for program in plan.programs.values()}.values():
        yield ""
        yield from _program_lines(" = ".join(names[id(program)]), program)


def _program_lines(title: str, program: Program) -> Iterator[str]:
    """The slots of a program in the order of their births; those that take over each other's bytes are one."""
    together: dict[int, list[str]] = defaultdict(list)
    for name, place in program.places.items():
        together[id(place)].append(name)
    born = {name: index for index, found in program.births.items() for name in found}
    dies = {name: index for index, found in program.deaths.items() for name in found}
    # What another lane reads last may live until the program's end.
    moments = [*(f"{index} {call.op}" for index, call in enumerate(program.calls)), f"{len(program.calls)} end"]
    arenas = ", ".join(f"{size:,} bytes on the {home}" for home, size in program.arena_bytes.items() if size)
    yield f"Program {title}: {len(program.calls):,} calls, {arenas or 'no slots'}"
    yield f"  {'home':<8}{'place':>16}{'bytes':>16}  {'birth':<28}{'death':<28}name"
    for root in sorted(born, key=lambda name: (born[name], name)):
        place = program.places[root]
        birth, death = moments[born[root]], moments[dies[root]]
        name = " = ".join(together[id(place)])
        yield f"  {place.home:<8}{place.offset:>16,}{place.size:>16,}  {birth:<28}{death:<28}{name}"
