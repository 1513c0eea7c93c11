"""The list of --debug-memory is the plan: every byte of it."""

import re

from tiny_engines import BF16, plan_of

from llmq.plan.arena import aligned
from llmq.plan.memory import Memory
from llmq.plan.slots import slot_lines

SLOT = re.compile(r"  (device|host) +([\d,]+) +([\d,]+)  (\d+) \w+ +(\d+) \w+ +(\S.*)")


def number(text):
    return int(text.replace(",", ""))


def test_the_list_has_every_tensor_with_its_life_and_its_place():
    plan = plan_of(BF16, Memory(("recompute_block",), offload=("residual",), host=("m",)))
    held, *programs = "\n".join(slot_lines(plan)).split("\n\n")
    rows = [line.split() for line in held.splitlines()[2:]]
    assert {name: home for home, _, name in rows} == {name: ref.home for name, ref in plan.persistent.items()}
    arenas = sum(plan.arena_bytes(home) for home in ("device", "host"))
    assert sum(number(size) for _, size, _ in rows) + arenas == plan.total_bytes + plan.host_bytes
    assert len(programs) == len({id(program) for program in plan.programs.values()})
    for text in programs:
        title, _, *lines = text.splitlines()
        program = plan.programs[re.match(r"Program (\w+)", title)[1]]
        found = [SLOT.fullmatch(line).groups() for line in lines]
        names = [name for *_, together in found for name in together.split(" = ")]
        assert sorted(names) == sorted(program.places)
        slots = [(home, *map(number, numbers)) for home, *numbers, _ in found]
        for home, arena in program.arena_bytes.items():
            end = max((place + size for h, place, size, *_ in slots if h == home), default=0)
            assert aligned(end) == arena
