"""The programs of a model as recorded, before anything is decided: on its stores, its slots and the shared cells."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from llmq.blocks.head import LogitsReader
from llmq.model import fused_update, optimizer
from llmq.model.decoder import Model
from llmq.model.limited_update import LimitedUpdater
from llmq.model.parameters import HEAD
from llmq.model.rope import table_refs
from llmq.ops.record import Call, Recorder
from llmq.optimizers.rule import MASTER, spaces
from llmq.plan.build import build_model, rows_of
from llmq.plan.memory import is_quant
from llmq.plan.passes.lanes import MAIN
from llmq.plan.spec import Spec, refuse
from llmq.row import Row
from llmq.stores.activations import Frame, Frames
from llmq.stores.fetched_weights import ALL_HERE, FetchedWeights, Homes, RemadeWeights
from llmq.stores.fused_grads import FusedGrads, Use
from llmq.stores.hosted import HostedGrads, HostedMoments
from llmq.stores.replicated import Alone, ReplicatedGrads, ReplicatedMoments, ReplicatedWeights
from llmq.stores.sharded import GatheredWeights, ManyRanks, ReducedGrads, ShardedGrads, ShardedMoments, ShardedWeights
from llmq.stores.sharding import Shards
from llmq.tensor import Ref, changed, num_norm_tiles

NUMBERS = ("norm", "last_norm", "grad_scale", "apply", "learning_rate", "loss_limit", "request")  # of an update


def weights_of(spec: Spec, rows: Sequence[Row]) -> Any:
    """The store of weights: on the host those that belong there, of many ranks whole or in shares, or remade."""
    memory, p, sharding = spec.memory, spec.precision, spec.sharding
    # A master on the host is not the weight that forward reads.
    masters = (None, p.master) if MASTER in memory.host else (p.wide_master, None)
    homes = Homes(memory.hosts_weight(p), masters[1])
    about = (rows, p.model, masters[0], homes)
    if not memory.persistent_quants:  # with the masters of all rows on this rank
        remade = partial(is_quant, precision=p)
        return RemadeWeights(*about, remade=remade, own_dtype=p.wide_master, in_place=memory.zero_copy)
    if sharding.size == 1 or not (sharding.weights or sharding.states):
        needs_slots = homes != ALL_HERE or any(row.stored for row in rows)
        return FetchedWeights(*about) if needs_slots else ReplicatedWeights(*about[:3])
    return (ShardedWeights if sharding.weights else GatheredWeights)(*about, sharding=sharding)


def grads_of(spec: Spec, rows: Sequence[Row], *, last: bool) -> Any:
    """The store of the gradients of a micro-step, the `last` of its step or another: one around another on the host."""
    memory, sharding = spec.memory, spec.sharding
    store: Callable[..., Any] = FusedGrads if memory.fused else ReplicatedGrads
    if sharding.size > 1:
        store = partial(ShardedGrads if sharding.gradients else ReducedGrads, sharding=sharding)
    if "grad" in memory.host:
        store = partial(HostedGrads, store=store, piece_bytes=memory.piece_bytes, in_place=memory.zero_copy)
    return store(rows, spec.precision.grad, last=last)


def moments_of(spec: Spec, rows: Sequence[Row], grads: Any) -> Any:
    """The store of masters and states: around it, where some of them or the gradients live on the host, one that
    fetches these."""
    memory, p, sharding = spec.memory, spec.precision, spec.sharding
    about = (rows, p.wide_master, {kind: p.of_state(kind.name) for kind in spec.hyper.rule.states})
    is_shared = sharding.size > 1 and sharding.states
    moments = ShardedMoments(*about, sharding=sharding) if is_shared else ReplicatedMoments(*about)
    given = {ref.name: ref for ref in grads.sums(Recorder()) if ref.home == "host"}
    hosted = [space for space in memory.host if space in spaces(spec.hyper.rule)]
    if not hosted and not given:
        return moments

    def is_cut(row: Row) -> bool:
        """Whether copies of the weight can be made piece by piece: a scale that is measured covers more."""
        site = HEAD if row.layer is None else row.site
        return p.scaling == "delayed" or row.stored is not None or site is None or p.dtype(site) != "e4m3"

    pieces: dict[str, Any] = {"piece_bytes": memory.piece_bytes, "is_cut": is_cut, "in_place": memory.zero_copy}
    return HostedMoments(moments, hosted, grads=given, **pieces)


class Recordings:
    """Records the programs of a spec. UsageError for what no plan can do."""

    def __init__(self, spec: Spec) -> None:
        refuse(spec)
        self.spec, p = spec, spec.precision
        self.model = build_model(spec)
        self.rows: tuple[Row, ...] = rows_of(spec, self.model)
        self.weights = weights_of(spec, self.rows)
        self.grads = {last: grads_of(spec, self.rows, last=last) for last in (False, True)}
        self.moments = moments_of(spec, self.rows, self.grads[True])
        world = spec.sharding
        self._shards = Shards(self.rows, world.size, world.rank) if world.size > 1 else None
        shares = self._shards if world.states else None
        self.tracked = spec.adapters.tracked(self.rows, p.stat, shares)
        self.ranks: Any = ManyRanks(self._shards.tiles()) if self._shards else Alone()
        self.sums, self.evaluated = (_sums(before, self.model.head.reader, p.stat) for before in ("", "evaluate."))
        self.cells = {**self._numbers(), **self.sums, **self.tracked.cells}
        self.always = Ref("always", "cell", (1,), p.stat)
        self.ropes = table_refs(spec.config, spec.seq_len, p.stat)
        self.batch = self._inputs("batch", spec.batch_size)
        for grads in self.grads.values():
            if isinstance(grads, FusedGrads):
                grads.use = self._fused(applies=grads.last)

    def _numbers(self) -> dict[str, Ref]:
        """The cells of an update."""
        stat = self.spec.precision.stat
        cells = {name: Ref(name, "cell", (1,), stat) for name in NUMBERS}
        cells["step"] = Ref("step", "cell", (1,), "int32")
        # As many partial sums as this rank adds to: a store's shares say which rows these are.
        count = sum(num_norm_tiles(grad.shape) for grad in self.grads[True].shares(Recorder()))
        cells["partials"] = Ref("partials", "cell", (count, 1), stat)
        return cells

    def handles(self, cells: Mapping[str, Ref]) -> Frame:
        """What the engine reads and writes beside rows: `cells`, the inputs, what evaluation leaves."""
        shared = {"always": self.always, "ropes": self.ropes, "batch": self.batch, "evaluated": Frame(self.evaluated)}
        return Frame({**cells, **shared, "agreed": Frame(self.ranks.cells(cells))})

    @cached_property
    def frames(self) -> Frames:
        """Of the micro-batches of training."""
        return self._frames(self.model, self.batch, self.sums)

    def values(self) -> dict[str, Ref]:
        """Where the value of each weight is: its master, of which this rank may have a `piece`, or itself where it is
        frozen. One held in a form has none."""
        masters = (state[MASTER] for state in self.moments.refs.values() if state[MASTER].form is None)
        return {ref.name: ref for ref in (*self.weights.frozen(), *masters)}

    def piece(self, weight: Ref) -> Ref:
        """The rows of a weight of which this rank has the master; of a frozen one all."""
        shards = self._shards if self.spec.sharding.states else None
        return shards.piece(weight) if shards and weight.name in shards.bounds else weight

    def train(self, *, first: bool = False, last: bool) -> list[Call]:
        """One forward and backward; `first` or `last` in its step."""
        ops = Recorder()
        # After an update copies are gathered, or fetched, once: later micro-steps find them there.
        weights = self.weights.first if first else self.weights
        self.model.train(ops, self.frames.a, self.frames.d, weights, self.grads[last])
        return ops.calls

    def gather(self) -> list[Call]:
        """All weights whole, as the forward pass of a step makes them; nothing where they are. On the main lane, one
        after the other: what goes to the host makes room for the next."""
        return [changed(call, lane=MAIN) for call in _recorded(self.weights.gather)]

    def evaluate(self) -> list[Call]:
        """Loss of a batch, without gradients."""
        # Another model on the same rows, without what is for training alone, such as NEFTune's noise.
        ops, model = Recorder(), build_model(self.spec.evaluated())
        frames = self._frames(model, self.batch, self.evaluated)
        model.infer(ops, frames.a, frames.d, self.weights)
        return ops.calls

    def _fused(self, *, applies: bool) -> Use:
        """The update of a part of the model in backward; the head, which is first, makes the loss."""
        first, count = {}, 0  # the place of each row's first partial sum of squares
        for name, ref in self.grads[True].refs.items():
            first[name] = count
            count += num_norm_tiles(ref.shape)

        def use(ops: Any, part: str | int, rows: Sequence[Row], grads: Mapping[str, Ref]) -> None:
            by, found = self._updater(self.cells), {row.name: (grads[row.name], first[row.name]) for row in rows}
            if part == "head" and applies:
                fused_update.begin(ops, by)
            fused_update.update(ops, by, self.weights, self.moments, found, applies=applies)

        return use

    def update(self, cells: Mapping[str, Ref]) -> list[Call]:
        """The optimizer step; of a fused one what is left of it."""
        by = self._updater(cells)
        if self.spec.memory.fused:
            return _recorded(lambda ops: fused_update.end(ops, by))
        stores = (self.weights, self.grads[True], self.moments, self.ranks)
        return _recorded(lambda ops: by.update(ops, *stores))

    def _updater(self, cells: Mapping[str, Ref]) -> optimizer.Updater:
        kind = LimitedUpdater if self.spec.skips_spikes else optimizer.Updater
        return kind(cells, self.spec.hyper, self.spec.seed, self.tracked.updates)

    def publish(self) -> list[Call]:
        """Copies of the weights from their masters."""
        return _recorded(lambda ops: optimizer.publish(ops, self.weights, self.moments))

    def allocate(self) -> dict[str, list[Call]]:
        """What a method runs between steps."""
        programs = self.tracked.programs(self.weights, self.moments)
        return {name: _recorded(record) for name, record in programs.items()}

    def calibrate(self, cells: Mapping[str, Ref]) -> list[Call]:
        """New scales from the amax of a warm-up pass."""
        return _recorded(lambda ops: optimizer.calibrate(ops, cells, self.ranks, self.always))

    def _inputs(self, name: str, b: int) -> Frame:
        """What the host gives for b sequences."""
        spec = self.spec
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("tokens", "targets", "positions"), (b, spec.seq_len)),
            "samples": (b,),
        }
        if spec.packing is not None:
            shapes["borders"] = (b, spec.packing.max_docs + 1)
        return Frame({key: Ref(f"{name}.{key}", "batch", shape, "int32") for key, shape in shapes.items()})

    def _frames(self, model: Model, inputs: Frame, sums: dict[str, Ref]) -> Frames:
        """Frames of the sequences in `inputs`, whose totals are `sums`."""
        spec, p = self.spec, self.spec.precision
        shared = {"batch": inputs, "const": Frame(self.ropes), "total": Frame(sums)}
        b, t = inputs.tokens.shape
        return Frames(model, shared, b, t, spec.config.hidden_size, p.model, p.stat)


def _sums(before: str, reader: LogitsReader, stat: str) -> dict[str, Ref]:
    """Where losses and what their reader counts are added up."""
    dtypes = {"loss": stat, **dict.fromkeys(reader.counts, "int32")}
    return {key: Ref(f"{before}{key}", "sum", (1,), dtype) for key, dtype in dtypes.items()}


def _recorded(record: Callable[[Recorder], None]) -> list[Call]:
    ops = Recorder(phase="update")
    record(ops)
    return ops.calls
