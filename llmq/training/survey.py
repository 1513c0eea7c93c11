"""What a run finds out on its first batches before its adapters are planned: the ranks of maps, and what A begins with.

The model as it is, with its base as the run holds it, is planned for that alone, without fp8 and what is trained, and
leaves the device again. The first rank does it and tells the others; a run that resumes has it from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmq.adapters.auto_rank import ranks_within, spectrum
from llmq.adapters.eva import Eva
from llmq.adapters.first_values import GIVEN
from llmq.adapters.lora import Lora
from llmq.adapters.method import Method
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

MOST_BATCHES = 64  # that are looked at while directions have not settled
MOST_GRADIENTS = 8  # micro-batches of the first step whose gradients are added up

RanksByMap = Mapping[str, tuple[int, float]]  # rank and alpha by the name of a map


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


def found_before(adapters: Method, *told: Mapping[str, Any]) -> Surveyed | None:
    """What a checkpoint or the first rank has of an earlier look, or that there is nothing to find; None: look."""
    if adapters.looks_at is None:
        return Surveyed()
    known = next((one["ranks"] for one in told if one.get("ranks")), None)
    return (
        None if known is None else Surveyed({name: (int(rank), float(alpha)) for name, (rank, alpha) in known.items()})
    )


def look(
    spec: Spec, data: Data, model: Values, backend: Backend, free: Callable[[], int], start_task: StartTask
) -> Surveyed:
    """What the first batches of the training data say. UsageError, and MemoryLimitError where there is no room for the
    gradient of one site."""
    return {"gradients": _at_gradients, "inputs": _at_inputs}[spec.adapters.looks_at or ""](
        spec, data, model, backend, free, start_task
    )


def _at_gradients(
    spec: Spec, data: Data, model: Values, backend: Backend, free: Callable[[], int], start_task: StartTask
) -> Surveyed:
    """The ranks of --lora-rank auto, by the gradients of the first step's micro-batches, of which it takes a few.

    Weights train for that, as many sites at a time as the device has room for, which then are not quantized; UsageError
    where the budget is less than a rank of any map.
    """
    adapters = spec.adapters
    assert isinstance(adapters, Lora) and adapters.budget is not None
    modules = {target.module.name: target.module for target in adapters.targets}
    costs = {name: module.inputs + module.outputs for name, module in modules.items()}
    if adapters.budget < (least := min(costs.values())):
        raise UsageError(
            f"--lora-budget {adapters.budget} is less than the {least} parameters of the smallest adapter of rank 1: "
            "raise it"
        )
    with data.loader() as loader:
        loader.start()
        batches = [loader.next() for _ in range(min(data.grad_accumulation, MOST_GRADIENTS))]
    sites = list(adapters.by_site)
    group, spectra = len(sites), {}
    with start_task("Looking at the gradients of adapted maps") as report:
        while sites:
            plan = _with_flags(_as_it_is(spec, adapters, sites[:group]), spec.memory.flags, backend)
            if plan.total_bytes > free() and group > 1:
                group = -(-group // 2)
                continue
            refuse_if_too_large(plan, Limits(free(), backend.scratch_bytes))
            engine = _with_gradients(plan, backend, model, batches)
            for site in sites[:group]:
                whole = engine.gradient(f"{site}.weight")
                for of in (target.module for target in adapters.by_site[site]):
                    spectra[of.name] = spectrum(whole[of.start : of.start + of.outputs])
                report(len(spectra), len(modules))
            del engine, sites[:group]
    ranks = ranks_within(adapters.budget, costs, spectra)
    total = sum(costs[name] * rank for name, rank in ranks.items())
    found = {t.module.name: (rank := ranks[t.module.name], t.alpha or 2.0 * rank) for t in adapters.targets}
    said = f"--lora-rank auto uses {total:,} of {adapters.budget:,} parameters, by {len(batches)} micro-batches"
    return Surveyed(found, {}, (said, *lines_of(found)))


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


def _at_inputs(
    spec: Spec, data: Data, model: Values, backend: Backend, free: Callable[[], int], start_task: StartTask
) -> Surveyed:
    """The ranks and the first A of EVA, by the inputs of sites.

    UsageError where a rank is larger than a map's inputs, or no batch has as many trained tokens as that.
    """
    adapters = spec.adapters
    assert isinstance(adapters, Lora)
    eva = Eva(adapters.targets, adapters.rho)
    for target in adapters.targets:
        if (most := eva.ranks[target.module.name]) > target.module.inputs:
            raise UsageError(
                f"--lora-rank {target.rank} with --eva-rho {adapters.rho:g} may give {target.module.name} the rank "
                f"{most}, and it has {target.module.inputs} inputs: use smaller ones"
            )
    tapped: dict[str, str] = {}
    plan = make_plan(_as_it_is(spec, adapters), backend.scratch_bytes, sites=lambda s, name: Tap(s, name, tapped))
    refuse_if_too_large(plan, Limits(free(), backend.scratch_bytes))
    seen = 0
    with data.loader() as loader, start_task("Looking at the inputs of adapted maps") as report:
        engine = Engine(plan, backend)
        engine.load(model(plan.rows))
        loader.start()
        while seen < MOST_BATCHES and (sites := eva.unsettled):
            batch = loader.next()
            _read_inputs(engine, batch, {name: site for name, site in tapped.items() if site in sites}, eva)
            eva.share()
            seen += 1
            report(len(eva.by_site) - len(eva.unsettled), len(eva.by_site))
    if missing := [site for site, found in eva.directions.items() if not found.seen]:
        most = max(eva.directions[site].count for site in missing)
        raise UsageError(
            f"--lora-init eva needs {most} trained tokens in a micro-batch, rank times --eva-rho, and none of the "
            f"first {seen} has them: use a larger --batch-size or --seq-len, or a smaller rank"
        )
    return _eva_found(adapters, eva, seen)


def _eva_found(adapters: Lora, eva: Eva, seen: int) -> Surveyed:
    """What EVA found, in so many batches. As in PEFT, alpha grows with the rank."""
    ranks = {t.module.name: (own := eva.ranks[t.module.name], t.alpha * own / t.rank) for t in adapters.targets}
    first = {f"{name}.lora_A.weight": value for name, value in eva.first().items()}
    open_sites = len(eva.unsettled)
    unsettled = f", in which {open_sites} of {len(eva.by_site)} inputs have not settled" if open_sites else ""
    return Surveyed(ranks, first, (f"--lora-init eva took {seen} micro-batches{unsettled}", *lines_of(ranks)))


def lines_of(ranks: RanksByMap) -> Iterator[str]:
    """The ranks of each kind of map, layer by layer: `q_proj: 8 8 12`."""
    kinds: dict[str, list[str]] = {}
    for name, (rank, _) in ranks.items():
        kinds.setdefault(name.rpartition(".")[2], []).append(str(rank))
    yield from (f"Ranks of {kind}: {' '.join(found)}" for kind, found in kinds.items())


def _as_it_is(spec: Spec, adapters: Lora, trained: Collection[str] = ()) -> Spec:
    """The model of a spec on one rank, in the model's dtype alone, with nothing trained but the weights of sites."""
    dtype = spec.precision.model
    plain = replace(spec.precision.without_fp8(), head=dtype, master=dtype, m=dtype, v=dtype)
    memory = replace(spec.memory, flags=(), drop=(), offload=(), host=(), fused=False)
    alone: dict[str, Any] = {"sharding": ALONE, "observe": False, "completions": None}
    return replace(
        spec.without_noise(),
        precision=plain,
        memory=memory,
        adapters=Method(base=adapters.base, also=frozenset(f"{site}.weight" for site in trained)),
        **alone,
    )


class Tap:
    """A site as it is, which notes the name of the slot that it reads: `tapped` has its own by that."""

    def __init__(self, spec: Spec, name: str, tapped: dict[str, str]) -> None:
        self._site: Site = site_of(spec, name)
        self._tapped = tapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y <- x, w, residual."""
        self._tapped[x.owner] = self._site.name
        self._site.forward(ops, a, y, x, w, residual)


def _read_inputs(engine: Engine, batch: Batch, tapped: Mapping[str, str], eva: Eva) -> None:
    """Gives EVA the inputs (n,K) of the sites in `tapped` at the trained tokens of a batch, one site at a time."""
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
                eva.directions[site].add(np.concatenate(pieces.pop(site))[trained].astype(np.float32))

        return call

    engine.feed(batch)
    engine.traced("evaluate", wrap)()
