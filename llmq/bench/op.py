"""`llmq-bench op`: the calls of a model with one layer, each timed alone with cold caches, beside its roofline.

The model is planned and bound as for training, so every op that a model calls can be timed, with the shapes, forms and
scratch that training gives it. Work and rooflines are computed as for the ladder.
"""

import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console

from llmq.bench.configuration import configurations, multiplied, shared
from llmq.bench.ladder import CallWork, Ceilings, different_tokens, look_at, roofline_s, work_of
from llmq.bench.results import show_machine
from llmq.engine.bound_plan import make_ready
from llmq.engine.measure import TIMED, cold_calls
from llmq.errors import UsageError
from llmq.hardware import device
from llmq.hardware.cards import TERA
from llmq.model.config import ModelConfig
from llmq.ops.record import Call
from llmq.options.commands import BenchOptions
from llmq.plan.plan import Plan
from llmq.screen import Screen, counted
from llmq.tensor import Ref


@dataclass(frozen=True)
class OpCall:
    """A call to time: `shapes` are `4x8x32 <- 4x8x16`, of the first output and the first input, and `dtypes` are
    `bf16 <- e4m3/row/delayed`, with all forms of that output."""

    op: str
    shapes: str
    dtypes: str
    work: CallWork

    @property
    def name(self) -> str:
        """What identifies it: the first cells of its row."""
        return f"{self.op} | {self.shapes} | {self.dtypes} | {self.work.num_bytes / 2**20:.1f}"

    def row(self, ms: float, ceilings: Ceilings) -> str:
        """Its row of the table: FLOP/s of matrix products, bytes/s of other ops."""
        work, seconds = self.work, max(ms, 1e-6) / 1e3  # the difference of two times may be zero
        tera, giga = work.flops / seconds / TERA, work.num_bytes / seconds / 1e9
        rate = f"{tera:.3g} TFLOP/s" if work.flops else f"{giga:,.0f} GB/s"
        return f"| {self.name} | {1e6 * seconds:.1f} | {rate} | {100 * roofline_s(work, ceilings) / seconds:.0f}% |"


def run(request: BenchOptions, training: Mapping[str, Any], pattern: str = "*", *, listed: bool = False) -> int:
    """Prints the times of the ops that match `pattern`, for each model and dtype; with `listed` only their names.

    UsageError if a model calls no such op.
    """
    where = device.pick_device(shared(training).system)
    wanted = [
        replace(one, facts=replace(one.facts, config=one_layer(one.facts.config)))
        for one in configurations(request, training, where)
    ]
    backend = wanted[0].open_backend()
    plans = [one.fitting_plan(backend) for one in wanted]
    chosen = [different_calls(plan, pattern) for plan in plans]
    if listed:
        print("\n".join(dict.fromkeys(call.name for calls in chosen for call in calls.values())))
        return 0
    machine = look_at(where, multiplied(wanted))
    show_machine(Console(), machine)
    for one, plan, calls in zip(wanted, plans, chosen, strict=True):
        print(f"\n{one.model} {one.dtype} {plan.spec.batch_size}x{plan.spec.seq_len}, one layer\n")
        print("| op | shapes | dtypes | MiB moved | us | rate | share of the roofline |\n|---|---|---|---|---|---|---|")
        # a row as soon as it is timed, and a bar on a terminal: below the rows, or on stderr
        rows = Screen()
        bars = rows if rows.is_terminal else Screen(sys.stderr)
        with bars.task(f"Timing the matrix products of {one.name}", only_bar=True) as report:
            make_ready(plan, backend, report)
        with bars.task(f"Timing the ops of {one.name}", only_bar=True) as report:
            for timed in counted(cold_calls(plan, backend, one.clock(), calls), len(calls), report):
                rows.line(calls[timed.program, timed.index].row(timed.ms, machine.ceilings))
        gc.collect()  # the next model needs the memory
    return 0


def one_layer(config: ModelConfig) -> ModelConfig:
    """The first layer of a model, between its embedding and its head."""
    return replace(config, num_layers=1, windows=config.windows[:1])


def different_calls(plan: Plan, pattern: str) -> dict[tuple[str, int], OpCall]:
    """The calls whose op matches, without repeats, by the program and the index of the first such call."""
    found: dict[OpCall, tuple[str, int]] = {}
    used, known = different_tokens(plan.spec), dict[str, None]()
    for name in TIMED:
        for index, call in enumerate(plan.programs[name].calls):
            known[call.op] = None
            if fnmatchcase(call.op, pattern):
                found.setdefault(described(call, work_of(call, plan.programs[name].places, used)), (name, index))
    if not found:
        raise UsageError(f"no op of a training step matches {pattern!r}: known are {', '.join(known)}")
    return {place: call for call, place in found.items()}


def described(call: Call, work: CallWork) -> OpCall:
    """How a call is shown."""
    read = next(ref for ref in call.inputs if ref is not None)
    result = next(result for result in call.outputs if result is not None and result.forms)
    forms = ", ".join(map(_stored, result.refs))
    return OpCall(call.op, f"{_size(result.ref)} <- {_size(read)}", f"{forms} <- {_stored(read)}", work)


def _size(ref: Ref) -> str:
    return "x".join(map(str, ref.shape))


def _stored(ref: Ref) -> str:
    return ref.form.key if ref.form else ref.dtype
