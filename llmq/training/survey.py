"""What a method of adaptation finds out on a run's first batches before it is planned.

The model without the method, with its base as the run holds it, is planned for that alone, without fp8, and leaves the
device again. The first rank does it for all; a run that resumes has it from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmq.adapters.first_values import GIVEN
from llmq.adapters.method import Method, RanksByMap
from llmq.backends import Backend, Op
from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import Data
from llmq.engine.advice import Limits, refuse_if_too_large
from llmq.engine.engine import Engine
from llmq.errors import UsageError
from llmq.files.source import Values
from llmq.plan.build import site_of
from llmq.plan.plan import Plan, make_plan
from llmq.plan.spec import Spec
from llmq.protocols import Site
from llmq.screen import StartTask
from llmq.stores.sharding import ALONE
from llmq.tensor import IGNORED, Ref
from llmq.training.ranks import Ranks

Take = Callable[[str, np.ndarray], None]  # of a site its inputs
MOST_BATCHES = 64  # whose inputs are looked at
MOST_GRADIENTS = 8  # micro-batches of the first step whose gradients are added up


@dataclass(frozen=True)
class Surveyed:
    """Ranks and alphas by the names of maps, if any were found; the first values of tensors, by name, which on other
    ranks than the first come with `share`; lines that say what was found."""

    ranks: RanksByMap = field(default_factory=dict)
    first: dict[str, np.ndarray] = field(default_factory=dict)
    lines: tuple[str, ...] = ()

    def fit(self, spec: Spec) -> Spec:
        """The spec with the ranks that were found."""
        return replace(spec, adapters=spec.adapters.with_ranks(self.ranks))

    def share(self, plan: Plan, ranks: Ranks) -> None:
        """Gives the first values of the first rank to all. All ranks call it with plans of the same rows."""
        if ranks.size == 1:
            return
        for row in (row for row in plan.rows if row.init == GIVEN):
            empty = np.empty(0, np.float32)
            mine = np.concatenate([self.first[part.name] for part in row.parts]) if ranks.is_first else empty
            whole = np.empty(row.shape, np.float32)
            ranks.world.exchange([mine] * ranks.size, [whole, *[empty] * (ranks.size - 1)])
            self.first.update({part.name: whole[part.start : part.stop] for part in row.parts})


def found_before(adapters: Method, *earlier: Mapping[str, Any]) -> Surveyed | None:
    """What a checkpoint or the first rank has of an earlier look, or that there is nothing to find; None: look."""
    if not adapters.looks:
        return Surveyed()
    known = next((one["ranks"] for one in earlier if one.get("ranks")), None)
    if known is None:
        return None
    return Surveyed({name: (int(rank), float(alpha)) for name, (rank, alpha) in known.items()})


def look(
    spec: Spec, data: Data, model: Values, backend: Backend, free: Callable[[], int], start_task: StartTask
) -> Surveyed:
    """What the first batches of the training data say. UsageError, and MemoryLimitError where there is no room for the
    gradient of one site."""
    return Surveyed(*spec.adapters.survey(RunBatches(spec, data, model, backend, free, start_task)))


@dataclass
class RunBatches:
    """The first batches of a run, and how many of them have been `seen`."""

    spec: Spec
    data: Data
    model: Values
    backend: Backend
    free: Callable[[], int]
    start_task: StartTask
    seen: int = 0

    def gradients(self, sites: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Each of the sites with the gradient of its weight: of the first step's micro-batches, of which it takes a
        few. Weights train for that, as many sites at a time as the device has room for, which then are not quantized.
        """
        with self.data.loader() as loader:
            batches = [loader.next() for _ in range(min(self.data.grad_accumulation, MOST_GRADIENTS))]
        self.seen, left, group = len(batches), list(sites), len(sites)
        with self.start_task("Looking at the gradients of adapted maps") as report:
            while left:
                plan = _with_flags(_as_it_is(self.spec, left[:group]), self.spec.memory.flags, self.backend)
                if plan.total_bytes > self.free() and group > 1:
                    group = -(-group // 2)
                    continue
                refuse_if_too_large(plan, Limits(self.free(), self.backend.scratch_bytes))
                engine = _with_gradients(plan, self.backend, self.model, batches)
                yield from ((site, engine.gradient(f"{site}.weight")) for site in left[:group])
                del engine, left[:group]
                report(len(sites) - len(left), len(sites))

    def inputs(self, wanted: Callable[[], Collection[str]], take: Take) -> Iterator[None]:
        """Gives `take` the inputs (n,K) of the sites that are `wanted` at the trained tokens of a batch, one site at a
        time, and yields after each batch, until none is wanted any more."""
        tapped: dict[str, str] = {}
        scratch = self.backend.scratch_bytes
        plan = make_plan(_as_it_is(self.spec), scratch, sites=lambda s, name: Tap(s, name, tapped))
        refuse_if_too_large(plan, Limits(self.free(), scratch))
        with self.data.loader() as loader, self.start_task("Looking at the inputs of adapted maps") as report:
            engine = Engine(plan, self.backend)
            engine.load(self.model(plan.rows))
            every = len(wanted())
            while self.seen < MOST_BATCHES and (sites := wanted()):
                batch = loader.next()
                _read_inputs(engine, batch, {name: site for name, site in tapped.items() if site in sites}, take)
                self.seen += 1
                yield
                report(every - len(wanted()), every)


def _with_flags(spec: Spec, flags: tuple[str, ...], backend: Backend) -> Plan:
    """The plan that recomputes what the run does, if that frees memory where so little trains."""
    try:
        return make_plan(replace(spec, memory=replace(spec.memory, flags=flags)), backend.scratch_bytes)
    except UsageError:  # of the last sites of a model, which keep nothing that could be made again
        return make_plan(spec, backend.scratch_bytes)


def _with_gradients(plan: Plan, backend: Backend, model: Values, batches: Sequence[Batch]) -> Engine:
    """An engine after the micro-steps of one step."""
    engine = Engine(plan, backend)
    engine.load(model(plan.rows))
    for index, batch in enumerate(batches):
        engine.micro_step(batch, first=index == 0, last=index == len(batches) - 1)
    return engine


def _as_it_is(spec: Spec, trained: Collection[str] = ()) -> Spec:
    """The model of a spec on one rank, in the model's dtype alone, with nothing trained but the weights of sites."""
    dtype = spec.precision.model
    plain = replace(spec.precision.without_fp8(), head=dtype, master=dtype, m=dtype, v=dtype)
    memory = replace(spec.memory, flags=(), drop=(), offload=(), host=(), fused=False)
    alone: dict[str, Any] = {"sharding": ALONE, "observe": False, "completions": None}
    weights = Method(base=spec.adapters.base, also=frozenset(f"{site}.weight" for site in trained))
    return replace(spec.without_noise(), precision=plain, memory=memory, adapters=weights, **alone)


class Tap:
    """A site that also notes the slot that it reads: `tapped` has the name of the site by that of the slot."""

    def __init__(self, spec: Spec, name: str, tapped: dict[str, str]) -> None:
        self._site: Site = site_of(spec, name)
        self._tapped = tapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y <- x, w, residual."""
        self._tapped[x.owner] = self._site.name
        self._site.forward(ops, a, y, x, w, residual)


def _read_inputs(engine: Engine, batch: Batch, tapped: Mapping[str, str], take: Take) -> None:
    """Gives `take` the inputs (n,K) of the sites in `tapped` at the trained tokens of a batch, one site at a time."""
    trained = np.flatnonzero(batch.targets.reshape(-1) != IGNORED)
    pieces: dict[str, list[np.ndarray]] = {}

    def wrap(op: str, function: Op) -> Op:
        def call(*handles: Any, **numbers: Any) -> None:
            function(*handles, **numbers)
            if op != "linear_forward" or (site := tapped.get(handles[1].name)) is None:
                return
            found = pieces.setdefault(site, [])
            array = handles[1].array
            rows = np.array(array.get() if hasattr(array, "get") else array)  # of a GPU, after what is on its stream
            found.append(rows.reshape(-1, rows.shape[-1]))
            if sum(map(len, found)) == batch.targets.size:  # tiles and chunks come in order
                take(site, np.concatenate(pieces.pop(site))[trained].astype(np.float32))

        return call

    engine.feed(batch)
    engine.traced("evaluate", wrap)()
