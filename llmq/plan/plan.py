"""The plan: everything that is decided before memory is allocated, and the table that `--dry-run` prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmq import optimizer
from llmq.arena import aligned
from llmq.blocks.attention import Packing
from llmq.config import ModelConfig
from llmq.errors import UsageError
from llmq.model import Model
from llmq.ops.record import Call, Recompute, Recorder
from llmq.ops.seam import record
from llmq.optimizer import Hyperparameters
from llmq.plan.build import build_model, without_noise
from llmq.plan.memory import Memory
from llmq.plan.observe import observed
from llmq.plan.precision import Precision
from llmq.plan.program import Compiler, Program, Step, own_scales, reads_of_weights, storage_name
from llmq.plan.recompute import ROLES, Fates, decide
from llmq.rows import Row, parameter_rows
from llmq.stores.activations import Frame, Frames
from llmq.stores.grads import ReplicatedGrads
from llmq.stores.moments import ReplicatedMoments
from llmq.stores.weights import ReplicatedWeights
from llmq.tensor import LARGEST, Ref, num_norm_tiles, stored_bytes

# what the allocator table calls each space, in its order
CATEGORIES = {
    "v": "Adam V",
    "m": "Adam M",
    "grad": "Gradients",
    "activation": "Activations",
    "master": "Master",
    "weight": "Weights",
    "workspace": "Workspace",
}
SCALE_STRIDE = 4  # floats from one delayed scale to the next: matmuls read scales at 16-byte aligned addresses only
HISTORY = 16  # steps whose amax a delayed scale covers


def scratch_storage(lane: str) -> str:
    """The storage that one call of a lane after the other uses while it runs."""
    return f"workspace:scratch.{lane}"


@dataclass(frozen=True)
class Plan:
    """`persistent` maps storages outside the activation arena to Refs; `table` sums bytes by category."""

    config: ModelConfig
    precision: Precision
    memory: Memory
    hyper: Hyperparameters
    batch_size: int
    seq_len: int
    seed: int
    rows: tuple[Row, ...]
    programs: Mapping[str, Program]
    persistent: Mapping[str, Ref]
    aliases: Mapping[str, str]
    scales: tuple[str, ...]  # cells: each has every SCALE_STRIDE-th element of the scale vectors
    limits: tuple[float, ...]  # the vector of largest finite values
    fates: Fates
    packing: Packing | None = None  # None: each row is one document, and has no borders
    kept: Mapping[str, int] = field(default_factory=dict)  # bytes of what lives from forward to backward, by storage
    observed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # sites that read a copy, by `observe`'s cell

    @property
    def activation_bytes(self) -> int:
        """Bytes of the arena that all programs share, one at a time."""
        return max(program.activation_bytes for program in self.programs.values())

    def table(self) -> dict[str, int]:
        """Bytes by category of the allocator table."""
        total = dict.fromkeys((*CATEGORIES.values(), "Other"), 0)
        own = {storage_name(ref) for ref in self.persistent.values()} & set(self.aliases.values())
        for storage, ref in self.persistent.items():
            category = "Weights" if storage in own else CATEGORIES.get(ref.space, "Other")
            total[category] += aligned(stored_bytes(ref))
        total["Activations"] = self.activation_bytes
        return total

    def state(self) -> dict[str, Ref]:
        """Storages that a checkpoint holds: masters, moments, and the state of persistent scales."""
        names = [f"{space}:{row.name}" for row in self.rows for space in ("master", "m", "v")]
        scales = sorted(name for name, ref in self.persistent.items() if ref.space == "scale")
        return {name: self.persistent[name] for name in names + scales}

    @property
    def total_bytes(self) -> int:
        """Bytes that the run allocates."""
        return sum(self.table().values())


@dataclass
class Recordings:
    """Records the programs of one model, on its stores and cells."""

    model: Model
    prompt_model: Model  # for rows of one document
    config: ModelConfig
    precision: Precision
    hyper: Hyperparameters
    rows: Sequence[Row]
    batch_size: int
    seq_len: int
    seed: int
    packing: Packing | None = None

    def __post_init__(self) -> None:
        p, stat = self.precision, self.precision.stat
        self.weights = ReplicatedWeights(self.rows, p.model)
        self.grads = ReplicatedGrads(self.rows, p.grad)
        self.moments = ReplicatedMoments(self.rows, p.master, p.m, p.v)
        cell = {name: Ref(name, "cell", (1,), stat) for name in ("norm", "grad_scale", "apply", "learning_rate")}
        cell["step"] = Ref("step", "cell", (1,), "int32")
        cell["partials"] = Ref(
            "partials", "cell", (sum(num_norm_tiles(ref.shape) for ref in self.grads.refs.values()),), stat
        )
        self.sums = {"loss": Ref("loss", "sum", (1,), stat), "tokens": Ref("tokens", "sum", (1,), "int32")}
        self.cells = {**cell, **self.sums}
        self.rope = Ref("rope", "const", (self.seq_len, self.config.head_dim), stat)

    def frames(self, model: Model, b: int, name: str, sums: dict[str, Ref], micro_step: int) -> Frames:
        """Frames of b sequences whose inputs are `name.tokens` and so on, and whose totals are `sums`."""
        shape = (b, self.seq_len)
        inputs = {key: Ref(f"{name}.{key}", "batch", shape, "int32") for key in ("tokens", "targets", "positions")}
        inputs |= {key: Ref(f"{name}.{key}", "batch", (b,), "int32") for key in ("index", "samples")}
        if self.packing is not None:
            inputs["borders"] = Ref(f"{name}.borders", "batch", (b, self.packing.max_docs + 1), "int32")
        shared = {"batch": Frame(inputs), "const": Frame({"rope": self.rope}), "total": Frame(sums)}
        p = self.precision
        return Frames(model, shared, b, self.seq_len, self.config.hidden_size, p.model, p.stat, micro_step)

    def train(self, recompute: Recompute | None = None) -> list[Call]:
        """One forward and backward."""
        ops = Recorder(recompute or Recompute())
        frames = self.frames(self.model, self.batch_size, "batch", self.sums, 0)
        self.model.forward(ops, frames.a, self.weights)
        ops.phase = "backward"
        head = (frames.a["head"], frames.d["head"], self.weights.bundle("head"), self.grads.bundle("head"))
        self.model.head.train(ops, *head)
        self.model.backward(ops, frames.a, frames.d, self.weights, self.grads)
        return ops.calls

    def evaluate(self) -> list[Call]:
        """Loss of a batch, without gradients."""
        ops = Recorder()
        sums = {name: replace(ref, name=f"evaluate.{name}") for name, ref in self.sums.items()}
        frames = self.frames(self.model, self.batch_size, "batch", sums, 0)
        without_noise(self.model).forward(ops, frames.a, self.weights)
        self.model.head.evaluate(ops, frames.a["head"], frames.d["head"], self.weights.bundle("head"))
        return ops.calls

    def generate(self) -> list[Call]:
        """Logits of one token of one sequence."""
        ops = Recorder()
        model = without_noise(self.prompt_model)
        logits = Ref("logits", "cell", (1, 1, model.head.vp), self.precision.model)
        frames = self.frames(model, 1, "prompt", {"logits": logits}, 1)
        model.forward(ops, frames.a, self.weights)
        model.head.generate(ops, frames.a["head"], self.weights.bundle("head"))
        return ops.calls

    def update(self, cells: Mapping[str, Ref]) -> list[Call]:
        """The optimizer step."""
        ops = Recorder(phase="update")
        rows = {row.name: row for row in self.rows}
        state = (self.weights.refs, self.grads.refs, self.moments.refs)
        optimizer.update(ops, rows, *state, cells, self.hyper, self.seed)
        return ops.calls

    def publish(self) -> list[Call]:
        """Copies of the weights from their masters."""
        ops = Recorder(phase="update")
        optimizer.publish(ops, self.weights.refs, self.moments.refs)
        return ops.calls

    def calibrate(self, cells: Mapping[str, Ref]) -> list[Call]:
        """New scales from the amax of a warm-up pass."""
        ops = Recorder(phase="update")
        optimizer.update_scales(ops, cells, Ref("always", "cell", (1,), self.precision.stat))
        return ops.calls


def make_plan(
    config: ModelConfig,
    precision: Precision,
    memory: Memory,
    hyper: Hyperparameters,
    *,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    packing: Packing | None = None,
    observe: bool = False,
    drop: Iterable[str] = (),
    scratch_bytes: Callable[[Step], int] | None = None,
) -> Plan:
    """Decides everything for one rank. `drop` names further slots to recompute, beyond the flags' roles (tests).

    With `packing` every batch comes with the borders of its rows' documents. `observe` adds the program that measures
    the errors of fp8 copies, if there are any. `scratch_bytes` is the backend's: what a step needs beside its
    arguments. UsageError if a recompute flag frees no byte.
    """
    rows = parameter_rows(config)
    model = build_model(config, precision, memory, hyper, seed, packing)
    prompt_model = build_model(config, precision, memory, hyper, seed)
    sizes = (batch_size, seq_len, seed, packing)
    recordings = Recordings(model, prompt_model, config, precision, hyper, rows, *sizes)
    plain = recordings.train()
    made = {storage_name(ref): ref for call in plain for ref in call.outputs if ref is not None}
    fates = decide(plain, memory.roles, drop)
    if memory.flags:
        _refuse_idle_flags(plain, made, memory)
    train = recordings.train(fates.recompute)
    evaluate, generate, publish = recordings.evaluate(), recordings.generate(), recordings.publish()

    weights, moments = recordings.weights.refs, recordings.moments.refs
    aliases = {}
    if precision.master == precision.model:
        aliases = {storage_name(ref): storage_name(moments[name]["master"]) for name, ref in weights.items()}
    weight_forms = reads_of_weights([train, evaluate, generate])
    masters = {name: state["master"] for name, state in moments.items()}
    compiler = Compiler(weight_forms, aliases, masters)
    programs = {
        # with one rank, the last micro-step of a step is like the middle ones, and the only one like the first
        "first": compiler.program("first", train, statistics=True, first=True),
        "next": compiler.program("next", train, statistics=True, first=False),
        "evaluate": compiler.program("evaluate", evaluate, statistics=False),
        "generate": compiler.program("generate", generate, statistics=False),
        "publish": compiler.program("publish", publish, statistics=False),
        "publish_counted": compiler.program("publish_counted", publish, statistics=True),
    }
    readers: dict[str, tuple[str, ...]] = {}
    if observe:
        calls, readers = observed(train, masters)
    if readers:
        programs["observe"] = compiler.program("observe", calls, statistics=False)
    scales = tuple(sorted(compiler.scales))
    cells = {**recordings.cells, **_scale_cells(len(scales))}
    programs["update"] = compiler.program("update", recordings.update(cells), statistics=True)
    programs["calibrate"] = compiler.program("calibrate", recordings.calibrate(cells), statistics=False)
    assert tuple(sorted(compiler.scales)) == scales
    persistent = _persistent(programs.values(), aliases)
    if scratch_bytes is not None:
        needs: dict[str, int] = defaultdict(int)
        for step in (step for program in programs.values() for step in program.steps):
            lane = record(step.op).lane
            needs[lane] = max(needs[lane], scratch_bytes(step))
        for lane, size in needs.items():
            if size:
                persistent[scratch_storage(lane)] = Ref(f"scratch.{lane}", "workspace", (size,), "uint8")
    return Plan(
        config,
        precision,
        memory,
        hyper,
        batch_size,
        seq_len,
        seed,
        rows,
        programs,
        persistent,
        aliases,
        scales,
        tuple(x for cell in scales for x in (LARGEST[cell.rsplit("@", 1)[1]], *[1.0] * (SCALE_STRIDE - 1))),
        fates,
        packing,
        kept_storages(made, fates),
        readers,
    )


def kept_storages(refs: Mapping[str, Ref], fates: Fates) -> dict[str, int]:
    """Bytes of every storage that lives from forward to backward."""
    kept = {}
    for name, form in fates.kept:
        ref = replace(refs[name], form=form)
        owned = [own_scales(ref)] if form is not None and form.owns_scales else []
        kept.update({storage_name(part): aligned(stored_bytes(part)) for part in (ref, *owned)})
    return kept


def _refuse_idle_flags(plain: Sequence[Call], made: Mapping[str, Ref], memory: Memory) -> None:
    def kept_bytes(roles: Iterable[str]) -> int:
        return sum(kept_storages(made, decide(plain, roles)).values())

    without = kept_bytes(())
    idle = [flag for flag in memory.flags if kept_bytes(ROLES[flag]) >= without]
    if idle:
        flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in idle)
        raise UsageError(f"{flags} frees no memory in this run: leave it out")


def _scale_cells(count: int) -> dict[str, Ref]:
    if not count:
        return {}
    count *= SCALE_STRIDE
    shapes = {"scales": (count,), "amax": (count,), "limits": (count,), "history": (HISTORY, count)}
    return {name: Ref(name, "scale", shape, "fp32") for name, shape in shapes.items()}


def _persistent(programs: Iterable[Program], aliases: Mapping[str, str]) -> dict[str, Ref]:
    """Every storage outside the activation arena that a program touches, whole."""
    found: dict[str, Ref] = {}
    for program in programs:
        for step in program.steps:
            operands = [o for o in step.inputs if o is not None]
            operands += [o for result in step.outputs if result for o in result.operands]
            for operand in operands:
                ref = operand.ref
                if ref.space == "activation" or storage_name(ref) in aliases:
                    continue
                ref = replace(ref, span=None, shape=ref.whole, whole=()) if ref.span else ref
                found[operand.storage] = ref
                if ref.form is not None and ref.form.owns_scales:
                    found[str(operand.scale)] = own_scales(ref)
    return found
