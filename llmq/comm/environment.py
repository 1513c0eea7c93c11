"""Who a process is among the ranks of a run, read off the variables that its launcher sets.

torchrun's variables are the contract: `--gpus N`, `llmq-launch` and Ray's actors set them, too, and beside them one
with the whole place. Else srun's count, and those of Open MPI and MPICH. One launcher may start another, as in
`srun torchrun`: the inner one counts, which is torchrun's before MPI's, and MPI's before srun's.

The store at which ranks meet (llmq/comm/store.py) has a port of its own: torchrun's is taken by its own store, and
Slurm names none, so that it follows from the number of the job. LLMQ_MASTER_PORT overrides it, and LLMQ_MASTER_ADDR the
address that follows from srun's variables.
"""

import json
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from llmq.errors import UsageError

# The kinds whose rank 0 tells the others by MPI where it is, and their variables: rank, size, both on the machine.
MPI = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # and MVAPICH and Intel
}
RAY = "ray"
HIDING = ("srun", *MPI)  # the kinds that may show each rank its own GPU alone, as srun --gpus-per-task=1 does
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # for stores: below the ports that Linux gives to outgoing connections
JOIN_S = 600.0  # that a rank waits for the others to come; LLMQ_JOIN_TIMEOUT overrides it
WATCHDOG_S = 60.0  # in which a rank that is lost is found; LLMQ_WATCHDOG_SECONDS overrides it
TRAIN = ("llmq-train",)  # what starts a process on its own, and with its options --gpus and --launcher ranks
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OURS = "LLMQ_PLACE"  # set beside them by our own launchers: the place, as JSON
NODE = r"(?:[^,\[\]]|\[\d[\d,-]*\])+"  # one part of Slurm's lists, such as gpu[01-03,7]-ib
NODES = re.compile(rf"({NODE})(?:,{NODE})*")
TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Place:
    """A rank of a run, by its launcher.

    `local_size` is None where the launcher does not tell how many ranks the machine has. `token` is what the ranks
    prove to each other, None if it is not given (llmq/comm/world.py then makes one, of `job`). `has_store` says
    that the launcher keeps the store; else rank 0 does, and of an MPI kind tells the others where. `start` is a command
    that starts as many ranks, before the arguments of `llmq-train`; `again` says that these are started after others
    that were lost.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int | None
    master_addr: str
    master_port: int
    token: str | None
    kind: str
    variables: str = "RANK, WORLD_SIZE"  # those by which it was recognised
    job: str = ""
    has_store: bool = False
    join_s: float = JOIN_S
    start: tuple[str, ...] = TRAIN
    again: bool = False

    @property
    def in_words(self) -> str:
        """One line: `Ranks: 8, 4 on this machine, started by torchrun (RANK, WORLD_SIZE); store at node1:29501`."""
        here = f", {self.local_size} on this machine" if self.local_size is not None else ""
        store = f"; store at {self.master_addr}:{self.master_port}" if self.master_port else ""
        return f"Ranks: {self.size}{here}, started by {self.kind} ({self.variables}){store}"

    def environ(self) -> dict[str, str]:
        """The variables by which a process of our own launchers is recognised as this rank."""
        assert self.local_size is not None and self.token is not None
        values = (self.rank, self.size, self.local_rank, self.local_size, self.master_addr, self.master_port)
        return dict(zip(TORCHRUN, map(str, values), strict=True)) | {OURS: json.dumps(asdict(self))}


def recognised(environ: Mapping[str, str], gpus: int = 1) -> Place | None:
    """This process among the ranks of a run; None if it was started by itself.

    `gpus` is the value of --gpus, 1 if it is not given. UsageError, which names the variables, if they contradict each
    other or it, or if some are missing.
    """
    read = (_by_torchrun(environ), *(_by_mpi(environ, kind) for kind in MPI), _by_srun(environ))
    found = [place for place in read if place is not None]
    if not found:
        return None
    place, *others = found
    for other in others:
        if place.kind in MPI and (place.rank, place.size) == (other.rank, other.size):
            place = other  # a site may have srun set MPI's variables for every program
        # Else the other can have started this launcher: once on each machine, or mpirun within a Slurm job.
        elif (place.local_size or 1) * other.size != place.size and (other.kind != "srun" or place.kind not in MPI):
            raise UsageError(
                f"two launchers at once: {place.kind} ({place.variables}) says rank {place.rank} of {place.size}, "
                f"{other.kind} ({other.variables}) rank {other.rank} of {other.size}: use one of them, or unset the "
                "variables of the other"
            )
    if not 0 <= place.rank < place.size:
        raise UsageError(f"{place.variables}: rank {place.rank} of {place.size} is none: ranks are 0 to size - 1")
    if place.local_size is not None and not 0 <= place.local_rank < place.local_size <= place.size:
        raise UsageError(
            f"{place.variables}: local rank {place.local_rank} of {place.local_size} on this machine does not fit "
            f"into a world of {place.size}"
        )
    if gpus > 1 and place.local_size is not None and gpus != place.local_size:
        raise UsageError(
            f"--gpus {gpus}, but {place.kind} started {place.local_size} of the {place.size} ranks on this machine "
            f"({place.variables}): start one process per GPU with it and leave --gpus out, or start one without it"
        )
    return place


def starts_ranks(launcher: str, place: Place | None, gpus: int) -> bool:
    """Whether this process is to start ranks; else it is one itself, or alone. UsageError for two launchers at once."""
    if place is not None and launcher == RAY and place.kind != RAY:
        raise UsageError(f"--launcher ray, but {place.kind} started this process ({place.variables}): use one of them")
    return place is None and (gpus != 1 or launcher == RAY)


def gpu_index(place: Place | None, num_gpus: int) -> int:
    """Which of the GPUs that this process sees is its own: that of its local rank, or the only one.

    UsageError if there are too few.
    """
    if place is None or (num_gpus == 1 and place.kind in HIDING):
        return 0
    if place.local_rank >= num_gpus:
        raise UsageError(
            f"rank {place.rank} is number {place.local_rank} on its machine, which shows it {num_gpus} GPUs: start one "
            "rank per GPU, or use --device cpu"
        )
    return place.local_rank


def watchdog_s(environ: Mapping[str, str]) -> float:
    """Seconds in which a rank that is lost is found, the patience of the watchdog. UsageError if they are no number."""
    return _seconds(environ, "LLMQ_WATCHDOG_SECONDS", WATCHDOG_S)


def _by_torchrun(environ: Mapping[str, str]) -> Place | None:
    """The variables of torchrun and of our own launchers; of others that set the same, such as Kubeflow's, there may be
    no local ones."""
    if OURS in environ:
        ours = json.loads(environ[OURS])
        return Place(**ours | {"start": tuple(ours["start"])})
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    _need(environ, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    address, port, own = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"), _ranks(environ, *TORCHRUN[:4])
    size, here = own["size"], own["local_size"] or 0
    if size > 1 and here:
        _need(environ, "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    # Where torchrun's agent keeps a store of its own, that is what listens at MASTER_PORT.
    beside = port + 1 if port + 1 < FIRST_PORT + NUM_PORTS else FIRST_PORT + port % NUM_PORTS
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT")
    first = (f"--nnodes={size // max(here, 1)}", "--node-rank=0", f"--master-addr={address}", f"--master-port={port}")
    start = ("torchrun", *(first if size > here else ()), f"--nproc-per-node={here}", "-m", "llmq")
    return Place(
        **own,
        master_addr=address,
        master_port=_number(environ, "LLMQ_MASTER_PORT", beside),
        kind="torchrun",
        job=f"torchrun {(address, port, environ.get('TORCHELASTIC_RUN_ID'), restarts)}",
        start=start if here else TRAIN,
        again=(restarts or "0") != "0",
    )


def _by_srun(environ: Mapping[str, str]) -> Place | None:
    """srun's variables, in a job step of several tasks: a batch script and a shell of salloc are one process."""
    if "SLURM_STEP_ID" not in environ or environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    needed = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    _need(environ, *needed, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    job, step, node = (_number(environ, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"))
    tasks = tasks_of_nodes(environ["SLURM_STEP_TASKS_PER_NODE"])
    if node >= len(tasks):
        raise UsageError(f"SLURM_NODEID {node} is none of the nodes of SLURM_STEP_TASKS_PER_NODE {tasks}")
    return Place(
        **_ranks(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "") | {"local_size": tasks[node]},
        # Rank 0 is on the first node, however tasks are distributed.
        master_addr=environ.get("LLMQ_MASTER_ADDR") or first_node(environ["SLURM_STEP_NODELIST"]),
        master_port=_number(environ, "LLMQ_MASTER_PORT", FIRST_PORT + (16 * job + step) % NUM_PORTS),
        kind="srun",
        variables="SLURM_PROCID, SLURM_STEP_NUM_TASKS",
        job=f"slurm {job}.{step} {environ.get('SLURM_RESTART_COUNT', '0')}",
        start=("srun", f"--ntasks={environ['SLURM_STEP_NUM_TASKS']}", *TRAIN),
    )


def first_node(nodes: str) -> str:
    """The first name in Slurm's list of nodes: a08b of `a[08-10]b,c`. UsageError if it is no list."""
    found = NODES.fullmatch(nodes)
    if found is None:
        raise UsageError(f"{nodes!r} is not a list of nodes such as node[01-03,7],other")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", found[1])


def tasks_of_nodes(tasks: str) -> list[int]:
    """Tasks of each node, in Slurm's short form: `8(x2),4` is 8, 8, 4. UsageError if it is no such list."""
    found = [TASKS.fullmatch(part) for part in tasks.split(",")]
    if None in found:
        raise UsageError(f"{tasks!r} is not a list of tasks per node such as 8(x2),4")
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]


def _by_mpi(environ: Mapping[str, str], kind: str) -> Place | None:
    """A rank of MPI by the names of its variables. Address and port are those of a store that this rank would keep."""
    rank, size, _, local_size = MPI[kind]
    if not {rank, size} & environ.keys():
        return None
    _need(environ, rank, size)
    is_here = environ.get(local_size) == environ[size]
    return Place(
        **_ranks(environ, *MPI[kind]),
        master_addr=environ.get("LLMQ_MASTER_ADDR") or ("127.0.0.1" if is_here else socket.gethostname()),
        master_port=_number(environ, "LLMQ_MASTER_PORT", 0),
        kind=kind,
        variables=f"{rank}, {size}",
        start=("mpirun", "-n", environ[size], *TRAIN),
    )


def _ranks(environ: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> dict[str, Any]:
    """The fields of a place that these variables give, of which the local ones may be missing, and those of ours."""
    return {
        "rank": _number(environ, rank),
        "size": _number(environ, size),
        "local_rank": _number(environ, local_rank, 0),
        "local_size": _number(environ, local_size) if local_size in environ else None,
        "token": environ.get("LLMQ_JOB_TOKEN"),
        "join_s": _seconds(environ, "LLMQ_JOIN_TIMEOUT", JOIN_S),
    }


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """A variable that is a number of seconds. UsageError if it is none."""
    text = environ.get(name, str(default))
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < 1e6:
            return seconds
    raise UsageError(f"{name} {text} is not a number of seconds above 0: leave it out for {default:g}")


def _need(environ: Mapping[str, str], *names: str) -> None:
    """UsageError naming what is there and what is missing, unless all of these are set."""
    missing = [name for name in names if name not in environ]
    if missing:
        there = next(name for name in names if name in environ)
        raise UsageError(f"{there} is set, but {', '.join(missing)} is not: set {', '.join(names)}, or none of them")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable that is a whole number of at least 0; UsageError if it is none."""
    if name not in environ and default is not None:
        return default
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is {text!r}, which is not a whole number")
    return int(text)
