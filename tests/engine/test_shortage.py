"""Memory that is refused after the plan was made: one error, with its numbers and what would fit."""

import re

import pytest
from tiny_engines import BF16, engine_of, plan_of, tiny

from llmq.backends import host
from llmq.backends.host import HostBackend
from llmq.disk import shown
from llmq.engine import advice
from llmq.engine.bound_plan import BoundPlan
from llmq.errors import MemoryLimitError, RefusedMemoryError
from llmq.plan.memory import Memory

ROOM = 1 << 20
pytestmark = pytest.mark.usefixtures("few_remedies")


class Full(HostBackend):
    """A backend whose device, or whose host, has been filled by another program."""

    takes_scratch = True

    def __init__(self, error, on):
        super().__init__()
        self.error, self.on = error, on

    def scratch_bytes(self, call):
        return 0

    def prepare(self, calls, report=None):
        self.fail("prepare")

    def memory(self, needs):
        self.fail("memory")
        return super().memory(needs)

    def program(self, launches):
        return lambda: self.fail("run")

    def fail(self, at):
        if at == self.on:
            raise self.error


def message_of(error, on, memory=None):
    """What a run of a plan ends with."""
    plan = plan_of(BF16, memory or Memory(), tiny(num_layers=1))
    with pytest.raises(MemoryLimitError) as caught:
        BoundPlan(plan, Full(error(plan), on)).run("first")
    assert type(caught.value) is MemoryLimitError and caught.value.exit_code == 4
    return plan, str(caught.value)


@pytest.mark.quick("memory")
@pytest.mark.parametrize("on", ["prepare", "memory"])
def test_an_allocation_that_is_refused_says_what_was_planned_is_free_and_is_missing(on):
    fits = plan_of(BF16, Memory(("recompute_block",)), tiny(num_layers=1)).total_bytes
    refused = lambda plan: RefusedMemoryError("no", num_bytes=plan.total_bytes, free_bytes=fits)  # noqa: E731
    plan, said = message_of(refused, on)
    missing = shown(plan.total_bytes - fits)
    numbers = f"no: {shown(plan.total_bytes)} were planned, {shown(fits)} are free now, {missing} are"
    assert said.startswith(numbers) and "another program on this GPU" in said
    assert "or change the run\nWhat fits, the fastest first:" in said and "Activations" in said
    assert re.search(r"^1 .* bytes  --", said, re.MULTILINE)


@pytest.mark.slow
def test_what_a_library_lacks_beside_the_plan_is_made_free_by_a_smaller_one(monkeypatch):
    monkeypatch.setattr(advice, "LIBRARY_BYTES", 1)
    plan, said = message_of(lambda plan: RefusedMemoryError("a workspace", free_bytes=0), "run")
    assert said.startswith(f"a workspace: {shown(plan.total_bytes)} were planned and are held, 0 bytes are free")
    assert "What fits" in said and "missing" not in said.splitlines()[0].split(";")[0]


@pytest.mark.slow
def test_host_memory_that_is_refused_is_counted_by_what_is_kept_there():
    hosted = Memory(host=("m", "v"))
    refused = lambda plan: RefusedMemoryError("x", home="host", num_bytes=plan.host_bytes, free_bytes=9)  # noqa: E731
    plan, said = message_of(refused, "memory", hosted)
    assert f"{shown(plan.host_bytes - 9)} are missing" in said and "fit: leave out --offload options, train" in said
    assert "Adam M" in said and "Activations" not in said
    most = lambda plan: RefusedMemoryError(  # noqa: E731
        "x", home="host", num_bytes=plan.host_bytes, free_bytes=plan.host_bytes - 1
    )
    assert "or change the run\nWhat fits, the fastest first:" in message_of(most, "memory", hosted)[1]


def test_an_array_that_numpy_cannot_have_is_a_lack_of_memory_too():
    _, said = message_of(lambda plan: MemoryError("Unable to allocate 1 GiB"), "run")
    assert (
        "the host has no more memory (Unable to allocate 1 GiB)" in said and "Activations" not in said.split("all")[1]
    )


def test_a_cpu_whose_memory_was_taken_is_not_written_until_the_kernel_ends_the_process(monkeypatch):
    plan = plan_of(BF16, Memory(host=("m",)), tiny(num_layers=2))
    monkeypatch.setattr(host, "host_memory_bytes", lambda: (1 << 40, plan.total_bytes // 2))
    monkeypatch.setattr(host, "HostMemory", lambda *_: pytest.fail("allocated"))
    with pytest.raises(
        MemoryLimitError, match=r"^the host refused .* were planned, .* are free now, .* are missing"
    ) as caught:
        BoundPlan(plan, HostBackend())
    assert type(caught.value) is MemoryLimitError and "another program on the host" in str(caught.value)
    assert "Activations" in caught.value.requests


@pytest.mark.quick("write")
@pytest.mark.parametrize("call", ["write", "read", "start_read"])
def test_what_is_refused_while_values_are_moved_has_a_table_too(monkeypatch, call):
    """Such as a buffer of pinned memory, or an array for a copy."""
    plan = plan_of(BF16, config=tiny(num_layers=1))
    engine = engine_of(plan)

    def refuse(*_):
        raise RefusedMemoryError("no buffer", home="host", num_bytes=5, free_bytes=3)

    monkeypatch.setattr(engine._memory, call, refuse)
    ref = plan.held("embed.weight")
    with pytest.raises(MemoryLimitError, match=r"no buffer: .* are held, 3 bytes are free now, 2 bytes") as caught:
        engine.write(ref, 0) if call == "write" else getattr(engine, call)(ref)
    assert type(caught.value) is MemoryLimitError and "segment" in caught.value.requests


def test_values_that_numpy_has_no_memory_for_are_explained():
    engine = engine_of(plan_of(BF16, config=tiny(num_layers=1)))

    def values():
        raise MemoryError("Unable to allocate 9 GiB")
        yield

    with pytest.raises(MemoryLimitError, match=r"no more memory .Unable to allocate 9 GiB"):
        engine.load(values())
