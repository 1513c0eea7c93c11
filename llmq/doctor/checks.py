"""All checks, in the order in which they are shown."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from llmq.doctor import gpus, machine, software, speed
from llmq.doctor.finding import Finding, bounded
from llmq.hardware import cuda_driver
from llmq.hardware.cuda_driver import Driver, Problem

QUICK_S = 6.0  # limits of checks


class Seen(NamedTuple):
    """What decides which checks there are: the driver, what keeps its GPUs from being used, and whether to measure."""

    driver: Driver | None
    problem: Problem | None
    speed: bool


class Check(NamedTuple):
    """One of the table."""

    name: str
    find: Callable[[], Iterator[Finding]]
    limit_s: float = QUICK_S


def examine(*, speed: bool = True) -> Iterator[Finding]:
    """Everything that is found, as it is found."""
    found: list[Seen] = []

    def look() -> Iterator[Finding]:
        driver = cuda_driver.read()
        problem = cuda_driver.problem(driver)
        found.append(Seen(driver, problem, speed))
        yield from software.driver(driver, problem)

    about_driver = bounded("driver", look, QUICK_S)
    yield from about_driver
    facts = found[0] if found else Seen(None, None, speed)
    for check in checks(facts):
        yield from bounded(check.name, check.find, check.limit_s)


def checks(facts: Seen) -> Iterator[Check]:
    """Those for this machine; a measurement comes after what it would disturb."""
    there = list(facts.driver.gpus) if facts.driver else []
    yield Check("python", software.python)
    yield Check("packages", software.packages)
    usable = facts.driver is not None and facts.problem is None
    if facts.driver is not None and usable:
        yield Check("libraries", partial(software.libraries, facts.driver.cuda))
    for gpu in there:
        others = [other for other in there if other is not gpu]
        yield Check(f"gpu{gpu.index}", partial(gpus.examine, gpu))
        yield Check(f"gpu{gpu.index}.links", partial(gpus.links, gpu, others, cuda_driver.can_reach))
    yield Check("cpu", machine.cpu)
    yield Check("memory", machine.memory)
    yield Check("memory.locked", machine.locked_memory)
    yield Check("memory.shared", partial(machine.shared_memory, len(there)))
    yield Check("disk", partial(machine.disks, speed=facts.speed))
    yield Check("hub", machine.hub)
    if not facts.speed:
        return
    yield Check("cpu.speed", machine.cpu_speed)
    if usable:
        yield Check("speed", partial(speed.gpus, there), speed.LIMIT_S + 2)
    if usable and len(there) > 1:
        yield Check("all_reduce", partial(speed.between, there), speed.LIMIT_S + 2)
